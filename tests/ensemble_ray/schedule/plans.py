"""Plans of bare tasks, the facts one tells about them, and a machine that is checked after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ensemble_ray import ExitReason, Node, Plan, RunState
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import Cancel, End, Instruction, Skip, Start
from ensemble_ray.schedule.machine import Machine, TaskState
from ensemble_ray.schedule.stimuli import Begun, Cancelled, CancelRequested, Completed, Exited, Failed, Stimulus
from ensemble_ray.values.ids import instance_of, key_of
from tests.ensemble_ray.schedule.invariants import check

STARTED = Begun(at=0.0)
CANCEL = CancelRequested(at=5.0)

COMPLETED = End(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)
FAILED = End(state=RunState.FAILED, exit_reason=ExitReason.ERROR)
CANCELLED = End(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
EXITED = End(state=RunState.COMPLETED, exit_reason=ExitReason.USER_EXIT_EARLY)
TIMED_OUT = End(state=RunState.COMPLETED, exit_reason=ExitReason.TIMEOUT)
OUT_OF_BUDGET = End(state=RunState.BUDGET_EXHAUSTED, exit_reason=ExitReason.BUDGET_EXHAUSTED)


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


def done(key: str, at: float = 1.0) -> Completed:
    """The task succeeded."""
    return Completed(at=at, instance=instance_of(key))


def failed(key: str, at: float = 1.0) -> Failed:
    """The task failed."""
    return Failed(at=at, instance=instance_of(key), error_type="ValueError")


def exited(
    key: str, at: float = 1.0, *, reason: ExitReason = ExitReason.USER_EXIT_EARLY, has_output: bool = False
) -> Exited:
    """The task, or the gate behind it, asked to end the run."""
    return Exited(at=at, instance=instance_of(key), reason=reason, has_output=has_output)


def stopped(key: str, at: float = 6.0) -> Cancelled:
    """The task was stopped."""
    return Cancelled(at=at, instance=instance_of(key))


def starts(*keys: str) -> list[Instruction]:
    """Start these, in this order."""
    return [Start(instance=instance_of(key)) for key in keys]


def skips(reason: str, *keys: str) -> list[Instruction]:
    """Skip these, in this order."""
    return [Skip(instance=instance_of(key), reason=reason) for key in keys]


def cancels(*keys: str) -> list[Instruction]:
    """Stop these, in this order."""
    return [Cancel(instance=instance_of(key)) for key in keys]


class CheckedMachine:
    """A machine whose invariants are checked after every step; calling it is telling it."""

    def __init__(self, plan: Plan) -> None:
        machine = machine_for(plan)
        assert isinstance(machine, Machine), "a plan of tasks alone"
        self.machine = machine
        check(self.machine)

    def __call__(self, *stimuli: Stimulus) -> list[Instruction]:
        instructions = self.machine.handle(*stimuli)
        check(self.machine)
        return instructions

    def states(self, *keys: str) -> list[TaskState]:
        """States of these tasks."""
        return [self.machine.states[instance_of(key)] for key in keys]

    @property
    def completed(self) -> tuple[str, ...]:
        """Return the keys of completed tasks, in completion order."""
        return tuple(key_of(each) for each in self.machine.completed)

    @property
    def failed(self) -> tuple[str, ...]:
        """Return the keys of failed tasks, in the order of their failures."""
        return tuple(key_of(each) for each in self.machine.failed)
