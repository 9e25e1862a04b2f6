"""Memory in a team file: stores by name or as `module:attribute`, scopes of tasks. Package: loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.databases import DatabaseKeys, url_of
from ensemble_ray.loader.document import Entries, Items
from ensemble_ray.loader.field_types import (
    Flag,
    Number,
    PathText,
    ReferenceText,
    Whole,
    has_method,
    reference,
    require_text,
    text_in,
)
from ensemble_ray.loader.reading import Reading, context_of
from ensemble_ray.loader.references import is_reference
from ensemble_ray.loader.section import FileSection, key, keys_of
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.memory.ensemble_memory import EnsembleMemory
from ensemble_ray.memory.sqlite.memory import SqliteMemory
from ensemble_ray.memory.store import STORE_METHODS, MemoryStore
from ensemble_ray.values.memory import MemoryScope

if TYPE_CHECKING:
    from ensemble_ray.memory.lasting import LastingMemory

__all__ = ["Memory", "ScopeNames", "StoreName"]

_IN_MEMORY = "in_memory"


def _object_with(what: str, *methods: str) -> PlainValidator:
    """Read an object, or a class that is made without arguments, which has all of these methods."""

    def has_all(found: object) -> bool:
        return all(has_method(name)(found) for name in methods)

    return reference(what, makes=True, accepts=has_all, is_intended=has_all)


def _read_model(node: object, info: ValidationInfo) -> object:
    name = require_text(node)
    if is_reference(name) and not name.startswith("openai:"):
        return _MODEL.validate_python(node, context=info.context)
    return resolve_embedding_model(name)


_MODEL = TypeAdapter[object](Annotated[object, _object_with("a model of embeddings", "embed")])
_ModelForm = Literal["local"] | Annotated[str, Field(pattern="^openai:.+$")] | ReferenceText


@keys_of(MemoryScope)
class _ScopeKeys(FileSection):
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


class _SqliteKeys(FileSection):
    """Memory in one file."""

    called = "the memory file"
    path: PathText = key("The file, seen from this file; it is made when it is first used.", is_required=True)
    embedding_model: Annotated[object, PlainValidator(_read_model, json_schema_input_type=_ModelForm)] = key(
        "Finds entries by meaning: `local`, `openai:MODEL`, or module:attribute."
    )


class _PostgresKeys(DatabaseKeys):
    """Memory in a PostgreSQL database."""

    called = "the memory's database"
    embedding_model: Annotated[object, PlainValidator(_read_model, json_schema_input_type=_ModelForm)] = key(
        "Finds entries by meaning: `local`, `openai:MODEL`, or module:attribute."
    )


class _StoreKeys(FileSection):
    """A store that is made of a section."""

    called = "the memory store"
    sqlite: _SqliteKeys = key("Memory in one file.")
    postgres: _PostgresKeys = key("Memory in a PostgreSQL database.")


def _build(reading: Reading, section: _StoreKeys) -> LastingMemory:
    """Return the memory of a section.

    Raises:
        ValidationError: it is none, or not one.
    """
    found = section.values()
    if len(found) != 1:
        raise ValidationError("must have one of the keys 'sqlite' and 'postgres'")
    if "sqlite" in found:
        values = section.sqlite.values()
        return SqliteMemory(values["path"], embedding_model=values.get("embedding_model"))
    from ensemble_ray.memory.postgres.memory import PostgresMemory  # only teams with a database pay for it

    values = section.postgres.values()
    return PostgresMemory(url_of(reading, section.postgres), embedding_model=values.get("embedding_model"))


def _read_part(what: str, *methods: str, part: str = "", has_word: bool = False) -> PlainValidator:
    """Read one kind of memory: a word, a section, or an object of the user's by its name."""
    named = TypeAdapter[object](Annotated[object, _object_with(what, *methods)])

    def read(node: object, info: ValidationInfo) -> object:
        word = text_in(node)
        if has_word and word == _IN_MEMORY:
            return MemoryStore.in_memory()
        if word is not None and not is_reference(word):
            words = f"`{_IN_MEMORY}`, " if has_word else ""
            sections = "{sqlite: {path: FILE}}, {postgres: {url: URL}}"
            raise ValidationError(f"must be {words}{sections}, or module:attribute, which names {what}")
        if not isinstance(node, Entries):
            return named.validate_python(node, context=info.context)
        memory = _build(context_of(info), _StoreKeys.model_validate(node, context=info.context))
        return getattr(memory, part) if part else memory

    form: Any = ReferenceText | _StoreKeys
    return PlainValidator(read, json_schema_input_type=Literal["in_memory"] | form if has_word else form)


StoreName = Annotated[object, _read_part("a memory store", *STORE_METHODS, has_word=True)]


@keys_of(EnsembleMemory)
class _MemoryKeys(FileSection):
    """Memory that all tasks use."""

    called = "the memory"
    short_term: Flag = key("Whether each task sees all that was done before it in the same run.")
    long_term: Annotated[object, _read_part("a long-term memory", "store", "retrieve", part="long_term")] = key(
        "Keeps outputs across runs: `sqlite: {path: ..., embedding_model: ...}`, `postgres: {url: ..., embedding_model: ...}`, "
        "or module:attribute."
    )
    entity_memory: Annotated[
        object, _read_part("an entity memory", "put", "get", "get_all", "is_empty", part="entities")
    ] = key("Facts that each task sees: `sqlite: {path: ...}`, `postgres: {url: ...}`, or module:attribute.")
    long_term_max_results: Whole = key("How many entries of `long_term` a task sees; > 0.")
    extractor: Annotated[object, reference("a callable")] = key(
        "Returns what `long_term` stores of an output, as module:function."
    )


Memory = Annotated[_MemoryKeys, AfterValidator(_MemoryKeys.build)]
