"""Package tools: the text a model sees for what a tool returned. In: any value. Out: text. Pure; never blocks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, MappingView
from enum import Enum
from itertools import islice
from typing import cast

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
    if isinstance(value, bytes | bytearray):
        return _decode(bytes(value), source)
    value = _plain_data(value, source)
    if isinstance(value, BaseModel | list | dict | tuple) or dataclasses.is_dataclass(value):
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
    """Return a container as the list or dict of its JSON, anything else as it is."""
    match value:
        case set() | frozenset():
            return sorted(cast("set[object]", value), key=str)
        case deque() | range() | MappingView():
            return list(cast("range", value))
        case tuple() if hasattr(value, "_asdict"):  # of a `NamedTuple`
            return cast("object", value._asdict())  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        case Mapping():
            return dict(cast("Mapping[object, object]", value))
        case Iterator():
            return items_of(cast("Iterator[object]", value), source)
        case _:
            return value


def _as_json(value: object, source: str) -> str:
    refused: list[ResultError] = []

    def text_inside(inner: object) -> object:
        plain = _plain_data(inner, source)
        if plain is not inner:
            return plain
        try:
            return _text_of(inner, source)
        except ResultError as error:
            refused.append(error)
            raise

    try:
        return to_json(value, fallback=text_inside).decode()
    except ValueError:  # halves of surrogate pairs, bytes that are no text, data that contains itself
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
