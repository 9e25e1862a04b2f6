"""Which processes of a cluster there are, and what they are doing: the port. Package: studio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.studio.schemas.actions import Actors

__all__ = ["ProcessReader"]


class ProcessReader(Protocol):
    """Looks at the processes of a cluster."""

    async def actors(self, run_id: str | None = None) -> Actors:
        """Return the processes that are there now; of a run, those that work for it."""
        ...
