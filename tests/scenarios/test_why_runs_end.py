"""A run that failed says why in its record, and every reader of it says the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import pytest

from ensemble_ray import (
    Ensemble,
    ExitReason,
    GraphRoutingContext,
    HierarchicalConstraints,
    Loop,
    MapEnsemble,
    OpenAIChatModel,
    ParallelExecutionError,
    RunState,
    Runtime,
    Task,
    TaskHandlerContext,
)
from ensemble_ray.facts.runs import OWN_ERRORS, RecordedError
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.failure import read_failure
from ensemble_ray.record.head import read_head
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RunStore, StoreAddress
from ensemble_ray.runs.inline import InlineRuntime
from ensemble_ray.serve.driving.run_driver import outcome_of_error, recorded_outcome
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.testing import Fault, ModelServer, ScriptedModel
from tests.builders import answer, task
from tests.command_line import calling
from tests.ensemble_ray.studio.stored_runs import Anybody
from tests.scenarios.answering import answering
from tests.scenarios.delegating import team as managed
from tests.scenarios.delegating import worker
from tests.scenarios.mapping import failing, map_task, team
from tests.scenarios.test_graphs import edge, graph
from tests.scenarios.test_phases import phase, reviewed_by

RUN = "why"
CAUSE = "no such key"


def break_down(*_: object) -> Any:
    """Raise with a cause, as code of a user."""
    try:
        {}[CAUSE]
    except KeyError as error:
        raise ValueError("broke down") from error


#: Where the cause was raised.
LINE = break_down.__code__.co_firstlineno + 3


def handle(context: TaskHandlerContext) -> str:
    """A handler that raises."""
    return str(break_down(context))


def until(context: object) -> bool:
    """A predicate that raises."""
    return bool(break_down(context))


def condition(context: GraphRoutingContext) -> bool:
    """A condition of an edge that raises."""
    return bool(break_down(context))


def source() -> Iterator[int]:
    """Items of which the second raises."""
    yield 0
    break_down()


def make(item: object) -> Task:
    """A factory that raises."""
    return task(str(break_down(item)))


def loop(**fields: Any) -> Loop:
    """A loop of one task."""
    given: dict[str, Any] = {"name": "refine", "body": [answering("w")], "max_iterations": 2, **fields}
    return Loop(**given)


def never(_: object) -> bool:
    """A predicate that never holds."""
    return False


def capped() -> Loop:
    """A loop whose cap fails the run."""
    return loop(until=never, on_max_iterations="throw")


class Secret(pydantic.BaseModel):
    """What a source makes of its lines."""

    number: int


class Kind(NamedTuple):
    """A way in which a run fails."""

    make: Callable[[], Any]
    #: class of the recorded error
    error: str
    #: of the causes
    causes: tuple[str, ...] = ()
    #: whether the test's own code raised
    is_placed: bool = False


PLACED = ("ValueError", ("KeyError",), True)
KINDS = {
    "task": Kind(
        lambda: Ensemble(tasks=[task("t", handler=handle)]),
        "AgentExecutionError",
        ("ValueError", "KeyError"),
        is_placed=True,
    ),
    "tasks": Kind(
        lambda: Ensemble(
            tasks=[task("t", handler=handle), answering("u")],
            workflow="parallel",
            parallel_error_strategy="continue_on_error",
        ),
        "AgentExecutionError",
        ("ValueError", "KeyError"),
        is_placed=True,
    ),
    "constraint": Kind(
        lambda: managed(
            ScriptedModel("done", "done"),
            [worker("Writer")],
            hierarchical_constraints=HierarchicalConstraints(required_workers=["Writer"]),
        ),
        "ConstraintViolationError",
    ),
    "manager": Kind(
        lambda: managed(ScriptedModel(ValueError("model")), [worker("Writer")]), "AgentExecutionError", ("ValueError",)
    ),
    "rejected phase": Kind(
        lambda: Ensemble(phases=[phase("A", answering("a"), review=reviewed_by("REJECT: no good"))]),
        "TaskExecutionError",
    ),
    "capped loop": Kind(lambda: Ensemble(loops=[capped()]), "MaxLoopIterationsExceededError"),
    "capped loop in parallel": Kind(
        lambda: Ensemble(loops=[capped()], workflow="parallel"), "MaxLoopIterationsExceededError"
    ),
    "capped loop of a phase": Kind(
        lambda: Ensemble(phases=[phase("A", answering("a"), capped())]), "MaxLoopIterationsExceededError"
    ),
    "capped graph": Kind(
        lambda: graph({"a": answering("a")}, edge("a", "a"), max_steps=2, on_max_steps="throw"),
        "MaxGraphStepsExceededError",
    ),
    "no edge": Kind(
        lambda: graph({"a": answering("a", "so it is")}, edge("a", "a", never, "never")),
        "GraphNoEdgeMatchedError",
    ),
    "predicate": Kind(lambda: Ensemble(loops=[loop(until=until)]), *PLACED),
    "predicate in parallel": Kind(lambda: Ensemble(loops=[loop(until=until)], workflow="parallel"), *PLACED),
    "predicate of a phase": Kind(lambda: Ensemble(phases=[phase("A", loop(until=until))]), *PLACED),
    "condition": Kind(lambda: graph({"a": answering("a")}, edge("a", "a", condition)), *PLACED),
    "source": Kind(lambda: team(items=source()), *PLACED),
    "factory": Kind(lambda: team(map_task=make), *PLACED),
    "reduce factory": Kind(lambda: team(reduce_task=break_down), *PLACED),
    "estimator": Kind(lambda: team(token_estimator=break_down, llm=ScriptedModel(otherwise="text")), *PLACED),
    "no items": Kind(lambda: team(items=iter(())), "ValidationError"),
    "item": Kind(lambda: team(llm=failing("map 1 "), max_parallel_tasks=1), "AgentExecutionError", ("ValueError",)),
    "all items": Kind(
        lambda: MapEnsemble(
            items=range(2),
            map_task=map_task,
            llm=failing("map"),
            parallel_error_strategy="continue_on_error",
        ),
        "AgentExecutionError",
        ("ValueError",),
    ),
}


@pytest.fixture
def store(home: str) -> RunStore:
    return store_at(StoreAddress.of(Path(home)))


def recorded(store: RunStore) -> RecordedError:
    """Why the run failed or stopped, as its record says."""
    errors = run_blocking(read_head(store, RUN)).errors
    assert errors, "no reason is on record"
    return errors[0]


def fail(kind: Kind, runtime: Runtime) -> BaseException:
    """Return what the run raised."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  each kind has its own
        kind.make().run(runtime=runtime, run_id=RUN)
    return caught.value


