"""The history of a run: the typed state folded from its facts, and the changes that a fact makes. Pure."""

from ensemble_ray.record.history.changes import (
    BatchChanged,
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
from ensemble_ray.record.history.executions import RecordedExecution
from ensemble_ray.record.history.run_history import RunHistory

__all__ = [
    "BatchChanged",
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
