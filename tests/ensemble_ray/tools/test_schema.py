"""JSON schemas of functions and models, and the reading of a model's arguments."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from ensemble_ray import ValidationError
from ensemble_ray.tools.schema import ArgumentError, Signature, model_parameters, signature_of


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Node(BaseModel):
    """A tree."""

    title: str
    kids: list[Node] = []


def signature(function: Callable[..., object]) -> Signature:
    """Its signature."""
    return signature_of(function, tool_name="t")


def properties(function: Callable[..., object]) -> dict[str, Any]:
    """What its schema says of its parameters."""
    found = signature(function).parameters["properties"]
    assert isinstance(found, dict)
    return found


def test_schema_follows_the_signature_when_it_is_typed() -> None:
    """S-TOOL-11: annotations become types, defaults make a parameter optional, others are required."""

    def f(
        text: str,
        count: int = 3,
        ratio: float = 0.5,
        tags: list[str] = [],  # noqa: B006  what is tested
        *,
        mode: Literal["a", "b"] = "a",
    ) -> None:
        """F."""

    assert signature(f).parameters == {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer", "default": 3},
            "ratio": {"type": "number", "default": 0.5},
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
            "mode": {"type": "string", "enum": ["a", "b"], "default": "a"},
        },
        "required": ["text"],
    }


def test_schema_is_empty_when_there_are_no_parameters() -> None:
    """S-TOOL-11."""
    assert signature(lambda: None).parameters == {"type": "object", "properties": {}}


def test_parameter_is_a_string_when_it_is_not_annotated() -> None:
    """S-TOOL-11: one whose default is None may be None."""

    def f(a, b="x", c=None) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """F."""

    found = properties(f)
    assert found["a"] == {"type": "string"}
    assert found["b"] == {"type": "string", "default": "x"}
    assert found["c"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert signature(f).read('{"a": 5, "c": null}') == ((), {"a": "5", "c": None})


def test_self_is_left_out_when_the_function_is_a_bound_method() -> None:
    """S-TOOL-11."""

    class Holder:
        def f(self, a: int) -> None:
            """F."""

    assert list(properties(Holder().f)) == ["a"]


GOOGLE = """Do it.

Args:
    a: First
        thing.
    b (int): Second thing.
"""
NUMPY = """Do it.

Parameters
----------
a : str
    First thing.
b : int
    Second thing.
"""
REST = """Do it.

:param a: First thing.
:param int b: Second thing.
"""


@pytest.mark.parametrize("doc", [GOOGLE, NUMPY, REST])
def test_description_comes_from_the_docstring_when_the_annotation_has_none(doc: str) -> None:
    """S-TOOL-11: Google, NumPy and reST style; Field wins over the docstring."""

    def f(a: str, b: Annotated[int, Field(description="Told here.", ge=0)] = 1) -> None: ...

    f.__doc__ = doc
    found = properties(f)
    assert found["a"]["description"] == "First thing."
    assert found["b"] == {"type": "integer", "description": "Told here.", "minimum": 0, "default": 1}


def test_types_are_spelled_out_in_place_when_they_are_named() -> None:
    """S-TOOL-11: an enum lists its values, a model its fields; a type that contains itself is a reference."""

    def f(color: Color, tree: Node) -> None:
        """F."""

    parameters = signature(f).parameters
    assert parameters["properties"] == {
        "color": {"type": "string", "enum": ["red", "blue"]},
        "tree": {"$ref": "#/$defs/Node"},
    }
    node = {
        "type": "object",
        "description": "A tree.",
        "properties": {
            "title": {"type": "string"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "default": []},
        },
        "required": ["title"],
    }
    assert parameters["$defs"] == {"Node": node}
    assert model_parameters(Node) == {**node, "$defs": {"Node": node}}


def test_default_is_not_told_when_json_cannot_say_it() -> None:
    """S-TOOL-11: no warning either; the function's own default applies when it is called."""
    marker = object()

    def f(a: Any = marker) -> None:
        """F."""

    assert properties(f) == {"a": {}}
    assert signature(f).read("{}") == ((), {})


def test_values_are_coerced_when_they_nearly_fit() -> None:
    """S-TOOL-13: numbers in strings, enums by value, nested models; surplus is ignored."""

    def f(n: int, color: Color, tree: Node, schema: str = "", _private: bool = False) -> None:  # noqa: FBT001, FBT002
        """F."""

    _, named = signature(f).read(
        '{"n": "4", "color": "blue", "tree": {"title": "t"}, "schema": 7, "_private": "yes", "zz": 1}'
    )
    assert named == {"n": 4, "color": Color.BLUE, "tree": Node(title="t"), "schema": "7", "_private": True}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"a": "x"}', "invalid arguments: 'a': Input should be a valid integer"),
        ("{}", "invalid arguments: 'a': Field required"),
        ("", "invalid arguments: 'a': Field required"),
        ("five", "invalid arguments: Invalid JSON"),
        ("[1]", "invalid arguments: Input should be an object"),
    ],
)
def test_reading_fails_when_arguments_do_not_fit(arguments: str, message: str) -> None:
    """S-TOOL-13, S-ENG-56: the text says which argument, and what is wrong with it."""

    def f(a: int) -> None:
        """F."""

    with pytest.raises(ArgumentError) as caught:
        signature(f).read(arguments)
    assert str(caught.value).startswith(message)


def test_blank_arguments_do_when_nothing_is_required() -> None:
    """S-ENG-56: models send an empty text, or null, for a tool without parameters."""
    for blank in ("", "  ", "null", "{}"):
        assert signature(lambda: None).read(blank) == ((), {})


def test_values_go_by_position_when_the_parameter_has_no_name_outside() -> None:
    """S-TOOL-11, S-TOOL-13: positional-only parameters; *args and **kwargs are not offered."""

    def f(a: int, b: int = 2, /, c: int = 3, *args: int, **kwargs: int) -> None:
        """F."""

    assert list(properties(f)) == ["a", "b", "c"]
    assert signature(f).read('{"a": 1, "c": 5}') == ((1, 2), {"c": 5})


def test_tool_is_refused_when_a_type_cannot_be() -> None:
    """S-ENG-60: unknown names and types without JSON form are told with the tool's name."""

    def unknown(a: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821  what is tested
        """F."""

    def lock(a: threading.Event) -> None:
        """F."""

    with pytest.raises(ValidationError, match=r"Tool 't': cannot resolve the annotations of its parameters: .*Nowhere"):
        signature(unknown)
    with pytest.raises(ValidationError, match=r"Tool 't': its parameters have no JSON schema"):
        signature(lock)


@pytest.mark.heavy
def test_signature_is_made_once_and_goes_with_its_function() -> None:
    """S-TOOL-11: kept beside the function, weakly, so that tools made per run do not pile up."""

    def f(a: int) -> None:
        """F."""

    assert signature(f) is signature(f)
    gone = weakref.ref(f)
    del f
    gc.collect(1)  # what is young; to look through all that a session has loaded takes seconds
    assert gone() is None
