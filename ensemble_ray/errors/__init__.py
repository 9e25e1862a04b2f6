"""The error tree.

Exception
├─ EnsembleError                     all errors that `run()` raises by contract
│  ├─ ValidationError (ValueError)
│  ├─ TaskExecutionError
│  │  └─ OutputParsingError
│  ├─ ParallelExecutionError
│  ├─ ConstraintViolationError
│  ├─ AgentExecutionError
│  │  └─ ManagerStalledError
│  ├─ MaxIterationsExceededError
│  ├─ ToolExecutionError
│  ├─ PromptTemplateError
│  ├─ GuardrailViolationError
│  ├─ RateLimitTimeoutError
│  ├─ RateLimitInterruptedError
│  ├─ RunExistsError
│  ├─ RecordError
│  ├─ MaxLoopIterationsExceededError
│  ├─ GraphNoEdgeMatchedError
│  ├─ MaxGraphStepsExceededError
│  ├─ StaleEpochError
│  ├─ ReviewTimeoutError
│  ├─ ReviewDecidedError
│  ├─ ReviewRoleError
│  ├─ UnknownOutcomeError
│  ├─ CircuitOpenError
│  └─ AllModelsFailedError
├─ IllegalStateError (RuntimeError)
│  └─ ToolConfigurationError
├─ TryAgain                          control flow
└─ ExitEarlyError                    control flow
   └─ BudgetExhaustedError

Every class crosses processes with its text, fields and chain of causes (S-ERR-33). A stand-in with the same class name
and text replaces a cause that cannot be pickled (S-ERR-31).
"""

from __future__ import annotations

from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING

from ensemble_ray.errors.texts import brief, message_of
from ensemble_ray.errors.travel import ErrorChain, PicklableError, portable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import ExecutionTrace, PhaseStatus
    from ensemble_ray.values.value import RateLimit

__all__ = [
    "AgentExecutionError", "AllModelsFailedError", "BatchError", "BudgetExhaustedError", "CircuitOpenError",
    "ConstraintViolationError", "EnsembleError", "ExitEarlyError", "GraphNoEdgeMatchedError", "GuardrailViolationError",
    "IllegalStateError", "ManagerStalledError",
    "MaxGraphStepsExceededError", "MaxIterationsExceededError", "MaxLoopIterationsExceededError", "OutputParsingError",
    "ParallelExecutionError", "PromptTemplateError", "RateLimitInterruptedError", "RateLimitTimeoutError",
    "RecordError", "ReviewDecidedError", "ReviewRoleError", "ReviewTimeoutError", "RunExistsError", "StaleEpochError",
    "TaskExecutionError", "ToolConfigurationError", "ToolExecutionError", "TryAgain", "UnknownOutcomeError",
    "ValidationError", "message_of", "portable",
]  # fmt: skip


class EnsembleError(PicklableError):
    """Root of all errors that `run()` raises by contract.

    Attributes:
        trace: The run's trace up to the failure; None if the run had not begun.
        run_id: The run's id; None if the run had not begun.
    """

    trace: ExecutionTrace | None = None
    run_id: str | None = None


_LONGEST_PREVIEW = 200  # S-GRAPH-45


