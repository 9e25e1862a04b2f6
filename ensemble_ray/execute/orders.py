"""What is handed to an executor and what comes back. Values only.

A `RunContext` is what all tasks of a run share; it is bound once per process. A `TaskOrder` is one task; it carries its
envelope (run, instance, epoch), so that whoever gets it needs to ask nobody. A `TaskResult` is what came of it. Both are
generic in how what users made is held: as objects where it is used, as bytes where it is only passed on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, TypeAlias, cast

from typing_extensions import TypeVar

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.run_options import RetryPolicy
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import StaleEpochError, ValidationError, message_of
from ensemble_ray.errors.travel import is_out_of_credit
from ensemble_ray.facts.runs import NO_REASON, RecordedError
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.memory import MemoryRules
from ensemble_ray.values.messages import OnIncomplete
from ensemble_ray.values.metrics import CostConfiguration, RunBudget
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import ModelSwitch, OpenReview, Review, ReviewPolicy
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import CaptureMode, RunTracing, TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.facts.runs import DirectiveFact
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.schedule.instructions import UnitFailure, UnitQuestion, UnitResult
    from ensemble_ray.schedule.stimuli import Stimulus
    from ensemble_ray.values.outputs import RunState


#: How an output is held: the object, or its bytes.
Output_co = TypeVar("Output_co", default=TaskOutput, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPart(Generic[Output_co]):
    """One iteration of a loop, or one step of a graph."""

    #: body names of the iteration in body order, or the one name of the state
    names: tuple[str, ...]
    #: in the same order
    outputs: tuple[Output_co, ...]
    #: whether these are iterations of a loop, and the one output of a state
    is_joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed:
    """The user's code raised."""

    #: class of the error
    error_type: str
    message: str
    #: the error itself, or its bytes where this process runs no user code
    error: BaseException | bytes
    #: beside bytes: what the end of a run tells of it
    reason: RecordedError | None = None

    @classmethod
    def of(cls, error: BaseException) -> EvaluationFailed:
        """Return what was raised, with the error itself."""
        return cls(error_type=type(error).__name__, message=message_of(error), error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingQuestions(Generic[Output_co]):
    """What will be asked when a task has completed."""

    #: asked in this order, until one holds
    questions: tuple[UnitQuestion, ...]
    #: how many parts of the unit's history the predicates were sent before
    sent_count: int
    #: the parts that follow those; the last one is that of the task, which its output completes
    new: tuple[HistoryPart[Output_co], ...]


_NONE: Mapping[str, bytes] = {}


class RunModels:
    """Models by name."""

    __slots__ = ("_bodies", "_loaded")

    def __init__(self, models: Mapping[str, ChatModel] | None = None, *, bodies: Mapping[str, bytes] = _NONE) -> None:
        """Make them of objects, or of what `packed` made of these."""
        self._loaded: dict[str, ChatModel] = dict(models or {})
        self._bodies = dict(bodies)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(sorted(self._loaded.keys() | self._bodies.keys()))

    @property
    def bodies(self) -> Mapping[str, bytes]:
        """Those that are packed, by name."""
        return self._bodies

    def get(self, name: str) -> ChatModel:
        """Return the model of that name.

        Raises:
            ValidationError: there is none, or it cannot be loaded in this process.
        """
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
        """Return them as they travel.

        Args:
            dump: Returns the bytes of a model; its second argument is what its user calls it.

        Raises:
            ValidationError: one of them cannot travel.
        """
        fresh = {
            name: dump(model, f"Model '{name}'") for name, model in self._loaded.items() if name not in self._bodies
        }
        return RunModels(bodies={**self._bodies, **fresh})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunModels) and self.names == other.names and self._bodies == other._bodies

    __hash__ = None  # type: ignore[assignment]  # what is loaded comes later

    def __reduce__(self) -> tuple[Callable[[Mapping[str, bytes]], RunModels], tuple[Mapping[str, bytes]]]:
        if unpacked := self._loaded.keys() - self._bodies.keys():
            raise TypeError(f"models travel as bytes alone, and these are not packed: {sorted(unpacked)}")
        return _of_bodies, (self._bodies,)


def _of_bodies(bodies: Mapping[str, bytes]) -> RunModels:
    return RunModels(bodies=bodies)


#: unknown_template: it was not begun, since the template of its agent is not known in that process.
#: waiting: it was put down at open gates, and is to be picked up when they are decided.
TaskStatus: TypeAlias = Literal["completed", "failed", "exited", "cancelled", "waiting", "unknown_template"]


