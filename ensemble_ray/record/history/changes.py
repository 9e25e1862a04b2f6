"""Changes of a run's history that follow from one fact. They carry the fact, so that readers find the texts there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Union

from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import (
    PlanRecorded,
    RecordedOutput,
    ReviewDecided,
    ReviewRequested,
    RunEnded,
    RunResumed,
)
from ensemble_ray.record.history.executions import ExecutionStatus, RecordedExecution
from ensemble_ray.schedule.instructions import IterationEnded, StepEnded
from ensemble_ray.values.delegation import DelegationRequest
from ensemble_ray.values.messages import ToolCall


class RunStarted(NamedTuple):
    """The run began."""

    fact: Fact[PlanRecorded]


class RunContinued(NamedTuple):
    """The run was resumed."""

    fact: Fact[RunResumed]


class RunFinished(NamedTuple):
    """The run ended, or waits for reviews."""

    fact: Fact[RunEnded]


class ExecutionStarted(NamedTuple):
    """A task of the plan started: the run requested it, or a fact of it is recorded. Once per execution."""

    execution: RecordedExecution
    fact: Fact


class ExecutionEnded(NamedTuple):
    """A task or delegated work ended. The executions that the end of the run closes have no such change."""

    execution: RecordedExecution
    status: ExecutionStatus
    fact: Fact
    #: of a failure or a skipped task
    reason: str = ""
    #: of a completed task, unless it is an item of several tasks
    output: RecordedOutput | None = None
    #: JSON data of `TaskMetrics`, of a failure that is recorded
    failed_metrics: Mapping[str, object] | None = None

    @property
    def metrics(self) -> Mapping[str, object]:
        """JSON data of its `TaskMetrics`; empty: not recorded."""
        return (self.failed_metrics or {}) if self.output is None else self.output.metrics


class RoundEnded(NamedTuple):
    """A loop ended an iteration, or a graph a step. Once each."""

    execution: RecordedExecution
    fact: Fact
    what: IterationEnded | StepEnded


class ModelReplied(NamedTuple):
    """A model answered."""

    execution: RecordedExecution
    fact: Fact[ModelAnswered]


class CallStarted(NamedTuple):
    """A call of a tool or a handler began."""

    execution: RecordedExecution
    fact: Fact[ToolIntended]


class CallEnded(NamedTuple):
    """A call of a tool, a handler or a delegation tool ended."""

    execution: RecordedExecution
    fact: Fact[ToolReturned]
    #: None for a delegation, or a call of an unknown tool
    intent: ToolIntended | None
    #: the model's request; None if it is unknown, or if the intent contains it
    requested: ToolCall | None
    delegation: Delegation | None


class Delegation(NamedTuple):
    """Work that an execution delegates, or tried to delegate."""

    request: DelegationRequest
    #: role of the worker; of the requested agent if the delegation was refused
    role: str
    #: None if the delegation was refused
    worker: RecordedExecution | None


class DelegationStarted(NamedTuple):
    """An execution delegates work, or its delegation was refused."""

    execution: RecordedExecution
    fact: Fact[DelegationDecided]
    delegation: Delegation


class GateOpened(NamedTuple):
    """A review was requested."""

    execution: RecordedExecution
    fact: Fact[ReviewRequested]


class GateClosed(NamedTuple):
    """A review was decided."""

    execution: RecordedExecution
    fact: Fact[ReviewDecided]
    #: None if its request is not recorded
    asked: Fact[ReviewRequested] | None


class WorkRecorded(NamedTuple):
    """An execution did something else, such as recalling memory."""

    execution: RecordedExecution
    fact: Fact
    #: input tokens of the work; -1 if the provider did not count
    input_tokens: int = 0
    output_tokens: int = 0
    #: answers to servers of its tools
    model_calls: int = 0


ExecutionChange = Union[  # noqa: UP007  a name for the union, also at run time
    ExecutionStarted,
    ExecutionEnded,
    RoundEnded,
    ModelReplied,
    CallStarted,
    CallEnded,
    DelegationStarted,
    GateOpened,
    GateClosed,
    WorkRecorded,
]
Change = Union[RunStarted, RunContinued, RunFinished, ExecutionChange]  # noqa: UP007  as above
