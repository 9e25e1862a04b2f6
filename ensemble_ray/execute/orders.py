"""Input and output of an executor: the context of a run, the order of a task, its result.

The values are generic in how they contain the user's objects: as objects in processes that use them, as bytes in
processes that only pass them on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, cast

from typing_extensions import TypeVar

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.run_options import RetryPolicy
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import StaleEpochError, ValidationError, message_of
from ensemble_ray.errors.travel import is_out_of_credit
from ensemble_ray.facts.runs import NO_REASON, DirectiveFact, RecordedError
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.ports import ChatModel
from ensemble_ray.schedule.instructions import UnitFailure, UnitQuestion, UnitResult
from ensemble_ray.schedule.stimuli import Stimulus
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.memory import MemoryRules
from ensemble_ray.values.messages import OnIncomplete
from ensemble_ray.values.metrics import CostConfiguration, RunBudget
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.reviews import ModelSwitch, OpenReview, Review, ReviewPolicy
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import CaptureMode, RunTracing, TaskTrace

# Results of tasks.

#: unknown_template: not started, since its process does not have the template of its agent.
#: waiting: suspended at open gates until these are decided.
TaskStatus: TypeAlias = Literal["completed", "failed", "exited", "cancelled", "waiting", "unknown_template"]


class FailureSummary(Protocol):
    """The part of a failure that the scheduler reads."""

    @property
    def error_type(self) -> str:
        """Name of the error's class; "": no error."""
        ...

    @property
    def message(self) -> str: ...

    @property
    def reason(self) -> RecordedError:
        """The error as the end of a run records it, with an empty key."""
        ...

    @property
    def newer_epoch(self) -> int:
        """Epoch of the attempt that replaced this one, if that is why it failed; else 0."""
        ...

    @property
    def is_out_of_credit(self) -> bool:
        """Whether a provider refused a call because the account has no credit (S-DUR-151)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """The error of a task without an output, and the trace of its work. Implements `FailureSummary`."""

    #: the original error, unwrapped; None: the task was cancelled
    error: BaseException | None = None
    trace: TaskTrace | None = None

    @property
    def cause(self) -> BaseException:
        """The error, or a substitute if there is none."""
        return self.error or RuntimeError("task failed without an error")

    @property
    def error_type(self) -> str:
        return "" if self.error is None else type(self.error).__name__

    @property
    def message(self) -> str:
        return "" if self.error is None else message_of(self.error)

    @property
    def reason(self) -> RecordedError:
        return NO_REASON if self.error is None else RecordedError.of(self.error)

    @property
    def newer_epoch(self) -> int:
        return self.error.newest if isinstance(self.error, StaleEpochError) else 0

    @property
    def is_out_of_credit(self) -> bool:
        return is_out_of_credit(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed:
    """An error of the user's predicate or condition."""

    error_type: str
    message: str
    #: the error, or its bytes in a process that runs no user code
    error: BaseException | bytes
    #: with bytes: the error as the end of a run records it
    reason: RecordedError | None = None

    @classmethod
    def of(cls, error: BaseException) -> EvaluationFailed:
        return cls(error_type=type(error).__name__, message=message_of(error), error=error)


# How values contain the user's objects.

