"""A new run that uses what another one recorded."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    AgentSynthesizer,
    Ensemble,
    EnsembleError,
    EnsembleOutput,
    ExitReason,
    InlineRuntime,
    RunExistsError,
    RunOptions,
    RunState,
    Task,
    ValidationError,
    afork,
    aresume,
    fork,
)
from ensemble_ray.process.concurrency import bridge, run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.recovery.forking import accept_fork, offer_fork
from ensemble_ray.runs.handle import Run
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import answer
from tests.ensemble_ray.record.delegating_team import Counted


def _team(
    model: ScriptedModel, *, edit: str = "Edit it", read: str = "Read it", workflow: str = "parallel"
) -> Ensemble:
    """Two readers, an editor of the first one's notes, who depends on nobody else."""
    agent = Agent(role="Writer", goal="Write", llm=model)
    first = Task(name="first", description=read, expected_output="Notes", agent=agent)
    second = Task(name="second", description="Read the other", expected_output="Notes", agent=agent)
    last = Task(name="last", description=edit, expected_output="Prose", agent=agent, context=[first])
    return Ensemble(tasks=[first, second, last], workflow=workflow)


async def begin_fork(run_id: str, task: str, team: Ensemble, *, runtime: InlineRuntime, new_run_id: str) -> Run:
    """Begin a fork and return its handle."""
    offer = await offer_fork(run_id, task, team, runtime=runtime)
    begun = await accept_fork(offer, runtime=runtime, new_run_id=new_run_id)
    assert isinstance(begun, Run)
    return begun


def _model(*texts: str) -> ScriptedModel:
    return ScriptedModel(*texts)


@pytest.fixture
def home(tmp_path: Path) -> InlineRuntime:
    """Where all runs of a test are."""
    return InlineRuntime(home=tmp_path)


async def _forked_from(home: InlineRuntime, run_id: str) -> object:
    (first, *_) = await store_at(home.store_address).facts(run_id)
    return first.data.to_data()["forked_from"]


async def test_only_what_follows_is_done_again_when_a_run_is_forked(home: InlineRuntime) -> None:
    """S-DUR-54, S-DUR-37: a parallel run; recorded answers are not asked for again, and the other run stays as it is."""
    before = await _team(_model("a", "b", "c")).arun(runtime=home, run_id="one")
    again = _model("C")
    changed = _team(again, edit="Edit it otherwise")
    output = await afork("one", "last", changed, runtime=home, new_run_id="two")
    assert [each.raw for each in output.task_outputs] == [*[each.raw for each in before.task_outputs[:2]], "C"]
    assert len(again.calls) == 1
    assert output.run_id == "two"
    assert await _forked_from(home, "two") == {"run": "one", "task": "last"}
    kept = await _team(_model()).arun(runtime=home, run_id="one")
    assert kept.raw == before.raw


async def test_a_fork_has_options_of_its_own(home: InlineRuntime) -> None:
    """S-DUR-142, S-DOM-94: those that are given, and the others of the run that it is of."""
    before = RunOptions(max_tokens=5000, max_parallel_tasks=2, tags={"a": "b"})
    await _team(_model("a", "b", "c")).arun(runtime=home, run_id="one", options=before)
    given = RunOptions(max_tokens=7000, context_budget=900)
    output = await afork(
        "one", "last", _team(_model("C")), runtime=home, new_run_id="two", options=given, max_tokens=8000
    )
    assert output.raw == "C"
    (first, *_) = await store_at(home.store_address).facts("two")
    header = first.data.to_data()
    assert header["options"] == {"max_tokens": 8000, "max_parallel_tasks": 2, "context_budget": 900}
    assert header["budget"] == {"max_tokens": 8000, "max_cost": None}


def test_a_fork_spends_no_more_than_it_is_given(home: InlineRuntime) -> None:
    """S-DOM-94, S-BUD-9: its own budget, without what the other run spent."""
    answers = [answer(text, 50, 50) for text in "abc"]
    _team(ScriptedModel(*answers)).run(runtime=home, run_id="one")
    spent = fork("one", "second", _team(ScriptedModel(*answers)), runtime=home, max_tokens=1)
    assert spent.state is RunState.BUDGET_EXHAUSTED
    with pytest.raises(TypeError, match="Did you mean 'max_tokens'"):
        fork("one", "last", runtime=home, max_token=1)  # type: ignore[call-arg]


def _with_inputs(model: ScriptedModel) -> Ensemble:
    """A reader of `{topic}`, a writer for `{audience}`."""
    agent = Agent(role="Writer", goal="Write", llm=model)
    first = Task(name="first", description="Read on {topic}", expected_output="Notes", agent=agent)
    last = Task(name="last", description="Write for {audience}", expected_output="Prose", agent=agent, context=[first])
    return Ensemble(tasks=[first, last], workflow="sequential")


