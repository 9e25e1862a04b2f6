"""The history of a run: the typed state that follows from its facts, and what each fact changed. Pure."""

from ensemble_ray.record.history.changes import (
    CallEnded,
    CallStarted,
    Change,
    Delegation,
    DelegationStarted,
    ExecutionChange,
    ExecutionEnded,
    ExecutionStarted,
    GateClosed,
    GateOpened,
    ModelReplied,
    RoundEnded,
    RunContinued,
    RunFinished,
    RunStarted,
    WorkRecorded,
)
from ensemble_ray.record.history.execution import RecordedExecution
from ensemble_ray.record.history.run_history import RunHistory

__all__ = [
    "CallEnded",
    "CallStarted",
    "Change",
    "Delegation",
    "DelegationStarted",
    "ExecutionChange",
    "ExecutionEnded",
    "ExecutionStarted",
    "GateClosed",
    "GateOpened",
    "ModelReplied",
    "RecordedExecution",
    "RoundEnded",
    "RunContinued",
    "RunFinished",
    "RunHistory",
    "RunStarted",
    "WorkRecorded",
]
