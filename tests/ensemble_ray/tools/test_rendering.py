"""The text of what a tool returned."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from ensemble_ray import ToolResult
from ensemble_ray.tools.outcome import ToolOutcome, outcome_of_result, outcome_of_return, unknown_tool
from ensemble_ray.tools.rendering import render_value


class Point(BaseModel):
    x: int
    y: int = 0


@pytest.mark.parametrize(
    ("value", "text"),
    [("as is", "as is"), (None, ""), (42, "42"), (1.5, "1.5"), (True, "True"), ((1, 2), "(1, 2)")],
)
def test_text_is_plain_when_the_value_is_no_data_structure(value: object, text: str) -> None:
    """S-TOOL-14: str as is, None as nothing, others by str."""
    assert render_value(value) == text


@pytest.mark.parametrize("value", [{"a": [1, None, "ü"]}, [1, "b"], Point(x=1), [Point(x=1)], {"p": Point(x=1)}])
def test_text_is_json_when_the_value_is_data(value: object) -> None:
    """S-TOOL-14: models, dicts and lists as JSON."""
    expected = json.loads(json.dumps(value, default=lambda model: model.model_dump()))
    assert json.loads(render_value(value)) == expected
    assert "\\u" not in render_value(value)


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


def test_text_names_the_tool_when_it_is_unknown() -> None:
    """S-ENG-55, S-SET-25."""
    assert unknown_tool("serch") == ToolOutcome("Error: Unknown tool 'serch'", "failure")
