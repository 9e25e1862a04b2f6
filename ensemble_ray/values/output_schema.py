"""Output types that a JSON schema describes, for requests, which cannot name a Python type."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin
from urllib.parse import unquote

from msgspec import Struct
from pydantic import StringConstraints, TypeAdapter
from pydantic_core import PydanticCustomError, SchemaError, core_schema

from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

LONGEST_SCHEMA = 20_000  # characters, with references resolved: the prompt contains the schema
DEEPEST, MOST_NODES = 16, 1_000
_LONGEST_PATTERN = 500
_SHOWN, _SHOWN_MISTAKES = 150, 20
_LONGEST_TITLE = 64
#: keywords whose value is a schema, a list of schemas, or schemas by name
_INNER = frozenset(
    {
        *("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties", "additionalItems"),
    }
)
_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_BY_NAME = frozenset({"properties", "dependentSchemas"})
#: without an effect once references are resolved
_DROPPED = frozenset({"$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "$vocabulary"})
_REFUSED = frozenset({"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "patternProperties"})
#: may stand beside a reference without a choice between both
_WORDS = frozenset({"title", "description", "default", "examples", "deprecated"})


class OutputSchema(Struct, frozen=True):
    """The metadata of an output type: `Annotated[Any, OutputSchema(text)]`.

    Attributes:
        text: The JSON schema without references, as JSON.
    """

    text: str

    @property
    def schema(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads(self.text))

    @property
    def name(self) -> str:
        title: object = self.schema.get("title")
        return title[:_LONGEST_TITLE] if isinstance(title, str) and title.strip() else "output_schema"

    def __repr__(self) -> str:
        return self.name

    def check(self, value: object) -> object:
        """Return a value that fits the schema, or raise a `PydanticCustomError` with the mistakes and their places."""
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise PydanticCustomError("output_schema", "NaN and Infinity are no numbers of JSON") from None
        found = list(_mistakes(self.text, value))
        if found:
            shown = "; ".join(found[:_SHOWN_MISTAKES])
            raise PydanticCustomError("output_schema", "{mistakes}", {"mistakes": shown})
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, core_schema.any_schema())

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return self.schema


def output_type_of(schema: Mapping[str, object]) -> type[Any]:
    """Return the output type that a JSON schema (2020-12) describes.

    Args:
        schema: With references to its own `$defs` alone; at most 20,000 characters, 1,000 nested schemas, 16 levels.

    Raises:
        ValidationError: it is no schema, is too large, or has a keyword that cannot be checked.
    """
    resolved = _Resolver(schema).resolve()
    text = json.dumps(resolved, ensure_ascii=False, separators=(",", ":"))
    if len(text) > LONGEST_SCHEMA:
        raise ValidationError(f"output_schema may have {LONGEST_SCHEMA:,} characters; this one has {len(text):,}")
    _check_schema(resolved)
    return cast("type[Any]", Annotated[Any, OutputSchema(text)])


def schema_in(output_type: object) -> OutputSchema | None:
    """Return the schema of a type of `output_type_of`; None: another type."""
    if get_origin(output_type) is not Annotated:
        return None
    return next((each for each in get_args(output_type)[1:] if isinstance(each, OutputSchema)), None)


class _Resolver:
    """Copies a schema, with the targets in place of references."""

    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._nodes_left = MOST_NODES

    def resolve(self) -> dict[str, object]:
        found = self._copy(self._root, "output_schema", 0, ())
        return cast("dict[str, object]", found)

    def _copy(self, schema: object, where: str, depth: int, within: tuple[str, ...]) -> object:
        self._nodes_left -= 1
        if depth > DEEPEST or self._nodes_left < 0:
            limit = f"{DEEPEST} levels" if depth > DEEPEST else f"{MOST_NODES:,} nested schemas"
            raise ValidationError(f"{where[:200]}: output_schema may have {limit} at most")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValidationError(f"{where[:200]}: a schema must be an object, true or false, got: {schema!r:.80}")
        found = cast("Mapping[str, object]", schema)
        if refused := sorted(_REFUSED & found.keys()):
            raise ValidationError(f"{where[:200]}: output_schema cannot have the keyword '{refused[0]}'")
        copy: dict[str, object] = {}
        for name, value in found.items():
            if name in _DROPPED or name == "$ref":
                continue
            copy[name] = self._value(name, value, f"{where}.{name}", depth, within)
        if "$ref" not in found:
            return copy
        reference = found["$ref"]
        if reference in within:
            raise ValidationError(
                f"{where[:200]}: the reference {reference!r:.80} contains itself. Write the levels that are needed"
            )
        target = self._copy(self._target(reference, where), where, depth + 1, (*within, cast("str", reference)))
        if isinstance(target, dict) and copy.keys() <= _WORDS:
            return {**cast("dict[str, object]", target), **copy}
        return {**copy, "allOf": [target, *cast("list[object]", copy.get("allOf", []))]}

    def _value(self, name: str, value: object, where: str, depth: int, within: tuple[str, ...]) -> object:
        if name in _INNER and isinstance(value, Mapping | bool):
            return self._copy(value, where, depth + 1, within)
        if name in _LISTS and isinstance(value, list):
            each = enumerate(cast("list[object]", value))
            return [self._copy(inner, f"{where}[{place}]", depth + 1, within) for place, inner in each]
        if name in _BY_NAME and isinstance(value, Mapping):
            named = cast("Mapping[str, object]", value).items()
            return {key: self._copy(inner, f"{where}.{key}", depth + 1, within) for key, inner in named}
        if name == "pattern":
            _check_pattern(value, where)
        return value

    def _target(self, reference: object, where: str) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValidationError(f"{where[:200]}: a reference must begin with '#/$defs/', got: {reference!r:.80}")
        found: object = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise ValidationError(f"{where[:200]}: output_schema has no {reference!r:.80}")
            found = found[key]
        return found


def _check_schema(schema: Mapping[str, object]) -> None:
    import jsonschema  # few runs need it

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ".".join(["output_schema", *map(str, error.absolute_path)])
        raise ValidationError(f"{where[:200]}: {error.message[: 2 * _SHOWN]}") from None


def _check_pattern(pattern: object, where: str) -> None:
    if not isinstance(pattern, str) or len(pattern) > _LONGEST_PATTERN:
        raise ValidationError(f"{where[:200]}: a pattern must be a text of {_LONGEST_PATTERN} characters at most")
    try:
        _matcher(pattern)
    except SchemaError:
        raise ValidationError(
            f"{where[:200]}: the pattern {pattern!r:.80} cannot be checked in linear time. Write it without lookaround and "
            "references"
        ) from None


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> TypeAdapter[str]:
    """Return an adapter of texts with a match. Its engine needs linear time, unlike `re`."""
    return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])


def _matches(pattern: str, text: str) -> bool:
    try:
        _matcher(pattern).validate_python(text)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=64)
def _validator(text: str) -> Any:
    import jsonschema.validators  # few runs need it

    def check_pattern(validator: Any, pattern: str, instance: object, _schema: object) -> Iterator[object]:
        if validator.is_type(instance, "string") and not _matches(pattern, cast("str", instance)):
            yield jsonschema.ValidationError(f"does not match {pattern!r}")

    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": check_pattern})
    return kind(json.loads(text))


def _mistakes(text: str, value: object) -> Iterator[str]:
    """Describe mistakes and their places. Messages contain the value, which is cut."""
    for error in _validator(text).iter_errors(value):
        where = ".".join(map(str, error.absolute_path))
        message = error.message
        if len(message) > 2 * _SHOWN:
            message = f"{message[:_SHOWN]}...{message[-_SHOWN:]}"
        yield f"'{where}': {message}" if where else message
