"""Tools whose input is a pydantic model."""

from __future__ import annotations

from enum import StrEnum

import pytest
from pydantic import BaseModel, ConfigDict, Field

from ensemble_ray import AbstractTypedAgentTool, ToolContext, ToolResult, TypedAgentTool, ValidationError
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.registry import resolve_tools


class Unit(StrEnum):
    METRIC = "metric"
    IMPERIAL = "imperial"


class Forecast(BaseModel):
    city: str = Field(description="Where")
    days: int = Field(description="How many")
    unit: Unit = Unit.METRIC
    tags: list[str] = []


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(alias="place")


class ForecastTool(AbstractTypedAgentTool[Forecast]):
    name = "forecast"
    description = "Tells the weather"
    input_type = Forecast

    def __init__(self) -> None:
        self.seen: list[Forecast] = []

    def execute_typed(self, arguments: Forecast, /) -> object:
        self.seen.append(arguments)
        return {"city": arguments.city, "unit": arguments.unit}


class StrictTool(TypedAgentTool[Strict]):
    name = "strict"
    description = "Takes one thing only"
    input_type = Strict

    async def execute_typed(self, arguments: Strict, /) -> ToolResult:
        return ToolResult.success(arguments.city, arguments)


def test_schema_has_a_property_per_field_when_input_is_typed() -> None:
    """S-TOOL-50: descriptions, required without default, enum values, items of lists."""
    spec = resolve_tools([ForecastTool()]).specs[0]
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where"},
            "days": {"type": "integer", "description": "How many"},
            "unit": {"type": "string", "enum": ["metric", "imperial"], "default": "metric"},
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        },
        "required": ["city", "days"],
    }


def test_model_instance_arrives_when_arguments_fit() -> None:
    """S-SET-1, S-TOOL-50: execute_typed gets the model and returns anything that has a text; surplus is ignored."""
    tool = ForecastTool()
    result = tool.execute('{"city": "Oslo", "days": 3, "unit": "imperial", "moon": true}')
    assert result == ToolResult.success('{"city":"Oslo","unit":"imperial"}')
    assert tool.seen == [Forecast(city="Oslo", days=3, unit=Unit.IMPERIAL)]


async def test_items_are_collected_when_a_typed_tool_yields() -> None:
    """S-LLM-45."""

    class Days(ForecastTool):
        def execute_typed(self, arguments: Forecast, /) -> object:
            yield from range(arguments.days)

    class LaterDays(ForecastTool):
        async def execute_typed(self, arguments: Forecast, /) -> object:  # type: ignore[override]  # yields
            for day in range(arguments.days):
                yield day

    for kind in (Days, LaterDays):
        (bound,) = resolve_tools([kind()])
        outcome = await call_tool(bound, '{"city": "Oslo", "days": 2}', context=ToolContext())
        assert outcome.text == "[0,1]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("Oslo", "Invalid JSON input for 'Forecast': "),
        ("", "Invalid JSON input for 'Forecast': "),
        ('["Oslo"]', "Expected a JSON object for 'Forecast' but received: array"),
        ('"Oslo"', "Expected a JSON object for 'Forecast' but received: string"),
        ("3.5", "Expected a JSON object for 'Forecast' but received: number"),
        ("true", "Expected a JSON object for 'Forecast' but received: boolean"),
        ("null", "Expected a JSON object for 'Forecast' but received: null"),
        ("{}", "Missing required parameter(s) for 'Forecast': city, days"),
        ('{"days": null, "city": "Oslo"}', "Missing required parameter(s) for 'Forecast': days"),
        ('{"city": "Oslo", "days": "many"}', "Failed to deserialize input for 'Forecast': 'days': "),
    ],
)
def test_failure_says_what_to_write_when_arguments_do_not_fit(arguments: str, message: str) -> None:
    """S-TOOL-51, S-SET-23: a failure that names the model class; the tool's own code is not reached."""
    tool = ForecastTool()
    result = tool.execute(arguments)
    assert not result.is_success
    assert result.error_message is not None
    assert result.error_message.startswith(message)
    assert tool.seen == []


async def test_surplus_is_ignored_when_the_model_forbids_it() -> None:
    """S-TOOL-51: unknown properties are ignored, also for a model that forbids them; aliases are what counts."""
    outcome = StrictTool().execute('{"place": "Oslo", "moon": 1}')
    assert not isinstance(outcome, ToolResult)
    assert await outcome == ToolResult.success("Oslo", Strict(place="Oslo"))
    assert StrictTool().execute("{}") == ToolResult.failure("Missing required parameter(s) for 'Strict': place")


@pytest.mark.parametrize("text", ["Oslo", "Oslo\nby the sea", "[1, 2]", "42", "null", '"Oslo"'])
async def test_plain_text_is_the_only_required_string(text: str) -> None:
    """S-TOOL-53, S-BIT-55: as a step of a pipeline or a handler gives it; under the name that the model class says."""
    outcome = StrictTool().execute(text)
    assert not isinstance(outcome, ToolResult)
    assert await outcome == ToolResult.success(text, Strict(place=text))


@pytest.mark.parametrize("text", ["", "  ", '{"place": "Oslo"', '{"place": 3}'])
def test_text_that_is_meant_as_arguments_is_not_taken_for_plain_text(text: str) -> None:
    """S-TOOL-53, S-TOOL-51: what begins with a brace, and what is blank."""
    outcome = StrictTool().execute(text)
    assert isinstance(outcome, ToolResult)
    assert not outcome.is_success


def test_class_is_refused_when_input_type_is_no_model_class() -> None:
    """S-TOOL-52: when the class is made, as a ValueError."""
    with pytest.raises(ValueError, match=r"Tool class '.*Wrong': input_type must be a pydantic model class") as caught:

        class Wrong(ForecastTool):  # pyright: ignore[reportUnusedClass]
            input_type = dict  # type: ignore[assignment]

    assert isinstance(caught.value, ValidationError)


def test_tool_is_refused_when_it_has_no_input_type() -> None:
    """S-TOOL-52: a class may leave it to its subclasses, a tool cannot be without it."""

    class Without(TypedAgentTool[Strict]):
        name = "without"
        description = "Takes nothing"

        def execute_typed(self, arguments: Strict, /) -> str:
            return arguments.city

    with pytest.raises(ValidationError, match="Tool 'without': input_type must be a pydantic model class, got: None"):
        resolve_tools([Without()])
