"""Studio: what one page is served from; and who may ask. Package: studio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol

from fastapi import Request

from ensemble_ray.access.rights import Right
from ensemble_ray.studio.schemas.runs import StudioInfo

if TYPE_CHECKING:
    from ensemble_ray.record.following import LiveEvents
    from ensemble_ray.record.stores import RunSummary
    from ensemble_ray.studio.actions import StudioActions
    from ensemble_ray.studio.processes import ProcessReader
    from ensemble_ray.studio.reading import StudioReader

__all__ = ["Guard", "LocalGuard", "Studio", "Visitor"]


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


class LocalGuard:
    """Lets everybody in who can reach the port."""

    async def admit(self, request: Request, right: Right) -> Visitor:
        """Return who asks."""
        del request, right
        return _LocalUser()


@dataclass(frozen=True, slots=True, kw_only=True)
class Studio:
    """What one page is served from."""

    reader: StudioReader
    #: which place this is, for people
    title: str
    guard: Guard = field(default_factory=LocalGuard)
    #: None: the page only reads
    actions: StudioActions | None = None
    read_only_reason: str | None = None
    #: None: nothing is known of processes
    processes: ProcessReader | None = None
    #: gives what happens just now in a run of this process; None: nothing is known
    live: Callable[[str], LiveEvents | None] | None = None

    def info(self) -> StudioInfo:
        """Return what the page can do here."""
        return StudioInfo(
            version=version("ensemble-ray"),
            actions=["cancel", "resume", "fork", "decide"] if self.actions is not None else [],
            has_actors=self.processes is not None,
            title=self.title,
            read_only_reason=self.read_only_reason,
        )