async def test_tasks_that_are_done_again_get_other_inputs(home: InlineRuntime) -> None:
    """S-DUR-92: in place of recorded ones, which stay where none are given; they are the fork's own on record."""
    await _with_inputs(_model("a", "b")).arun({"topic": "tides", "audience": "sailors"}, runtime=home, run_id="one")
    again = _model("B")
    output = await afork(
        "one", "last", _with_inputs(again), inputs={"audience": "children"}, runtime=home, new_run_id="two"
    )
    assert [each.raw for each in output.task_outputs] == ["a", "B"]
    assert "Write for children" in str(again.calls[0].messages[1].content)
    (first, *_) = await store_at(home.store_address).facts("two")
    assert first.data.to_data()["inputs"] == {"topic": "tides", "audience": "children"}
    assert (await aresume("two", _with_inputs(_model()), runtime=home)).raw == "B"


async def test_other_inputs_are_refused_where_recorded_outputs_would_differ(home: InlineRuntime) -> None:
    """S-DUR-92: the used task whose text they change is named; changes of the definition may be allowed, this not."""
    await _with_inputs(_model("a", "b")).arun({"topic": "tides", "audience": "sailors"}, runtime=home, run_id="one")
    team = _with_inputs(_model())
    with pytest.raises(
        ValidationError, match=r"inputs change the texts or attachments of tasks .* 'first'\. Fork from 'first'"
    ):
        await afork("one", "last", team, inputs={"topic": "moons"}, runtime=home, allow_changes=True)
    output = await afork("one", "first", _with_inputs(_model("A", "B")), inputs={"topic": "moons"}, runtime=home)
    assert output.raw == "B"


async def test_later_tasks_are_done_again_when_the_run_is_sequential(home: InlineRuntime) -> None:
    """S-DUR-54: also those that do not depend on it."""
    await _team(_model("a", "b", "c"), workflow="sequential").arun(runtime=home, run_id="one")
    again = _model("B", "C")
    output = await afork("one", "second", _team(again, workflow="sequential"), runtime=home)
    assert [each.raw for each in output.task_outputs] == ["a", "B", "C"]
    assert output.run_id != "one"


async def test_failed_run_goes_on_as_a_fork(home: InlineRuntime) -> None:
    """S-DUR-54, S-DUR-35: what failed is done again, what was done is not."""
    broken = ScriptedModel("a", "b", ConnectionError("gone"))
    team = _team(broken, workflow="sequential").replace(retry=None)
    with pytest.raises(EnsembleError, match=r"^Task '.*' failed: "):
        await team.arun(runtime=home, run_id="one")
    output = await afork("one", "last", _team(_model("c"), workflow="sequential"), runtime=home)
    assert [each.raw for each in output.task_outputs] == ["a", "b", "c"]


async def test_changed_task_is_refused_when_its_record_would_be_used(home: InlineRuntime) -> None:
    """S-DUR-54: unless it is allowed."""
    await _team(_model("a", "b", "c")).arun(runtime=home, run_id="one")
    changed = _team(_model("C"), read="Read another")
    with pytest.raises(ValidationError, match=r"tasks.first.description: 'Read it' -> 'Read another'.*--allow-changes"):
        await afork("one", "last", changed, runtime=home)
    output = await afork("one", "last", changed, runtime=home, allow_changes=True)
    assert [each.raw for each in output.task_outputs][-1] == "C"


async def test_offer_says_what_is_done_again_and_asks_nobody(home: InlineRuntime) -> None:
    """S-DUR-54: told first."""
    await _team(_model("a", "b", "c")).arun(runtime=home, run_id="one")
    model = _model()
    offer = await offer_fork("one", "first", _team(model), runtime=home)
    assert (offer.plan.reused, offer.plan.again) == (("second",), ("first", "last"))
    assert offer.descriptions["last"] == "Edit it"
    assert len(model.calls) == 0
    assert [each.run_id for each in await store_at(home.store_address).runs()] == ["one"]


async def test_fork_can_be_resumed_and_forked(home: InlineRuntime) -> None:
    """S-DUR-54: it is a run like others."""
    await _team(_model("a", "b", "c")).arun(runtime=home, run_id="one")
    await afork("one", "last", _team(_model("C")), runtime=home, new_run_id="two")
    output = await afork("two", "last", _team(_model("D")), runtime=home, new_run_id="three")
    assert output.raw == "D"
    summary = await store_at(home.store_address).summary("three")
    assert summary is not None
    assert summary.state is RunState.COMPLETED


