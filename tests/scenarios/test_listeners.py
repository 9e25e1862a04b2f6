"""Listeners: where they run, what they may do, what their failures lead to."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleListener,
    RunState,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskStartEvent,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, task
from tests.scenarios.teams import PATIENCE_S, Watcher, told_by_us, wait_for


def go(runtime: Runtime, *answers: object, **fields: object) -> object:
    """Run one task per answer."""
    writer = agent(ScriptedModel(*answers))
    return Ensemble(tasks=[task(f"t{n}", writer) for n in range(len(answers))], **fields).run(runtime=runtime)


def test_listeners_are_called_in_this_process(runtime: Runtime) -> None:
    """S-EVT-6, S-CONV-33: one that holds a lock and a list sees its own list filled; never on the loop's thread."""

    class Holding(EnsembleListener):
        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.seen: list[tuple[int, str]] = []

        def on_task_start(self, event: TaskStartEvent) -> None:
            with self.lock:
                self.seen.append((os.getpid(), threading.current_thread().name))

    listener = Holding()
    go(runtime, "x", listeners=[listener])
    assert listener.seen == [(os.getpid(), "ensemble-ray-listener")]


def test_all_registered_listeners_are_called(inline_runtime: Runtime) -> None:
    """S-EVT-2, S-EVT-1: objects and callables, one or several; an object needs only the methods it has."""

    class Small:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_task_complete(self, event: TaskCompleteEvent) -> None:
            self.seen.append(event.task_output.raw)

    small, watcher = Small(), Watcher()
    one: list[str] = []
    two: list[str] = []
    ids: list[object] = []
    go(
        inline_runtime,
        "x",
        listeners=[small, watcher],
        on_task_start=lambda event: one.append(event.task_description),
        on_task_complete=[lambda event: one.append(event.task_output.raw), lambda event: two.append(event.agent_role)],
        on_ensemble_started=lambda _id, workflow, total: ids.append((workflow, total)),
    )
    assert small.seen == ["x"]
    assert sorted(one) == ["t0", "x"]
    assert two == ["Writer"]
    assert ids == [("sequential", 1)]
    assert watcher.lines == ["start t0", "complete t0"]


def test_additional_listener_is_called_too(inline_runtime: Runtime) -> None:
    """S-DOM-69."""
    first, second = Watcher(), Watcher()
    writer = agent(ScriptedModel(otherwise="x"))
    ensemble = Ensemble(tasks=[task("go", writer)], listeners=[first])
    ensemble.with_additional_listener(second).run(runtime=inline_runtime)
    assert first.methods == second.methods
    ensemble.run(runtime=inline_runtime)
    assert len(first.heard) == 2 * len(second.heard)


