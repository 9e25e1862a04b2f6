"""The output of a run, and of a question to an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Generic, Protocol, Self, cast, overload

from pydantic import BeforeValidator, PrivateAttr, SerializationInfo, SerializerFunctionWrapHandler, field_serializer
from typing_extensions import TypeVar as TypeVarWithDefault

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.errors.texts import brief
from ensemble_ray.values.messages import ChatMessage
from ensemble_ray.values.metrics import ExecutionMetrics
from ensemble_ray.values.reviews import OpenReview
from ensemble_ray.values.task_output import (
    NOT_PARSED,
    GraphStep,
    LoopHistory,
    Parsed_co,
    Shown,
    TaskOutput,
    UnitOutputs,
    count,
    figures,
)
from ensemble_ray.values.trace import ExecutionTrace, ToolCallTrace, jsonable
from ensemble_ray.values.value import Duration, FrozenSequence, Value

Parsed = TypeVarWithDefault("Parsed", default=Any)
_SHOWN_NAMES = 20


class ExitReason(StrEnum):
    """Why a run ended."""

    COMPLETED = "completed"
    USER_EXIT_EARLY = "user_exit_early"
    TIMEOUT = "timeout"
    ERROR = "error"
    CANCELLED = "cancelled"
    BUDGET_EXHAUSTED = "budget_exhausted"  # S-BUD-4
    WAITING = "waiting"  # open gates keep the remaining tasks waiting (S-REV-114)


class RunState(StrEnum):
    """The state of a run."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"  # decisions at its open gates resume it (S-REV-114)
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    BUDGET_EXHAUSTED = "budget_exhausted"  # a larger budget resumes it (S-BUD-6)

    @property
    def is_final(self) -> bool:
        """Whether the run has ended for good."""
        return self in {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.BUDGET_EXHAUSTED}

    @property
    def is_active(self) -> bool:
        """Whether a process must own the run."""
        return self in {RunState.PENDING, RunState.RUNNING}

    @property
    def exit_reason(self) -> ExitReason:
        """The exit reason of a run in this state, unless its record has another."""
        return next((reason for reason, state in _STATES.items() if state is self), ExitReason.COMPLETED)


#: Every other reason means completed.
_STATES = {
    ExitReason.ERROR: RunState.FAILED,
    ExitReason.CANCELLED: RunState.CANCELLED,
    ExitReason.BUDGET_EXHAUSTED: RunState.BUDGET_EXHAUSTED,
    ExitReason.WAITING: RunState.WAITING,
}


class FailedItem(Value):
    """An item of a map without an output, in `output.failed_items` with `on_item_error="collect"`.

    Attributes:
        index: 0-based position in the source.
        item: The item, or its text if the item cannot be stored.
        error_type: Class of the error, without its module.
        message: Text of the error.
        attempts: Requests to the provider in the item's last model call; 0 without any.
        raw: The last answer, if it could not be parsed; None: the item failed for another reason.
    """

    index: int
    item: Any
    error_type: str
    message: str
    attempts: int = 0
    raw: str | None = None

    @field_serializer("item", mode="wrap", when_used="json")
    def _item_as_json(self, value: object, _handler: SerializerFunctionWrapHandler, _info: SerializationInfo) -> object:
        return jsonable(value)


class ItemResult(Value):
    """The result of one item in `run.items()` and `stream()`: an output or an error.

    Attributes:
        index: 0-based position in the source; the order of results is undefined.
        item: The item, or its text if the item cannot be stored.
        output: Output of its task; None: it failed.
        error: Why it failed; None: it did not.
        attempts: Of a failed item, as in `FailedItem`; else 0.
    """

    index: int
    item: Any
    output: TaskOutput | None = None
    error: FailedItem | None = None
    attempts: int = 0


class TypedTask(Protocol[Parsed_co]):
    """A task as a key of outputs: found by its object id (S-CONV-30), typed by its output type."""

    @property
    def object_id(self) -> str: ...

    @property
    def output_type(self) -> type[Parsed_co] | UnionType | None: ...


