"""What a dashboard serves beside its own (S-WEB-63). Contracts only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class PageClient(Protocol):
    """One page that is connected."""

    async def send(self, message: Mapping[str, object]) -> None:
        """Send it a message, `type` included, behind what it has been sent."""
        ...

    def subscribe(self, types: AbstractSet[str] | None, run_id: str | None) -> None:
        """Send it from now on only what is of these types and of that run; None: whatever it is."""
        ...


class ControlMessages(Protocol):
    """Answers messages of pages that the dashboard itself does not know."""

    @property
    def handlers(self) -> Mapping[str, Callable[[Any, Mapping[str, Any]], Awaitable[None]]]:
        """What answers a message, by type; it is given the page's `PageClient` and the message."""
        ...

    def forget(self, client: Any, /) -> None:
        """Take notice that a page has gone."""
        ...


@runtime_checkable
class Control(Protocol):
    """Begins and steers runs on behalf of pages and programs."""

    @property
    def app(self) -> ASGIApp:
        """Its routes, below `/api`."""
        ...

    @property
    def sockets(self) -> ControlMessages:
        """Its messages."""
        ...

    async def __aenter__(self) -> object:
        """Be ready to be asked."""
        ...

    async def __aexit__(self, *error: object) -> bool | None:
        """Be asked no more."""
        ...
