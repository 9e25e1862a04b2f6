"""Who asks for what the page is told, and what is theirs to see. Package: studio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastapi import Request

    from ensemble_ray.access.rights import Right
    from ensemble_ray.record.stores import RunSummary

__all__ = ["ANYBODY", "Guard", "LocalGuard", "Visitor"]


class Visitor(Protocol):
    """Who asks."""

    @property
    def name(self) -> str | None:
        """Under which name decisions are recorded; None: the user of this process."""
        ...

    def may_see(self, run: RunSummary) -> bool:
        """Whether a run is theirs to know of."""
        ...


class Guard(Protocol):
    """Says who may ask what."""

    async def admit(self, request: Request, right: Right) -> Visitor:
        """Return who asks.

        Raises:
            StudioRefusal: they may not.
        """
        ...


class _LocalUser:
    """The user of this machine, who may do everything."""

    name = None

    def may_see(self, run: RunSummary) -> bool:
        """Whether a run is theirs to know of."""
        del run
        return True


#: Who is let in without a key.
ANYBODY: Visitor = _LocalUser()


class LocalGuard:
    """Lets everybody in who can reach the port."""

    async def admit(self, request: Request, right: Right) -> Visitor:
        """Return who asks."""
        del request, right
        return ANYBODY
