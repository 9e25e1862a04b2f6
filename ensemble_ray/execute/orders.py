"""Context, order and result of a task. Processes that only pass on the user's objects have their bytes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import TypeVar

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.run_options import RetryPolicy
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import StaleEpochError, ValidationError, message_of
from ensemble_ray.errors.travel import interrupts_run
from ensemble_ray.facts.runs import NO_REASON, DirectiveFact, RecordedError
from ensemble_ray.llm.names import NO_NAMES, ModelNames
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.run_context import CurrentRun, RunDeps
from ensemble_ray.schedule.instructions import UnitFailure, UnitQuestion, UnitResult
from ensemble_ray.schedule.stimuli import Stimulus
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.memory import MemoryRules
from ensemble_ray.values.messages import OnIncomplete
from ensemble_ray.values.metrics import RunBudget
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.prices import RunCosts
from ensemble_ray.values.reviews import ModelSwitch, OpenReview, Review, ReviewPolicy
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import CaptureMode, RunTracing, TaskTrace

#: unknown_template: not started, since the process lacks the agent's template. waiting: suspended at open gates.
TaskStatus: TypeAlias = Literal["completed", "failed", "exited", "cancelled", "waiting", "unknown_template"]


class FailureSummary(Protocol):
    """The part of a failure that the scheduler reads."""

    @property
    def error_type(self) -> str: ...

    @property
    def message(self) -> str: ...

    @property
    def reason(self) -> RecordedError:
        """The error in the run's end, with an empty key."""
        ...

    @property
    def newer_epoch(self) -> int:
        """Epoch of the attempt that replaced this one, else 0."""
        ...

    @property
    def interrupts_run(self) -> bool:
        """Whether the run stops without a failure (S-DUR-151, S-CTX-52)."""
        ...


class TaskFailure(Struct, frozen=True, kw_only=True):
    """Error and trace of a task without an output. Implements `FailureSummary`."""

    error: BaseException | None = None  # unwrapped; None: the task was cancelled
    trace: TaskTrace | None = None

    @property
    def cause(self) -> BaseException:
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
    def interrupts_run(self) -> bool:
        return interrupts_run(self.error)


class EvaluationFailed(Struct, frozen=True, kw_only=True):
    error_type: str
    message: str
    error: BaseException | bytes  # as bytes in a process that runs no user code
    reason: RecordedError | None = None  # with bytes: the error in the run's end

    @classmethod
    def of(cls, error: BaseException) -> EvaluationFailed:
        return cls(error_type=type(error).__name__, message=message_of(error), error=error)


# Each is the object, or its bytes.

Task_co = TypeVar("Task_co", default=Task, covariant=True)
Agent_co = TypeVar("Agent_co", default=Agent, covariant=True)  # bytes: the data beside its template
Output_co = TypeVar("Output_co", default=TaskOutput, covariant=True)
Failure_co = TypeVar("Failure_co", bound=FailureSummary, default=TaskFailure, covariant=True)  # bytes: with a summary
Order_co = TypeVar("Order_co", covariant=True)
NewTask = TypeVar("NewTask")
NewAgent = TypeVar("NewAgent")
NewOutput = TypeVar("NewOutput")
NewFailure = TypeVar("NewFailure", bound=FailureSummary)


class TaskResult(Struct, Generic[Output_co, Failure_co], frozen=True, kw_only=True):
    key: str
    instance: str
    status: TaskStatus
    at: float
    duration_s: float = 0.0
    epoch: int = 0
    output: Output_co | None = None
    packed: bytes | None = None  # the output's pickle from another process
    text: str | None = None  # if the order has `wants_text`
    failure: Failure_co | None = None
    total_tokens: int = -1
    tool_call_count: int = 0
    incomplete_answers: int = 0  # cut off or empty answers, of the task and its workers (S-MET-18)
    attempts: int = 0  # requests for the last model call; 0: no model call (S-MR-152)
    exit_reason: ExitReason = ExitReason.USER_EXIT_EARLY  # of a task that ended the run
    delegated: Sequence[tuple[str, Output_co]] = ()  # (role, output) of workers, as completed (S-HIER-6)
    failed_delegations: Sequence[TaskTrace] = ()  # traces of a manager's workers without an output
    open_reviews: tuple[OpenReview, ...] = ()
    verdicts: tuple[bool | EvaluationFailed, ...] = ()  # results of `asks`, up to the first that held

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
    """Count cut-off or empty answers of a task and its workers (S-MR-205)."""
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


class TaskBody(NamedTuple, Generic[Task_co]):
    task: Task_co
    input_guardrails: int = 0
    output_guardrails: int = 0