#: a task: the object, or its bytes
Task_co = TypeVar("Task_co", default=Task, covariant=True)
#: an agent of a task: the object, or as bytes the data in which it differs from its template
Agent_co = TypeVar("Agent_co", default=Agent, covariant=True)
#: an output: the object, or its bytes
Output_co = TypeVar("Output_co", default=TaskOutput, covariant=True)
#: a failure: the object, or its bytes with a summary
Failure_co = TypeVar("Failure_co", bound=FailureSummary, default=TaskFailure, covariant=True)
Order_co = TypeVar("Order_co", covariant=True)
NewTask = TypeVar("NewTask")
NewAgent = TypeVar("NewAgent")
NewOutput = TypeVar("NewOutput")
NewFailure = TypeVar("NewFailure", bound=FailureSummary)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult(Generic[Output_co, Failure_co]):
    key: str
    instance: str
    status: TaskStatus
    at: float
    duration_s: float = 0.0
    #: epoch of the order
    epoch: int = 0
    output: Output_co | None = None
    #: the output as it arrived from another process, pickled
    packed: bytes | None = None
    #: text of the answer, if the order has `wants_text`
    text: str | None = None
    #: if there is no output
    failure: Failure_co | None = None
    total_tokens: int = -1
    tool_call_count: int = 0
    #: answers that were cut off or empty, of the task and its workers (S-MET-18)
    incomplete_answers: int = 0
    #: requests to the provider for the last model call; 0: no model call (S-MR-152)
    attempts: int = 0
    #: of a task that ended the run early, with or without an output
    exit_reason: ExitReason = ExitReason.USER_EXIT_EARLY
    #: of a manager: (role, output) of its workers in completion order (S-HIER-6)
    delegated: Sequence[tuple[str, Output_co]] = ()
    #: of a manager: traces of its workers without an output
    failed_delegations: Sequence[TaskTrace] = ()
    #: of a waiting task
    open_reviews: tuple[OpenReview, ...] = ()
    #: results of the order's `asks`, up to the first that held
    verdicts: tuple[bool | EvaluationFailed, ...] = ()

    @property
    def error(self: TaskResult[object, TaskFailure]) -> BaseException | None:
        return None if self.failure is None else self.failure.error

    @property
    def trace(self: TaskResult[object, TaskFailure]) -> TaskTrace | None:
        return None if self.failure is None else self.failure.trace

    def convert(
        self, output: Callable[[Output_co], NewOutput], failure: Callable[[Failure_co], NewFailure]
    ) -> TaskResult[NewOutput, NewFailure]:
        return replace(
            cast("TaskResult[NewOutput, NewFailure]", self),
            output=None if self.output is None else output(self.output),
            failure=None if self.failure is None else failure(self.failure),
            delegated=tuple((role, output(each)) for role, each in self.delegated),
        )


def count_incomplete(result: TaskResult) -> int:
    """Count the answers of a task and its workers that were cut off or empty (S-MR-205)."""
    traces = [result.trace, None if result.output is None else result.output.trace, *result.failed_delegations]
    if result.delegated:
        traces += [output.trace for _, output in result.delegated]
    count = 0
    for trace in traces:
        if trace is not None:
            count += trace.metrics.incomplete_answers
            if trace.delegations:
                count += sum([each.metrics.incomplete_answers for each in trace.with_workers() if each is not trace])
    return count


# Orders of tasks.


class TaskBody(NamedTuple, Generic[Task_co]):
    """A task of a plan, as a coordinator puts it into orders."""

    task: Task_co
    input_guardrails: int = 0
    output_guardrails: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision(Generic[Output_co]):
    """Feedback for a further attempt at a task."""

    #: 0: the first attempt
    attempt: int = 0
    feedback: str = ""
    #: output of an earlier attempt, to be shown
    prior: Output_co | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPart(Generic[Output_co]):
    """One iteration of a loop, or one step of a graph."""

    #: body names of the iteration in body order, or the name of the state
    names: tuple[str, ...]
    #: in the order of `names`
    outputs: tuple[Output_co, ...]
    #: the outputs are iterations of a loop and count as the one output of a state
    is_joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingQuestions(Generic[Output_co]):
    """Predicates to evaluate when a task has completed."""

    #: evaluated in this order, until one holds
    questions: tuple[UnitQuestion, ...]
    #: number of parts of the unit's history that the predicates have already received
    sent_count: int
    #: the parts after those; the task's output completes the last one
    new: tuple[HistoryPart[Output_co], ...]


class OutputOf(NamedTuple):
    """Stands for the output of an earlier task of a continuation, which only the process of the tasks has yet."""

    instance: str


