"""Runs that go on: after the death of their process, after a cancellation; what is recorded is never done again."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ensemble_ray import (
    AgentSynthesizer,
    Ensemble,
    ExitReason,
    InlineRuntime,
    RunExistsError,
    RunState,
    Task,
    TaskExecutionError,
    ValidationError,
    aresume,
    fork,
    resume,
    tool,
)
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import ModelServer, ScriptedCall, ScriptedModel, ServedRequest
from ensemble_ray.values.ids import OWNER_STEP
from tests.builders import agent, call, task
from tests.scenarios.dying_run import DIED, MARKS, MODEL, RUN_ID, answers, team
from tests.scenarios.teams import PATIENCE_S, Watcher, recorded_state, wait_for
from tests.template import run_forked

ROOT = Path(__file__).resolve().parents[2]


def die(*, is_placed: bool = False) -> None:
    """Run the team in a process of its own, which dies in it."""
    script = f"from tests.scenarios.dying_run import main; main(is_placed={is_placed})"
    done = run_forked([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == DIED, done.stderr


@dataclass
class Died:
    """A run whose process died, as it left it, and its model, which answers each request of a test once."""

    place: Path
    server: ModelServer
    #: what the model says next
    left: list[object]
    #: how many requests came before the test
    before: int = 0

    @property
    def requests(self) -> list[ServedRequest]:
        """What the model was asked in the run: before its process died, and in the test."""
        return [*self.server.requests[:2], *self.server.requests[self.before :]]


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Died]:
    """The team has run once in a process of its own, which died."""
    left = answers()
    with ModelServer(lambda _: left.pop(0)) as server, pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("died")
        patch.setenv(MODEL, server.base_url)
        patch.setenv(MARKS, str(place / "marks"))
        patch.setenv("ENSEMBLE_RAY_HOME", str(place / "home"))
        patch.delenv("ENSEMBLE_RAY_STORE", raising=False)
        die()
        yield Died(place, server, left)


@pytest.fixture
def server(died: Died, home: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Died:
    """The dead run is in the home of the test, and its model says what is left to say."""
    shutil.copytree(died.place / "home", home, dirs_exist_ok=True)
    shutil.copy(died.place / "marks", tmp_path / "marks")
    monkeypatch.setenv(MODEL, died.server.base_url)
    monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
    died.left[:] = answers()[2:]
    died.before = len(died.server.requests)
    return died


def test_run_goes_on_when_its_process_died(server: Died, home: str) -> None:
    """S-DUR-30, S-DUR-34, S-DUR-35, S-DUR-37, S-DUR-38: one run, as if nothing had happened; each request once."""
    assert recorded_state(home, RUN_ID) is RunState.INTERRUPTED
    assert len(server.requests) == 2
    output = resume(RUN_ID, team())
    assert output.raw == "actor + five"
    assert [each.raw for each in output.task_outputs] == ["actor", "five", "actor + five"]
    assert (output.run_id, output.exit_reason) == (RUN_ID, ExitReason.COMPLETED)
    assert sorted(Counter(request.key for request in server.requests).values()) == [1, 1, 1]
    assert output.metrics.total_llm_call_count == 3
    assert output.total_tool_calls == 1
    assert output.trace is not None
    assert [each.task_description for each in output.trace.task_traces] == [
        "Name a word about Ray", "Measure it", "Conclude",
    ]  # fmt: skip
    assert [len(each.llm_interactions) for each in output.trace.task_traces] == [1, 2, 0]
    assert recorded_state(home, RUN_ID) is RunState.COMPLETED


async def test_run_goes_on_from_async_code(server: Died) -> None:
    """S-DUR-35: the same contract; by the beginning of its id."""
    assert (await aresume(RUN_ID[:3], team())).raw == "actor + five"
    assert len(server.requests) == 3


def test_inputs_and_options_are_the_recorded_ones_when_a_run_goes_on(server: Died) -> None:
    """S-DUR-35: the topic of then; the model sees as much of the tool's output as it would have."""
    output = resume(RUN_ID, team())
    assert output.task_outputs[0].task_description == "Name a word about Ray"
    told = [str(each["content"]) for each in server.requests[2].messages if each["role"] == "tool"]
    assert told[0].startswith("5 l")
    assert "letters" not in told[0]