class Revision(Struct, Generic[Output_co], frozen=True, kw_only=True):
    attempt: int = 0
    feedback: str = ""
    prior: Output_co | None = None


class HistoryPart(Struct, Generic[Output_co], frozen=True, kw_only=True):
    """An iteration of a loop, or a step of a graph."""

    names: tuple[str, ...]  # body names in body order, or the name of the state
    outputs: tuple[Output_co, ...]
    is_joined: bool = False  # the outputs are iterations of a loop and count as one output of a state


class FollowingQuestions(Struct, Generic[Output_co], frozen=True, kw_only=True):
    """Predicates to evaluate when a task has completed."""

    questions: tuple[UnitQuestion, ...]  # evaluated until one holds
    sent_count: int  # parts of the unit's history that the predicates already have
    new: tuple[HistoryPart[Output_co], ...]  # the following parts; the task's output completes the last one


class OutputOf(NamedTuple):
    """Stands for an output that only the process of the tasks has yet."""

    instance: str


class Continuation(NamedTuple, Generic[Order_co]):
    """Tasks that a process starts by itself, each after the one before (S-DUR-156)."""

    number: int  # rises within a run; `revoke` names it
    orders: tuple[Order_co, ...]  # contexts may contain `OutputOf`


class TaskOrder(Struct, Generic[Task_co, Agent_co, Output_co], frozen=True, kw_only=True):
    run_id: str
    key: str
    instance: str  # path, such as `facts#0`
    epoch: int  # of the dispatch; the journal refuses older ones
    index: int  # 1-based position in the task list; of a dynamic task, in its level (S-MR-95)
    task: Task_co  # resolved, without context tasks
    agent_key: str | None  # its agent's or template's key; None: a handler does the task
    agent_role: str
    agent: Agent_co | None = None  # of a dynamic task; `agent_key` is then its template's (S-MR-142)
    total_tasks: int | None = None  # of its level or loop body; 0: unknown; None: the run's number
    context: Sequence[Output_co] = ()  # in the order of the task's context
    joined: tuple[tuple[int, int], ...] = ()  # ranges of `context`, each to be joined into one output (S-LOOP-72)
    revision: Revision[Output_co] | None = None
    missing_context: str | None = None  # description of a context task without an output (S-ENG-11)
    is_streaming: bool = False
    input_guardrails: int = 0  # `Callables` has the guardrails themselves
    output_guardrails: int = 0
    depth: int = 0  # depth of a delegation; 0: a task of the plan (S-DEL-11)
    caller_role: str = ""
    delegation_id: str = ""
    wants_text: bool = False  # the result must contain the answer's text
    description: str = ""  # for readers that do not load the task
    is_resubmission: bool = False  # dispatched before in this epoch, and suspended at a gate or collected for a batch
    directives: tuple[str, ...] = ()  # active when the task was started, like `switches`
    switches: tuple[ModelSwitch, ...] = ()
    is_reflected_later: bool = False  # a later order reflects on the accepted output (S-REFL-19)
    reflects_on: Output_co | None = None  # an accepted output, only to be reflected on
    asks: FollowingQuestions[Output_co] | None = None  # evaluated by the task's process at its completion
    continuation: Continuation[TaskOrder[Task_co, Agent_co, Output_co]] | None = None

    def result(self, status: TaskStatus, at: float, **fields: Any) -> TaskResult:
        return TaskResult(key=self.key, instance=self.instance, epoch=self.epoch, status=status, at=at, **fields)

    def convert(
        self, task: NewTask, agent: NewAgent | None, output: Callable[[Output_co], NewOutput], **changes: str | None
    ) -> TaskOrder[NewTask, NewAgent, NewOutput]:
        """Return the order with converted objects and changed fields, without the fields that runners do not read."""
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
            **changes,
        )


class Peers(Protocol):
    """Runs delegated tasks with other agents of the run, in any process."""

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run a task to its end; cancellation stops it. A dead process is a failed result."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Stop tasks. `perform` then returns within the grace period, if their processes can be reached."""


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
        """Return a model, or raise `ValidationError` if it is unknown or cannot be loaded here."""
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
        """Return the models as bytes. `dump` receives a model, and a name for errors."""
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