class Continuation(NamedTuple, Generic[Order_co]):
    """Tasks that the process of a task starts by itself, each when the one before it has completed (S-DUR-156)."""

    #: rises with each continuation of a run; `revoke` names it
    number: int
    #: their contexts may contain `OutputOf`
    orders: tuple[Order_co, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder(Generic[Task_co, Agent_co, Output_co]):
    """One task to run."""

    run_id: str
    key: str
    #: path of this execution, such as `facts#0`
    instance: str
    #: generation of the dispatch; the journal refuses older ones
    epoch: int
    #: 1-based position in the task list; of a dynamic task, within its level (S-MR-95)
    index: int
    #: resolved task without its context tasks
    task: Task_co
    #: key of its agent or of the agent's template; None: a handler does the task
    agent_key: str | None
    agent_role: str
    #: agent of a dynamic task; `agent_key` is then the key of its template (S-MR-142)
    agent: Agent_co | None = None
    #: number of tasks of its level or loop body; 0: unknown; None: the run's number
    total_tasks: int | None = None
    #: outputs of the context tasks in the order of the task's context
    context: Sequence[Output_co] = ()
    #: ranges of `context`, in order, each to be joined into one output, such as iterations of a loop (S-LOOP-72)
    joined: tuple[tuple[int, int], ...] = ()
    #: None: the task as planned
    revision: Revision[Output_co] | None = None
    #: description of a context task that has no output (S-ENG-11)
    missing_context: str | None = None
    is_streaming: bool = False
    #: numbers of guardrails; `Callables` has the guardrails themselves
    input_guardrails: int = 0
    output_guardrails: int = 0
    #: 0: a task of the plan; else the depth of its delegation (S-DEL-11)
    depth: int = 0
    #: role of the delegating agent
    caller_role: str = ""
    #: id of the delegation's request
    delegation_id: str = ""
    #: the source reads the text of the answer, so the result must contain it
    wants_text: bool = False
    #: description of the task, for readers that do not load it
    description: str = ""
    #: the task was dispatched before in this epoch, and suspended at a gate
    is_resubmission: bool = False
    #: directives of the run that were active when the task was started
    directives: tuple[str, ...] = ()
    #: model switches of the run that were active when the task was started
    switches: tuple[ModelSwitch, ...] = ()
    #: a later order reflects on the output, after its phase has accepted it (S-REFL-19)
    is_reflected_later: bool = False
    #: an accepted output: only reflect on it; None: do the task
    reflects_on: Output_co | None = None
    #: predicates that its process evaluates when it has completed; None: there are none, or another process has them
    asks: FollowingQuestions[Output_co] | None = None
    #: None: the process waits for the next order
    continuation: Continuation[TaskOrder[Task_co, Agent_co, Output_co]] | None = None

    def result(self, status: TaskStatus, at: float, **fields: Any) -> TaskResult:
        """Return a result of this order, with further fields of `TaskResult`."""
        return TaskResult(key=self.key, instance=self.instance, epoch=self.epoch, status=status, at=at, **fields)

    def convert(
        self, task: NewTask, agent: NewAgent | None, output: Callable[[Output_co], NewOutput], **changes: str | None
    ) -> TaskOrder[NewTask, NewAgent, NewOutput]:
        """Return the same order with the user's objects converted, without the fields that runners do not read.

        `changes` are other fields and their new values.
        """
        order = cast("TaskOrder[NewTask, NewAgent, NewOutput]", self)
        revision = None
        if self.revision is not None:
            prior = None if self.revision.prior is None else output(self.revision.prior)
            revision = replace(cast("Revision[NewOutput]", self.revision), prior=prior)
        return replace(
            order,
            task=task,
            agent=agent,
            context=tuple(output(each) for each in self.context),
            revision=revision,
            reflects_on=None if self.reflects_on is None else output(self.reflects_on),
            asks=None,
            continuation=None,
            **changes,  # type: ignore[arg-type]  # fields of an order
        )


class Peers(Protocol):
    """Runs delegated tasks with the other agents of the run, in any process."""

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run a task to its end. Cancelling the caller stops the task; a dead process is a failed result."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Stop tasks. `perform` returns their results within the grace period, if it can reach their processes."""
        ...


# Context of a run.

_NO_BODIES: Mapping[str, bytes] = {}


class RunModels:
    """Models by name. Only packed models can be pickled."""

    __slots__ = ("_bodies", "_loaded")

    def __init__(
        self, models: Mapping[str, ChatModel] | None = None, *, bodies: Mapping[str, bytes] = _NO_BODIES
    ) -> None:
        self._loaded: dict[str, ChatModel] = dict(models or {})
        self._bodies = dict(bodies)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._loaded.keys() | self._bodies.keys()))

    @property
    def bodies(self) -> Mapping[str, bytes]:
        return self._bodies

    def get(self, name: str) -> ChatModel:
        """Return a model, or raise `ValidationError` if its name is unknown or this process cannot load it."""
        if name not in self._loaded:
            if name not in self._bodies:
                raise ValidationError(f"The run has no model '{name}'. Known: [{', '.join(self.names)}]")
            try:
                self._loaded[name] = cast("ChatModel", pickle.loads(self._bodies[name]))  # noqa: S301  bytes of our own driver
            except Exception as error:
                raise ValidationError(
                    f"Model '{name}' cannot be loaded in a worker process: {message_of(error)}. Install the module it comes "
                    "from on every node, or use runtime='inline'"
                ) from error
        return self._loaded[name]

    def pack(self, dump: Callable[[object, str], bytes]) -> RunModels:
        """Return the models as bytes. `dump` serializes a model; its second argument is a name for error messages."""
        fresh = {
            name: dump(model, f"Model '{name}'") for name, model in self._loaded.items() if name not in self._bodies
        }
        return RunModels(bodies={**self._bodies, **fresh})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunModels) and self.names == other.names and self._bodies == other._bodies

    __hash__ = None  # type: ignore[assignment]  # `get` changes it

    def __reduce__(self) -> tuple[Callable[[Mapping[str, bytes]], RunModels], tuple[Mapping[str, bytes]]]:
        if unpacked := self._loaded.keys() - self._bodies.keys():
            raise TypeError(f"models must be packed before they are pickled; not packed: {sorted(unpacked)}")
        return _of_bodies, (self._bodies,)


