"""What agent processes know of endpoints, on its way between them: from one to the scheduler, from there to all others.

Nobody waits for news, and lost ones are found out anew by each process. Must never happen: news that come back to
whoever told them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ensemble_ray.limits.breaker import FAILURES_TO_OPEN, LONGEST_OPEN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ensemble_ray.limits.endpoints import EndpointNews

__all__ = ["EndpointBoard", "EndpointLine"]


class EndpointLine:
    """A process's way to tell others."""

    def __init__(self, scheduler: Any, house: str) -> None:
        self._scheduler = scheduler
        self._house = house

    def tell(self, news: EndpointNews) -> None:
        """Send news."""
        self._scheduler.endpoint_news.remote(self._house, news)


class EndpointBoard:
    """What processes that start later must hear: the failures of each endpoint since its last answer."""

    def __init__(self) -> None:
        self._failures: dict[str, deque[tuple[float, EndpointNews]]] = {}

    def note(self, news: EndpointNews, at: float) -> None:
        """Take note of news; `at` in seconds of any origin."""
        if news.kind == "answered":
            self._failures.pop(news.endpoint, None)
        elif news.kind in {"failed", "probe_failed"}:
            self._failures.setdefault(news.endpoint, deque(maxlen=FAILURES_TO_OPEN)).append((at, news))

    def current(self, at: float) -> Iterator[EndpointNews]:
        """What still counts."""
        for told in self._failures.values():
            for told_at, news in told:
                if at - told_at < LONGEST_OPEN_S:
                    yield news
