"""A sink that keeps what it is given. Package: testing; fulfils the `RunEventSink` port."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TypeVar

from ensemble_ray.events import Event

E = TypeVar("E", bound=Event)


class RecordingSink:
    """A `RunEventSink` that keeps every event in order.

    Args:
        kinds: The types it wants; None: all.
    """

    def __init__(self, kinds: Collection[type[Event]] | None = None) -> None:
        self._kinds = None if kinds is None else frozenset(kinds)
        self._lock = threading.Lock()
        self._events: list[Event] = []

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything emitted so far, in order."""
        with self._lock:
            return tuple(self._events)

    def wants(self, event_type: type[Event]) -> bool:
        """Whether that type is among the kinds."""
        return self._kinds is None or event_type in self._kinds

    def emit(self, event: Event) -> None:
        """Keep one event."""
        with self._lock:
            self._events.append(event)

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return: what is emitted is here."""

    def of(self, event_type: type[E]) -> tuple[E, ...]:
        """Return the events of one type, in order."""
        return tuple(event for event in self.events if isinstance(event, event_type))
