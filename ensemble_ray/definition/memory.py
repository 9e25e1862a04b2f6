"""How tasks and ensembles say what memory they use. Package: definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import InstanceOf, SkipValidation, model_validator

from ensemble_ray.definition.fields import Accepts, to_tuple
from ensemble_ray.errors import ValidationError
from ensemble_ray.memory.ensemble_memory import EnsembleMemory
from ensemble_ray.memory.store import STORE_METHODS, MemoryStore
from ensemble_ray.values.memory import MemoryScope
from ensemble_ray.values.value import Value

__all__ = ["MemoryScopesField", "Remembers", "check_scopes"]

if TYPE_CHECKING:
    MemoryScopesField: TypeAlias = Accepts[
        tuple[MemoryScope, ...], str | MemoryScope | Sequence[str | MemoryScope] | None
    ]
else:
    MemoryScopesField = Annotated[tuple, SkipValidation]


class Remembers(Value):
    """What an ensemble remembers by.

    Attributes:
        memory: Memory that all tasks use; None: none.
        memory_store: Keeps the scopes that tasks declare, and has the data wherever they run; None: scopes mean nothing.
    """

    memory: InstanceOf[EnsembleMemory] | None = None
    memory_store: Annotated[MemoryStore | None, SkipValidation] = None

    @model_validator(mode="before")
    @classmethod
    def _check_memory(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        store = cast("Mapping[str, Any]", data).get("memory_store")
        missing = () if store is None else [name for name in STORE_METHODS if not callable(getattr(store, name, None))]
        if missing:
            raise ValidationError(
                f"Ensemble memory_store ({type(store).__name__}) has no method {' and no method '.join(map(repr, missing))}"
            )
        return cast("object", data)


def check_scopes(value: object) -> tuple[MemoryScope, ...]:
    """Return what a task declares as scopes, in order.

    Raises:
        ValidationError: one is no scope, or is there twice (S-MEM-72).
    """
    entries = to_tuple(value)
    scopes: list[MemoryScope] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            scopes.append(MemoryScope(name=entry))
        elif isinstance(entry, MemoryScope):
            scopes.append(entry)
        else:
            raise ValidationError(
                f"Task memory_scopes[{index}] must be a name or a MemoryScope, got: {type(entry).__name__}"
            )
        if any(scope.name == scopes[-1].name for scope in scopes[:-1]):
            raise ValidationError(f"Task memory_scopes has scope '{scopes[-1].name}' more than once")
    return tuple(scopes)