class EnsembleOutput(Shown):
    """The output of a run.

    Attributes:
        raw: Text of the last task; "" without outputs.
        task_outputs: In execution order; immutable.
        total_duration: Wall time of the whole run.
        trace: The run as a tree; `ExecutionTrace.EMPTY` if the run never began, or if you created the output yourself.
        run_id: Names the run's record; None if you created the output yourself.
        failed_items: Items of a map without an output, in item order.
        open_reviews: Gates that a detached run waits for, oldest first; empty if the run ended.
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
    open_reviews: FrozenSequence[OpenReview] = ()
    #: positions in task_outputs by object id
    _positions: Mapping[str, int] = PrivateAttr(default_factory=dict[str, int])
    #: positions in task_outputs by key in the plan
    _names: Mapping[str, int] = PrivateAttr(default_factory=dict[str, int])
    _units: UnitOutputs = PrivateAttr(default=UnitOutputs())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnsembleOutput) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # its metrics and inputs are mappings

    def text_and_figures(self) -> tuple[str, str]:
        found = self.metrics
        line = figures(
            len(self.task_outputs),
            found.total_llm_call_count,
            found.total_tokens,
            self.total_duration,
            reused=found.total_reused_calls,
        )
        if self.failed_items:
            line += f", {count(len(self.failed_items), 'failed item')}"
        if self.exit_reason is ExitReason.WAITING:
            return self.raw, f"{line}, waits for {count(len(self.open_reviews), 'review')}"
        return self.raw, line if self.is_complete else f"{line}, ended early: {self.exit_reason.value}"

    @classmethod
    def of(
        cls,
        raw: str,
        task_outputs: Sequence[TaskOutput] | None,
        total_duration: timedelta | float,
        total_tool_calls: int,
    ) -> EnsembleOutput:
        """Create the output of a completed run."""
        took = total_duration if isinstance(total_duration, timedelta) else timedelta(seconds=total_duration)
        return cls(raw=raw, task_outputs=task_outputs or (), total_duration=took, total_tool_calls=total_tool_calls)

    def with_positions(
        self, positions: Mapping[str, int], units: UnitOutputs | None = None, names: Mapping[str, int] | None = None
    ) -> EnsembleOutput:
        """Set the index of outputs by object id, unit and task key, and return this output; for internal use."""
        self._positions = dict(positions)
        self._units = units or UnitOutputs()
        self._names = dict(names or {})
        return self

    def replace(self, **changes: object) -> Self:
        """Return a copy with changed fields. It finds outputs by task unless `task_outputs` changes."""
        copy = super().replace(**changes)
        if "task_outputs" not in changes:
            copy.with_positions(self._positions, self._units, self._names)
        return copy

    @property
    def text(self) -> str:
        """The same as `raw`."""
        return self.raw

    @property
    def state(self) -> RunState:
        """The state of the run when its call ended; `waiting` if gates are open."""
        return _STATES.get(self.exit_reason, RunState.COMPLETED)

    @property
    def is_complete(self) -> bool:
        """Whether every task ran."""
        return self.exit_reason is ExitReason.COMPLETED

    @property
    def completed_tasks(self) -> Sequence[TaskOutput]:
        """The same as `task_outputs`."""
        return self.task_outputs

    @property
    def last_completed_output(self) -> TaskOutput | None:
        """The last output; None without outputs."""
        return self.task_outputs[-1] if self.task_outputs else None

    def get_output(self, task: TypedTask[Parsed] | None) -> TaskOutput[Parsed] | None:
        """Return the output of a task object; None if the task is unknown or did not complete."""
        if task is None:
            return None
        position = self._positions.get(task.object_id)
        return None if position is None else self.task_outputs[position]

    @overload
    def __getitem__(self, task: TypedTask[Parsed]) -> TaskOutput[Parsed]: ...
    @overload
    def __getitem__(self, task: str | int) -> TaskOutput: ...
    def __getitem__(self, task: TypedTask[Any] | str | int) -> TaskOutput:
        """Return the output of a task object, of a task's name, or at a position of `task_outputs`.

        Raises:
            IllegalStateError: There is no such output.
        """
        outputs = self.task_outputs
        if isinstance(task, int):
            if not -len(outputs) <= task < len(outputs):
                raise IllegalStateError(f"Output {task} does not exist: this run has {count(len(outputs), 'output')}")
            return outputs[task]
        if isinstance(task, str):
            place = self._names.get(task.replace("/", "_").replace("#", "_"))  # as the plan writes them
            if place is None:
                shown = ", ".join([*self._names][:_SHOWN_NAMES]) + (", ..." if len(self._names) > _SHOWN_NAMES else "")
                raise IllegalStateError(f"No task named '{task}' has an output in this run. Those with one: [{shown}]")
            return outputs[place]
        if not hasattr(task, "object_id"):
            msg = f"An output is found by its task, the task's name or a position, got: {type(task).__name__}"
            raise IllegalStateError(msg)
        found = self.get_output(task)
        if found is None:
            name = getattr(task, "name", None) or brief(str(getattr(task, "description", task)))
            msg = f"Task '{name}' has no output in this run: it did not complete, or is another object"
            raise IllegalStateError(msg)
        return found

    def __contains__(self, task: object) -> bool:
        """Return whether a task object or a task's name has an output."""
        try:
            return self[cast("str", task)] is not None
        except IllegalStateError:
            return False

    def get_loop_history(self, name: str | None) -> list[dict[str, TaskOutput]]:
        """Return the outputs of each iteration of a loop by body key; index 0 is the first iteration.

        [] for a loop that is unknown or did not run. For a loop that ran several times, the last run counts.
        """
        found = self._loop(name)
        return [] if found is None else [dict(each) for each in found.iterations]

    def get_loop_termination_reason(self, name: str | None) -> str | None:
        """Return why a loop ended: `predicate`, `max_iterations`, `budget_exhausted` or `exit_early`; None if unknown."""
        found = self._loop(name)
        return None if found is None else found.termination_reason

    def was_loop_terminated_by_max_iterations(self, name: str | None) -> bool:
        """Whether a loop with `on_max_iterations="return_with_flag"` reached its cap."""
        found = self._loop(name)
        return found is not None and found.is_flagged

    def _loop(self, name: str | None) -> LoopHistory | None:
        return None if name is None else self._units.loops.get(name)

    @property
    def phase_outputs(self) -> dict[str, list[TaskOutput]]:
        """Outputs of completed phases by name, in the order in which they completed."""
        return {name: list(outputs) for name, outputs in self._units.phases.items()}

    @property
    def graph_history(self) -> list[GraphStep]:
        """The steps of the run's graph, in order; [] without a graph."""
        return [] if self._units.graph is None else list(self._units.graph.steps)

    @property
    def graph_termination_reason(self) -> str | None:
        """Why the run's graph ended: `terminal` or `max_steps`; None if no graph ended."""
        return None if self._units.graph is None else self._units.graph.termination_reason

    @property
    def was_graph_terminated_by_max_steps(self) -> bool:
        """Whether a graph with `on_max_steps="return_with_flag"` reached its cap."""
        return self._units.graph is not None and self._units.graph.is_flagged


