"""JsonParserTool: paths, rendering, failures, and its two ways of being called."""

from __future__ import annotations

import json

import pytest

from ensemble_ray import JsonParserTool
from tests.ensemble_ray.tools.builtin.travel import travelled


def _at(path: str, document: str) -> str:
    result = JsonParserTool().execute(json.dumps({"json_path": path, "json": document}))
    return result.output if result.is_success else f"failure: {result.error_message}"


@pytest.mark.parametrize(
    ("path", "document", "value"),
    [
        ("user.name", '{"user": {"name": "Ada"}}', "Ada"),
        ("items[0].title", '{"items": [{"title": "first"}]}', "first"),
        ("[1].x", '[{"x": 1}, {"x": 2}]', "2"),
        ("m[0][1]", '{"m": [[1, 2]]}', "2"),
        ("a b.c-d", '{"a b": {"c-d": 1}}', "1"),
    ],
)
def test_value_is_found_when_path_names_it(path: str, document: str, value: str) -> None:
    """S-BIT-50."""
    assert _at(path, document) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ('"bare é"', "bare é"),
        ('""', ""),
        ("42", "42"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("1.5", "1.5"),
        ("true", "true"),
        ("false", "false"),
        ('{"a": [1, "é"], "b": null}', '{"a":[1,"é"],"b":null}'),
        ('[1, {"x": 2}]', '[1,{"x":2}]'),
        (r'"\ud800!"', "\ufffd!"),
    ],
)
def test_value_is_rendered_by_its_kind_when_found(value: str, text: str) -> None:
    """S-BIT-51; half a surrogate pair, which nothing could store, is replaced."""
    assert _at("v", f'{{"v": {value}}}') == text


@pytest.mark.parametrize(
    ("path", "document", "message"),
    [
        (" ", "{}", "Path expression must not be blank"),
        ("a", "  ", "JSON content must not be blank"),
        ("b", '{"a": 1}', "Path not found: 'b'"),
        ("a.c", '{"a": {"b": 1}}', "Path not found: 'c'"),
        ("a.b.c", '{"a": {"b": 1}}', "Path not found: 'a.b.c'"),
        ("a.b", '{"a": null}', "Path not found: 'a.b'"),
        ("a.b", '{"a": [1]}', "Path not found: 'a.b'"),
        ("a[0]", '{"a": {"0": 1}}', "Path not found: 'a[0]'"),
        ("a[2]", '{"a": [1, 2]}', "Array index out of bounds: index 2 is out of bounds for array of size 2"),
        ("a[-1]", '{"a": [1]}', "Array index out of bounds: index -1 is out of bounds for array of size 1"),
        ("a..b", '{"a": 1}', "Path not found: 'a..b'"),
        ("a[x]", '{"a": [1]}', "Path not found: 'a[x]'"),
    ],
)
def test_failure_says_where_the_path_ends_when_it_leads_nowhere(path: str, document: str, message: str) -> None:
    """S-BIT-52."""
    assert _at(path, document) == f"failure: {message}"


@pytest.mark.parametrize(
    "document", ["{bad", '{"v": NaN}', "[" * 100_000, '{"v": ' + "9" * 5_000 + "}", '{"v": 1e999}', "{} {}"]
)
def test_failure_says_invalid_when_json_cannot_be_read(document: str) -> None:
    """S-BIT-52: also what would exhaust Python's stack or its numbers."""
    assert _at("v", document).startswith("failure: Invalid JSON: ")


def test_value_is_null_when_the_key_holds_null() -> None:
    """S-BIT-53."""
    assert _at("a", '{"a": null}') == "null"


def test_parameters_keep_their_names_when_the_schema_is_made() -> None:
    """S-BIT-54."""
    schema = JsonParserTool().input_type.model_json_schema()
    assert list(schema["properties"]) == ["json_path", "json"]
    assert schema["required"] == ["json_path", "json"]


def test_missing_parameters_are_named_when_the_model_leaves_them_out() -> None:
    """S-BIT-54: by the names of the schema."""
    result = JsonParserTool().execute("{}")
    assert result.error_message == "Missing required parameter(s) for 'JsonParserInput': json_path, json"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('a.b\n{"a": {"b": 7}}', "7"),
        ('[0].x\n[\n {"x": "y"}\n]', "y"),
        ('a\r\n{"a": 1}', "1"),
        ('\n{"a": 1}', "failure: Path expression must not be blank"),
        ("a.b", "failure: JSON content must not be blank"),
        ("", "failure: Path expression must not be blank"),
    ],
)
def test_two_lines_are_taken_when_the_input_is_plain_text(text: str, answer: str) -> None:
    """S-BIT-55."""
    result = JsonParserTool().execute(text)
    assert (result.output if result.is_success else f"failure: {result.error_message}") == answer


def test_named_arguments_are_taken_when_they_follow_an_empty_line() -> None:
    """S-BIT-55: what begins with a brace is no path."""
    assert JsonParserTool().execute('\n{"json_path": "a", "json": "{\\"a\\": 1}"}').output == "1"


def test_tool_travels_when_pickled() -> None:
    """S-CONV-34."""
    copy = travelled(JsonParserTool())
    assert (copy.name, copy.execute('a\n{"a": 1}').output) == ("json_parser", "1")