class FailureSummary(Protocol):
    """What scheduling needs to know of a failure, however it is held."""

    @property
    def error_type(self) -> str:
        """Name of the error's class; "": no error."""
        ...

    @property
    def message(self) -> str:
        """What the error says."""
        ...

    @property
    def reason(self) -> RecordedError:
        """What the end of a run tells of it; its key is empty."""
        ...

    @property
    def newer_epoch(self) -> int:
        """The epoch that took the task's place, where that is why it failed; else 0."""
        ...

    @property
    def is_out_of_credit(self) -> bool:
        """Whether a provider refused a call of the task because the account has no credit (S-DUR-151)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """Why a task gave no output, and what it did until then."""

    #: the original error, unwrapped; None: it was cancelled
    error: BaseException | None = None
    trace: TaskTrace | None = None

    @property
    def cause(self) -> BaseException:
        """The error, where there must be one."""
        return self.error or RuntimeError("task failed without an error")

    @property
    def error_type(self) -> str:
        """Name of the error's class; "": no error."""
        return "" if self.error is None else type(self.error).__name__

    @property
    def message(self) -> str:
        """What the error says."""
        return "" if self.error is None else message_of(self.error)

    @property
    def reason(self) -> RecordedError:
        """What the end of a run tells of it; its key is empty."""
        return NO_REASON if self.error is None else RecordedError.of(self.error)

    @property
    def newer_epoch(self) -> int:
        """The epoch that took the task's place, where that is why it failed; else 0."""
        return self.error.newest if isinstance(self.error, StaleEpochError) else 0

    @property
    def is_out_of_credit(self) -> bool:
        """Whether a provider refused a call of the task because the account has no credit."""
        return is_out_of_credit(self.error)


#: How a task is held: the object, or its bytes.
Task_co = TypeVar("Task_co", default=Task, covariant=True)
#: How an agent that comes with its task is held: the object, or as bytes the data in which it differs from its template.
Agent_co = TypeVar("Agent_co", default=Agent, covariant=True)


#: How a failure is held: the object, or its bytes with a summary.
Failure_co = TypeVar("Failure_co", bound=FailureSummary, default=TaskFailure, covariant=True)
NewTask = TypeVar("NewTask")
NewAgent = TypeVar("NewAgent")
NewOutput = TypeVar("NewOutput")
NewFailure = TypeVar("NewFailure", bound=FailureSummary)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all tasks of a run share."""

    run_id: str
    workflow: str
    total_tasks: int
    #: listener methods anybody wants; other events are not built
    interest: frozenset[str] = frozenset()
    capture_mode: CaptureMode = CaptureMode.OFF
    is_verbose: bool = False
    #: most tokens of a request where its task does not say; None: no limit (S-MEM-131)
    context_budget: int | None = None
    #: characters of a tool's output that the model sees; negative: all (S-ENG-70)
    max_tool_output_length: int = -1
    #: characters of tool input and output in log lines; -1: all (S-ENG-72)
    tool_log_truncate_length: int = 200
    #: log fields of the caller, carried into every process (S-PAR-16)
    log_fields: Mapping[str, str] = field(default_factory=dict[str, str])
    cost: CostConfiguration | None = None
    #: what the run may spend; None: as much as it likes
    budget: RunBudget | None = None
    #: whether calls are reported to the driver's ToolMetrics
    has_tool_metrics: bool = False
    #: whether warnings and prints of agents' processes go to the driver's log (S-SET-57)
    forwards_logs: bool = False
    #: `effects`, `run` or `off` (S-DUR-2)
    durability: str = "effects"
    #: `tell_model`, `fail` or `ask`, which also stands for a callable of the driver's (S-DUR-24)
    on_unknown: str = "tell_model"
    #: what becomes of model calls that fail by the provider's fault; None: they fail the task
    retry: RetryPolicy | None = None
    #: what becomes of an incomplete answer where its agent does not say (S-ENG-37)
    on_incomplete: OnIncomplete = "warn"
    #: who may hand work to whom, and how deep
    delegation: DelegationContext = field(default_factory=DelegationContext)
    #: what the manager of a hierarchical run is held to
    hierarchy: HierarchyRules | None = None
    #: which tasks have a gate behind them that say nothing of it; None: there is nobody to ask (S-REV-15)
    review_policy: ReviewPolicy | None = None
    #: the gate that the policy puts there; None: `Review()` (S-REV-16, S-WEB-51)
    policy_review: Review | None = None
    #: whether a task at an open gate is put down, and the run waits in its record (S-REV-113)
    is_detached: bool = False
    #: which kinds of memory it has; None: none
    memory: MemoryRules | None = None
    #: whether there is a store for what is learned of its tasks
    has_reflections: bool = False
    #: models that its tasks can be told to ask in place of their agents' own
    models: RunModels = field(default_factory=RunModels)
    #: what its spans have in common; None: nobody traces it
    tracing: RunTracing | None = None

    @property
    def has_plan(self) -> bool:
        """Whether the run's tasks were planned before it began; else they are made while it goes on."""
        return self.total_tasks > 0


