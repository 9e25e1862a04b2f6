"""Package tools: the text a model sees for what a tool returned. In: any value. Out: text. Pure; never blocks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, MappingView, Sequence
from enum import Enum
from itertools import islice
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_json

from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.shown import Shown
from ensemble_ray.values.trace import jsonable

__all__ = ["MOST_ITEMS", "ResultError", "items_of", "name_value", "render_value", "too_many_items"]

#: Items of one result; a generator that yields more may never end.
MOST_ITEMS = 100_000
#: The text of an object whose class defines none: `<Report object at 0x7f...>`, `<function f at 0x7f...>`.
_ADDRESS = re.compile(r"<.* at 0x[0-9A-Fa-f]+>+", re.DOTALL)


class ResultError(TypeError):
    """A tool or a handler returned something that has no text."""


def render_value(value: object, source: str = "A tool") -> str:
    """Text of a tool's return value (S-TOOL-14): strings as they are, None as "", data as JSON, the rest by `str`.

    Args:
        value: What the tool returned.
        source: Who returned it, for the error.

    Raises:
        ResultError: it has no text (S-LLM-47).
    """
    if isinstance(value, Enum):
        value = cast("object", value.value)
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, Shown):  # what a run gave: its text, without trace and figures
        return value.text_and_figures()[0]
    if isinstance(value, bytes | bytearray | memoryview):
        return _decode(bytes(value), source)
    is_data = isinstance(value, BaseModel | Mapping | Sequence | set | frozenset | MappingView | Iterator)
    if is_data or _has_fields(value) or hasattr(type(value), "__pydantic_serializer__"):
        return _as_json(value, source)
    return _text_of(value, source)


def name_value(value: object) -> str:
    """Return the text of a value that only its address tells from others: the name of its class (S-LLM-49)."""
    shown = jsonable(value)
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", shown if isinstance(shown, str) else to_json(shown).decode())


def items_of(items: Iterator[object], source: str = "A tool") -> list[object]:
    """Return what an iterator yields.

    Raises:
        ResultError: it yields more than `MOST_ITEMS` items.
    """
    found = list(islice(items, MOST_ITEMS + 1))
    if len(found) > MOST_ITEMS:
        raise too_many_items(source)
    return found


def too_many_items(source: str) -> ResultError:
    """Return the error of a result without an end."""
    return ResultError(f"{source} yielded more than {MOST_ITEMS:,} items. Return a list of the items that matter")


def _plain_data(value: object, source: str) -> object:
    """Return a container as the lists and dicts of its JSON, anything else as it is."""
    match value:
        case str() | bytes() | bytearray() | memoryview() | BaseModel():
            return value
        case set() | frozenset():
            return sorted((_plain_data(each, source) for each in cast("set[object]", value)), key=_order)
        case tuple() if hasattr(value, "_asdict"):  # of a `NamedTuple`
            return _plain_data(value._asdict(), source)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        case Mapping():
            return {key: _plain_data(each, source) for key, each in cast("Mapping[object, object]", value).items()}
        case Sequence() | MappingView():
            return [_plain_data(each, source) for each in cast("Sequence[object]", value)]
        case Iterator():
            return _plain_data(items_of(cast("Iterator[object]", value), source), source)
        case _ if _has_fields(value):
            names = [each.name for each in dataclasses.fields(cast("Any", value)) if hasattr(value, each.name)]
            return {name: _plain_data(getattr(value, name), source) for name in names}
        case _ if dataclasses.is_dataclass(type(value)) and not hasattr(type(value), "__pydantic_serializer__"):
            return _text_of(value, source)
        case _:
            return value


def _has_fields(value: object) -> bool:
    """Return whether its fields are its JSON: of a dataclass with neither a text nor a serializer of its own."""
    kind = type(value)
    is_own = kind.__str__ is not object.__str__ or hasattr(kind, "__pydantic_serializer__")
    return dataclasses.is_dataclass(kind) and not is_own


def _order(item: object) -> tuple[bool, float, str]:
    return (False, item, "") if isinstance(item, int | float) else (True, 0, str(item))


def _as_json(value: object, source: str) -> str:
    refused: list[ResultError] = []

    def text_inside(inner: object) -> object:
        try:
            plain = _plain_data(inner, source)  # of a field of a model
            return _text_of(inner, source) if plain is inner else plain
        except ResultError as error:
            refused.append(error)
            raise

    try:
        value = _plain_data(value, source)
        return to_json(value, fallback=text_inside).decode()
    except (ValueError, RecursionError):  # halves of surrogate pairs, bytes that are no text, data that contains itself
        if refused:
            raise refused[0] from None
        return json.dumps(whole_data(jsonable(value)), ensure_ascii=False, separators=(",", ":"))


def _text_of(value: object, source: str) -> str:
    text = str(value)
    if _ADDRESS.fullmatch(text):
        raise ResultError(
            f"{source} returned a {type(value).__name__}, which has no text. "
            "Return a str, a JSON value, a pydantic model or a dataclass, or define __str__"
        )
    return text


def _decode(value: bytes, source: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ResultError(
            f"{source} returned {len(value)} bytes that are no UTF-8 text. Return text, or write a file and return its path"
        ) from error
