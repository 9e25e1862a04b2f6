"""Runs that hand work on, go on after the death of their process: nobody is asked again, no rule is counted wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import (
    ConstraintViolationError,
    Ensemble,
    EnsembleOutput,
    HierarchicalConstraints,
    RunState,
    Runtime,
    TaskExecutionError,
    ToolCall,
    ValidationError,
    resume,
)
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.runs.planned_tasks import PlannedTasks
from ensemble_ray.testing import ModelServer, ScriptedCall, ScriptedModel, replay
from tests.builders import agent, call, task
from tests.scenarios.delegating import hand, told
from tests.scenarios.delegating import team as hierarchy
from tests.scenarios.dying_delegations import DIED, LAST, MARKS, MODEL, RUN_ID, answers, team
from tests.scenarios.teams import PATIENCE_S, Marks
from tests.template import run_forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    """What happened in whichever process."""
    return Marks(tmp_path / "marks")


@pytest.fixture
def dead(
    model_server: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch, marks: Marks
) -> Callable[..., ModelServer]:
    """Runs the team in a process of its own until it dies at a mark; gives its model's server."""

    def die(last: str, *, is_managed: bool = True) -> ModelServer:
        server = model_server(answers(is_managed=is_managed))
        for name, value in ((MODEL, server.base_url), (MARKS, str(marks.path)), (LAST, last)):
            monkeypatch.setenv(name, value)
        script = (
            "from tests.scenarios.dying_delegations import main; "
            f"main(is_managed={is_managed}, is_reporting={last == 'report'})"
        )
        done = run_forked([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == DIED, done.stderr
        return server

    return die


def _is_whole(output: EnsembleOutput, server: ModelServer) -> None:
    """Every request was sent once, and the output tells of all of it."""
    assert set(server.requests_by_key().values()) == {1}
    assert output.raw == "all done"
    assert output.metrics.total_llm_call_count == len(server.requests) == 8
    assert output.metrics.total_tokens == 15 * 8


@pytest.mark.parametrize("last", ["pay 5", "judge Manager write", "writer begins", "report"])
def test_managed_run_goes_on_when_its_process_died(
    dead: Callable[..., ModelServer], marks: Marks, home: str, last: str
) -> None:
    """S-DUR-70, S-DUR-71, S-DUR-72, S-DUR-73, S-DUR-23, S-HIER-26, S-HIER-41, S-HIER-6: wherever it dies.

    In a worker's tool, in a policy, between a decision and its worker, behind the manager's output; caps and stages are
    exact, the tool is called once.
    """
    server = dead(last)
    output = resume(RUN_ID, team())
    _is_whole(output, server)
    assert [(each.agent_role, each.raw) for each in output.task_outputs] == [
        ("Digger", "gold"), ("Writer", "a text"), ("Manager", "all done"),
    ]  # fmt: skip
    lines = ["judge Manager dig", "judge Digger pay", "pay 5", "judge Manager write", "writer begins"]
    again = [last] if last in {"judge Manager write", "writer begins"} else []  # what was begun and is not on record
    assert sorted(marks.lines) == sorted([*lines, *again])
    assert output.trace is not None
    told = [(each.worker_role, each.succeeded) for each in output.trace.task_traces[0].delegations]
    assert told == [("Writer", False), ("Digger", True), ("Writer", True), ("Digger", False)]
    (paid,) = output.trace.task_traces[1].delegations
    assert paid.worker_trace is not None
    assert paid.worker_trace.llm_interactions[0].tool_calls[0].outcome == ("unknown" if last == "pay 5" else "success")
    directory = RunDirectory(Path(home), RUN_ID)
    assert directory.state() is RunState.COMPLETED
    assert fold_trace(directory.facts()).task_traces == output.trace.task_traces


@pytest.mark.parametrize("last", ["pay 5", "writer begins"])
def test_run_of_peers_goes_on_when_its_process_died(dead: Callable[..., ModelServer], marks: Marks, last: str) -> None:
    """S-DUR-70, S-DUR-71, S-DUR-72, S-DUR-73: two delegations inside each other, and one behind them."""
    server = dead(last, is_managed=False)
    output = resume(RUN_ID, team(is_managed=False))
    _is_whole(output, server)
    assert len(output.task_outputs) == 1
    assert marks.lines.count("pay 5") == 1
    assert marks.lines.count("judge Asker dig") == 1
    assert output.trace is not None
    (asker,) = output.trace.task_traces
    digger, writer = asker.delegations
    assert (digger.depth, digger.result, writer.result) == (0, "gold", "a text")
    assert digger.worker_trace is not None
    assert [(each.depth, each.result) for each in digger.worker_trace.delegations] == [(1, "done")]


def test_changed_constraint_is_named_when_a_managed_run_should_go_on(dead: Callable[..., ModelServer]) -> None:
    """S-DUR-75, S-DUR-36: by its path; allowed, what was decided stays decided and the rest is held to the new one."""
    server = dead("writer begins")
    with pytest.raises(ValidationError, match=r"plan\.hierarchy\.max_calls_per_worker\.Digger: 1 -> 2"):
        resume(RUN_ID, team(cap=2))
    output = resume(RUN_ID, team(cap=2), allow_changes=True)
    _is_whole(output, server)
    assert output.trace is not None
    assert "delegation cap of 1" in output.trace.task_traces[0].delegations[3].result


def _delegate(role: str, text: str) -> ToolCall:
    return call("delegate_task", f'{{"agent_role": "{role}", "task_description": "{text}"}}')


def _managed(manager: ScriptedModel, worker: ScriptedModel, **changes: object) -> Ensemble:
    writer = agent(worker, "Writer")
    ensemble = Ensemble(tasks=[task("Write it", writer)], workflow="hierarchical", manager_llm=manager)
    return ensemble.replace(**changes)


@pytest.fixture
def lost_at_end(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on no run's end comes into its record, until it is called: as if its process had died just before."""
    usual = PlannedTasks.close

    async def lost(*_: object) -> None:
        raise OSError("lost")

    monkeypatch.setattr(PlannedTasks, "close", lost)
    return lambda: monkeypatch.setattr(PlannedTasks, "close", usual)


def test_failed_manager_fails_the_run_that_goes_on_with_what_its_workers_gave(
    lost_at_end: Callable[[], None],
) -> None:
    """S-DUR-72, S-DUR-39, S-HIER-60: its error, its cause and the outputs are those of the first life."""
    manager = ScriptedModel(_delegate("Writer", "write"), ValueError("no more"))
    ensemble = _managed(manager, ScriptedModel("a text"))
    with pytest.raises(OSError, match="lost"):
        ensemble.run(runtime="inline", run_id="failing")
    lost_at_end()
    with pytest.raises(TaskExecutionError, match=r"Hierarchical workflow manager failed: .*no more") as caught:
        resume("failing", ensemble, runtime="inline")
    assert [each.raw for each in caught.value.completed_task_outputs] == ["a text"]
    assert len(manager.calls) == 2
    assert caught.value.trace is not None
    assert [each.agent_role for each in caught.value.trace.task_traces] == ["Manager", "Writer"]
    with pytest.raises(ValidationError, match=r"Run 'failing' failed and is not resumed\.$"):
        resume("failing", ensemble, runtime="inline")


def test_missing_required_worker_fails_the_run_that_goes_on(lost_at_end: Callable[[], None], home: str) -> None:
    """S-DUR-72, S-HIER-50: as it would have in its first life; the record shows the same error."""
    rules = HierarchicalConstraints(required_workers=["Writer"])
    manager = ScriptedModel("I am done")
    ensemble = _managed(manager, ScriptedModel(), hierarchical_constraints=rules, enforce_required="fail")
    with pytest.raises(OSError, match="lost"):
        ensemble.run(runtime="inline", run_id="missing")
    lost_at_end()
    with pytest.raises(ConstraintViolationError) as caught:
        resume("missing", ensemble, runtime="inline")
    assert caught.value.violations == ("Required worker 'Writer' was not delegated to during this run.",)
    assert caught.value.trace is not None
    errors = [(each.error_type, each.message) for each in caught.value.trace.errors]
    assert errors == [("ConstraintViolationError", str(caught.value))]
    folded = fold_trace(RunDirectory(Path(home), "missing").facts())
    assert [(each.error_type, each.message) for each in folded.errors] == errors
    assert len(manager.calls) == 1


def test_same_work_asked_for_twice_is_told_in_request_order(inline_runtime: Runtime, home: str) -> None:
    """S-TRC-41, S-HIER-83, S-DUR-77: whoever is done first; live, in the record, and when it is replayed."""
    second = asyncio.Event()

    async def late(_asked: ScriptedCall) -> str:
        await second.wait()
        return "first"

    async def early(_asked: ScriptedCall) -> str:
        second.set()
        return "second"

    manager = ScriptedModel([hand("Writer", number=0), hand("Writer", number=1)], "done")
    ensemble = hierarchy(manager, [agent(ScriptedModel(late, early), "Writer")])
    output = ensemble.run(runtime=inline_runtime)
    assert [each.raw for each in output.task_outputs] == ["second", "first", "done"]
    assert output.trace is not None
    assert [each.final_output for each in output.trace.task_traces] == ["done", "first", "second"]
    assert told(manager) == ["first", "second"]
    directory = RunDirectory(Path(home), output.run_id)
    assert fold_trace(directory.facts()).task_traces == output.trace.task_traces
    assert replay(output, ensemble).is_same