class TaskBody(NamedTuple, Generic[Task_co]):
    """A task of a plan, as a coordinator puts it into orders."""

    task: Task_co
    input_guardrails: int = 0
    output_guardrails: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision(Generic[Output_co]):
    """What another attempt at a task has beside the task itself."""

    #: 0: the first attempt
    attempt: int = 0
    feedback: str = ""
    #: of an earlier attempt, which is shown
    prior: Output_co | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder(Generic[Task_co, Agent_co, Output_co]):
    """One task to run."""

    run_id: str
    key: str
    #: path of this execution: `facts#0`
    instance: str
    #: re-dispatch generation; an older one is refused by the journal
    epoch: int
    #: 1-based position in the task list; of a task that was made while its run goes on, within its level (S-MR-95)
    index: int
    #: resolved task without its context tasks
    task: Task_co
    #: its agent, or the agent's template; None: a handler does it
    agent_key: str | None
    agent_role: str
    #: of a task that was made while its run goes on: who does it; its key is then that of its kind (S-MR-142)
    agent: Agent_co | None = None
    #: how many it is one of, such as those of its level or of a loop's body; 0: nobody knows yet; None: those of the run
    total_tasks: int | None = None
    #: outputs of the context tasks in the order of the task's context list
    context: Sequence[Output_co] = ()
    #: ranges of these, in order, that arrive as one output each, as the iterations of a loop do (S-LOOP-72)
    joined: tuple[tuple[int, int], ...] = ()
    #: None: the task as it stands in the plan
    revision: Revision[Output_co] | None = None
    #: description of a context task whose output does not exist (S-ENG-11)
    missing_context: str | None = None
    is_streaming: bool = False
    #: how many guardrails the task has; they are asked through `Callables` and need not travel with the task
    input_guardrails: int = 0
    output_guardrails: int = 0
    #: 0: a task of the plan; else how deep it was delegated (S-DEL-11)
    depth: int = 0
    #: who delegated it
    caller_role: str = ""
    #: of a delegated task; its request's id
    delegation_id: str = ""
    #: whether its result says the text of its answer, since the source reads it
    wants_text: bool = False
    #: of the task, for those who tell of it without loading it
    description: str = ""
    #: whether it was handed out before under the same epoch, and put down at a gate
    is_resubmission: bool = False
    #: what people told the run, active when it was started
    directives: tuple[str, ...] = ()
    #: which models of the run's catalog agents ask in place of their own, as it was when it was started
    switches: tuple[ModelSwitch, ...] = ()
    #: whether its output is reflected on later, when its phase has accepted it (S-REFL-19)
    is_reflected_later: bool = False
    #: an accepted output that is to be reflected on, in place of doing the task; None: the task is to be done
    reflects_on: Output_co | None = None
    #: what predicates in the process that does it are asked when it completed; None: nothing, or they are elsewhere
    asks: FollowingQuestions[Output_co] | None = None

    def convert(
        self, task: NewTask, agent: NewAgent | None, output: Callable[[Output_co], NewOutput]
    ) -> TaskOrder[NewTask, NewAgent, NewOutput]:
        """Return the same order with what users made held otherwise, without questions: those are not its runner's business."""
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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult(Generic[Output_co, Failure_co]):
    """What came of one order."""

    key: str
    instance: str
    status: TaskStatus
    at: float
    duration_s: float = 0.0
    #: of the dispatch that it is the result of
    epoch: int = 0
    output: Output_co | None = None
    #: of its answer, where its order wants that
    text: str | None = None
    #: of a task that gave no output
    failure: Failure_co | None = None
    total_tokens: int = -1
    tool_call_count: int = 0
    #: answers that were cut off or empty (S-MET-18), its workers' among them
    incomplete_answers: int = 0
    #: requests to the provider for its last model call; 0 when none was made (S-MR-152)
    attempts: int = 0
    #: of a task that ended the run early, with an output or without
    exit_reason: ExitReason = ExitReason.USER_EXIT_EARLY
    #: of a manager: what its workers gave, by role, in completion order (S-HIER-6)
    delegated: Sequence[tuple[str, Output_co]] = ()
    #: of a manager: what its workers did that gave nothing
    failed_delegations: Sequence[TaskTrace] = ()
    #: of a task that waits: its open gates
    open_reviews: tuple[OpenReview, ...] = ()
    #: what came of the questions of its order, as far as they were asked
    verdicts: tuple[bool | EvaluationFailed, ...] = ()

    @property
    def error(self: TaskResult[object, TaskFailure]) -> BaseException | None:
        """The original error of a task that failed."""
        return None if self.failure is None else self.failure.error

    @property
    def trace(self: TaskResult[object, TaskFailure]) -> TaskTrace | None:
        """What a task that gave no output did until then."""
        return None if self.failure is None else self.failure.trace

    def convert(
        self, output: Callable[[Output_co], NewOutput], failure: Callable[[Failure_co], NewFailure]
    ) -> TaskResult[NewOutput, NewFailure]:
        """Return the same result, its outputs and its failure held otherwise."""
        return replace(
            cast("TaskResult[NewOutput, NewFailure]", self),
            output=None if self.output is None else output(self.output),
            failure=None if self.failure is None else failure(self.failure),
            delegated=tuple((role, output(each)) for role, each in self.delegated),
        )