class MaxLoopIterationsExceededError(EnsembleError):
    """A loop reached its cap, and the cap raises an error. Unrelated to the cap of an agent's tool loop."""

    def __init__(self, loop_name: str, max_iterations: int, completed_task_outputs: Sequence[TaskOutput] = ()) -> None:
        super().__init__(f"Loop '{loop_name}' did not converge after {max_iterations} iterations")
        self.loop_name = loop_name
        self.max_iterations = max_iterations
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class GraphNoEdgeMatchedError(EnsembleError):
    """No edge of a graph's state matched its output.

    Attributes:
        output_preview: The full text of the state's output.
        candidate_edges: The tried edges, in declared order.
    """

    def __init__(
        self,
        graph_name: str,
        current_state: str,
        output_preview: str,
        candidate_edges: Sequence[str] = (),
        completed_task_outputs: Sequence[TaskOutput] = (),
    ) -> None:
        shown = output_preview
        if len(shown) > _LONGEST_PREVIEW:
            shown = f"{shown[:_LONGEST_PREVIEW]}…"
        super().__init__(
            f"Graph '{graph_name}' state '{current_state}' has no matching outgoing edge for the produced output. "
            f"Candidate edges: {'; '.join(candidate_edges)} Output preview: {shown}"
        )
        self.graph_name = graph_name
        self.current_state = current_state
        self.output_preview = output_preview
        self.candidate_edges = tuple(candidate_edges)
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class MaxGraphStepsExceededError(EnsembleError):
    """A graph reached its cap on steps before its end, and the cap raises an error."""

    def __init__(
        self, graph_name: str, max_steps: int, last_state: str, completed_task_outputs: Sequence[TaskOutput] = ()
    ) -> None:
        super().__init__(
            f"Graph '{graph_name}' did not reach a terminal state after {max_steps} step(s). "
            f"Last state: '{last_state}'."
        )
        self.graph_name = graph_name
        self.max_steps = max_steps
        self.last_state = last_state
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class ValidationError(EnsembleError, ValueError):
    """The configuration is invalid; found at construction or at the start of a run. Unrelated to pydantic's error."""


class UnreadableAttachmentError(ValidationError):
    """A model does not read an attachment of a request. The request was not sent, or its endpoint refused the attachment."""


class PromptTemplateError(EnsembleError):
    """A template has variables without a value: all of them, and the full template."""

    def __init__(self, message: str, missing_variables: Sequence[str] = (), template: str = "") -> None:
        super().__init__(message)
        self.missing_variables = tuple(missing_variables)
        self.template = template


class TaskExecutionError(EnsembleError):
    """A task failed; `__cause__` is the reason, `completed_task_outputs` are the outputs before it.

    Attributes:
        phase_statuses: Status of each phase by its name; empty for a run without phases.
        task_name: Name of the task, else its description; empty if no task of the plan failed.
    """

    phase_statuses: Mapping[str, PhaseStatus] = MappingProxyType({})
    task_name: str = ""

    def __init__(
        self,
        message: str,
        task_description: str = "",
        agent_role: str = "",
        completed_task_outputs: Sequence[TaskOutput] = (),
    ) -> None:
        super().__init__(message)
        self.task_description = task_description
        self.agent_role = agent_role
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class OutputParsingError(TaskExecutionError):
    """No attempt produced an answer of the declared type."""

    def __init__(  # noqa: PLR0917  S-SET-3 fixes the order
        self,
        message: str,
        raw_output: str = "",
        output_type: type[object] | UnionType | None = None,
        parse_errors: Sequence[str] = (),
        attempt_count: int = 0,
        task_description: str = "",
        agent_role: str = "",
        completed_task_outputs: Sequence[TaskOutput] = (),
    ) -> None:
        super().__init__(message, task_description, agent_role, completed_task_outputs)
        self.raw_output = raw_output
        self.output_type = output_type
        self.parse_errors = tuple(parse_errors)
        self.attempt_count = attempt_count


class ParallelExecutionError(EnsembleError):
    """Some tasks of a parallel run failed under continue_on_error."""

    def __init__(
        self,
        message: str,
        completed_task_outputs: Sequence[TaskOutput] = (),
        failed_task_causes: Mapping[str, BaseException] | None = None,
        failed_count: int | None = None,
        completed_count: int | None = None,
    ) -> None:
        super().__init__(message)
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)
        self.failed_task_causes = dict(failed_task_causes or {})
        self.failed_count = len(self.failed_task_causes) if failed_count is None else failed_count
        self.completed_count = len(self.completed_task_outputs) if completed_count is None else completed_count

    def state(self) -> dict[str, object]:
        """Return the fields; the errors of failed tasks keep their causes."""
        return {
            **super().state(),
            "failed_task_causes": {key: ErrorChain(e) for key, e in self.failed_task_causes.items()},
        }