@pytest.mark.parametrize("name", KINDS)
def test_the_record_says_why_a_run_failed(name: str, store: RunStore, inline_runtime: Runtime) -> None:
    """S-ERR-66, S-ERR-67: class, text, causes, and the line of user code that raised; the error names the run."""
    kind = KINDS[name]
    error = fail(kind, inline_runtime)
    assert vars(error)["run_id"] == RUN
    reason = recorded(store)
    assert reason.error_type == kind.error
    trace = vars(error).get("trace")
    assert trace is None or reason.message in [each.message for each in trace.errors]
    texts = [str(error)]
    if isinstance(error, ParallelExecutionError):
        texts += map(str, error.failed_task_causes.values())
    assert any(reason.message in text for text in texts)
    assert tuple(each.error_type for each in reason.causes) == kind.causes
    place = f'File "{__file__}", line {LINE}, in break_down'
    assert reason.place == (place if kind.is_placed else "")


@pytest.mark.parametrize("name", ["task", "constraint", "no edge", "condition"])
def test_the_record_says_the_same_on_ray(name: str, store: RunStore, ray_runtime: Runtime) -> None:
    """S-ERR-66, S-ERR-67: where the process that records the end runs no user code."""
    kind = KINDS[name]
    error = fail(kind, ray_runtime)
    reason = recorded(store)
    assert reason.error_type == kind.error
    assert reason.message in str(error)
    assert tuple(each.error_type for each in reason.causes) == kind.causes
    assert reason.place.endswith(f"line {LINE}, in break_down" if kind.is_placed else "")


