"""RunEvents: the events of one run, for its listeners and for readers of its handle. An `EventSink`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.events.delivery import Delivery, EventLog, EventStream, listeners_of
from ensemble_ray.events.telemetry.active import tracers_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ensemble_ray.definition.run_rules import Watched
    from ensemble_ray.events import Event
    from ensemble_ray.values.outputs import ExitReason


class RunEvents:
    """Listeners and readers of one run."""

    def __init__(
        self,
        definition: Watched,
        *,
        fields: dict[str, str],
        is_read: bool,
        on_interrupt: Callable[[BaseException], None],
    ) -> None:
        """Make it.

        Args:
            definition: Has the listeners.
            fields: Log fields for their threads.
            is_read: Whether a stream may be asked for.
            on_interrupt: Called on the thread of a listener that was interrupted (S-SET-27).
        """
        declared = listeners_of(definition.listeners, definition.callbacks)
        self._listeners = (*declared, *tracers_here(declared))
        self._log = EventLog(is_open=is_read)
        self._delivery = Delivery(self._listeners, fields=fields, on_interrupt=on_interrupt)
        #: the listener methods that anybody wants; it does not change
        self.interest: frozenset[str] = self._delivery.interest | self._log.interest

    @property
    def trace_id(self) -> str | None:
        """The id that a listener gave to what it traces."""
        trace_ids = (getattr(listener, "trace_id", None) for listener in self._listeners)
        return next((str(found) for found in trace_ids if found is not None), None)

    @property
    def listeners(self) -> Sequence[object]:
        """All of them, that of the environment included."""
        return self._listeners

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether a listener or a reader wants events of that type."""
        return event_type.method in self.interest

    def emit(self, event: Event) -> None:
        """Hand the event to listeners and readers."""
        self._delivery.emit(event)
        self._log.emit(event)

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return when the listeners to one of these types have heard of all that happened so far."""
        await self._delivery.wait_until_delivered(*event_types)

    def stream(self) -> EventStream:
        """Return all events, the past ones first."""
        return self._log.stream()

    async def close(self, run_id: str, exit_reason: ExitReason) -> None:
        """Return when every listener has every event, and its end; then no more events come."""
        self._delivery.end(run_id, exit_reason)
        await self._delivery.close()
        self._log.close()