class ConstraintViolationError(EnsembleError):
    """A hierarchical run ended with its constraints unmet."""

    def __init__(self, violations: Sequence[str], completed_task_outputs: Sequence[TaskOutput] = ()) -> None:
        if not violations:
            raise ValueError("violations must not be None or empty")
        found = tuple(violations)
        what = "constraint violated" if len(found) == 1 else f"constraints violated ({len(found)})"
        super().__init__(f"Hierarchical {what}: {'; '.join(found)}")
        self.violations = found
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class AgentExecutionError(EnsembleError):
    """The model, the handler, the tool batch or the agent's process failed."""

    is_of_callable = False  # a guardrail failed; its model is no model of the run (S-MR-155)

    def __init__(self, message: str, agent_role: str = "", task_description: str = "") -> None:
        super().__init__(message)
        self.agent_role = agent_role
        self.task_description = task_description


class ManagerStalledError(AgentExecutionError):
    """A manager made no progress in too many turns; the run's error has the outputs of its workers.

    Attributes:
        turns: How many turns in a row.
        last_results: Tool results of the last turns, the newest last.
    """

    def __init__(self, turns: int, last_results: Sequence[str] = (), task_description: str = "") -> None:
        last = f" Its last tool result: {brief(last_results[-1])}" if last_results else ""
        super().__init__(
            f"The manager made no progress in {turns} turns: no worker completed a new task."
            f"{last}{'' if not last or last.endswith('.') else '.'} Change its tasks, constraints or model, or set manager_stall_turns",
            "Manager",
            task_description,
        )
        self.turns = turns
        self.last_results = tuple(last_results)


class MaxIterationsExceededError(EnsembleError):
    """The agent kept calling tools after three stop messages."""

    def __init__(self, agent_role: str, task_description: str, max_iterations: int, tool_calls_made: int) -> None:
        super().__init__(
            f"Agent '{brief(agent_role)}' exceeded maximum iterations ({max_iterations}). "
            f"Tool calls made: {tool_calls_made}. Task: '{brief(task_description)}'. "
            "Consider increasing max_iterations or simplifying the task."
        )
        self.agent_role = agent_role
        self.task_description = task_description
        self.max_iterations = max_iterations
        self.tool_calls_made = tool_calls_made


class ToolExecutionError(EnsembleError):
    """A tool's infrastructure failed. The library logs it and passes it to the model; it never stops a run."""

    def __init__(self, message: str, tool_name: str = "", tool_input: str = "") -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.tool_input = tool_input


class GuardrailViolationError(EnsembleError):
    """A guardrail rejected an input or an output. `guardrail_type` is `input` or `output`."""

    def __init__(self, guardrail_type: str, violation_message: str, task_description: str, agent_role: str) -> None:
        kind = str(getattr(guardrail_type, "value", guardrail_type))
        super().__init__(
            f"{kind.upper()} guardrail violation on agent '{brief(agent_role)}' task '{brief(task_description)}': "
            f"{brief(violation_message)}"
        )
        self.guardrail_type = guardrail_type
        self.violation_message = violation_message
        self.task_description = task_description
        self.agent_role = agent_role


class RateLimitTimeoutError(EnsembleError):
    """No permit arrived within the wait timeout; the model was not called."""

    def __init__(self, rate_limit: RateLimit, wait_timeout: timedelta) -> None:
        waited_ms = round(wait_timeout.total_seconds() * 1000)
        super().__init__(
            f"Rate limit exceeded: waited {waited_ms}ms but no token became available. "
            f"Limit: {rate_limit.requests} requests per {rate_limit.period}. "
            "Increase wait_timeout or reduce concurrency."
        )
        self.rate_limit = rate_limit
        self.wait_timeout = wait_timeout


class RateLimitInterruptedError(EnsembleError):
    """A synchronous wait for a permit was interrupted."""


class RunExistsError(EnsembleError):
    """Another run with this id is running."""