def test_definition_is_found_where_it_came_from(
    model_server: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    """S-DUR-35: nobody passes it."""
    server = model_server(answers())
    monkeypatch.setenv(MODEL, server.base_url)
    monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
    die(is_placed=True)
    assert resume("latest").raw == "actor + five"
    assert len(server.requests) == 3
    assert recorded_state(home, RUN_ID) is RunState.COMPLETED


@pytest.mark.usefixtures("server")
def test_definition_is_asked_for_when_a_program_made_it() -> None:
    """S-DUR-35: it says what to do."""
    with pytest.raises(ValidationError, match=rf"resume\('{RUN_ID}', ensemble\)"):
        resume(RUN_ID)


def test_another_definition_is_refused_with_what_differs(server: Died, home: str) -> None:
    """S-DUR-36: by its path; nothing is asked, and the run can still go on with the one it was begun with."""
    with pytest.raises(ValidationError, match="of another definition") as caught:
        resume(RUN_ID, team(goal="be quick"))
    assert "goal" in str(caught.value)
    assert "be exact" in str(caught.value)
    assert "be quick" in str(caught.value)
    assert "allow_changes" in str(caught.value)
    assert (len(server.requests), recorded_state(home, RUN_ID)) == (2, RunState.INTERRUPTED)
    assert resume(RUN_ID, team()).raw == "actor + five"


def test_another_definition_goes_on_when_that_is_allowed(server: Died) -> None:
    """S-DUR-36: what is recorded is used all the same; what is asked from now on is asked by the new one."""
    output = resume(RUN_ID, team(goal="be quick"), allow_changes=True)
    assert output.raw == "actor + five"
    assert len(server.requests) == 3
    assert "be quick" in str(server.requests[2].messages[0]["content"])


def test_completed_run_gives_its_recorded_output(server: Died) -> None:
    """S-DUR-35: nothing is asked, no task runs; the output is that of the first time."""
    first = resume(RUN_ID, team())
    again = resume(RUN_ID, team())
    assert len(server.requests) == 3
    assert [each.raw for each in again.task_outputs] == [each.raw for each in first.task_outputs]
    assert (again.exit_reason, again.metrics) == (first.exit_reason, first.metrics)


def test_run_dies_twice_and_goes_on_twice(server: Died, tmp_path: Path) -> None:
    """S-DUR-16, S-DUR-30: each owner under a higher epoch; what both recorded is used."""
    marks = tmp_path / "marks"
    marks.unlink()  # so that the tool's process dies in it again
    script = f"from tests.scenarios.dying_run import team; import ensemble_ray; ensemble_ray.resume({RUN_ID!r}, team())"
    done = run_forked([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == DIED, done.stderr
    assert resume(RUN_ID, team()).raw == "actor + five"
    assert len(server.requests) == 3
    facts = RunDirectory(Path(os.environ["ENSEMBLE_RAY_HOME"]), RUN_ID).facts()
    assert [fact.epoch for fact in facts if fact.kind == "resume"] == [OWNER_STEP, 2 * OWNER_STEP]


# In one process.


def hung(*answers: str, durability: str = "effects") -> tuple[Ensemble, ScriptedModel, threading.Event]:
    """A team of one whose model hangs after these answers, until the event is set; then it says `end`."""
    asked, go_on = threading.Event(), threading.Event()

    def hang(_asked: ScriptedCall) -> str:
        if go_on.is_set():
            return "end"
        asked.set()
        wait_for(go_on)
        return "late"

    model = ScriptedModel(*answers, otherwise=hang)
    worker = agent(model)
    ensemble = Ensemble(tasks=[task("one", worker), task("two", worker)], durability=durability)
    run = ensemble.start(runtime="inline", run_id="hung")
    wait_for(asked)
    run.cancel()
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    go_on.set()
    return ensemble, model, go_on


def test_cancelled_run_can_go_on(home: str) -> None:
    """S-DUR-35: what was completed is not done again; events are of what is."""
    ensemble, model, _ = hung("first")
    watcher = Watcher()
    output = resume("hung", ensemble.replace(listeners=[watcher]), runtime="inline")
    assert [each.raw for each in output.task_outputs] == ["first", "end"]
    assert output.exit_reason is ExitReason.COMPLETED
    assert len(model.calls) == 3
    assert watcher.lines == ["start two", "complete two"]
    assert recorded_state(home, "hung") is RunState.COMPLETED


def test_failed_run_is_refused_and_told_of_fork() -> None:
    """S-DUR-35, S-DUR-153, S-DUR-154: its failure is recorded; a fork is another run, which is made as it is told."""
    worker = agent(ScriptedModel("done", ValueError("no"), "x"))
    ensemble = Ensemble(tasks=[task("first", worker), task("go", worker)])
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime="inline", run_id="failed")
    with pytest.raises(ValidationError, match=r"ensemble_ray\.fork\('failed', 'task-2', ensemble\)"):
        resume("failed", ensemble, runtime="inline")
    assert fork("failed", "task-2", ensemble, runtime="inline").raw == "x"


def test_running_run_is_refused_with_its_owner() -> None:
    """S-DUR-15: the process is named; the running one is not disturbed."""
    asked, go_on = threading.Event(), threading.Event()

    def slow(_asked: ScriptedCall) -> str:
        asked.set()
        wait_for(go_on)
        return "done"

    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel(slow)))])
    run = ensemble.start(runtime="inline", run_id="busy")
    wait_for(asked)
    with pytest.raises(RunExistsError, match=f"process {os.getpid()}.*--take-over"):
        resume("busy", ensemble, runtime="inline")
    go_on.set()
    assert run.result(timeout_s=PATIENCE_S).raw == "done"