class RunContext(Struct, frozen=True, kw_only=True):
    """Values that all tasks of a run share. A process receives them once."""

    run_id: str
    workflow: str
    total_tasks: int
    interest: frozenset[str] = frozenset()  # listener methods in use; other events are not built
    capture_mode: CaptureMode = CaptureMode.OFF
    is_verbose: bool = False
    context_budget: int | None = None  # most tokens of a request by default; None: no limit (S-MEM-131)
    max_tool_output_length: int = -1  # most characters that the model sees; negative: all (S-ENG-70)
    tool_log_truncate_length: int = 200  # most characters in log lines; -1: all (S-ENG-72)
    log_fields: Mapping[str, str] = msgspec.field(
        default_factory=dict[str, str]
    )  # the caller's, for every process (S-PAR-16)
    cost: RunCosts = None
    budget: RunBudget | None = None
    has_tool_metrics: bool = False  # the driver has ToolMetrics
    forwards_logs: bool = False  # agents' warnings and prints go to the driver's log (S-SET-57)
    durability: str = "effects"  # `effects`, `run` or `off` (S-DUR-2)
    on_unknown: str = "tell_model"  # `tell_model`, `fail` or `ask`, also for a callable (S-DUR-24)
    retry: RetryPolicy | None = None  # of model calls after provider failures; None: the task fails
    on_incomplete: OnIncomplete = "warn"  # unless the agent has its own (S-ENG-37)
    delegation: DelegationContext = msgspec.field(default_factory=DelegationContext)
    hierarchy: HierarchyRules | None = None
    review_policy: ReviewPolicy | None = None  # default gates after tasks; None: no reviewer (S-REV-15)
    policy_review: Review | None = None  # None: `Review()` (S-REV-16, S-WEB-51)
    is_detached: bool = False  # tasks at open gates are suspended, and the run waits (S-REV-113)
    memory: MemoryRules | None = None  # None: no memory
    has_reflections: bool = False
    models: RunModels = msgspec.field(default_factory=RunModels)  # that directives can switch to
    tracing: RunTracing | None = None  # None: not traced
    began_at: float = 0.0  # at which the run was started or resumed, Unix time, s
    declared_model: ModelNames = NO_NAMES  # of tasks in no plan: the model in the recorded definition
    is_fork: bool = False  # it asks for new answers (S-USE-23)
    inputs: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])  # for user code, like the next fields
    tags: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    user: str = ""
    deps: RunDeps | None = None

    @property
    def has_plan(self) -> bool:
        return self.total_tasks > 0

    def current_run(self) -> CurrentRun:
        """Return the context of the run for user code in this process."""
        run = CurrentRun(run_id=self.run_id, inputs=self.inputs, tags=self.tags, user=self.user)
        return run if self.deps is None else run.with_deps(self.deps)


class ResumePoint(Struct, Generic[Output_co, Failure_co], frozen=True, kw_only=True):
    started_at: float  # of the first attempt
    #: in the groups in which the source received them, without the effects of a cancellation
    stimuli: Sequence[Sequence[Stimulus]]
    #: by instance: tasks with a recorded output or failure, perhaps unknown to the source; built on access. The output
    #: is absent if the run's outputs can look it up.
    results: Mapping[str, TaskResult[Output_co, Failure_co]]
    #: by instance: tasks without a recorded end, if some must not run again
    stopped: Mapping[str, TaskResult[Output_co, Failure_co]] = msgspec.field(
        default_factory=dict[str, "TaskResult[Output_co, Failure_co]"]
    )
    is_restart: bool = False  # only the owner's process was replaced, and no user resumed the run
    directives: Sequence[DirectiveFact] = ()  # with expired ones


class FailedTask(Struct, Generic[Failure_co], frozen=True, kw_only=True):
    instance: str
    at: float
    failure: Failure_co
    completed_before: int = 0  # number of completed tasks before it (S-PAR-22)


class RunOutcome(Struct, Generic[Output_co, Failure_co], frozen=True, kw_only=True):
    state: RunState
    exit_reason: ExitReason
    started_at: float
    completed_at: float
    completed: Sequence[tuple[str, Output_co]] = ()  # (instance, output) in completion order
    delegated: Sequence[tuple[str, Output_co]] = ()  # (instance, output) of workers in completion order
    failed_delegations: Sequence[TaskTrace] = ()  # of workers without an output
    failures: Sequence[FailedTask[Failure_co]] = ()
    unfinished: Sequence[tuple[str, Failure_co]] = ()  # (instance, failure) of cancelled or exited tasks
    units: tuple[UnitResult, ...] = ()  # loops, phases and graphs, in the order of their ends
    unit_failures: tuple[UnitFailure, ...] = ()  # of units without a failed task
    raised: Sequence[tuple[str, Failure_co]] = ()  # (path of the unit, error of the user's code)
    open_reviews: tuple[OpenReview, ...] = ()  # of a waiting run, in the order in which tasks reached them

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
