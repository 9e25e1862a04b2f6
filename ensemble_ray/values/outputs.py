"""What a task and a run give back. Layer: above trace."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, Self, TypeVar, cast

from pydantic import (
    BeforeValidator,
    PrivateAttr,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    SkipValidation,
    field_serializer,
)
from typing_extensions import TypeVar as TypeVarWithDefault

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.errors.texts import brief
from ensemble_ray.values.messages import ChatMessage
from ensemble_ray.values.metrics import ExecutionMetrics, TaskMetrics
from ensemble_ray.values.trace import ExecutionTrace, TaskTrace, ToolCallTrace, jsonable
from ensemble_ray.values.value import Duration, FrozenSequence, Instant, Value

__all__ = [
    "AgentOutput",
    "EnsembleOutput",
    "ExitReason",
    "FailedItem",
    "ItemResult",
    "Parsed_co",
    "RunState",
    "TaskOutput",
    "TypedTask",
    "full_name",
]

T = TypeVar("T")
Parsed = TypeVarWithDefault("Parsed", default=Any)
#: What a task's answer is parsed into; Any where the task does not say.
Parsed_co = TypeVarWithDefault("Parsed_co", default=Any, covariant=True)


class ExitReason(StrEnum):
    """Why a run ended (S-DOM-52, S-SET-14)."""

    COMPLETED = "completed"
    USER_EXIT_EARLY = "user_exit_early"
    TIMEOUT = "timeout"
    ERROR = "error"
    CANCELLED = "cancelled"
    #: what the run may spend is spent (S-BUD-4)
    BUDGET_EXHAUSTED = "budget_exhausted"


class RunState(StrEnum):
    """Where a run stands (S-SET-14)."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    #: it ended before its time, since what it may spend was spent; a larger budget lets it go on (S-BUD-6)
    BUDGET_EXHAUSTED = "budget_exhausted"

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen any more."""
        return self in {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.BUDGET_EXHAUSTED}

    @property
    def is_going_on(self) -> bool:
        """Whether somebody must own the run."""
        return self in {RunState.PENDING, RunState.RUNNING, RunState.WAITING}


def full_name(kind: type[object]) -> str:
    """`module.qualname` of a class (S-CONV-10)."""
    return f"{kind.__module__}.{kind.__qualname__}"


_NOT_PARSED = "No parsed output available. Set output_type on the task to have its answer parsed."


class _Printer(Protocol):
    """The part of IPython's printer that is used here."""

    def text(self, text: str) -> None: ...


class _Shown(Value):
    """A value that people print: its text and one line of figures instead of all its fields (S-SET-52)."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parsed: object) -> type[Self]:
            """Return the class: to type checkers alone it is one per type of answer (S-CONV-39)."""
            return cls

    def _text_and_figures(self) -> tuple[str, str]:
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text, and below it one line of figures."""
        text, figures = self._text_and_figures()
        return f"{text}\n[{figures}]" if text else f"[{figures}]"

    def __repr__(self) -> str:
        """Return one line: the class, the beginning of the text, the figures."""
        text, figures = self._text_and_figures()
        return f"<{type(self).__name__} {reprlib.repr(text)}: {figures}>"

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's signature
        """Show it in a notebook as `print` does."""
        printer.text(str(self))