def test_frozen_owner_writes_no_more_when_its_run_was_taken_from_it(home: str) -> None:
    """S-DUR-17, S-DUR-16: when it wakes it stops; the run is the new owner's, and ends once."""
    asked, go_on = threading.Event(), threading.Event()

    def frozen(_asked: ScriptedCall) -> str:
        if asked.is_set():
            return "new"
        asked.set()
        wait_for(go_on)
        return "old"

    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel(otherwise=frozen)))])
    run = ensemble.start(runtime="inline", run_id="frozen")
    wait_for(asked)
    assert resume("frozen", ensemble, runtime="inline", take_over=True).raw == "new"
    go_on.set()
    with pytest.raises(Exception, match=rf"epoch {OWNER_STEP}, epoch 0 must stop") as caught:
        run.result(timeout_s=PATIENCE_S)
    assert type(caught.value).__name__ in {"StaleEpochError", "TaskExecutionError"}
    assert recorded_state(home, "frozen") is RunState.COMPLETED
    outputs = [fact for fact in RunDirectory(Path(home), "frozen").facts() if fact.kind == "output"]
    assert [fact.epoch for fact in outputs] == [OWNER_STEP]


def test_unknown_run_is_refused() -> None:
    """S-DUR-35: with what is there."""
    with pytest.raises(ValidationError, match="Unknown run 'nowhere'"):
        resume("nowhere", Ensemble(tasks=[task("go", handler=str)]), runtime="inline")


def test_run_that_was_not_recorded_cannot_go_on() -> None:
    """S-DUR-2: durability `off` leaves nothing."""
    ensemble, _, _ = hung("first", durability="off")
    with pytest.raises(ValidationError, match="Unknown run 'hung'"):
        resume("hung", ensemble, runtime="inline")


def test_synthesizer_is_not_asked_again(home: str) -> None:
    """S-SET-46, S-DUR-37: its answers are recorded as effects of the run."""
    asked, go_on = threading.Event(), threading.Event()

    def hang(_asked: ScriptedCall) -> str:
        if not asked.is_set():
            asked.set()
            wait_for(go_on)
        return "written"

    persona = '{"role": "Poet", "goal": "Rhyme", "background": "Old"}'
    model = ScriptedModel(persona, otherwise=hang)
    ensemble = Ensemble(tasks=[Task.of("Write")], llm=model, agent_synthesizer=AgentSynthesizer.llm_based())
    run = ensemble.start(runtime="inline", run_id="made")
    wait_for(asked)
    run.cancel()
    run.result(timeout_s=PATIENCE_S)
    go_on.set()
    output = resume("made", ensemble, runtime="inline")
    assert (output.raw, output.task_outputs[0].agent_role) == ("written", "Poet")
    assert len(model.calls) == 3
    answers = [fact for fact in RunDirectory(Path(home), "made").facts() if fact.kind == "model"]
    assert len({fact.name for fact in answers}) == len(answers) == 2


def test_run_goes_on_where_it_is_recorded(tmp_path: Path) -> None:
    """S-DUR-35: with the runtime that knows the place."""
    runtime = InlineRuntime(home=tmp_path / "elsewhere")

    @tool(effect="once")
    def note() -> str:
        """Note."""
        noted.append("x")
        return "noted"

    noted: list[str] = []
    failing = ScriptedModel(call("note"), otherwise="done")
    ensemble = Ensemble(tasks=[task("go", agent(failing, tools=[note]))])
    first = ensemble.run(runtime=runtime, run_id="there")
    with pytest.raises(ValidationError, match="Unknown run 'there'"):
        resume("there", ensemble, runtime="inline")
    again = resume("there", ensemble, runtime=runtime)
    assert (again.raw, noted, len(failing.calls)) == (first.raw, ["x"], 2)
