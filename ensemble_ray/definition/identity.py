"""Values with a hidden id: agents and tasks. Package: definition.

Two built alike are two; a pickled copy or an internal rewrite is the same one (S-CONV-30, S-CONV-31). The id never
reaches a record: it only finds things inside a process.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import PrivateAttr

from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.value import Value

__all__ = ["Identified"]


class Identified(Value):
    """A frozen value that is equal to nothing but itself, its copies by pickling and its internal rewrites."""

    _object_id: str = PrivateAttr(default_factory=new_object_id)

    @property
    def object_id(self) -> str:
        """The hidden id."""
        # Read past pydantic's attribute hook: planning asks for it several times per task, and the hook costs 1 us.
        # Nor through `cast`, whose call costs as much as all the rest.
        private: Any = self.__pydantic_private__
        object_id: str = private["_object_id"]
        return object_id

    def rewritten(self, **changes: object) -> Self:
        """Return the same one with fields changed: it keeps its id, unvalidated; for the library's own use."""
        return self.model_copy(update=changes)

    def duplicated(self, **changes: object) -> Self:
        """Return another one with fields changed: it has an id of its own, unvalidated; for the library's own use."""
        copy = self.model_copy(update=changes)
        copy._object_id = new_object_id()  # noqa: SLF001  of the same class
        return copy

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identified):
            return NotImplemented
        return self.object_id == other.object_id

    def __hash__(self) -> int:
        return hash(self.object_id)