def _figures(tasks: int | None, model_calls: int, tokens: int, duration: timedelta) -> str:
    parts = [] if tasks is None else [_count(tasks, "task")]
    parts.append(_count(model_calls, "model call"))
    if tokens >= 0:
        parts.append(_count(tokens, "token"))
    return ", ".join((*parts, f"{duration.total_seconds():.1f} s"))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class TaskOutput(_Shown, Generic[Parsed_co]):
    """What one task gave (S-DOM-40 to S-DOM-43)."""

    raw: str
    #: with its variables resolved
    task_description: str
    agent_role: str
    completed_at: Instant
    duration: Duration
    tool_call_count: int = 0
    parsed_output: Any = None
    #: as the task declared it; `dict[K, V]` is no class and would be refused by a check
    output_type: Annotated[type[Any] | None, SkipValidation] = None
    metrics: TaskMetrics = TaskMetrics.EMPTY
    trace: TaskTrace | None = None

    def _text_and_figures(self) -> tuple[str, str]:
        found = self.metrics
        return self.raw, _figures(None, found.llm_call_count, found.total_tokens, self.duration)

    @property
    def parsed(self) -> Parsed_co:
        """The answer as the task's `output_type`.

        Raises:
            IllegalStateError: there is none (S-DOM-75).
        """
        if self.parsed_output is None:
            raise IllegalStateError(_NOT_PARSED)
        return cast("Parsed_co", self.parsed_output)

    def get_parsed_output(self, kind: type[T]) -> T:
        """Return the parsed output as an instance of that type.

        Raises:
            IllegalStateError: there is none, or it is of another type (S-DOM-42).
        """
        if self.parsed_output is None:
            raise IllegalStateError(_NOT_PARSED)
        if not isinstance(self.parsed_output, kind):
            actual = full_name(type(cast("object", self.parsed_output)))
            msg = f"Parsed output is of type {actual} but requested type {full_name(kind)} does not match."
            raise IllegalStateError(msg)
        return self.parsed_output

    @field_serializer("output_type", when_used="json")
    def _type_as_json(self, value: type[object] | None) -> str | None:
        return None if value is None else full_name(value)

    @field_serializer("parsed_output", mode="wrap", when_used="json")
    def _parsed_as_json(
        self, value: object, _handler: SerializerFunctionWrapHandler, _info: SerializationInfo
    ) -> object:
        return jsonable(value)


class FailedItem(Value):
    """An item of a map that gave no output (S-MR-150); among `output.failed_items` with `on_item_error="collect"`.

    Attributes:
        index: 0-based position in the source.
        item: The item; its text where it could not be kept.
        error_type: Class of the error, without its module.
        message: What the error says.
        attempts: Requests to the provider for the item's last model call; 0 when none was made (S-MR-152).
    """

    index: int
    item: Any
    error_type: str
    message: str
    attempts: int = 0

    @field_serializer("item", mode="wrap", when_used="json")
    def _item_as_json(self, value: object, _handler: SerializerFunctionWrapHandler, _info: SerializationInfo) -> object:
        return jsonable(value)


class ItemResult(Value):
    """What came of one item (S-MR-131), as `run.items()` and `stream()` give it: an output, or why there is none.

    Attributes:
        index: 0-based position in the source; results come in no certain order.
        item: The item; its text where it could not be kept.
        output: What its task gave; None: it failed.
        error: Why it failed; None: it did not.
        attempts: Of a failed item, as in `FailedItem`; else 0.
    """

    index: int
    item: Any
    output: TaskOutput | None = None
    error: FailedItem | None = None
    attempts: int = 0


class TypedTask(Protocol[Parsed_co]):
    """A task, as its output is found: by its hidden id (S-CONV-30), and typed by what its answer is parsed into."""

    @property
    def object_id(self) -> str:
        """The hidden id."""
        ...

    @property
    def output_type(self) -> type[Parsed_co] | None:
        """The type of its parsed answer."""
        ...


