"""Forms of MCP servers: what a reviewer is told to write, and what becomes of it."""

from __future__ import annotations

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.tools.mcp.questions import approved_values, form_prompt, read_values

ORDER = {
    "properties": {
        "count": {"type": "integer", "description": "Pieces"},
        "gift": {"type": "boolean", "default": False},
        "size": {"enum": ["s", "l"]},
    },
    "required": ["count"],
}
SURE = {"properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
COLOURS = {"properties": {"of": {"type": "array", "items": {"anyOf": [{"const": "red"}, {"const": "blue"}]}}}}


def test_a_reviewer_is_told_the_fields() -> None:
    """S-INT-12: names, kinds, choices, defaults, and whether a value alone will do."""
    assert form_prompt(ORDER).splitlines() == [
        "Edit: write count, or a JSON object. Exit: decline",
        "- count (integer, required): Pieces",
        "- gift (boolean, may be left out, default false)",
        "- size (one of ['s', 'l'], may be left out)",
    ]
    assert form_prompt(COLOURS).splitlines()[1] == "- of (some of ['red', 'blue'], may be left out)"
    assert form_prompt({}) == "Approve to accept, exit to decline"


@pytest.mark.parametrize(
    ("text", "form", "values"),
    [
        ('{"count": 3, "size": "l"}', ORDER, {"count": 3, "size": "l"}),
        ("3", ORDER, {"count": 3}),
        ("yes", SURE, {"sure": True}),
        ("false", SURE, {"sure": False}),
        ("red, blue", COLOURS, {"of": ["red", "blue"]}),
        ('["red"]', COLOURS, {"of": ["red"]}),
        ("12", {"properties": {"name": {"type": "string"}}}, {"name": "12"}),
        ("1.5", {"properties": {"price": {"type": "number"}}}, {"price": 1.5}),
    ],
)
def test_what_is_written_becomes_values(text: str, form: dict[str, object], values: dict[str, object]) -> None:
    """S-INT-12: an object, or the value of the only field that is needed."""
    assert read_values(text, form) == values


@pytest.mark.parametrize(
    ("text", "form", "problem"),
    [
        ("many", ORDER, "'count' must be of the type integer"),
        ('{"count": 1.5}', ORDER, "'count' must be of the type integer"),
        ('{"count": true}', ORDER, "'count' must be of the type integer"),
        ('{"size": "l"}', ORDER, "missing: \\['count'\\]"),
        ('{"count": 1, "size": "m"}', ORDER, "must be of \\['s', 'l'\\]"),
        ('{"count": 1, "colour": "red"}', ORDER, "no fields \\['colour'\\]"),
        ("perhaps", SURE, "'sure' must be of the type boolean"),
        ("green", COLOURS, "must be of"),
        ("x", {"properties": {"a": {}, "b": {}}}, "a JSON object with the fields"),
    ],
)
def test_what_does_not_fit_is_told(text: str, form: dict[str, object], problem: str) -> None:
    """S-INT-12: so that the reviewer can write it anew."""
    with pytest.raises(ValidationError, match=problem):
        read_values(text, form)


def test_an_approval_is_defaults_and_yes() -> None:
    """S-INT-12: where that is not enough, it answers nothing."""
    assert approved_values(SURE) == {"sure": True}
    assert approved_values(ORDER) is None
    assert approved_values({"properties": {"n": {"type": "integer", "default": 2}, "m": {}}, "required": ["n"]}) == {
        "n": 2
    }


@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("text", ["9" * 401, "-Infinity", "NaN", "1e999"])
def test_a_number_that_no_server_can_read_does_not_fit(kind: str, text: str) -> None:
    """S-INT-12: so it is asked for again."""
    with pytest.raises(ValidationError, match=f"'count' must be of the type {kind}"):
        read_values(text, {"properties": {"count": {"type": kind}}, "required": ["count"]})
