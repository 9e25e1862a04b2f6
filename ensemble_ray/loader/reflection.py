"""How a team file says that tasks are reflected on, and where that is kept (S-REFL-37, S-REFL-43). Package: loader."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.definition.reflection import ReflectionConfig
from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.databases import DatabaseKeys, url_of
from ensemble_ray.loader.document import Entries, Scalar
from ensemble_ray.loader.field_types import PathText, ReferenceText, has_method, reference, text_in
from ensemble_ray.loader.reading import Reading, context_of
from ensemble_ray.loader.references import is_reference
from ensemble_ray.loader.section import FileSection, key
from ensemble_ray.loader.user_code import CallableName
from ensemble_ray.loader.value_sections import keys_of
from ensemble_ray.memory.reflections import REFLECTION_METHODS, InMemoryReflectionStore
from ensemble_ray.memory.sqlite.reflections import SqliteReflectionStore
from ensemble_ray.ports.reflection import ReflectionStore

__all__ = ["ReflectionName", "ReflectionStoreName"]


@keys_of(ReflectionConfig)
class _ReflectionKeys(FileSection):
    """How the outputs of a task are reflected on."""

    called: ClassVar[str] = "the reflection"
    strategy: CallableName = key("Reflects in place of a model, as module:function.")


class _FileKeys(FileSection):
    """Reflections in one file."""

    called: ClassVar[str] = "the file of reflections"
    path: PathText = key("The file, seen from this file; it is made when it is first used.", is_required=True)


class _DatabaseKeys(DatabaseKeys):
    """Reflections in a PostgreSQL database."""

    called: ClassVar[str] = "the database of reflections"


class _StoreKeys(FileSection):
    """A store that is made of a section."""

    called: ClassVar[str] = "the reflection store"
    sqlite: _FileKeys = key("Reflections in one file, which may be that of a memory.")
    postgres: _DatabaseKeys = key("Reflections in a PostgreSQL database, which may be that of a memory.")


def _read_reflection(node: object, info: ValidationInfo) -> ReflectionConfig | None:
    if isinstance(node, Entries):
        built: ReflectionConfig = _ReflectionKeys.model_validate(node, context=context_of(info)).build()
        return built
    if isinstance(node, Scalar) and isinstance(node.value, bool):
        return ReflectionConfig() if node.value else None
    raise ValidationError("must be true, false, or a mapping with keys such as 'model'")


def _read_store(node: object, info: ValidationInfo) -> object:
    word = text_in(node)
    if word == "in_memory":
        return InMemoryReflectionStore()
    if word is not None and not is_reference(word):
        raise ValidationError(
            "must be `in_memory`, {sqlite: {path: FILE}}, {postgres: {url: URL}}, or module:attribute, "
            "which names a store of reflections"
        )
    if isinstance(node, Entries):
        return _build(context_of(info), _StoreKeys.model_validate(node, context=info.context))
    return _NAMED.validate_python(node, context=info.context)


def _build(reading: Reading, section: _StoreKeys) -> ReflectionStore:
    """Return the store of a section.

    Raises:
        ValidationError: it is none, or not one.
    """
    found = section.values()
    if len(found) != 1:
        raise ValidationError("must have one of the keys 'sqlite' and 'postgres'")
    if "sqlite" in found:
        return SqliteReflectionStore(section.sqlite.values()["path"])
    from ensemble_ray.memory.postgres.reflections import PostgresReflectionStore  # only teams with a database pay

    return PostgresReflectionStore(url_of(reading, section.postgres))


def _is_store(found: object) -> bool:
    return all(has_method(name)(found) for name in REFLECTION_METHODS)


_NAMED = TypeAdapter[Any](
    Annotated[object, reference("a store of reflections", makes=True, accepts=_is_store, is_intended=_is_store)]
)
ReflectionName = Annotated[object, PlainValidator(_read_reflection, json_schema_input_type=bool | _ReflectionKeys)]
ReflectionStoreName = Annotated[
    object, PlainValidator(_read_store, json_schema_input_type=Literal["in_memory"] | ReferenceText | _StoreKeys)
]