@pytest.mark.parametrize("name", KINDS)
def test_all_readers_say_why_a_run_failed(
    name: str, store: RunStore, inline_runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-ERR-68, S-STU-200, S-SRV-230: `trace`, `runs`, Studio and the endpoint show the recorded text."""
    kind = KINDS[name]
    error = fail(kind, inline_runtime)
    reason = recorded(store)
    call = calling(capsys)
    said = f"{reason.error_type}: {reason.message}"
    tree = call("trace", RUN).printed
    begin = said[:100]
    problems: list[str] = []
    if begin not in tree or reason.place not in tree:
        problems.append(f"trace: {tree}")
    listed = call("runs").printed
    if begin not in listed:
        problems.append(f"runs: {listed}")
    (data,) = json.loads(call("runs", "--json").printed)
    causes = [{"type": each.error_type, "message": each.message} for each in reason.causes]
    listed_error = data.get("error", {})
    shown = (listed_error.get("message"), listed_error.get("place", ""), listed_error.get("causes", []))
    if shown != (reason.message, reason.place, causes):
        problems.append(f"runs --json: {data}")
    detail = run_blocking(StudioReader(store, can_decide=False).run(RUN, Anybody()))
    seen = detail.error
    if seen is None or (seen.class_, seen.message, seen.place) != (reason.error_type, reason.message, reason.place):
        problems.append(f"studio: {seen}")
    after, live = run_blocking(recorded_outcome(store, RUN)), outcome_of_error(error, RUN)
    assert after is not None
    assert after.error is not None
    assert live.error is not None
    wanted = live.error.model_copy(update={"tasks": []}) if name == "item" else live.error
    if isinstance(error, OWN_ERRORS) and after.error != wanted:
        problems.append(f"endpoint: {live.error}, later {after.error}")
    if not isinstance(error, OWN_ERRORS) and after.error.error != "InternalError":
        problems.append(f"endpoint: {after.error}")
    assert not problems


@pytest.mark.parametrize("name", KINDS)
def test_all_readers_explain_a_failed_run_with_the_same_lines(
    name: str, store: RunStore, inline_runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-ERR-68, S-STU-211: what failed, why, where and what to do: `trace`, Studio, and the note of the exception."""
    error = fail(KINDS[name], inline_runtime)
    reason = recorded(store)
    detail = run_blocking(StudioReader(store, can_decide=False).run(RUN, Anybody()))
    assert detail.error is not None
    lines = detail.error.lines
    assert lines[0] == detail.error.what
    assert lines[1].startswith(f"{reason.error_type}: {reason.message[:40]}")
    assert detail.next_step is not None
    assert lines[-1].startswith(detail.next_step.text)
    tree = calling(capsys)("trace", RUN).printed
    assert [line for line in lines[:-1] if line not in tree] == []
    note = vars(error)["__notes__"][-1].split("\n")
    told = (reason.message[:40], "caused by", "File ")  # by the traceback
    assert note == [line for line in lines if not any(each in line for each in told)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("task", "Task 't' failed"),
        ("constraint", "The manager failed"),
        ("rejected phase", "Phase 'A' failed"),
        ("capped loop of a phase", "Loop 'refine', attempt 1 of phase 'A', failed"),
        ("no edge", "Graph 'g', step 1, failed"),
        ("predicate", "Loop 'refine' ('break_down') failed"),
        ("source", "Code that makes items or tasks ('break_down') failed"),
        ("item", "Item 1 failed"),
    ],
)
def test_a_failed_run_says_what_failed(name: str, what: str, store: RunStore, inline_runtime: Runtime) -> None:
    """S-STU-210: the task, the unit with its execution, the item, or the code of the run."""
    fail(KINDS[name], inline_runtime)
    summary = run_blocking(store.summary(RUN))
    assert summary is not None
    failure = run_blocking(read_failure(store, summary))
    assert failure is not None
    assert failure.what == what


@pytest.mark.parametrize(("name", "key"), [("item", "map-1"), ("all items", "map-0"), ("source", ""), ("no items", "")])
def test_the_record_names_the_item_that_failed(name: str, key: str, store: RunStore, inline_runtime: Runtime) -> None:
    """S-MR-210: by its key; the run itself has none."""
    fail(KINDS[name], inline_runtime)
    assert recorded(store).key == key


def test_a_namesake_of_an_error_of_this_package_is_hidden(store: RunStore, inline_runtime: Runtime) -> None:
    """S-SRV-230: pydantic's `ValidationError` has the name of ours, and quotes its input."""
    fail(Kind(lambda: team(items=(Secret.model_validate({"number": text}) for text in ["hidden"])), ""), inline_runtime)
    assert recorded(store).error_type == "ValidationError"
    outcome = run_blocking(recorded_outcome(store, RUN))
    assert outcome is not None
    assert outcome.error is not None
    assert (outcome.error.error, outcome.error.message) == (
        "InternalError",
        "ValidationError in the code of the team. The record of the run says more",
    )


def test_a_budget_of_a_map_that_is_spent_is_a_reason(store: RunStore, inline_runtime: Runtime) -> None:
    """S-ERR-66: in its trace, too."""
    output = team(llm=ScriptedModel(otherwise=answer("text", 90, 10)), max_tokens=420).run(
        runtime=inline_runtime, run_id=RUN
    )
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert output.trace is not None
    assert recorded(store).error_type == "BudgetExhaustedError"
    assert [each.message for each in output.trace.errors] == [recorded(store).message]