async def test_fork_of_a_run_with_options_can_be_resumed(home: InlineRuntime) -> None:
    """S-DUR-54, S-DUR-36: the options are part of what the new run is recorded with, also one that turns recording on."""
    team, options = _team(_model("a", "b", "c")), RunOptions(max_tool_output_length=100, durability="run")
    await team.replace(durability="off").arun(runtime=home, run_id="one", options=options)
    hanging = _team(ScriptedModel(lambda _: asyncio.sleep(600))).replace(durability="off")
    begun = await bridge(begin_fork("one", "last", hanging, runtime=home, new_run_id="two"))
    await begun.acancel()
    assert (await begun.aresult()).exit_reason is ExitReason.CANCELLED
    again = _team(_model("C")).replace(durability="off")
    assert (await aresume("two", again, runtime=home)).raw == "C"


async def test_fork_is_recorded_with_the_agents_that_it_has(home: InlineRuntime) -> None:
    """S-DUR-54, S-DUR-36, S-DUR-37: one made anew for a changed task is asked for once; then the fork can be resumed."""

    def team(*answers: str | Callable[[ScriptedCall], object], second: str = "Edit it") -> Ensemble:
        first = Task(name="first", description="Read it", expected_output="Notes")
        last = Task(name="last", description=second, expected_output="Prose")
        by_model = AgentSynthesizer.llm_based()
        return Ensemble(tasks=[first, last], llm=ScriptedModel(*answers), agent_synthesizer=by_model)

    def made(role: str) -> str:
        return f'{{"role": "{role}", "goal": "Work", "backstory": "Long"}}'

    await team(made("Reader"), made("Editor"), "a", "b").arun(runtime=home, run_id="one")
    hanging = team(made("Author"), lambda _: asyncio.sleep(600), second="Edit it otherwise")
    begun = await bridge(begin_fork("one", "last", hanging, runtime=home, new_run_id="two"))
    await begun.acancel()
    assert (await begun.aresult()).exit_reason is ExitReason.CANCELLED
    output = await aresume("two", team("B", second="Edit it otherwise"), runtime=home)
    assert [(each.raw, each.agent_role) for each in output.task_outputs] == [("a", "Reader"), ("B", "Author")]
    assert output.trace is not None
    assert [each.role for each in output.trace.agents] == ["Reader", "Author"]


async def test_fork_without_a_record_is_refused(home: InlineRuntime) -> None:
    """S-DUR-54, S-DUR-2: it would do everything again."""
    await _team(_model("a", "b", "c")).arun(runtime=home, run_id="one")
    with pytest.raises(ValidationError, match="durability 'off'"):
        await afork("one", "last", _team(_model("C")).replace(durability="off"), runtime=home)


async def test_id_that_is_taken_is_refused(home: InlineRuntime) -> None:
    """S-DUR-54, S-DUR-15."""
    await _team(_model("a", "b", "c")).arun(runtime=home, run_id="one")
    with pytest.raises(RunExistsError, match="one"):
        await begin_fork("one", "last", _team(_model("C")), runtime=home, new_run_id="one")


def test_program_is_named_when_the_definition_cannot_be_had(home: InlineRuntime) -> None:
    """S-DUR-54: the message says what to do."""
    _team(_model("a", "b", "c")).run(runtime=home, run_id="one")
    with pytest.raises(ValidationError, match=r"begun by a program.*ensemble_ray.fork\('one', TASK, ensemble\)"):
        fork("one", "last", runtime=home)
    with pytest.raises(ValidationError, match="Unknown task 'lats'"):
        fork("one", "lats", _team(_model()), runtime=home)
    output = fork("latest", "last", _team(_model("C")), runtime=home)
    assert isinstance(output, EnsembleOutput)
    assert run_blocking(_forked_from(home, str(output.run_id))) == {"run": "one", "task": "last"}


async def test_peers_of_a_reused_task_are_not_asked_again_when_a_run_is_forked(home: InlineRuntime) -> None:
    """S-DUR-76, S-DUR-54: what it gave is used, and the trace shows who helped."""
    whole = Counted()
    asking = whole.peers()
    last = Task(name="last", description="note it", expected_output="x", agent=asking.agents[2])  # type: ignore[index]
    team = asking.replace(tasks=[*asking.tasks, last], workflow="sequential")
    before = await team.arun(runtime=home, run_id="one")
    whole.asked.clear()
    whole.judged.clear()
    output = await afork("one", "last", team, runtime=home, new_run_id="two")
    assert (whole.asked, whole.judged) == (["Writer/note it/0"], [])
    assert output.trace is not None
    assert before.trace is not None
    assert output.trace.task_traces[0] == before.trace.task_traces[0]
    agents = [each.replace(max_iterations=3) if each.role == "Checker" else each for each in team.agents or ()]
    with pytest.raises(ValidationError, match=r"agents\.checker\.max_iterations: 25 -> 3"):
        await afork("one", "last", team.replace(agents=agents), runtime=home, new_run_id="three")
