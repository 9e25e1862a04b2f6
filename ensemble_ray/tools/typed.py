"""Package tools: tools whose input is a pydantic model. In: the model's JSON text. Out: a `ToolResult`.

Bad arguments are failures that tell the model what to write instead; they never reach `execute_typed` (S-TOOL-51).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Generic, TypeVar, cast

import pydantic
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.threads import is_async_callable
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.schema import explain_arguments
from ensemble_ray.tools.tool import AbstractAgentTool, AgentTool, ToolResult, as_result
from ensemble_ray.tools.waiting import collect

__all__ = ["AbstractTypedAgentTool", "TypedAgentTool", "input_type_of", "parse_input"]

InputT = TypeVar("InputT", bound=BaseModel)


class TypedAgentTool(AgentTool, Generic[InputT]):
    """A tool whose arguments are the fields of a pydantic model.

    Attributes:
        input_type: The model class; field descriptions are what the model reads of its parameters.
    """

    input_type: type[InputT]

    def __init_subclass__(cls, **options: object) -> None:
        """Refuse a class whose `input_type` cannot describe arguments.

        Raises:
            ValidationError: it is no model class.
        """
        super().__init_subclass__(**options)
        input_type: object = cls.__dict__.get("input_type")
        if input_type is not None and not isinstance(
            input_type, property
        ):  # a property is looked at when a tool is resolved
            _check_input_type(input_type, f"Tool class '{cls.__qualname__}'")

    @abstractmethod
    def execute_typed(self, arguments: InputT, /) -> object:
        """Do the work; may be `async`. Returns a `ToolResult` or anything that has a text."""

    def execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        """Parse the JSON text and do the work."""
        parsed = parse_input(text, input_type_of(self))
        if isinstance(parsed, ToolResult):
            return parsed
        outcome = self.execute_typed(parsed)
        if isinstance(outcome, Awaitable | AsyncIterator):
            return _await_result(cast("object", outcome), self.name)
        return as_result(outcome, self.name)


class AbstractTypedAgentTool(AbstractAgentTool, TypedAgentTool[InputT]):
    """A typed tool with the timing, metrics and exception safety of `AbstractAgentTool`."""

    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        """Parse the JSON text and do the work."""
        return TypedAgentTool[InputT].execute(self, text)

    def _is_async(self) -> bool:
        return is_async_callable(self.execute_typed)


async def _await_result(outcome: object, tool_name: str) -> ToolResult:
    return as_result(await collect(outcome), tool_name)


def input_type_of(tool: TypedAgentTool[InputT]) -> type[InputT]:
    """Return the tool's input model.

    Raises:
        ValidationError: there is no `input_type`, or it is no model class (S-TOOL-52).
    """
    input_type: object = getattr(tool, "input_type", None)
    _check_input_type(input_type, f"Tool '{tool.name}'")
    return cast("type[InputT]", input_type)


def _check_input_type(input_type: object, owner: str) -> None:
    if not isinstance(input_type, type) or not issubclass(input_type, BaseModel):
        raise ValidationError(f"{owner}: input_type must be a pydantic model class, got: {input_type!r}")


def parse_input(text: str, input_type: type[InputT]) -> InputT | ToolResult:
    """Return the arguments as an instance of the model, or the failure that the model reads (S-TOOL-51).

    A text that is no JSON object is the value of the one required field, where that is a string (S-TOOL-53).
    """
    name = input_type.__name__
    field = None if not text.strip() or text.lstrip().startswith("{") else _only_required_string(input_type)
    if field is not None:
        text = to_json({field: whole_text(text)}).decode()
    try:
        data: object = from_json(text)
    except ValueError as error:
        return ToolResult.failure(f"Invalid JSON input for '{name}': {error}")
    except TypeError:  # what pydantic says of a text that no UTF-8 can hold
        return ToolResult.failure(f"Invalid JSON input for '{name}': half of a surrogate pair is no character")
    if not isinstance(data, dict):
        return ToolResult.failure(f"Expected a JSON object for '{name}' but received: {_kind_of(data)}")
    values = cast("dict[str, object]", data)
    missing = [
        field.alias or key
        for key, field in input_type.model_fields.items()
        if field.is_required() and all(values.get(accepted) is None for accepted in _accepted_names(key, field.alias))
    ]
    if missing:
        return ToolResult.failure(f"Missing required parameter(s) for '{name}': {', '.join(missing)}")
    try:
        if input_type.model_config.get("extra") == "forbid":
            return input_type.model_validate_json(to_json(_drop_unknown(values, input_type)))
        return input_type.model_validate_json(text)
    except pydantic.ValidationError as error:
        return ToolResult.failure(f"Failed to deserialize input for '{name}': {explain_arguments(error)}")


def _only_required_string(input_type: type[BaseModel]) -> str | None:
    """Return the name under which a text can be given as the one argument that is needed; None where it cannot."""
    required = [(key, field) for key, field in input_type.model_fields.items() if field.is_required()]
    if len(required) != 1 or required[0][1].annotation is not str:
        return None
    key, field = required[0]
    return field.alias or key


def _accepted_names(key: str, alias: str | None) -> tuple[str, ...]:
    return (key,) if alias is None else (alias, key)


def _drop_unknown(values: Mapping[str, object], input_type: type[BaseModel]) -> dict[str, object]:
    known = {name for key, field in input_type.model_fields.items() for name in _accepted_names(key, field.alias)}
    return {name: value for name, value in values.items() if name in known}


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array"
