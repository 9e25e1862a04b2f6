"""Who asks for what the page is told, and what is theirs to see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fastapi import Request

    from ensemble_ray.access.keys import Right
    from ensemble_ray.record.stores import RecordedRun


class Visitor(Protocol):
    """Who asks."""

    @property
    def name(self) -> str | None:
        """Under which name decisions are recorded; None: the user of this process."""
        ...

    @property
    def sees_cluster(self) -> bool:
        """Whether processes of others' runs, limits and endpoints are theirs to know of."""
        ...

    @property
    def sees_all(self) -> bool:
        """Whether there is nothing that they may not see."""
        ...

    def may_see(self, run: RecordedRun) -> bool:
        """Whether a run is theirs to know of."""
        ...


class Guard(Protocol):
    """Says who may ask what."""

    async def admit(self, request: Request, right: Right, *, is_counted: bool = True) -> Visitor:
        """Return who asks.

        Args:
            request: What is asked.
            right: What it needs.
            is_counted: False: it was let in and counted before, and is looked at again.

        Raises:
            StudioRefusal: they may not.
        """
        ...


class _LocalUser:
    """The user of this machine, who may do everything."""

    name = None
    sees_cluster = True
    sees_all = True

    def may_see(self, run: RecordedRun) -> bool:
        """Whether a run is theirs to know of."""
        del run
        return True


#: Who is let in without a key.
ANYBODY: Visitor = _LocalUser()


class LocalGuard:
    """Lets everybody in who can reach the port."""

    async def admit(self, request: Request, right: Right, *, is_counted: bool = True) -> Visitor:
        """Return who asks."""
        del request, right, is_counted
        return ANYBODY