class EnsembleOutput(_Shown):
    """What a run gave (S-DOM-50 to S-DOM-55).

    Attributes:
        raw: Text of the last task; "" when there are no outputs.
        task_outputs: In execution order; immutable.
        total_duration: Wall time of the whole run.
        trace: The run as a tree; `ExecutionTrace.EMPTY` for a run that never began and a value made by hand.
        run_id: Names the run's record; None for a value made by hand.
        failed_items: Items of a map that gave no output, in item order (S-MR-150).
    """

    raw: str = ""
    task_outputs: FrozenSequence[TaskOutput] = ()
    total_duration: Duration = timedelta()
    total_tool_calls: int = 0
    exit_reason: Annotated[ExitReason, BeforeValidator(lambda value: value or ExitReason.COMPLETED)] = (
        ExitReason.COMPLETED
    )
    metrics: ExecutionMetrics = ExecutionMetrics.EMPTY
    trace: Annotated[ExecutionTrace, BeforeValidator(lambda value: value or ExecutionTrace.EMPTY)] = (
        ExecutionTrace.EMPTY
    )
    run_id: str | None = None
    failed_items: FrozenSequence[FailedItem] = ()
    #: object id of a task -> position in task_outputs
    _positions: Mapping[str, int] = PrivateAttr(default_factory=dict[str, int])

    def _text_and_figures(self) -> tuple[str, str]:
        found = self.metrics
        figures = _figures(len(self.task_outputs), found.total_llm_call_count, found.total_tokens, self.total_duration)
        if self.failed_items:
            figures += f", {_count(len(self.failed_items), 'failed item')}"
        return self.raw, figures if self.is_complete else f"{figures}, ended early: {self.exit_reason.value}"

    @classmethod
    def of(
        cls,
        raw: str,
        task_outputs: Sequence[TaskOutput] | None,
        total_duration: timedelta | float,
        total_tool_calls: int,
    ) -> EnsembleOutput:
        """Return a completed output made by hand (S-DOM-55)."""
        took = total_duration if isinstance(total_duration, timedelta) else timedelta(seconds=total_duration)
        return cls(raw=raw, task_outputs=task_outputs or (), total_duration=took, total_tool_calls=total_tool_calls)

    def with_positions(self, positions: Mapping[str, int]) -> EnsembleOutput:
        """Return this output, able to find the outputs of those task ids; for the assembly of a run."""
        self._positions = dict(positions)
        return self

    def replace(self, **changes: object) -> Self:
        """Return a copy with these fields changed; it still finds outputs by task while they are the same."""
        copy = super().replace(**changes)
        if "task_outputs" not in changes:
            copy.with_positions(self._positions)
        return copy

    @property
    def is_complete(self) -> bool:
        """Whether every task ran (S-DOM-52)."""
        return self.exit_reason is ExitReason.COMPLETED

    @property
    def completed_tasks(self) -> Sequence[TaskOutput]:
        """The same as `task_outputs` (S-DOM-53)."""
        return self.task_outputs

    @property
    def last_completed_output(self) -> TaskOutput | None:
        """The last output, None when there is none."""
        return self.task_outputs[-1] if self.task_outputs else None

    def get_output(self, task: TypedTask[Parsed] | None) -> TaskOutput[Parsed] | None:
        """Return the output of that very task object; None when unknown or not run (S-DOM-54)."""
        if task is None:
            return None
        position = self._positions.get(task.object_id)
        return None if position is None else self.task_outputs[position]

    def __getitem__(self, task: TypedTask[Parsed]) -> TaskOutput[Parsed]:
        """Return the output of that very task object.

        Raises:
            IllegalStateError: it has none (S-DOM-74).
        """
        found = self.get_output(task)
        if found is None:
            name = getattr(task, "name", None) or brief(str(getattr(task, "description", task)))
            raise IllegalStateError(
                f"Task '{name}' has no output in this run: it did not complete, or is another object"
            )
        return found


class AgentOutput(_Shown, Generic[Parsed_co]):
    """What an agent answered to a question (S-DOM-79). Give it as `history=` to ask on.

    Attributes:
        output: The whole output of the run: metrics, trace, why it ended.
        messages: The conversation with this question and its answer: roles `user` and `assistant` in turns.
    """

    output: EnsembleOutput
    messages: FrozenSequence[ChatMessage] = ()

    def _text_and_figures(self) -> tuple[str, str]:
        return self.output._text_and_figures()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  shown alike

    @property
    def text(self) -> str:
        """The answer; "" when the run ended before there was one."""
        return self.output.raw

    @property
    def parsed(self) -> Parsed_co:
        """The answer as the `output_type` that was asked for.

        Raises:
            IllegalStateError: there is none (S-DOM-75).
        """
        answered = self.output.last_completed_output
        if answered is None:
            raise IllegalStateError(_NOT_PARSED)
        return cast("Parsed_co", answered.parsed)

    @property
    def tool_calls(self) -> tuple[ToolCallTrace, ...]:
        """The tools that were called, in order, with arguments and results."""
        return tuple(
            call
            for traced in self.output.trace.task_traces
            for interaction in traced.llm_interactions
            for call in interaction.tool_calls
        )

    @property
    def metrics(self) -> ExecutionMetrics:
        """What the run took: model calls, tokens, times, costs."""
        return self.output.metrics

    @property
    def run_id(self) -> str | None:
        """The run's id, which names its record."""
        return self.output.run_id

    @property
    def is_complete(self) -> bool:
        """Whether there is an answer: the run did not end early."""
        return self.output.is_complete