class AgentOutput(Shown, Generic[Parsed_co]):
    """The answer of an agent to a question. Pass it as `history=` to continue the conversation.

    Attributes:
        output: The whole output of the run: metrics, trace, exit reason.
        messages: The conversation with this question and its answer; roles `user` and `assistant` alternate.
    """

    output: EnsembleOutput
    messages: FrozenSequence[ChatMessage] = ()

    def text_and_figures(self) -> tuple[str, str]:
        return self.output.text_and_figures()

    @property
    def text(self) -> str:
        """The answer; "" if the run ended before it."""
        return self.output.raw

    @property
    def raw(self) -> str:
        """The same as `text`."""
        return self.output.raw

    @property
    def parsed(self) -> Parsed_co:
        """The answer as an instance of the requested `output_type`.

        Raises:
            IllegalStateError: There is no parsed answer.
        """
        answered = self.output.last_completed_output
        if answered is None:
            raise IllegalStateError(NOT_PARSED)
        return cast("Parsed_co", answered.parsed)

    @property
    def tool_calls(self) -> tuple[ToolCallTrace, ...]:
        """The tool calls in order, with arguments and results."""
        return tuple(
            call
            for traced in self.output.trace.task_traces
            for interaction in traced.llm_interactions
            for call in interaction.tool_calls
        )

    @property
    def metrics(self) -> ExecutionMetrics:
        """The run's usage: model calls, tokens, times, costs."""
        return self.output.metrics

    @property
    def run_id(self) -> str | None:
        """The id of the run and its record."""
        return self.output.run_id

    @property
    def is_complete(self) -> bool:
        """Whether the run ended with an answer, not early."""
        return self.output.is_complete