class RecordError(EnsembleError):
    """The record of a run cannot be written or read: a full disk, a directory without rights, a damaged file."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StaleEpochError(EnsembleError):
    """A newer writer does this work; the rejected writer must stop before its next effect."""

    def __init__(self, run: str, name: str, epoch: int, newest: int) -> None:
        super().__init__(f"Run '{run}' was taken over: '{name}' is written by epoch {newest}, epoch {epoch} must stop")
        self.run = run
        self.name = name
        self.epoch = epoch
        self.newest = newest


class UnknownOutcomeError(EnsembleError):
    """A tool call began before a crash, and its outcome is unknown."""

    def __init__(self, message: str, effect: str = "", tool_name: str = "") -> None:
        super().__init__(message)
        self.effect = effect
        self.tool_name = tool_name


class CircuitOpenError(EnsembleError):
    """An endpoint keeps failing, and the circuit breaker blocks calls; the cause is the last failure."""

    def __init__(self, message: str, endpoint: str = "") -> None:
        super().__init__(message)
        self.endpoint = endpoint


class AllModelsFailedError(EnsembleError):
    """No model of a fallback chain answered; the cause is the error of the last one.

    Attributes:
        failures: The failure of each model, by its name in the chain, in the order in which they were asked.
    """

    def __init__(self, failures: Mapping[str, str]) -> None:
        told = "; ".join(f"{name}: {brief(text)}" for name, text in failures.items())
        super().__init__(f"No model of the chain answered. {told}")
        self.failures = dict(failures)


class BatchError(EnsembleError):
    """The Batch API refused a batch, or cannot be reached. The run can be resumed; the cause is the provider's error.

    Attributes:
        batch: The id of the batch in the record and in the provider's metadata.
    """

    def __init__(self, message: str, batch: str = "") -> None:
        super().__init__(message)
        self.batch = batch


class ReviewTimeoutError(EnsembleError):
    """A review gate had no decision in time, and its `on_timeout` is `fail`."""


class ReviewDecidedError(EnsembleError):
    """A review gate has a decision already, or its timeout has passed.

    Attributes:
        run_id: The run.
        gate_id: Id of the gate.
        verdict: The decision: `approve`, `edit` or `exit`; after a timeout, the gate's `on_timeout`.
        by: Name of the reviewer; `(timeout)` after a timeout.
        decided_at: Time of the decision.
        comment: Comment on the decision.
    """

    def __init__(  # noqa: PLR0917  its arguments travel by position
        self,
        message: str,
        run_id: str = "",
        gate_id: str = "",
        verdict: str = "",
        by: str = "",
        decided_at: datetime | None = None,
        comment: str = "",
    ) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.gate_id = gate_id
        self.verdict = verdict
        self.by = by
        self.decided_at = decided_at
        self.comment = comment


class ReviewRoleError(EnsembleError):
    """A review gate requires a role that its reviewer does not have.

    Attributes:
        run_id: The run.
        gate_id: Id of the gate.
        role: The required role.
        roles: Roles of the reviewer, sorted.
    """

    def __init__(
        self, message: str, run_id: str = "", gate_id: str = "", role: str = "", roles: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.gate_id = gate_id
        self.role = role
        self.roles = tuple(roles)


class IllegalStateError(PicklableError, RuntimeError):
    """The object has the wrong state for this call. The text is never sent to a model."""


class DriverGoneError(IllegalStateError):
    """The process that started the run is gone. `is_deps_lost`: it had the deps of the run."""

    is_deps_lost = False


class ToolConfigurationError(IllegalStateError):
    """The configuration of a tool is invalid."""


class TryAgain(PicklableError):  # noqa: N818  control flow, and a name of the face
    """A tool or a guardrail raises it: the model receives the message and tries again.

    Examples:
        >>> raise TryAgain("Give the date as YYYY-MM-DD")
        Traceback (most recent call last):
        ensemble_ray.errors.TryAgain: Give the date as YYYY-MM-DD
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ExitEarlyError(PicklableError):
    """Ends the run with the outputs so far; it becomes the `exit_reason`, never an error of `run()`."""

    def __init__(self, message: str = "", timed_out: bool = False) -> None:  # noqa: FBT001, FBT002  S-SET-3 fixes the order
        super().__init__(message)
        self.timed_out = timed_out


class BudgetExhaustedError(ExitEarlyError):
    """Ends the run because a request exceeds the remaining budget (S-BUD-4). Only the library raises it."""
