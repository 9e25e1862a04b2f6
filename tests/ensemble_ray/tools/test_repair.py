"""Arguments that nearly fit are repaired by the schema."""

from __future__ import annotations

import json

import pytest

from ensemble_ray.tools.schema import repair_arguments

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
        "count": {"type": "integer", "default": 5},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x"],
        },
        "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "any": {},
        "node": {"$ref": "#/$defs/Node"},
    },
    "required": ["text"],
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
}


def repaired(text: str) -> tuple[object, list[str]] | None:
    """What the arguments are, and what was repaired."""
    found = repair_arguments(text, SCHEMA)
    return None if found is None else (json.loads(found.text), list(found.repairs))


@pytest.mark.parametrize(
    ("text", "value", "repairs"),
    [
        (json.dumps('{"text": "a"}'), {"text": "a"}, ["arguments: JSON in a string"]),
        ('{"tags": "[\\"a\\", \\"b\\"]"}', {"tags": ["a", "b"]}, ["tags: JSON in a string"]),
        ('{"more": "{\\"k\\": \\"1\\"}"}', {"more": {"k": 1}}, ["more: JSON in a string", "more.k: JSON in a string"]),
        ('{"more": "null"}', {"more": None}, ["more: JSON in a string"]),
        ('{"count": "3"}', {"count": 3}, ["count: JSON in a string"]),
        (
            '{"node": "{\\"next\\": \\"{}\\"}"}',
            {"node": {"next": {}}},
            ["node: JSON in a string", "node.next: JSON in a string"],
        ),
        ('{"place": "{\\"x\\": 1,}"}', {"place": {"x": 1}}, ["place: a comma too many", "place: JSON in a string"]),
        (
            '{"text": "a", "count": null, "tags": null, "more": null}',
            {"text": "a", "more": None},
            ["count: null for an argument that can be left out", "tags: null for an argument that can be left out"],
        ),
        ('{"place": {"x": 1, "y": null}}', {"place": {"x": 1}}, ["place.y: null for an argument that can be left out"]),
        ("null", {}, ["arguments: null"]),
        ('{"text": "a\nb\tc"}', {"text": "a\nb\tc"}, ["arguments: raw control characters"]),
        ('{"text": "a"}</tool_call>', {"text": "a"}, ["arguments: text after it"]),
        ('{"text": "a"}},', {"text": "a"}, ["arguments: text after it"]),
        ('{"text": ",}", "tags": ["a",],\n}', {"text": ",}", "tags": ["a"]}, ["arguments: a comma too many"]),
        ('```json\n{"text": "a"}\n```', {"text": "a"}, ["arguments: a code fence"]),
    ],
)
def test_a_near_miss_is_repaired_when_the_schema_leaves_one_reading(
    text: str, value: object, repairs: list[str]
) -> None:
    """S-LLM-40 to S-LLM-42: with a short text for each change."""
    assert repaired(text) == (value, repairs)


@pytest.mark.parametrize(
    "text",
    [
        '{"text": "[1]", "either": "[\\"a\\"]", "any": "{}", "unknown": null}',
        '{"text": null}',
        '{"any": null, "more": null}',
        '{"tags": "a"}',
        '{"tags": "a, b"}',
        '{"tags": "{}"}',
        '{"count": "3 or 4"}',
        '{"count": "3.5"}',
        '{"text": "a"',
        '{"text": "a',
        '{"tags": "[\\"a\\""}',
        '{"text": "a"}{"text": "b"}',
        '{"text": "a"} and [1]',
        '"a"',
        "[1]",
        "5",
        "text",
        "",
        '"\\"{}\\""',
    ],
)
def test_arguments_stay_when_they_fit_or_are_in_doubt(text: str) -> None:
    """S-LLM-41: half an answer, two answers and one value for a list are no near misses."""
    assert repaired(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        '{"text": ' + '"' * 200_001,
        '{"text": "' + '\\"' * 200_000,
        "{" + ", " * 200_000,
        "{" + "," * 200_000 + "}",
        '{"tags": [' + "1," * 100_000 + "]",
        "```" * 100_000,
        '{"count": "' + "9" * 300_000 + '"}',
        '{"place": {"y": null}}' + " " * 300_000 + "{",
    ],
)
def test_hostile_arguments_are_left_as_they_are(text: str) -> None:
    """S-LLM-42: after linear work, without an error."""
    assert repaired(text) is None
