"""Events of loops and graphs on Ray: packed where outputs are bytes, and in order with tasks."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from ensemble_ray import LoopIterationCompletedEvent, Plan
from ensemble_ray.actors.link.events import HubSink, pack_announcement
from ensemble_ray.actors.link.packing import pack_output
from ensemble_ray.actors.link.wire import WireOrder
from ensemble_ray.actors.scheduler.planned_run import Announcements
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.schedule.instructions import IterationEnded
from tests.actors.test_wire import output_of

LOOP = LoopUnit(key="loop:refine", name="refine", body=("w",), body_names=("writer",))
ENDED = IterationEnded(unit="loop:refine", iteration=2, instances=("loop:refine#1/w#0",), duration_s=1.0)


class Hub:
    """Takes events when it may."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.may = asyncio.Event()
        self.publish = self

    async def remote(self, run_id: str, events: list[bytes]) -> None:
        """Publish."""
        assert run_id == "run"
        await self.may.wait()
        self.events += events


def order(key: str) -> WireOrder:
    """An order."""
    return TaskOrder(
        run_id="run", key=key, instance=f"{key}#0", epoch=0, index=1, task=b"", agent_key="a", agent_role="A"
    )


class Bench:
    """Announcements of a run whose driver listens to that."""

    def __init__(self, *interest: str) -> None:
        self.hub, self.started = Hub(), list[str]()
        sink = HubSink(self.hub, "run", frozenset(interest))
        plan = Plan(workflow="sequential", nodes=(), units=(LOOP,))
        self.announcements = Announcements("run", plan, sink, self._start)

    def _start(self, orders: Any) -> None:
        self.started += [each.key for each in orders]

    async def settled(self) -> None:
        """Return when nothing more happens by itself."""
        for _ in range(10):
            await asyncio.sleep(0)


def test_event_arrives_with_its_outputs_loaded() -> None:
    """S-LOOP-108: bytes of outputs are loaded where the event is, and nowhere else."""
    event = pickle.loads(pack_announcement("run", LOOP, ENDED, [pack_output(output_of("draft"))]))  # noqa: S301  our own
    assert isinstance(event, LoopIterationCompletedEvent)
    assert (event.loop_name, event.iteration_number, event.instance) == ("refine", 2, "loop:refine#1")
    assert [(key, each.raw) for key, each in event.iteration_outputs.items()] == [("writer", "draft")]
    pack_announcement("run", LOOP, ENDED, [b"no pickle at all"])


async def test_tasks_start_when_the_hub_has_what_was_announced_before() -> None:
    """S-LOOP-107, S-GRAPH-75: so no event of theirs overtakes it; what was stopped meanwhile is not started."""
    bench = Bench("on_loop_iteration_completed")
    announcements = bench.announcements
    announcements.start([order("first")])
    assert bench.started == ["first"]
    announcements.announce(ENDED, [b"body"])
    announcements.start([order("second"), order("third")])
    announcements.start([order("fourth")])
    await bench.settled()
    assert (bench.started, bench.hub.events) == (["first"], [])
    assert [each.key for each in announcements.withdraw(["third#0", "first#0"])] == ["third"]
    bench.hub.may.set()
    await bench.settled()
    assert (bench.started, len(bench.hub.events)) == (["first", "second", "fourth"], 1)
    announcements.start([order("fifth")])
    assert bench.started[-1] == "fifth"


async def test_nothing_waits_when_nobody_listens() -> None:
    """S-EVT-10: an event that nobody wants is not built."""
    bench = Bench("on_task_start")
    bench.announcements.announce(ENDED, [b"body"])
    bench.announcements.start([order("first")])
    await bench.announcements.flush()
    assert (bench.started, bench.hub.events) == (["first"], [])
