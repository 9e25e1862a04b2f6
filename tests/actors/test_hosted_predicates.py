"""Predicates on Ray: packed with their run, asked in the one process of its callables, also when that is replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from ensemble_ray import Ensemble, Graph, GraphEdge, Loop, LoopIterationContext, Task, ValidationError
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.packing import pack_callables
from ensemble_ray.actors.link.packing import pack_output, unpack, unpack_failure
from ensemble_ray.actors.link.wire import WireFailure
from ensemble_ray.actors.scheduler.planned_run import RemotePredicates
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.actors.scheduler.session import RunSession
from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart
from ensemble_ray.schedule.instructions import UntilHolds
from tests.actors.sessions import Owner, packed
from tests.actors.test_wire import output_of
from tests.builders import task


class Stopping:
    """A predicate that wants two iterations, says which process it is in, and raises after the third."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def __call__(self, context: LoopIterationContext) -> bool:
        self._place.write_text(str(os.getpid()))
        if context.iteration_number == 3:
            raise LookupError("third")
        return [each["w"].raw for each in context.history] == ["one", "two"]


def iteration(raw: str) -> HistoryPart[bytes]:
    """An iteration, as a scheduler holds it."""
    return HistoryPart(names=("w",), outputs=(pack_output(output_of(raw)),))


async def test_history_is_sent_again_when_the_host_was_replaced(ray_cluster: str, tmp_path: Path) -> None:
    """S-LOOP-54, S-LOOP-53: one copy for the whole run; a new one is sent everything; errors come back as they were."""
    del ray_cluster
    spawn.scheduler(SchedulerActor)  # hosts know whom to report to
    place = tmp_path / "pid"
    loop = Loop(name="refine", body=[task("w")], until=Stopping(place))
    submission = replace(
        await packed(Ensemble(tasks=[task("t", handler=str)])), callables=pack_callables({}, (), {"loop:refine": loop})
    )
    owner = Owner(submission, ProcessPool())
    owner.session.open()
    predicates = RemotePredicates(owner.session)
    first, second = (UntilHolds(unit="loop:refine", iteration=number) for number in (1, 2))
    assert await predicates.holds(first, sent_count=0, new=[iteration("one")]) is False
    pid = int(place.read_text())
    os.kill(pid, signal.SIGKILL)
    assert await predicates.holds(second, sent_count=1, new=[iteration("two")]) is None
    assert await predicates.holds(second, sent_count=0, new=[iteration("one"), iteration("two")]) is True
    assert int(place.read_text()) not in {pid, os.getpid()}
    third = UntilHolds(unit="loop:refine", iteration=3)
    failed = await predicates.holds(third, sent_count=2, new=[iteration("three")])
    assert isinstance(failed, EvaluationFailed)
    assert (failed.error_type, failed.message) == ("LookupError", "third")
    error = unpack_failure(WireFailure(body=cast("bytes", failed.error))).error
    assert (type(error), str(error)) == (LookupError, "third")
    await owner.session.close(keep=None)


async def test_question_is_one_message_with_only_what_is_new() -> None:
    """S-LOOP-145: bytes, which Ray hands on as they are; earlier iterations are not sent again."""
    asked: list[bytes] = []

    class Call:
        async def remote(self, body: bytes) -> bool:
            asked.append(body)
            return True

    class Session:
        run_id = "run"

        async def ask_callables(self, ask: Callable[[Any], Awaitable[object]]) -> object:
            return await ask(SimpleNamespace(holds_predicate=Call()))

    predicates = RemotePredicates(cast("RunSession", Session()))
    question = UntilHolds(unit="loop:refine", iteration=900)
    newest = iteration("nine hundred")
    assert await predicates.holds(question, sent_count=899, new=[newest]) is True
    (body,) = asked
    assert unpack(body, tuple) == ("run", question, 899, (newest,))


@pytest.mark.parametrize("where", ["Loop 'refine' -> until", "Graph 'g' -> edges[1] -> condition"])
def test_predicate_that_cannot_travel_is_named(where: str) -> None:
    """S-CONV-34: before anything is started, with the path to the culprit."""
    lock = threading.Lock()

    def held(context: object) -> bool:
        del context
        return lock.locked()

    loop = Loop(name="refine", body=[Task.of("w")], until=held if "Loop" in where else len)
    edges = [
        GraphEdge(from_state="a", to_state="a"),
        GraphEdge(from_state="a", to_state=Graph.END, condition=held if "Graph" in where else None),
    ]
    graph = Graph(name="g", states={"a": Task.of("a")}, edges=edges, start="a")
    with pytest.raises(ValidationError) as caught:
        pack_callables({}, (), {"loop:refine": loop, "graph:g": graph})
    assert where in str(caught.value)
    assert "lock" in str(caught.value)


def test_run_without_predicates_has_nothing_to_host() -> None:
    """S-SET-31: no process is started for a loop that only has a cap."""
    assert pack_callables({}, (), {"loop:refine": Loop(name="refine", body=[Task.of("w")], max_iterations=2)}) is None
