"""Instructions for a model on the form of its answer.

The schema text is an example-like object, not a JSON schema: small models follow an example better, and it is shorter.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime as dt
import decimal
import enum
import json
import pathlib
import types
import typing
import uuid
from collections.abc import Mapping

import pydantic
from pydantic.fields import FieldInfo

from ensemble_ray.values.output_schema import schema_in
from ensemble_ray.values.task_output import OutputType

#: The described type is level 0. Objects below this level appear by name only, so that recursive types end (S-SET-22).
_DEEPEST = 5
_INDENT = "  "
_ONLY_JSON = "Respond with ONLY valid JSON: no code fences, no explanation, no text before or after it."
_SCALARS: tuple[tuple[type[object], str], ...] = (
    (bool, '"boolean"'),  # before int, of which it is a subclass
    (int, '"integer"'),
    (float, '"number"'),
    (decimal.Decimal, '"number"'),
    (str, '"string"'),
    # pydantic reads these from strings
    (bytes, '"string"'),
    (dt.date, '"string"'),
    (dt.time, '"string"'),
    (dt.timedelta, '"string"'),
    (uuid.UUID, '"string"'),
    (pathlib.PurePath, '"string"'),
)
#: Words in the instruction for types that need no JSON.
_IN_WORDS: tuple[tuple[type[object], str], ...] = (
    (bool, "true or false"),
    (int, "an integer"),
    (float, "a number"),
    (decimal.Decimal, "a number"),
    (str, "plain text"),
    (dt.datetime, "a date and time in ISO 8601"),
    (dt.date, "a date in ISO 8601"),
    (dt.time, "a time in ISO 8601"),
    (dt.timedelta, "a duration in ISO 8601"),
    (types.NoneType, "null"),
)
_LISTS = (
    *(list, tuple, set, frozenset, collections.deque),
    *(collections.abc.Sequence, collections.abc.Set, collections.abc.Collection, collections.abc.Iterable),
)


def describe_schema(output_type: OutputType | None) -> str:
    """Return the schema text of a type: its fields with the types of their values, indented by two spaces per level.

    Args:
        output_type: Any `output_type` of a task.

    Raises:
        ValueError: the type is None.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class City:
        ...     name: str
        ...     districts: list[str]
        >>> print(describe_schema(City))
        {
          "name": "string",
          "districts": ["string"]
        }
    """
    if output_type is None or output_type is type(None):
        raise ValueError("Cannot describe the schema of None. Pass a type, such as a pydantic model, str or list[int]")
    if (schema := schema_in(output_type)) is not None:
        return json.dumps(schema.schema, indent=len(_INDENT), ensure_ascii=False)
    options = _options(output_type)
    return " or ".join(_describe(option, -1) if option is not type(None) else "null" for option in options)


def output_format_section(output_type: OutputType) -> str:
    """Return the section of the user prompt that requests this type (S-OUT-1, S-LLM-54)."""
    plain = _only_plain(output_type)
    if plain is not None:
        return f"## Output Format\n{plain}"
    return f"## Output Format\n{_ONLY_JSON} It must match this schema:\n{describe_schema(output_type)}"


def correction_prompt(output_type: OutputType, *, problem: str, response: str) -> str:
    """Return the prompt after an answer that could not be parsed (S-OUT-31)."""
    return (
        "Your previous response could not be parsed.\n\n"
        f"## Error\n{problem}\n\n"
        f"## Your Previous Response\n{response}\n\n"
        f"## Required Schema\n{describe_schema(output_type)}\n\n"
        f"{_only_plain(output_type) or _ONLY_JSON}"
    )


def _options(output_type: object) -> tuple[object, ...]:
    """Return the members of a union, or the type itself."""
    output_type, _ = _plain(output_type, -1, keeps_unions=True)
    if typing.get_origin(output_type) in {typing.Union, types.UnionType}:
        return tuple(inner for option in typing.get_args(output_type) for inner in _options(option))
    return (output_type,)


def _only_plain(output_type: object) -> str | None:
    """Return the instruction for a type of texts, numbers or choices; None if it needs JSON."""
    words = [_in_words(option) for option in _options(output_type)]
    if None in words:
        return None
    if words == ["plain text"]:
        return "Respond with plain text."
    wanted = " or ".join(word for word in words if word is not None)
    return f"Respond with ONLY {wanted}: no quotes, no code fences, no explanation, no text before or after it."


def _in_words(option: object) -> str | None:
    if typing.get_origin(option) is typing.Literal:
        values = [each.value if isinstance(each, enum.Enum) else each for each in typing.get_args(option)]
        return f"one of these: {', '.join(map(str, values))}"
    if not isinstance(option, type):
        return None
    if issubclass(option, enum.Enum):
        return f"one of these: {', '.join(str(member.value) for member in option)}"
    return next((words for kind, words in _IN_WORDS if issubclass(option, kind)), None)


def _describe(output_type: object, level: int) -> str:
    """Return the schema text of a type; `level` is the level of the surrounding object, or -1."""
    output_type, level = _plain(output_type, level)
    origin, arguments = typing.get_origin(output_type) or output_type, typing.get_args(output_type)
    if _is_record(origin):
        return _object(output_type, level + 1)
    if origin is typing.Literal:
        return _choices([value.value if isinstance(value, enum.Enum) else value for value in arguments])
    if isinstance(origin, type):
        if issubclass(origin, enum.Enum):
            return _choices([member.value for member in origin])
        for scalar, text in _SCALARS:
            if issubclass(origin, scalar):
                return text
        if origin in _LISTS:
            items = [_describe(item, level) for item in arguments if item is not Ellipsis]
            return f"[{', '.join(items)}]" if items else '["any"]'
        if issubclass(origin, collections.abc.Mapping):
            if len(arguments) != 2:  # noqa: PLR2004  key and value
                return '{"key": "value"}'
            key, value = (_describe(argument, level) for argument in arguments)
            return f"{{{key}: {value}}}"
    return '"any"'


def _plain(output_type: object, level: int, *, keeps_unions: bool = False) -> tuple[object, int]:
    """Unwrap types without an effect on JSON: Annotated, Optional, NewType, aliases. Also return the level."""
    while True:
        origin = typing.get_origin(output_type)
        if origin in {typing.Annotated, typing.Required, typing.NotRequired, typing.Final}:
            output_type = typing.get_args(output_type)[0]
        elif origin in {typing.Union, types.UnionType}:
            if keeps_unions:
                return output_type, level
            options = [option for option in typing.get_args(output_type) if option is not type(None)]
            if len(options) != 1:
                return typing.Any, level
            output_type = options[0]
        elif isinstance(output_type, typing.NewType):
            output_type = output_type.__supertype__
        elif type(output_type).__name__ == "TypeAliasType":
            # An alias of a `type` statement, or its backport. It may contain itself, so it counts as a level.
            level += 1
            output_type = getattr(output_type, "__value__", typing.Any) if level <= _DEEPEST else _TooDeep
        else:
            return output_type, level


def _choices(values: list[object]) -> str:
    return f'"enum: {", ".join(str(value) for value in values)}"'


def _is_record(output_type: object) -> bool:
    if not isinstance(output_type, type):
        return False
    # Not `typing.is_typeddict`: pydantic needs the backport's TypedDict before Python 3.12.
    is_typed_dict = issubclass(output_type, dict) and hasattr(output_type, "__total__")
    is_named_tuple = issubclass(output_type, tuple) and hasattr(output_type, "_fields")
    is_class_of_fields = issubclass(output_type, pydantic.BaseModel) or dataclasses.is_dataclass(output_type)
    return is_class_of_fields or is_typed_dict or is_named_tuple


def _object(output_type: object, level: int) -> str:
    if level > _DEEPEST:
        return '"object"'
    if isinstance(output_type, type) and issubclass(output_type, pydantic.RootModel):
        return _describe(output_type.model_fields["root"].annotation, level)
    fields = _fields(output_type)
    if not fields:
        return "{}"
    inner = [f'"{name}": {_describe(field, level)}'.replace("\n", f"\n{_INDENT}") for name, field in fields.items()]
    lines = f",\n{_INDENT}".join(inner)
    return f"{{\n{_INDENT}{lines}\n}}"


def _fields(output_type: object) -> Mapping[str, object]:
    """Return the types of fields by JSON name, in declaration order (S-OUT-3, S-OUT-4)."""
    origin = typing.get_origin(output_type) or output_type
    known: Mapping[str, FieldInfo] | None = getattr(origin, "__pydantic_fields__", None)
    if known is not None:
        config: object = getattr(origin, "model_config", None) or getattr(origin, "__pydantic_config__", None)
        by_name = isinstance(config, Mapping) and config.get("validate_by_alias") is False
        found: dict[str, object] = {}
        for name, field in known.items():
            alias = field.validation_alias or field.alias
            if isinstance(alias, pydantic.AliasChoices):
                alias = alias.choices[0]
            if isinstance(alias, pydantic.AliasPath):
                alias = str(alias.path[0]) if len(alias.path) == 1 else name
            if field.init is not False:
                found[name if by_name else alias or name] = field.annotation
        return found
    hints = typing.get_type_hints(origin, include_extras=True)
    if dataclasses.is_dataclass(origin):
        return {field.name: hints[field.name] for field in dataclasses.fields(origin) if field.init}
    return hints


class _TooDeep(pydantic.BaseModel):
    """Placeholder for a type below the deepest level."""
