"""What is handed to an executor and what comes back. Package: execute. Values only.

A `RunContext` is what all tasks of a run share; it is bound once per process. A `TaskOrder` is one task; it carries its
envelope (run, instance, epoch), so that whoever gets it needs to ask nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.retry_policy import RetryPolicy
from ensemble_ray.definition.task import Task
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.values.amounts import RunBudget
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.messages import OnIncomplete
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.outputs import ExitReason, RunState, TaskOutput
from ensemble_ray.values.reviews import ReviewPolicy
from ensemble_ray.values.trace import CaptureMode, TaskTrace

__all__ = ["RunContext", "RunOutcome", "TaskFailure", "TaskOrder", "TaskResult"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
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
    task: Task
    agent_key: str | None
    agent_role: str
    #: of a task that was made while its run goes on: who does it; its key is then that of its kind (S-MR-142)
    agent: Agent | None = None
    #: of such a task: how many its level has, 0 where nobody knows yet; None: as many as the run has
    total_tasks: int | None = None
    #: outputs of the context tasks in the order of the task's context list
    context: Sequence[TaskOutput] = ()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What came of one order."""

    key: str
    instance: str
    status: Literal["completed", "failed", "exited", "cancelled"]
    at: float
    duration_s: float
    #: of the dispatch that it is the result of
    epoch: int = 0
    output: TaskOutput | None = None
    #: the original error, unwrapped
    error: BaseException | None = None
    #: of a task that gave no output: what it did until then
    trace: TaskTrace | None = None
    total_tokens: int = -1
    tool_call_count: int = 0
    #: requests to the provider for its last model call; 0 when none was made (S-MR-152)
    attempts: int = 0
    #: of a task that ended the run early, with an output or without
    exit_reason: ExitReason = ExitReason.USER_EXIT_EARLY
    #: of a manager: what its workers gave, by instance, in completion order (S-HIER-6)
    delegated: Sequence[tuple[str, TaskOutput]] = ()
    #: of a manager: what its workers did that gave nothing
    failed_delegations: Sequence[TaskTrace] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """A failed task of an ended run."""

    key: str
    at: float
    error: BaseException
    #: how many tasks were completed when it failed (S-PAR-22)
    completed_before: int
    trace: TaskTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended; made into an output or an error by `record.result`."""

    run_id: str
    state: RunState
    exit_reason: ExitReason
    started_at: float
    completed_at: float
    #: (task key, output) in completion order
    completed: Sequence[tuple[str, TaskOutput]] = ()
    #: outputs of a manager's workers in completion order
    delegated: Sequence[TaskOutput] = ()
    #: what workers of a manager did that gave nothing
    failed_delegations: Sequence[TaskTrace] = ()
    failures: Sequence[TaskFailure] = ()
    #: what to warn of, such as a budget that is spent; "": nothing
    warning: str = ""
    #: (task key, trace) of unfinished tasks: cancelled or exited ones
    unfinished: Sequence[tuple[str, TaskTrace]] = ()
