"""The error tree. Layer: lowest but for how errors travel; imported by everybody.

Exception
├─ EnsembleError                     everything that `run()` raises by contract
│  ├─ ValidationError (ValueError)   bad configuration, found before any model call
│  ├─ TaskExecutionError             a task failed; carries what was completed
│  │  └─ OutputParsingError          the answer never became the declared type
│  ├─ ParallelExecutionError         continue_on_error, and some tasks failed
│  ├─ ConstraintViolationError       a hierarchical constraint was not met
│  ├─ AgentExecutionError            model, handler or tool batch failed
│  │  └─ ManagerStalledError         a manager's turns brought nothing new
│  ├─ MaxIterationsExceededError     the agent went on calling tools
│  ├─ ToolExecutionError             tool infrastructure; logged, never raised out of a run
│  ├─ PromptTemplateError            inputs are missing
│  ├─ GuardrailViolationError        a guardrail said no
│  ├─ RateLimitTimeoutError          no permit in time
│  ├─ RateLimitInterruptedError      waiting for a permit was interrupted
│  ├─ RunExistsError                 a run of that id is running
│  ├─ RecordError                    the run's record cannot be written or read
│  ├─ MaxLoopIterationsExceededError a loop did not converge, and its cap raises
│  ├─ GraphNoEdgeMatchedError        no edge of a graph's state matched
│  ├─ MaxGraphStepsExceededError     a graph did not reach its end, and its cap raises
│  ├─ StaleEpochError                somebody newer does this work; the writer must stop
│  ├─ ReviewTimeoutError             a gate with on_timeout=fail was not answered in time
│  ├─ ReviewDecidedError             somebody was first at a gate, or its time was up
│  ├─ UnknownOutcomeError            an effect was begun before a crash; nobody knows whether it was done
│  └─ CircuitOpenError               an endpoint fails for everybody; it is not asked for now
├─ IllegalStateError (RuntimeError)  the object is not in a state for that call
│  └─ ToolConfigurationError         a tool is set up wrongly
├─ TryAgain                          control flow: a tool or guardrail asks the model to try again
└─ ExitEarlyError                    control flow: end the run, keep what is done
   └─ BudgetExhaustedError           what the run may spend is spent; never raised out of a run

Every class crosses processes with its text, fields and chain of causes (S-ERR-33). A cause that cannot travel is
replaced by a stand-in of the same class name and text (S-ERR-31).
"""

from __future__ import annotations

from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING

from ensemble_ray.errors.texts import brief, message_of
from ensemble_ray.errors.travel import Chain, Portable, portable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime, timedelta

    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import ExecutionTrace, PhaseStatus
    from ensemble_ray.values.value import RateLimit

__all__ = [
    "AgentExecutionError",
    "BudgetExhaustedError",
    "CircuitOpenError",
    "ConstraintViolationError",
    "EnsembleError",
    "ExitEarlyError",
    "GraphNoEdgeMatchedError",
    "GuardrailViolationError",
    "IllegalStateError",
    "ManagerStalledError",
    "MaxGraphStepsExceededError",
    "MaxIterationsExceededError",
    "MaxLoopIterationsExceededError",
    "OutputParsingError",
    "ParallelExecutionError",
    "PromptTemplateError",
    "RateLimitInterruptedError",
    "RateLimitTimeoutError",
    "RecordError",
    "ReviewDecidedError",
    "ReviewTimeoutError",
    "RunExistsError",
    "StaleEpochError",
    "TaskExecutionError",
    "ToolConfigurationError",
    "ToolExecutionError",
    "TryAgain",
    "UnknownOutcomeError",
    "ValidationError",
    "message_of",
    "portable",
]


class EnsembleError(Portable):
    """Root of everything that `run()` raises by contract.

    Attributes:
        trace: The run's trace up to the failure; None where the run had not begun.
        run_id: The run's id; None where the run had not begun.
    """

    trace: ExecutionTrace | None = None
    run_id: str | None = None


#: Characters of an output in a message (S-GRAPH-45).
_LONGEST_PREVIEW = 200


class MaxLoopIterationsExceededError(EnsembleError):
    """A loop's predicate never held, and its cap raises. Unrelated to the cap of an agent's tool loop."""

    def __init__(self, loop_name: str, max_iterations: int, completed_task_outputs: Sequence[TaskOutput] = ()) -> None:
        super().__init__(f"Loop '{loop_name}' did not converge after {max_iterations} iterations")
        self.loop_name = loop_name
        self.max_iterations = max_iterations
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class GraphNoEdgeMatchedError(EnsembleError):
    """No edge of a graph's state matched what the state gave.

    Attributes:
        output_preview: Text of the state's output, uncut.
        candidate_edges: The edges that were tried, in declared order.
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
    """A graph did not come to its end within its steps, and its cap raises."""

    def __init__(
        self,
        graph_name: str,
        max_steps: int,
        last_state: str,
        completed_task_outputs: Sequence[TaskOutput] = (),
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
    """Configuration that cannot work, found at construction or at the start of a run. Unrelated to pydantic's."""


