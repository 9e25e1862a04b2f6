"""Announcements: events of a run's loops and graphs on their way to the hub, and orders that wait for them.

In: what the source announces, with outputs as bytes; orders. Out: events, after those of the tasks that they tell of, whose
reports came behind their events (S-PAR-41); then the orders. Must never happen: a task whose events overtake those of the
iteration or step before it (S-LOOP-107).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ensemble_ray.actors.link.background_tasks import BackgroundTasks
from ensemble_ray.actors.link.events import pack_announcement
from ensemble_ray.events import GraphStateCompletedEvent, LoopIterationCompletedEvent
from ensemble_ray.schedule.instructions import IterationEnded
from ensemble_ray.values.ids import instance_of, node_key

if TYPE_CHECKING:
    from ensemble_ray.actors.link.events import HubSink
    from ensemble_ray.actors.link.wire import WireOrder
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.schedule.instructions import StepEnded

__all__ = ["Announcements"]


class Announcements:
    """The announcements of one run, in order with its tasks."""

    def __init__(self, run_id: str, plan: Plan, sink: HubSink, start: Callable[[Sequence[WireOrder]], None]) -> None:
        """Make them.

        Args:
            run_id: Whose.
            plan: Has the units.
            sink: Takes events.
            start: Takes orders whose turn has come.
        """
        self._run_id = run_id
        self._units = {unit.key: unit for unit in plan.units}
        self._sink = sink
        self._start = start
        #: orders that wait for events, by instance
        self._waiting: dict[str, WireOrder] = {}
        self._background = BackgroundTasks()

    def announce(self, what: IterationEnded | StepEnded, outputs: Sequence[bytes]) -> None:
        """Publish the event, where anybody wants it; never waits."""
        event_type = LoopIterationCompletedEvent if isinstance(what, IterationEnded) else GraphStateCompletedEvent
        if self._sink.wants(event_type):
            unit = self._units[node_key(instance_of(what.unit))]
            self._sink.emit_packed(pack_announcement(self._run_id, unit, what, outputs))

    def start(self, orders: Sequence[WireOrder]) -> None:
        """Start these when the hub has what was announced before; never waits."""
        if self._sink.is_idle and not self._waiting:
            self._start(orders)
            return
        is_first = not self._waiting
        self._waiting.update((order.instance, order) for order in orders)
        if is_first:
            self._background.start(self._start_waiting())

    def withdraw(self, instances: Sequence[str]) -> list[WireOrder]:
        """Return those that still wait, which are started no more."""
        found = (self._waiting.pop(instance, None) for instance in instances)
        return [order for order in found if order is not None]

    async def flush(self) -> None:
        """Return when the hub has everything that was announced."""
        await self._sink.flush()

    async def _start_waiting(self) -> None:
        while not self._sink.is_idle:
            await self._sink.flush()
        orders, self._waiting = list(self._waiting.values()), {}
        if orders:
            self._start(orders)
