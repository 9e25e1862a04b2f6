"""Memory in a team file: stores by name or as `module:attribute`, scopes of tasks. Package: loader."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.loader.document import Entries, Items
from ensemble_ray.loader.kinds import Flag, Number, ReferenceText, Whole, has_method, reference, require_text, text_in
from ensemble_ray.loader.section import Section, key, keys_of
from ensemble_ray.memory.ensemble_memory import EnsembleMemory
from ensemble_ray.memory.store import STORE_METHODS, MemoryStore
from ensemble_ray.values.memory import MemoryScope

__all__ = ["Memory", "ScopeNames", "StoreName"]

_IN_MEMORY = "in_memory"


def _object_with(what: str, *methods: str) -> PlainValidator:
    """Read an object, or a class that is made without arguments, which has all of these methods."""

    def has_all(found: object) -> bool:
        return all(has_method(name)(found) for name in methods)

    return reference(what, makes=True, accepts=has_all, is_intended=has_all)


@keys_of(MemoryScope)
class _ScopeKeys(Section):
    """A part of the memory store that a task reads and writes."""

    called = "scope '{name}'"
    keep_entries_within: Number = key("How long it keeps an entry, s; default: for ever.")


def _read_scopes(node: object, info: ValidationInfo) -> list[object]:
    return [
        _SCOPE.validate_python(each, context=info.context) if isinstance(each, Entries) else require_text(each)
        for each in (node if isinstance(node, Items) else [node])
    ]


_SCOPE = TypeAdapter[object](Annotated[_ScopeKeys, AfterValidator(_ScopeKeys.build)])
_ScopeForm = str | _ScopeKeys
ScopeNames = Annotated[list[object], PlainValidator(_read_scopes, json_schema_input_type=_ScopeForm | list[_ScopeForm])]

_STORE = TypeAdapter[object](Annotated[object, _object_with("a memory store", *STORE_METHODS)])


def _read_store(node: object, info: ValidationInfo) -> object:
    if text_in(node) == _IN_MEMORY:
        return MemoryStore.in_memory()
    return _STORE.validate_python(node, context=info.context)


StoreName = Annotated[object, PlainValidator(_read_store, json_schema_input_type=Literal["in_memory"] | ReferenceText)]


@keys_of(EnsembleMemory)
class _MemoryKeys(Section):
    """Memory that all tasks use."""

    called = "the memory"
    short_term: Flag = key("Whether each task sees all that was done before it in the same run.")
    long_term: Annotated[object, _object_with("a long-term memory", "store", "retrieve")] = key(
        "Keeps outputs across runs, as module:attribute."
    )
    entity_memory: Annotated[object, _object_with("an entity memory", "put", "get", "get_all", "is_empty")] = key(
        "Facts that each task sees, as module:attribute."
    )
    long_term_max_results: Whole = key("How many entries of `long_term` a task sees; > 0.")
    extractor: Annotated[object, reference("a callable")] = key(
        "Returns what `long_term` stores of an output, as module:function."
    )


Memory = Annotated[_MemoryKeys, AfterValidator(_MemoryKeys.build)]
