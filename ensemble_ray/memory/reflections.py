"""Reflections that last as long as their process. Package: memory. Methods may be called from any thread."""

from __future__ import annotations

from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.in_memory import StaysHere
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.reflection import TaskReflection

__all__ = ["REFLECTION_METHODS", "InMemoryReflectionStore", "check_reflection", "check_reflection_key"]

#: What an object must have to be used as a store of reflections (S-REFL-5).
REFLECTION_METHODS = ("store", "retrieve")


class InMemoryReflectionStore(StaysHere):
    """Reflections by key, as long as the process lives. Fulfils `ReflectionStore`."""

    def __init__(self) -> None:
        self._reflections: dict[str, TaskReflection] = {}
        self._lock = new_lock()

    def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key.

        Raises:
            ValidationError: the key is blank, or it is no reflection.
        """
        key = check_reflection_key(key)
        check_reflection(reflection)
        with self._lock:
            self._reflections[key] = reflection

    def retrieve(self, key: str) -> TaskReflection | None:
        """Return the reflection of a key; None where there is none.

        Raises:
            ValidationError: the key is blank.
        """
        with self._lock:
            return self._reflections.get(check_reflection_key(key))


def check_reflection_key(key: str | None) -> str:
    """Return the key.

    Raises:
        ValidationError: it is None or blank.
    """
    if key is None or not key.strip():
        raise ValidationError("reflection key must not be None or blank")
    return key


def check_reflection(reflection: object) -> None:
    """Refuse what is no reflection.

    Raises:
        ValidationError: it is something else, such as None.
    """
    if not isinstance(reflection, TaskReflection):
        raise ValidationError(f"reflection must be a TaskReflection, got: {type(reflection).__name__}")
