"""Map-reduces that end before they are done: cancelled, interrupted, by their own wish; no user code is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    EnsembleError,
    ExitEarlyError,
    ExitReason,
    InlineRuntime,
    RunState,
    Task,
    TaskCompleteEvent,
    resume,
)
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.items import pulling
from ensemble_ray.ports import Journal
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.runs.inline import InlineSession
from ensemble_ray.runs.ports import Deliver, RunRequest
from ensemble_ray.testing import ScriptedModel
from tests.scenarios.mapping import (
    answer,
    asked_of,
    map_task,
    model,
    raising,
    raws,
    team,
)
from tests.scenarios.teams import PATIENCE_S, Watcher, task_of, wait_for


class Hanging:
    """User code that hangs until it is let go."""

    def __init__(self) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> Any:
        self.reached.set()
        wait_for(self.let_go)
        return map_task("late")

    def items(self) -> Iterator[int]:
        """One item, then nothing for long."""
        yield 0
        self()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """User code that hangs as long as the test lasts."""
    hangs = Hanging()
    yield hangs
    hangs.let_go.set()


@pytest.mark.parametrize(
    ("place", "done"),
    [
        ("map_task", []),
        ("reduce_task", ["0", "1", "2", "3", "4", "5"]),
        ("token_estimator", ["text"] * 6),
        ("direct_task", []),
        ("input_estimator", []),
        ("source", ["0"]),
    ],
)
def test_cancel_waits_for_no_user_code(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch, place: str, done: list[str]
) -> None:
    """S-SET-27, S-MR-47: what was completed is in the output; nothing starts any more."""
    monkeypatch.setattr(pulling, "_CLOSE_S", 0.01)  # a source that hangs is given a moment, then left
    fields: dict[str, Any] = {"items": hanging.items()} if place == "source" else {place: hanging}
    fields |= {"direct_task": map_task} if place == "input_estimator" else {}
    fields |= {"llm": ScriptedModel(otherwise="text")} if place == "token_estimator" else {}
    if place == "direct_task":
        fields["input_estimator"] = str
    run = team(6, **fields).start(runtime="inline")
    wait_for(hanging.reached)
    completed = (each for each in run.events() if isinstance(each, TaskCompleteEvent))
    for _ in done:
        next(completed)
    run.cancel()
    output = run.result(PATIENCE_S)
    assert (output.exit_reason, run.state) == (ExitReason.CANCELLED, RunState.CANCELLED)
    assert raws(output) == done


def test_cancel_while_a_reduce_runs(hanging: Hanging) -> None:
    """S-SET-27: the maps and what they said are kept."""
    llm = ScriptedModel(otherwise=lambda asked: hanging() and "late" if "reduce" in task_of(asked) else answer(asked))
    run = team(6, llm=llm).start(runtime="inline")
    wait_for(hanging.reached)
    run.cancel()
    assert raws(run.result(PATIENCE_S)) == ["0", "1", "2", "3", "4", "5"]


async def test_arun_that_is_cancelled_ends_the_run(hanging: Hanging, home: str) -> None:
    """S-SET-27, S-PAR-33: the record says so."""
    begun = asyncio.create_task(team(6, map_task=hanging).arun(runtime="inline", run_id="gone"))
    await asyncio.to_thread(wait_for, hanging.reached)
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert RunDirectory(Path(home), "gone").state() is RunState.CANCELLED


def test_interrupt_of_a_listener_ends_the_run() -> None:
    """S-SET-27: as Ctrl-C does."""

    class Impatient(Watcher):
        def on_task_complete(self, event: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        team(6, listeners=[Impatient()]).run(runtime="inline")


def test_early_exit_keeps_what_was_done() -> None:
    """S-MR-100: a task that ends the run early fails nothing; nothing more starts."""

    def made(item: int) -> Task:
        handler = raising(ExitEarlyError("enough")) if item == 2 else _say
        return Task(description=f"map {item}", expected_output="e", handler=handler)

    output = team(6, map_task=made, max_parallel_tasks=1).run(runtime="inline")
    assert (output.exit_reason, raws(output)) == (ExitReason.USER_EXIT_EARLY, ["said", "said"])


def _say(_context: object) -> str:
    return "said"


class _Losing(InlineRuntime):
    """A runtime whose processes are gone when the first results have come, as with a lost cluster."""

    async def open_session(self, request: RunRequest, *, journal: Journal, deliver: Deliver) -> InlineSession:
        def lose(results: Sequence[TaskResult]) -> None:
            deliver(results)
            if not session.failed.done():
                session.failed.set_exception(EnsembleError("the cluster is gone"))

        session = await super().open_session(request, journal=journal, deliver=lose)
        return session


def test_run_is_interrupted_when_its_houses_are_gone(home: str) -> None:
    """S-MR-164: no failure of the run's, so that it can be gone on with; what is recorded is not asked again."""
    llm = model()
    with pytest.raises(EnsembleError, match="the cluster is gone"):
        team(llm=llm, max_parallel_tasks=2).run(runtime=_Losing(), run_id="lost")

    assert RunDirectory(Path(home), "lost").state() is RunState.INTERRUPTED
    assert len(resume("lost", team(llm=llm), runtime="inline").task_outputs) == 9
    assert sorted(asked_of(llm)) == sorted(set(asked_of(llm)))