def test_failing_listener_disturbs_nobody(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-EVT-3: WARN with the method's name; the run and later listeners go on."""

    class Broken(EnsembleListener):
        def on_task_start(self, event: TaskStartEvent) -> None:
            raise ValueError("listener broke")

    watcher = Watcher()
    output = go(runtime, "x", "y", listeners=[Broken(), watcher])
    assert output.raw == "y"  # type: ignore[attr-defined]
    assert watcher.lines == ["start t0", "complete t0", "start t1", "complete t1"]
    warnings = told_by_us(caplog.records, logging.WARNING)
    assert [record.getMessage() for record in warnings] == ["Listener Broken.on_task_start raised"] * 2
    assert all("listener broke" in str(record.exc_info[1]) for record in warnings if record.exc_info)


def test_async_listeners_are_awaited_on_their_own_loop(runtime: Runtime) -> None:
    """S-CONV-16, S-SET-33: all before `run` returns."""
    seen: list[object] = []

    async def note(event: TaskStartEvent) -> None:
        await asyncio.sleep(0)
        seen.append((event.task_description, asyncio.get_running_loop()))

    go(runtime, "x", "y", on_task_start=note)
    assert [name for name, _ in seen] == ["t0", "t1"]  # type: ignore[misc]
    assert seen[0][1] is seen[1][1]  # type: ignore[index]


def test_slow_listener_delays_only_itself(runtime: Runtime) -> None:
    """S-SET-32, S-PAR-42: it holds its first event until the run's last model call was made; nothing is lost."""
    last_asked, seen = threading.Event(), []

    def slow(event: TaskStartEvent) -> None:
        wait_for(last_asked)
        seen.append(event.task_description)

    def last(_asked: ScriptedCall) -> str:
        last_asked.set()
        return "end"

    watcher = Watcher()
    writer = agent(ScriptedModel("x", "y", last))
    tasks = [task(f"t{n}", writer) for n in range(3)]
    Ensemble(tasks=tasks, on_task_start=slow, listeners=[watcher]).run(runtime=runtime)
    assert seen == ["t0", "t1", "t2"]
    assert len(watcher.lines) == 6


def test_events_are_delivered_before_a_failure_is_raised(runtime: Runtime) -> None:
    """S-EVT-6, S-PAR-42, S-ENG-14."""
    watcher = Watcher()
    with pytest.raises(TaskExecutionError):
        go(runtime, "x", ValueError("no"), listeners=[watcher])
    assert watcher.lines == ["start t0", "complete t0", "start t1", "failed t1"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interrupt_in_a_listener_ends_the_run(runtime: Runtime, stop: type[BaseException]) -> None:
    """S-EVT-4, S-SET-27: the run is released and recorded as cancelled, then the interrupt goes on."""
    model = ScriptedModel("x")
    gate = threading.Event()

    def interrupt(_event: TaskCompleteEvent) -> None:
        raise stop("enough")

    def never(_asked: ScriptedCall) -> str:
        gate.wait(2 * PATIENCE_S)  # only cancelling the run gets past this
        return "never"

    model = ScriptedModel("x", never)
    writer = agent(model)
    ensemble = Ensemble(tasks=[task("a", writer), task("b", writer)], on_task_complete=interrupt)
    run = ensemble.start(runtime=runtime)
    try:
        with pytest.raises(stop):
            run.result(timeout_s=PATIENCE_S)
    finally:
        gate.set()
    assert run.state is RunState.CANCELLED


def test_trace_id_of_a_listener_is_put_on_the_trace(inline_runtime: Runtime) -> None:
    """S-EVT-21: the first that is not None."""

    class Tracer(EnsembleListener):
        def __init__(self, trace_id: str | None) -> None:
            self.trace_id = trace_id

    output = go(inline_runtime, "x", listeners=[Tracer(None), Watcher(), Tracer("t-1"), Tracer("t-2")])
    assert output.trace.trace_id == "t-1"  # type: ignore[attr-defined]


def test_one_listener_gets_its_events_in_order(runtime: Runtime) -> None:
    """S-EVT-7, S-PAR-40: also in a parallel run, where several tasks send at the same time."""
    watcher = Watcher()
    writer = agent(ScriptedModel(otherwise="x"))
    tasks = [task(f"t{n}", writer) for n in range(20)]
    Ensemble(tasks=tasks, workflow="parallel", listeners=[watcher]).run(runtime=runtime)
    assert watcher.threads == {"ensemble-ray-listener"}
    for n in range(20):
        own = [line for line in watcher.lines if line.endswith(f" t{n}")]
        assert own == [f"start t{n}", f"complete t{n}"]


def test_listener_may_start_a_run_of_its_own(runtime: Runtime) -> None:
    """S-CONV-37, S-SET-33: a blocking run in a listener's thread is no deadlock."""
    inner: list[str] = []

    def start_another(_event: TaskCompleteEvent) -> None:
        inner.append(Ensemble(tasks=[task("inner", agent(ScriptedModel("deep")))]).run(runtime=runtime).raw)

    assert go(runtime, "x", on_task_complete=start_another).raw == "x"  # type: ignore[attr-defined]
    assert inner == ["deep"]