def _of_bodies(bodies: Mapping[str, bytes]) -> RunModels:  # submissions contain its name
    return RunModels(bodies=bodies)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Values that all tasks of a run share. A process receives them once."""

    run_id: str
    workflow: str
    total_tasks: int
    #: listener methods with a listener; other events are not built
    interest: frozenset[str] = frozenset()
    capture_mode: CaptureMode = CaptureMode.OFF
    is_verbose: bool = False
    #: most tokens of a request, unless the task has its own limit; None: no limit (S-MEM-131)
    context_budget: int | None = None
    #: most characters of a tool's output that the model sees; negative: all (S-ENG-70)
    max_tool_output_length: int = -1
    #: most characters of tool input and output in log lines; -1: all (S-ENG-72)
    tool_log_truncate_length: int = 200
    #: log fields of the caller, for every process of the run (S-PAR-16)
    log_fields: Mapping[str, str] = field(default_factory=dict[str, str])
    cost: CostConfiguration | None = None
    #: None: no limit
    budget: RunBudget | None = None
    #: calls are reported to the driver's ToolMetrics
    has_tool_metrics: bool = False
    #: warnings and prints of agents' processes go to the driver's log (S-SET-57)
    forwards_logs: bool = False
    #: `effects`, `run` or `off` (S-DUR-2)
    durability: str = "effects"
    #: `tell_model`, `fail` or `ask`; a callable of the driver is `ask`, too (S-DUR-24)
    on_unknown: str = "tell_model"
    #: retries of model calls that fail by the provider's fault; None: the task fails
    retry: RetryPolicy | None = None
    #: handling of incomplete answers, unless the agent has its own (S-ENG-37)
    on_incomplete: OnIncomplete = "warn"
    delegation: DelegationContext = field(default_factory=DelegationContext)
    #: constraints of the manager of a hierarchical run
    hierarchy: HierarchyRules | None = None
    #: tasks that have a gate after them by default; None: the run has no reviewer (S-REV-15)
    review_policy: ReviewPolicy | None = None
    #: the gate of `review_policy`; None: `Review()` (S-REV-16, S-WEB-51)
    policy_review: Review | None = None
    #: tasks at open gates are suspended, and the run waits in its record (S-REV-113)
    is_detached: bool = False
    #: kinds of memory of the run; None: none
    memory: MemoryRules | None = None
    #: the run has a reflection store
    has_reflections: bool = False
    #: models that directives can switch agents to
    models: RunModels = field(default_factory=RunModels)
    #: shared data of the run's spans; None: the run is not traced
    tracing: RunTracing | None = None

    @property
    def has_plan(self) -> bool:
        """Whether all tasks are known before the run starts."""
        return self.total_tasks > 0


# State and outcome of a run.


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint(Generic[Output_co, Failure_co]):
    """Recorded state of a run that is resumed."""

    #: start of the first attempt
    started_at: float
    #: stimuli of the source, in the groups in which it received them, without the effects of a cancellation
    stimuli: Sequence[Sequence[Stimulus]]
    #: by instance: tasks with a recorded output or failure, whether or not the source received it. Results are built on
    #: access. One has no output if the run's outputs can look up the recorded one.
    results: Mapping[str, TaskResult[Output_co, Failure_co]]
    #: by instance: tasks without a recorded end, for instance stopped by a join; filled if some must not run again
    stopped: Mapping[str, TaskResult[Output_co, Failure_co]] = field(
        default_factory=dict[str, "TaskResult[Output_co, Failure_co]"]
    )
    #: only the owner's process was replaced; else a user resumed the run, perhaps after a cancellation
    is_restart: bool = False
    #: directives of the run, the expired ones included
    directives: Sequence[DirectiveFact] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTask(Generic[Failure_co]):
    instance: str
    at: float
    failure: Failure_co
    #: number of tasks that had completed before (S-PAR-22)
    completed_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome(Generic[Output_co, Failure_co]):
    """Outcome of a run."""

    state: RunState
    exit_reason: ExitReason
    started_at: float
    completed_at: float
    #: (instance, output) in completion order
    completed: Sequence[tuple[str, Output_co]] = ()
    #: (instance, output) of a manager's workers in completion order
    delegated: Sequence[tuple[str, Output_co]] = ()
    #: traces of a manager's workers without an output
    failed_delegations: Sequence[TaskTrace] = ()
    failures: Sequence[FailedTask[Failure_co]] = ()
    #: (instance, failure) of tasks that were cancelled or exited
    unfinished: Sequence[tuple[str, Failure_co]] = ()
    #: results of loops, phases and graphs in the order in which they ended
    units: tuple[UnitResult, ...] = ()
    #: failures of units that no task's failure caused, in order
    unit_failures: tuple[UnitFailure, ...] = ()
    #: (path of the unit, error of the user's predicate or condition)
    raised: Sequence[tuple[str, Failure_co]] = ()
    #: of a waiting run: its open gates in the order in which tasks reached them
    open_reviews: tuple[OpenReview, ...] = ()

    def convert(
        self, output: Callable[[Output_co], NewOutput], failure: Callable[[Failure_co], NewFailure]
    ) -> RunOutcome[NewOutput, NewFailure]:
        return replace(
            cast("RunOutcome[NewOutput, NewFailure]", self),
            completed=[(key, output(each)) for key, each in self.completed],
            delegated=[(key, output(each)) for key, each in self.delegated],
            failures=[
                replace(cast("FailedTask[NewFailure]", each), failure=failure(each.failure)) for each in self.failures
            ],
            unfinished=[(key, failure(each)) for key, each in self.unfinished],
            raised=[(unit, failure(each)) for unit, each in self.raised],
        )