def test_a_run_that_its_watch_breaks_is_interrupted(
    store: RunStore, inline_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-ERR-69: whatever broke it; its state says the same as its record."""
    is_asked = asyncio.Event()

    async def entry(_: object) -> str:
        is_asked.set()
        return await asyncio.get_running_loop().create_future()

    async def watch(*_: object) -> None:
        await is_asked.wait()
        raise ConnectionError("the store is gone")

    monkeypatch.setattr("ensemble_ray.runs.inline.watch_for_cancel", watch)
    with pytest.raises(ConnectionError):
        Ensemble(tasks=[task("t")], llm=ScriptedModel(otherwise=entry)).run(runtime=inline_runtime, run_id=RUN)
    summary = run_blocking(store.summary(RUN))
    assert summary is not None
    assert summary.state is RunState.INTERRUPTED
    assert recorded(store).error_type == "ConnectionError"


def test_a_map_that_breaks_before_its_first_task_is_interrupted(store: RunStore) -> None:
    """S-ERR-69: its state says the same as its record."""

    class Broken(InlineRuntime):
        async def open_session(self, *_: object, **__: object) -> Any:
            raise ConnectionError("no cluster")

    with pytest.raises(ConnectionError):
        team().run(runtime=Broken(), run_id=RUN)
    summary = run_blocking(store.summary(RUN))
    assert summary is not None
    assert summary.state is RunState.INTERRUPTED
    assert recorded(store).error_type == "ConnectionError"


def test_a_budget_that_is_spent_is_a_reason(
    store: RunStore, inline_runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-ERR-66, S-ERR-68: nothing is raised; the record and its readers say what the limit was."""
    tasks = [task(each, name=each) for each in "ab"]
    llm = ScriptedModel(otherwise=answer("text", 90, 10))
    output = Ensemble(tasks=tasks, llm=llm, max_tokens=420).run(runtime=inline_runtime, run_id=RUN)
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    reason = recorded(store)
    assert (reason.key, reason.error_type) == ("b", "BudgetExhaustedError")
    assert reason.message.startswith("Budget exhausted: the limit is max_tokens 420")
    assert output.trace is not None
    assert [each.message for each in output.trace.errors] == [reason.message]
    call = calling(capsys)
    assert all(reason.message[:100] in call(*command).printed for command in (("trace", RUN), ("runs",)))


def one_task(llm: OpenAIChatModel) -> Ensemble:
    """A run of one task."""
    return Ensemble(tasks=[task("t")], llm=llm)


def one_map(llm: OpenAIChatModel) -> MapEnsemble:
    """A run over one item."""
    return MapEnsemble(items=[1], map_task=map_task, llm=llm)


def refuse(_: object) -> Fault:
    """An endpoint whose account has no credit."""
    return Fault(status=429, message="You exceeded your current quota", code="insufficient_quota")


@pytest.mark.parametrize("make", [one_task, one_map])
def test_a_run_without_credit_names_itself(
    make: Callable[..., Any], store: RunStore, inline_runtime: Runtime, model_server: Callable[..., ModelServer]
) -> None:
    """S-ERR-50, S-DUR-151: also where it is interrupted, or ends for that."""
    llm = OpenAIChatModel("m", base_url=model_server(refuse).base_url, api_key="sk-of-a-test")
    error = fail(Kind(lambda: make(llm), ""), inline_runtime)
    assert vars(error)["run_id"] == RUN
    reason = recorded(store)
    assert reason.error_type == "AgentExecutionError"
    assert [each.error_type for each in reason.causes] == ["RateLimitError"]


def test_a_run_that_breaks_says_why(
    store: RunStore, inline_runtime: Runtime, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """S-ERR-69: what is around the tasks broke; the run is interrupted, and can go on."""
    full = tmp_path / "full.jsonl"
    full.symlink_to("/dev/full")
    error = fail(Kind(lambda: team(results=full), "RecordError"), inline_runtime)
    assert vars(error)["run_id"] == RUN
    reason = recorded(store)
    assert (reason.key, reason.error_type, reason.message) == ("", "RecordError", str(error))
    call = calling(capsys)
    assert all(reason.message[:60] in call(*command).printed for command in (("trace", RUN), ("runs",)))
    detail = run_blocking(StudioReader(store, can_decide=False).run(RUN, Anybody()))
    assert detail.error is not None
    assert detail.error.message == reason.message
    assert detail.resume_advice == f"ensemble_ray.resume({RUN!r}, ensemble), in the program that began it"
