"""UnitEvents: what a map-reduce tells of its items' loops, behind what is told of their tasks.

Tasks may be told of by processes of a cluster, and their loops by this one. Must never happen: an iteration that listeners hear
of before its tasks (S-MR-195).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.events import Event
    from ensemble_ray.ports import EventSink
    from ensemble_ray.runs.ports import ExecutorSession


class UnitEvents:
    """Takes events of this process and passes them on by way of the run's executor. Fulfils `EventSink`."""

    def __init__(self, events: EventSink) -> None:
        """Make it of the run's sink; nothing is told before the executor is there."""
        self._events = events
        self.executor: ExecutorSession

    def wants(self, event_type: type[Event]) -> bool:
        """Whether anybody listens to that type."""
        return self._events.wants(event_type)

    def emit(self, event: Event) -> None:
        """Take one event."""
        self.executor.emit(event)
