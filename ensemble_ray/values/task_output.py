"""What a task gives back. Layer: above trace."""

from __future__ import annotations

import re
from types import UnionType
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, cast

from pydantic import SerializationInfo, SerializerFunctionWrapHandler, SkipValidation, TypeAdapter, field_serializer
from typing_extensions import TypeVar as TypeVarWithDefault

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.metrics import TaskMetrics
from ensemble_ray.values.shown import Shown, figures
from ensemble_ray.values.trace import TaskTrace, jsonable
from ensemble_ray.values.value import Duration, Instant

__all__ = ["NOT_PARSED", "OutputType", "Parsed_co", "TaskOutput", "full_name", "type_name"]

T = TypeVar("T")
#: What a task's answer is parsed into; Any where the task does not say.
Parsed_co = TypeVarWithDefault("Parsed_co", default=Any, covariant=True)


#: What an answer is parsed into: a class, or `A | B`, which is none.
OutputType: TypeAlias = type[Any] | UnionType


def full_name(output_type: object) -> str:
    """`module.qualname` of a class (S-CONV-10); any other type as it is written, its classes by their full names."""
    if isinstance(output_type, type):
        return f"{output_type.__module__}.{output_type.__qualname__}"
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(output_type))  # of the functions in `Annotated`


def type_name(output_type: object) -> str:
    """Return what messages call a type: a class by its name, any other type as it is written."""
    return output_type.__name__ if isinstance(output_type, type) else str(output_type)


def _takes_none(output_type: object) -> bool:
    try:
        return output_type is not None and TypeAdapter(cast("type[object]", output_type)).validate_python(None) is None
    except Exception:  # noqa: BLE001  the type is unknown to pydantic, or its own hooks raise
        return False


def _is_same(one: object, other: object) -> bool:
    """Compare types; `Annotated[int, Field(gt=5)]` is not equal to its own copy from another process."""
    return one == other or (not isinstance(one, type) and full_name(one) == full_name(other))


#: Told where there is no parsed output.
NOT_PARSED = "No parsed output available. Set output_type on the task to have its answer parsed."


class TaskOutput(Shown, Generic[Parsed_co]):
    """What one task gave."""

    raw: str
    #: with its variables resolved
    task_description: str
    agent_role: str
    completed_at: Instant
    duration: Duration
    tool_call_count: int = 0
    parsed_output: Any = None
    #: as the task declared it; `list[X]` and `X | None` are no classes and would be refused by a check
    output_type: Annotated[OutputType | None, SkipValidation] = None
    metrics: TaskMetrics = TaskMetrics.EMPTY
    trace: TaskTrace | None = None

    def text_and_figures(self) -> tuple[str, str]:
        """Return the text, and the line of figures without its brackets."""
        found = self.metrics
        return self.raw, figures(None, found.llm_call_count, found.total_tokens, self.duration)

    @property
    def text(self) -> str:
        """The answer as text, the same as `raw`."""
        return self.raw

    @property
    def parsed(self) -> Parsed_co:
        """The answer as the task's `output_type`.

        Raises:
            IllegalStateError: there is none.
        """
        if self.parsed_output is None and not _takes_none(self.output_type):
            raise IllegalStateError(NOT_PARSED)
        return cast("Parsed_co", self.parsed_output)

    def get_parsed_output(self, output_type: type[T]) -> T:
        """Return the parsed output as an instance of that type.

        Raises:
            IllegalStateError: there is none, or it is of another type.
        """
        if self.output_type is not None and _is_same(output_type, self.output_type):
            return cast("T", self.parsed)
        if self.parsed_output is None:
            raise IllegalStateError(NOT_PARSED)
        if not isinstance(output_type, type) or not isinstance(self.parsed_output, output_type):
            actual = full_name(type(cast("object", self.parsed_output)))
            msg = f"Parsed output is of type {actual} but requested type {full_name(output_type)} does not match."
            raise IllegalStateError(msg)
        return self.parsed_output

    @field_serializer("output_type", when_used="json")
    def _type_as_json(self, value: OutputType | None) -> str | None:
        return None if value is None else full_name(value)

    @field_serializer("parsed_output", mode="wrap", when_used="json")
    def _parsed_as_json(
        self, value: object, _handler: SerializerFunctionWrapHandler, _info: SerializationInfo
    ) -> object:
        return whole_data(jsonable(value))
