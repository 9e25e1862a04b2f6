"""Changes of a run's history that follow from one fact. They carry the fact, which has the texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Union

from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import (
    BatchRecorded,
    PlanRecorded,
    RecordedOutput,
    ReviewDecided,
    ReviewRequested,
    RunEnded,
    RunResumed,
)
from ensemble_ray.record.batches import RecordedBatch
from ensemble_ray.record.history.executions import ExecutionStatus, RecordedExecution
from ensemble_ray.schedule.instructions import IterationEnded, StepEnded
from ensemble_ray.values.delegation import DelegationRequest
from ensemble_ray.values.messages import ToolCall


class RunStarted(NamedTuple):
    fact: Fact[PlanRecorded]


class RunContinued(NamedTuple):
    fact: Fact[RunResumed]


class RunFinished(NamedTuple):
    fact: Fact[RunEnded]


class BatchChanged(NamedTuple):
    """A batch of map requests has another state, or more answers."""

    fact: Fact[BatchRecorded]
    batch: RecordedBatch


class ExecutionStarted(NamedTuple):
    """A task of the plan started: the run requested it, or a fact of it is recorded. Once per execution."""

    execution: RecordedExecution
    fact: Fact


class ExecutionEnded(NamedTuple):
    """A task or delegated work ended. Executions that the run's end closes have no such change."""

    execution: RecordedExecution
    status: ExecutionStatus
    fact: Fact
    reason: str = ""
    output: RecordedOutput | None = None  # of a completed task, unless it is an item of several tasks
    failed_metrics: Mapping[str, object] | None = None  # JSON data of `TaskMetrics`, of a recorded failure

    @property
    def metrics(self) -> Mapping[str, object]:
        return (self.failed_metrics or {}) if self.output is None else self.output.metrics


class RoundEnded(NamedTuple):
    execution: RecordedExecution
    fact: Fact
    what: IterationEnded | StepEnded


class ModelReplied(NamedTuple):
    execution: RecordedExecution
    fact: Fact[ModelAnswered]


class CallStarted(NamedTuple):
    execution: RecordedExecution
    fact: Fact[ToolIntended]


class CallEnded(NamedTuple):
    execution: RecordedExecution
    fact: Fact[ToolReturned]
    intent: ToolIntended | None  # None for a delegation, or a call of an unknown tool
    requested: ToolCall | None  # the model's request, unless the intent contains it
    delegation: Delegation | None


class Delegation(NamedTuple):
    request: DelegationRequest
    role: str  # of the worker, or of the requested agent if refused
    worker: RecordedExecution | None


class DelegationStarted(NamedTuple):
    execution: RecordedExecution
    fact: Fact[DelegationDecided]
    delegation: Delegation


class GateOpened(NamedTuple):
    execution: RecordedExecution
    fact: Fact[ReviewRequested]


class GateClosed(NamedTuple):
    execution: RecordedExecution
    fact: Fact[ReviewDecided]
    asked: Fact[ReviewRequested] | None


class WorkRecorded(NamedTuple):
    execution: RecordedExecution
    fact: Fact
    input_tokens: int = 0  # -1 if the provider did not count
    output_tokens: int = 0
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
Change = Union[RunStarted, RunContinued, RunFinished, BatchChanged, ExecutionChange]  # noqa: UP007  as above
