"""What agent processes know of endpoints, on its way between them: from one to the scheduler, from there to all others.

Nobody waits for an update, and lost ones are found out anew by each process. Must never happen: an update that comes back
to the process that sent it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ensemble_ray.limits.breaker import FAILURES_TO_OPEN, LONGEST_OPEN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ensemble_ray.limits.endpoints import EndpointUpdate

__all__ = ["EndpointBoard", "EndpointUpdateSender"]


class EndpointUpdateSender:
    """A process's way to tell others."""

    def __init__(self, scheduler: Any, source: str) -> None:
        self._scheduler = scheduler
        self._source = source

    def send(self, update: EndpointUpdate) -> None:
        """Send an update."""
        self._scheduler.update_endpoint.remote(self._source, update)


class EndpointBoard:
    """What processes that start later must be sent: the failures of each endpoint since its last answer."""

    def __init__(self) -> None:
        self._failures: dict[str, deque[tuple[float, EndpointUpdate]]] = {}

    def note(self, update: EndpointUpdate, at: float) -> None:
        """Take note of an update; `at` in seconds of any origin."""
        if update.category == "answered":
            self._failures.pop(update.endpoint, None)
        elif update.category in {"failed", "probe_failed"}:
            self._failures.setdefault(update.endpoint, deque(maxlen=FAILURES_TO_OPEN)).append((at, update))

    def current(self, at: float) -> Iterator[EndpointUpdate]:
        """Yield those that still count."""
        for noted in self._failures.values():
            for noted_at, update in noted:
                if at - noted_at < LONGEST_OPEN_S:
                    yield update
