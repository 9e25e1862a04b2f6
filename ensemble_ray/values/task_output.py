"""The output of a task, and the outputs of loops, phases and graphs."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, Self, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct
from pydantic import SerializationInfo, SerializerFunctionWrapHandler, SkipValidation, TypeAdapter, field_serializer
from typing_extensions import TypeVar as TypeVarWithDefault

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.metrics import TaskMetrics
from ensemble_ray.values.output_schema import schema_in
from ensemble_ray.values.trace import TaskTrace, jsonable
from ensemble_ray.values.value import Duration, Instant, Value

if TYPE_CHECKING:
    from datetime import timedelta


class _Printer(Protocol):
    def text(self, text: str) -> None: ...


class Shown(Value):
    """A value that prints as its text and a line of figures."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parsed: object) -> type[Self]:
            return cls  # only type checkers distinguish the types of answers

    def text_and_figures(self) -> tuple[str, str]:
        """Return the text, and a line of figures."""
        raise NotImplementedError

    def __str__(self) -> str:
        text, line = self.text_and_figures()
        return f"{text}\n[{line}]" if text else f"[{line}]"

    def __repr__(self) -> str:
        text, line = self.text_and_figures()
        return f"<{type(self).__name__} {reprlib.repr(text)}: {line}>"

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's signature
        printer.text(str(self))


def figures(tasks: int | None, model_calls: int, tokens: int, duration: timedelta, *, reused: int = 0) -> str:
    """Return a line of figures, without unknown tokens."""
    parts = [] if tasks is None else [count(tasks, "task")]
    parts.append(count(model_calls, "model call"))
    if tokens >= 0:
        parts.append(count(tokens, "token"))
    if reused:
        parts.append(count(reused, "reused answer"))
    return ", ".join((*parts, f"{duration.total_seconds():.1f} s"))


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


T = TypeVar("T")
Parsed_co = TypeVarWithDefault("Parsed_co", default=Any, covariant=True)


OutputType: TypeAlias = type[Any] | UnionType  # `A | B` is no class


def full_name(output_type: object) -> str:
    """Return `module.qualname` of a class (S-CONV-10), or another type as text with such names."""
    if isinstance(output_type, type):
        return f"{output_type.__module__}.{output_type.__qualname__}"
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", str(output_type))  # addresses of functions in `Annotated`


def type_name(output_type: object) -> str:
    """Return the name of a class, the title of a schema, or another type as text."""
    if (schema := schema_in(output_type)) is not None:
        return schema.name
    return output_type.__name__ if isinstance(output_type, type) else str(output_type)


NOT_PARSED = "No parsed output available. Set output_type on the task to have its answer parsed."


class TaskOutput(Shown, Generic[Parsed_co]):
    """The output of one task."""

    raw: str
    task_description: str  # resolved
    agent_role: str
    completed_at: Instant
    duration: Duration
    tool_call_count: int = 0
    parsed_output: Any = None
    #: as declared; unchecked, since `list[X]` and `X | None` are no classes
    output_type: Annotated[OutputType | None, SkipValidation] = None
    metrics: TaskMetrics = TaskMetrics.EMPTY
    trace: TaskTrace | None = None

    def text_and_figures(self) -> tuple[str, str]:
        found = self.metrics
        return self.raw, figures(
            None, found.llm_call_count, found.total_tokens, self.duration, reused=found.reused_calls
        )

    @property
    def text(self) -> str:
        """The same as `raw`."""
        return self.raw

    @property
    def parsed(self) -> Parsed_co:
        """The answer as an instance of the task's `output_type`.

        Raises:
            IllegalStateError: There is no parsed answer.
        """
        is_optional = False
        if self.parsed_output is None and self.output_type is not None:
            with suppress(Exception):  # the type is unknown to pydantic, or its own hooks raise
                is_optional = TypeAdapter(cast("type[object]", self.output_type)).validate_python(None) is None
        if self.parsed_output is None and not is_optional:
            raise IllegalStateError(NOT_PARSED)
        return cast("Parsed_co", self.parsed_output)

    def get_parsed_output(self, output_type: type[T]) -> T:
        """Return the parsed output as an instance of a type.

        Raises:
            IllegalStateError: There is no parsed output, or it has another type.
        """
        own = self.output_type
        # By name: `Annotated[int, Field(gt=5)]` is not equal to its own copy from another process.
        is_alias = own is not None and not isinstance(output_type, type) and full_name(output_type) == full_name(own)
        if is_alias or (own is not None and output_type == own):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStep:
    """A step of a graph.

    Attributes:
        state_name: The state.
        step_number: 1-based.
        output: Output of the state.
        next_state: The next state, possibly `Graph.END`; None if the run ended before.
    """

    state_name: str
    step_number: int
    output: TaskOutput
    next_state: str | None


class LoopHistory(Struct, frozen=True, kw_only=True):
    """The outputs of a loop's iterations by body key, and why it ended."""

    iterations: Sequence[Mapping[str, TaskOutput]]
    termination_reason: str | None
    is_flagged: bool = False  # S-LOOP-63


class GraphHistory(Struct, frozen=True, kw_only=True):
    """The steps of a graph, and why it ended."""

    steps: Sequence[GraphStep]
    termination_reason: str | None
    is_flagged: bool = False  # S-GRAPH-51


class UnitOutputs(Struct, frozen=True, kw_only=True):
    """The outputs of a run by loop, phase and graph."""

    loops: Mapping[str, LoopHistory] = msgspec.field(
        default_factory=dict[str, LoopHistory]
    )  # by name; the last run counts
    #: of completed phases by name, in order of completion
    phases: Mapping[str, Sequence[TaskOutput]] = msgspec.field(default_factory=dict[str, Sequence[TaskOutput]])
    graph: GraphHistory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopIterationContext:
    """The argument of a loop's `until` after an iteration. It contains only outputs of the loop.

    Attributes:
        iteration_number: 1-based.
        last_iteration_outputs: Outputs of this iteration by body key, in body order; read-only.
        history: The outputs of all iterations, including this one; read-only.
        last_body_output: Output of the last task of the body in this iteration.
    """

    iteration_number: int
    last_iteration_outputs: Mapping[str, TaskOutput]
    history: Sequence[Mapping[str, TaskOutput]]
    last_body_output: TaskOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRoutingContext:
    """The argument of an edge's condition after a step.

    Attributes:
        current_state: The state of the step.
        last_output: Its output.
        step_number: 1-based.
        state_history: Outputs of each visited state, in the order of visits, including this one; read-only.
    """

    current_state: str
    last_output: TaskOutput
    step_number: int
    state_history: Mapping[str, Sequence[TaskOutput]]


def join_iterations(outputs: Sequence[TaskOutput]) -> TaskOutput:
    """Return the outputs of all iterations as one (S-LOOP-72, S-LOOP-73)."""
    first, *later = outputs
    texts = [f"\n\n--- iteration {number} ---\n\n{each.raw}" for number, each in enumerate(later, start=2)]
    return first.model_copy(update={"raw": "".join([first.raw, *texts]), "parsed_output": None})