def count_incomplete(result: TaskResult) -> int:
    """Return how many answers of a task and of its workers were cut off or empty (S-MR-205)."""
    outputs = (*(() if result.output is None else (result.output,)), *(output for _, output in result.delegated))
    traces = (*(each.trace for each in outputs), result.trace, *result.failed_delegations)
    return sum(
        each.metrics.incomplete_answers for trace in traces if trace is not None for each in trace.with_workers()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Generic[Output_co, Failure_co]):
    """What the record knows of a run that goes on."""

    #: when it began first
    started_at: float
    #: what its source was told, in the groups in which it was; what a cancellation did is left out
    stimuli: Sequence[Sequence[Stimulus]]
    #: by instance: tasks whose output or failure is recorded, whether or not the source was told; a result is made when it
    #: is asked for, and has no output where the run's outputs have a recorded one to be looked up
    results: Mapping[str, TaskResult[Output_co, Failure_co]]
    #: by instance: what is known of tasks of which no end is recorded, such as those that a join stopped; made where some
    #: of them are not to run again
    stopped: Mapping[str, TaskResult[Output_co, Failure_co]] = field(
        default_factory=dict[str, "TaskResult[Output_co, Failure_co]"]
    )
    #: whether only its owner's process was replaced; else somebody wants it to go on, also after a cancellation
    is_restart: bool = False
    #: what people told it, the expired included
    directives: Sequence[DirectiveFact] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTask(Generic[Failure_co]):
    """A failed task of an ended run."""

    instance: str
    at: float
    failure: Failure_co
    #: how many tasks were completed when it failed (S-PAR-22)
    completed_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome(Generic[Output_co, Failure_co]):
    """How a run ended."""

    state: RunState
    exit_reason: ExitReason
    started_at: float
    completed_at: float
    #: (instance, output) in completion order
    completed: Sequence[tuple[str, Output_co]] = ()
    #: outputs of a manager's workers in completion order
    delegated: Sequence[tuple[str, Output_co]] = ()
    #: what workers of a manager did that gave nothing
    failed_delegations: Sequence[TaskTrace] = ()
    failures: Sequence[FailedTask[Failure_co]] = ()
    #: (instance, failure) of unfinished tasks: cancelled or exited ones
    unfinished: Sequence[tuple[str, Failure_co]] = ()
    #: what became of loops, phases and graphs, in the order in which they ended
    units: tuple[UnitResult, ...] = ()
    #: of units where no task's failure is the reason, in order
    unit_failures: tuple[UnitFailure, ...] = ()
    #: by path of the unit: what the user's predicates and conditions raised
    raised: Sequence[tuple[str, Failure_co]] = ()
    #: of a run that waits: its open gates, in the order in which its tasks came to them
    open_reviews: tuple[OpenReview, ...] = ()

    def convert(
        self, output: Callable[[Output_co], NewOutput], failure: Callable[[Failure_co], NewFailure]
    ) -> RunOutcome[NewOutput, NewFailure]:
        """Return the same outcome, its outputs and failures held otherwise."""
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


class Peers(Protocol):
    """Where delegated work is done: by agents of the same run, wherever they live."""

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run that task to its end; a cancelled caller stops it. A process that died is a failed result."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these; `perform` still gives what came of each, within the processes' grace, if its process can be reached."""
        ...
