"""Schemas that others wrote, in the form that all endpoints accept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.tools.foreign_schema import (
    LONGEST_SCHEMA,
    MOST_NODES,
    SchemaError,
    hash_name,
    normalise_parameters,
    rename_properties,
)
from ensemble_ray.tools.mcp.session import repair_listing, tool_names

TEXT = {"type": "string"}
ANY = {
    "anyOf": [
        TEXT,
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "object", "additionalProperties": True},
    ]
}


def of_parameter(schema: object, **root: object) -> tuple[object, tuple[str, ...]]:
    """What becomes of the schema of one parameter, and what is dropped."""
    found = normalise_parameters({"type": "object", "properties": {"p": schema}, **root})
    return cast("Mapping[str, object]", found.parameters["properties"]).get("p"), found.dropped


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": ["object", "null"]},
        {"properties": {}},
        {"properties": None},
        {"type": "object", "required": ["a"]},
        {"$schema": "http://json-schema.org/draft-07/schema#", "additionalProperties": False},
        {"oneOf": [{"type": "object"}, {"type": "null"}]},
        {"type": "object", "enum": [{}]},
    ],
)
def test_arguments_are_an_object_with_properties_when_a_schema_names_none(schema: object) -> None:
    """S-LLM-60: endpoints refuse an object without properties, and a choice at the top."""
    assert normalise_parameters(schema).parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("schema", "form", "dropped"),
    [
        ({"type": ["string", "null"]}, {"anyOf": [TEXT, {"type": "null"}]}, ()),
        ({"type": "string", "nullable": True}, {"anyOf": [TEXT, {"type": "null"}]}, ()),
        ({"oneOf": [TEXT, {"type": "integer"}, False]}, {"anyOf": [TEXT, {"type": "integer"}]}, ()),
        ({"anyOf": [TEXT, {"anyOf": [TEXT]}]}, TEXT, ()),
        ({"const": "a"}, {"type": "string", "enum": ["a"]}, ()),
        ({"enum": ["a", None, ""]}, {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}, ("enum ''",)),
        ({"enum": [1, 2]}, {"description": "one of 1, 2", "type": "integer"}, ("enum of kind integer",)),
        (
            {"type": "string", "format": "email", "description": "Who."},
            {"description": "Who. (format: email)", "type": "string"},
            ("format",),
        ),
        ({"type": "string", "format": "date-time"}, {"type": "string", "format": "date-time"}, ()),
        ({"type": "string", "pattern": r"\p{L}"}, TEXT, ("pattern",)),
        ({"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "^a+$"}, ()),
        ({"type": "integer", "exclusiveMinimum": 0}, {"type": "integer", "minimum": 1}, ()),
        ({"maximum": 3, "exclusiveMaximum": True}, {"type": "number", "maximum": 3}, ("exclusiveMaximum",)),
        ({"type": "array"}, {"type": "array", "items": ANY}, ()),
        ({"type": "array", "items": {}, "uniqueItems": True}, {"type": "array", "items": ANY}, ("uniqueItems",)),
        (
            {"items": [TEXT, {"type": "null"}]},
            {"type": "array", "items": {"anyOf": [TEXT, {"type": "null"}]}},
            ("items",),
        ),
        ({"prefixItems": [TEXT, TEXT]}, {"type": "array", "items": TEXT}, ("prefixItems",)),
        ({"allOf": [TEXT], "title": "T"}, TEXT, ()),
        (
            {"allOf": [{"properties": {"a": TEXT}, "required": ["a"]}, {"properties": {"b": TEXT}}], "default": {}},
            {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a"], "default": {}},
            (),
        ),
        (
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": False},
            {"type": "object", "properties": {"a": TEXT}},
            (),
        ),
        ({"type": "object", "additionalProperties": TEXT}, {"type": "object", "additionalProperties": TEXT}, ()),
        (
            {"patternProperties": {"^a": TEXT}, "type": "object"},
            {"type": "object", "additionalProperties": True},
            ("patternProperties",),
        ),
        (
            {"type": "string", "if": {}, "then": {}, "examples": [1], "$comment": "c"},
            TEXT,
            ("$comment", "examples", "if", "then"),
        ),
        ({}, {}, ()),
        (True, {}, ()),
        ("string", {}, ("schemas that are no objects",)),
        (False, None, ("properties that nothing fits",)),
        ({"type": "text"}, {}, ()),
    ],
)
def test_a_parameter_is_described_by_few_keywords(schema: object, form: object, dropped: tuple[str, ...]) -> None:
    """S-LLM-60, S-LLM-61: what has no keyword that all endpoints know is said in words, or dropped by name."""
    assert of_parameter(schema) == (form, dropped)


def test_references_are_spelled_out_when_they_are_local() -> None:
    """S-LLM-60: in any place of the schema; one that leads back to itself, or out of the schema, says its type at most."""
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    assert of_parameter({"$ref": "#/$defs/Node", "description": "First."}, **{"$defs": {"Node": node}}) == (
        {
            "description": "First.",
            "type": "object",
            "properties": {"next": {"type": "object", "additionalProperties": True}},
        },
        ("$ref",),
    )
    assert of_parameter({"$ref": "#/definitions/a~1b"}, definitions={"a/b": TEXT}) == (TEXT, ())
    assert of_parameter({"$ref": "https://example.com/x.json"}) == ({}, ("$ref",))
    assert of_parameter({"$ref": "#/properties/p"}) == ({}, ("$ref",))


def test_a_choice_of_objects_at_the_top_becomes_one_object() -> None:
    """S-LLM-60: with the properties of all; required is what each of them requires."""
    found = normalise_parameters(
        {
            "anyOf": [
                {"properties": {"a": TEXT, "to": TEXT}, "required": ["a", "to"]},
                {"properties": {"b": TEXT, "to": TEXT}, "required": ["b", "to"]},
            ]
        }
    )
    assert found.parameters == {"type": "object", "properties": {"b": TEXT, "to": TEXT, "a": TEXT}, "required": ["to"]}


def test_required_names_properties_alone() -> None:
    """S-LLM-60."""
    found = normalise_parameters({"properties": {"a": TEXT}, "required": ["a", "a", "b", 5]})
    assert found.parameters == {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
    assert found.dropped == ("required",)
    assert "required" not in normalise_parameters({"properties": {"a": TEXT}, "required": True}).parameters


@pytest.mark.parametrize(
    "schema",
    [None, True, [], "x", {"type": "array"}, {"type": "string"}, {"enum": ["a"]}, {"anyOf": [{"type": "string"}]}],
)
def test_a_schema_is_refused_when_it_describes_no_object(schema: object) -> None:
    """S-LLM-64."""
    with pytest.raises(SchemaError, match=r"^the schema of its arguments "):
        normalise_parameters(schema)


def _nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "anyOf": [schema]}
    return schema


def _doubling(keyword: str) -> dict[str, object]:
    steps = {f"D{n}": {keyword: [{"$ref": f"#/$defs/D{n + 1}"}, {"$ref": f"#/$defs/D{n + 1}"}]} for n in range(60)}
    return {"$defs": {**steps, "D60": {"type": "object"}}, "$ref": "#/$defs/D0", "type": "object"}


@pytest.mark.parametrize(
    "schema",
    [
        _nested(3_000),
        _doubling("allOf"),
        _doubling("anyOf"),
        _doubling("prefixItems"),
        {"properties": {f"p{n}": TEXT for n in range(20 * MOST_NODES)}},
        {
            "$defs": {"E": {"enum": [str(n) for n in range(50_000)]}},
            "properties": {f"p{n}": {"$ref": "#/$defs/E"} for n in range(3_000)},
        },
    ],
)
def test_a_schema_is_bounded_when_it_is_hostile(schema: dict[str, object]) -> None:
    """S-LLM-60, S-LLM-64: by depth, number and length; what is beyond is "anything", or the whole is refused."""
    try:
        found = normalise_parameters(schema)
    except SchemaError as error:
        assert str(LONGEST_SCHEMA) in str(error)  # noqa: PT017  either is right
    else:
        assert len(json.dumps(found.parameters)) <= LONGEST_SCHEMA


_KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "required",
        "items",
        "anyOf",
        "allOf",
        "enum",
        "$ref",
        "minimum",
        "exclusiveMinimum",
        "format",
        "nullable",
    ]
)
_VALUES = st.recursive(
    st.sampled_from([None, True, False, 1, 0.5, "string", "object", "array", "null", "#", "#/properties/a", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYWORDS | st.just("a"), inner, max_size=4),
    max_leaves=25,
)


@given(st.dictionaries(_KEYWORDS, _VALUES, max_size=5))
def test_any_schema_is_refused_or_has_the_form(schema: dict[str, object]) -> None:
    """S-LLM-60: and what has the form is left as it is."""
    try:
        found = normalise_parameters(schema)
    except SchemaError:
        return
    again = normalise_parameters(found.parameters)
    assert (again.parameters, again.dropped) == (found.parameters, ())
    assert found.parameters["type"] == "object"
    assert not {"anyOf", "enum", "$ref", "allOf"} & found.parameters.keys()


def test_parameters_get_other_names_when_endpoints_refuse_theirs() -> None:
    """S-LLM-65: the server gets its own."""
    schema = normalise_parameters(
        {"properties": {"$top": TEXT, "_top": TEXT, "a.b-c": TEXT, "x" * 70: TEXT}, "required": ["$top"]}
    )
    parameters, originals = rename_properties(schema.parameters)
    names = list(cast("Mapping[str, object]", parameters["properties"]))
    assert names[1:3] == ["_top", "a.b-c"]
    assert [originals.get(name) for name in names] == ["$top", None, None, "x" * 70]
    assert parameters["required"] == [names[0]]
    assert all(len(name) <= 64 for name in names)
    assert rename_properties(parameters) == (parameters, {})


def test_names_of_a_servers_tools_are_short_and_different() -> None:
    """S-LLM-62: whatever their order."""
    names = ["a-b", "a_b", "a.b", "x" * 80, "x" * 81, "3d", "plain"]
    made = tool_names(names, "s_")
    assert (made["a_b"], made["plain"], made["3d"]) == ("s_a_b", "s_plain", "s_3d")
    assert tool_names(["3d"], "") == {"3d": "_3d"}
    assert made["a-b"] == hash_name("s_a_b", "a-b") != made["a.b"]
    assert len(set(made.values())) == len(names)
    assert max(map(len, made.values())) == 64
    assert tool_names(names[::-1], "s_") == made


def test_one_wrong_tool_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """S-LLM-64: members that the protocol does not allow are left out, and tools that are wrong without them, with one line."""
    pytest.importorskip("mcp_types")
    fine = {"name": "fine", "inputSchema": {"type": "object", "properties": {"a": TEXT}}}
    tools = [
        fine,
        {"name": "bare"},
        {"name": "null", "inputSchema": None, "description": 5, "annotations": {"readOnlyHint": True}},
        {"name": "untyped", "inputSchema": {"properties": {"a": "x"}, "required": True}, "outputSchema": []},
        {"name": "text", "inputSchema": {"type": "string"}},
        {"name": "fine", "inputSchema": {"type": "object"}},
        {"name": " "},
        "no tool",
    ]
    empty = {"type": "object", "properties": {}}
    assert repair_listing(tools, "stdio:shop") == [
        fine,
        {"name": "bare", "inputSchema": empty},
        {"name": "null", "inputSchema": empty, "annotations": {"readOnlyHint": True}},
        {"name": "untyped", "inputSchema": {"type": "object", "properties": {"a": {}}}},
    ]
    (line,) = caplog.messages
    assert line == (
        "MCP server 'stdio:shop': 4 of its tools are left out: 'text': the schema of its arguments describes no object, "
        "but: string; a second 'fine'; one without a name; one without a name"
    )
