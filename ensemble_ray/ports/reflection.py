"""Contract of stores of reflections. Their methods may be called from any thread, several at a time (S-REFL-17)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ensemble_ray.values.reflection import TaskReflection

__all__ = ["ReflectionStore"]


@runtime_checkable
class ReflectionStore(Protocol):
    """Keeps the newest reflection of each task across runs; its methods may be async."""

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        ...

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection of a key; None where there is none."""
        ...