class PromptTemplateError(EnsembleError):
    """Template variables without a value: all of them, and the template uncut."""

    def __init__(self, message: str, missing_variables: Sequence[str] = (), template: str = "") -> None:
        super().__init__(message)
        self.missing_variables = tuple(missing_variables)
        self.template = template


class TaskExecutionError(EnsembleError):
    """A task failed; `__cause__` is why, `completed_task_outputs` is what was done before.

    Attributes:
        phase_statuses: Status of each phase by its name; empty for a run without phases.
        task_name: Name of the task, else its description; empty where no task of the plan failed.
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
    """No attempt gave an answer of the declared type."""

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
        """Return the fields; the failed tasks' causes keep their own causes."""
        return {**super().state(), "failed_task_causes": {key: Chain(e) for key, e in self.failed_task_causes.items()}}


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

    #: whether a guardrail failed; what it called is no model of the run (S-MR-155)
    is_of_callable = False

    def __init__(self, message: str, agent_role: str = "", task_description: str = "") -> None:
        super().__init__(message)
        self.agent_role = agent_role
        self.task_description = task_description


class ManagerStalledError(AgentExecutionError):
    """A manager's turns brought nothing new for too long; what its workers gave stands on the run's error.

    Attributes:
        turns: How many turns in a row.
        last_results: What the manager was told in its last turns, the newest last.
    """

    def __init__(self, turns: int, last_results: Sequence[str] = (), task_description: str = "") -> None:
        last = f" The last thing it was told: {brief(last_results[-1])}" if last_results else ""
        super().__init__(
            f"The manager made no progress in {turns} turns: no worker completed anything that had not been done."
            f"{last}{'' if not last or last.endswith('.') else '.'} Change its tasks, constraints or model, or set manager_stall_turns",
            "Manager",
            task_description,
        )
        self.turns = turns
        self.last_results = tuple(last_results)


class MaxIterationsExceededError(EnsembleError):
    """The agent went on calling tools after three stop messages."""

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
    """A tool's infrastructure failed; it is logged and told to the model, and never stops a run."""

    def __init__(self, message: str, tool_name: str = "", tool_input: str = "") -> None:
        super().__init__(message)
        self.tool_name = tool_name
        self.tool_input = tool_input


class GuardrailViolationError(EnsembleError):
    """A guardrail said no. `guardrail_type` is `input` or `output`."""

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
    """No permit came within the wait timeout; the model was not called."""

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
    """Synchronous waiting for a permit was interrupted."""


class RunExistsError(EnsembleError):
    """A run of that id is running already."""


class RecordError(EnsembleError):
    """The record of a run cannot be written or read: a full disk, a directory without rights, a damaged file."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class StaleEpochError(EnsembleError):
    """A newer writer does this work already; the refused one must stop before its next effect."""

    def __init__(self, run: str, name: str, epoch: int, newest: int) -> None:
        super().__init__(f"Run '{run}' was taken over: '{name}' is written by epoch {newest}, epoch {epoch} must stop")
        self.run = run
        self.name = name
        self.epoch = epoch
        self.newest = newest


class UnknownOutcomeError(EnsembleError):
    """An effect was begun before a crash, and nothing tells whether it was done."""

    def __init__(self, message: str, effect: str = "", tool_name: str = "") -> None:
        super().__init__(message)
        self.effect = effect
        self.tool_name = tool_name


class CircuitOpenError(EnsembleError):
    """An endpoint fails for everybody and is not asked for now; the last failure is the cause."""

    def __init__(self, message: str, endpoint: str = "") -> None:
        super().__init__(message)
        self.endpoint = endpoint


class ReviewTimeoutError(EnsembleError):
    """Nobody answered at a review gate in time, and `on_timeout` is `fail`."""


class ReviewDecidedError(EnsembleError):
    """A review gate has its decision: somebody was first, or its time was up.

    Attributes:
        run_id: The run.
        gate_id: Id of the gate.
        verdict: What was decided: `approve`, `edit` or `exit`; where the time was up, its `on_timeout`.
        by: Who decided; `(timeout)` where the time was up.
        decided_at: When.
        comment: What was said about it.
    """

    def __init__(  # noqa: PLR0917  its arguments travel by their places
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


class IllegalStateError(Portable, RuntimeError):
    """The object is not in a state for that call; never fed to a model."""


class ToolConfigurationError(IllegalStateError):
    """A tool is set up in a way that cannot work."""


class TryAgain(Portable):
    """Raised by a tool or a guardrail: the model is given the message and tries again.

    Examples:
        >>> raise TryAgain("Give the date as YYYY-MM-DD")
        Traceback (most recent call last):
        ensemble_ray.errors.TryAgain: Give the date as YYYY-MM-DD
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ExitEarlyError(Portable):
    """Ends the run with what is done so far; it becomes `exit_reason`, never an error of `run()`."""

    def __init__(self, message: str = "", timed_out: bool = False) -> None:  # noqa: FBT001, FBT002  S-SET-3 fixes the order
        super().__init__(message)
        self.timed_out = timed_out


class BudgetExhaustedError(ExitEarlyError):
    """Ends the run, since a request does not fit into what may still be spent (S-BUD-4); raised by the library alone."""
