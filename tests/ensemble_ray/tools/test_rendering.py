"""The text of what a tool returned."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

import pydantic.dataclasses
import pytest
from pydantic import BaseModel

from ensemble_ray import ToolResult
from ensemble_ray.tools.tool import ToolOutcome, outcome_of_result, outcome_of_return
from ensemble_ray.tools.user_code import render_value


class Point(BaseModel):
    x: int
    y: int = 0


class Color(Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Leg:
    start: str
    color: Color


@dataclasses.dataclass
class Track:
    ends: Pair
    marks: set[str]


@dataclasses.dataclass
class Named:
    """A dataclass with a text of its own."""

    name: str

    def __str__(self) -> str:
        return f"the place {self.name}"


@pydantic.dataclasses.dataclass
class Wrapped:
    inner: object


class Bare:
    """A class without a text."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as is", "as is"),
        (None, ""),
        (42, "42"),
        (1.5, "1.5"),
        (True, "True"),
        (b"caf\xc3\xa9", "café"),
        (Color.RED, "red"),
        (PurePosixPath("a/b"), "a/b"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.50"),
        (date(2026, 1, 2), "2026-01-02"),
        (ValueError("no rows"), "no rows"),
    ],
)
def test_text_is_plain_when_the_value_is_no_data_structure(value: object, text: str) -> None:
    """S-TOOL-14, S-LLM-48: str as is, None as nothing, bytes as UTF-8, an enum as its value, others by str."""
    assert render_value(value) == text


@pytest.mark.parametrize("value", [{"a": [1, None, "ü"]}, [1, "b"], Point(x=1), [Point(x=1)], {"p": Point(x=1)}])
def test_text_is_json_when_the_value_is_data(value: object) -> None:
    """S-TOOL-14: models, dicts and lists as JSON."""
    expected = json.loads(json.dumps(value, default=lambda model: model.model_dump()))
    assert json.loads(render_value(value)) == expected
    assert "\\u" not in render_value(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, "b"), '[1,"b"]'),
        ({"b", "a"}, '["a","b"]'),
        (frozenset({2}), "[2]"),
        (deque([1]), "[1]"),
        (range(2), "[0,1]"),
        ({"a": 1}.keys(), '["a"]'),
        (map(str, [1, 2]), '["1","2"]'),
        (Pair(1, 2), '{"left":1,"right":2}'),
        (Leg("Bern", Color.RED), '{"start":"Bern","color":"red"}'),
        (MappingProxyType({"legs": [Leg("Bern", Color.RED)]}), '{"legs":[{"start":"Bern","color":"red"}]}'),
        ({"rows": (each for each in "ab"), "at": date(2026, 1, 2), "keys": {1: 2}.keys()},
         '{"rows":["a","b"],"at":"2026-01-02","keys":[1]}'),
        ([Pair(1, 2)], '[{"left":1,"right":2}]'),
        ({"legs": [Track(Pair(1, 2), {"b", "a", "c"})]}, '{"legs":[{"ends":{"left":1,"right":2},"marks":["a","b","c"]}]}'),
        ({3, 10, 2}, "[2,3,10]"),
        ([{"b", 10, 9, "a"}, frozenset({(2, 1)})], '[[9,10,"a","b"],[[2,1]]]'),
        (UserList(["a"]), '["a"]'),
        ([UserList([1]), UserDict(a=1)], '[[1],{"a":1}]'),
        (Named("Bern"), "the place Bern"),
        ([Named("Bern")], '["the place Bern"]'),
        (Track, f"<class '{__name__}.Track'>"),
        (Wrapped(UserList([Pair(1, 2)])), '{"inner":[{"left":1,"right":2}]}'),
    ],
)  # fmt: skip
def test_text_is_json_when_the_value_is_a_container(value: object, text: str) -> None:
    """S-LLM-48: tuples, sets, views, iterators and dataclasses are data as lists and dicts are."""
    assert render_value(value) == text


@pytest.mark.parametrize(
    ("value", "kind"),
    [(Bare(), "Bare"), (lambda: 1, "function"), (threading.Lock(), "lock"), ([{"a": Bare()}], "Bare")],
)
def test_value_is_refused_when_it_has_no_text(value: object, kind: str) -> None:
    """S-LLM-47: the address of an object tells a model nothing; the error says what to return."""
    with pytest.raises(TypeError, match=rf"^Tool 'find' returned a {kind}, which has no text. Return a str, a JSON"):
        render_value(value, "Tool 'find'")


def test_value_is_refused_when_its_bytes_are_no_text() -> None:
    """S-LLM-48."""
    with pytest.raises(TypeError, match=r"^A tool returned 2 bytes that are no UTF-8 text"):
        render_value(b"\xff\xfe")


def test_value_is_refused_when_it_yields_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-LLM-46."""
    monkeypatch.setattr("ensemble_ray.tools.user_code.MOST_ITEMS", 3)

    def numbers() -> Iterator[int]:
        while True:
            yield 1

    with pytest.raises(TypeError, match="yielded more than 3 items"):
        render_value(numbers())


def test_text_is_json_when_data_holds_what_json_does_not_know() -> None:
    """S-TOOL-14: what has no JSON form stands by its str."""

    class Thing:
        def __str__(self) -> str:
            return "a thing"

    assert json.loads(render_value({"t": Thing()})) == {"t": "a thing"}


def test_outcome_is_failure_when_a_string_begins_with_error() -> None:
    """S-TOOL-15: the verdict changes, the text does not."""
    assert outcome_of_return("Error: no rows") == ToolOutcome("Error: no rows", "failure")
    assert outcome_of_return("No Error: fine") == ToolOutcome("No Error: fine", "success")
    assert outcome_of_return(["Error: in data"]) == ToolOutcome('["Error: in data"]', "success")


def test_outcome_follows_the_result_when_a_function_returns_one() -> None:
    """S-TOOL-14, S-TOOL-3: a ToolResult is honoured, payload included."""
    assert outcome_of_return(ToolResult.success("ok", [1])) == ToolOutcome("ok", "success", [1])
    assert outcome_of_return(ToolResult.failure("no")) == ToolOutcome("Error: no", "failure")


def test_text_carries_the_message_when_a_result_is_a_failure() -> None:
    """S-TOOL-22, S-ENG-54."""
    assert outcome_of_result(ToolResult.failure("no")) == ToolOutcome("Error: no", "failure")
    assert outcome_of_result(ToolResult.success("yes")) == ToolOutcome("yes")
