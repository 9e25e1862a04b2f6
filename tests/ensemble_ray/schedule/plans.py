"""Plans of bare tasks, the facts one tells about them, and a machine that is checked after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ensemble_ray.plan.plan import Node, Plan
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import CancelTask, EndRun, Instruction, SkipTask, StartTask
from ensemble_ray.schedule.states import TaskState
from ensemble_ray.schedule.stimuli import (
    CancelRequested,
    RunStarted,
    Stimulus,
    TaskCancelled,
    TaskCompleted,
    TaskExited,
    TaskFailed,
)
from ensemble_ray.values.outputs import ExitReason, RunState

STARTED = RunStarted(at=0.0)
CANCEL = CancelRequested(at=5.0)

COMPLETED = EndRun(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)
FAILED = EndRun(state=RunState.FAILED, exit_reason=ExitReason.ERROR)
CANCELLED = EndRun(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
EXITED = EndRun(state=RunState.COMPLETED, exit_reason=ExitReason.USER_EXIT_EARLY)
TIMED_OUT = EndRun(state=RunState.COMPLETED, exit_reason=ExitReason.TIMEOUT)
OUT_OF_BUDGET = EndRun(state=RunState.BUDGET_EXHAUSTED, exit_reason=ExitReason.BUDGET_EXHAUSTED)


def plan_of(
    workflow: str,
    context: Mapping[str, Sequence[str]],
    *,
    error_strategy: str = "fail_fast",
    cap: int | None = None,
) -> Plan:
    """A plan of tasks by key, each with the keys of its context tasks, in list order."""
    nodes = tuple(
        Node(
            key=key,
            index=index,
            description=f"Do {key}",
            expected_output="",
            agent_role="Worker",
            agent_key="worker",
            context=tuple(needed),
        )
        for index, (key, needed) in enumerate(context.items(), start=1)
    )
    return Plan(workflow=workflow, nodes=nodes, error_strategy=error_strategy, max_parallel_tasks=cap)


def sequence(*keys: str) -> Plan:
    """A sequential plan of tasks without context."""
    return plan_of("sequential", dict.fromkeys(keys, ()))


def done(key: str, at: float = 1.0) -> TaskCompleted:
    """The task succeeded."""
    return TaskCompleted(at=at, key=key)


def failed(key: str, at: float = 1.0) -> TaskFailed:
    """The task failed."""
    return TaskFailed(at=at, key=key, error_type="ValueError")


def exited(key: str, at: float = 1.0, *, reason: ExitReason = ExitReason.USER_EXIT_EARLY) -> TaskExited:
    """The task asked to end the run."""
    return TaskExited(at=at, key=key, reason=reason)


def stopped(key: str, at: float = 6.0) -> TaskCancelled:
    """The task was stopped."""
    return TaskCancelled(at=at, key=key)


def starts(*keys: str) -> list[Instruction]:
    """Start these, in this order."""
    return [StartTask(key=key) for key in keys]


def skips(reason: str, *keys: str) -> list[Instruction]:
    """Skip these, in this order."""
    return [SkipTask(key=key, reason=reason) for key in keys]


def cancels(*keys: str) -> list[Instruction]:
    """Stop these, in this order."""
    return [CancelTask(key=key) for key in keys]


class Told:
    """A machine whose invariants are checked after every step; calling it is telling it."""

    def __init__(self, plan: Plan) -> None:
        self.machine = machine_for(plan)
        self.machine.validate()

    def __call__(self, *stimuli: Stimulus) -> list[Instruction]:
        instructions = self.machine.handle(*stimuli)
        self.machine.validate()
        return instructions

    def states(self, *keys: str) -> list[TaskState]:
        """States of these tasks."""
        return [self.machine.states[key] for key in keys]
