"""What a task at work needs of the run's process. Contracts only."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Callables"]


class Callables(Protocol):
    """Asks a callable of the run."""

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it with that argument; what it raises is raised here."""
        ...
