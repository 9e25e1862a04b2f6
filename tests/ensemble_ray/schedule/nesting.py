"""Plans with units, and runs of them as obedient coordinators would make them: checked after every step, all is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ensemble_ray import ExitReason, Node, Plan
from ensemble_ray.plan.plan import LoopUnit, Unit
from ensemble_ray.schedule.instructions import Announce, Cancel, End, Evaluate, Instruction, Question, Start
from ensemble_ray.schedule.nested import NestedSource, make_machine
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Evaluated,
    Exited,
    Failed,
    Stimulus,
)
from ensemble_ray.schedule.unit import Execution, UnitMachine
from tests.ensemble_ray.schedule.invariants import check

Word = TypeVar("Word")


def node(key: str, context: Sequence[str] = ()) -> Node:
    """A bare task."""
    return Node(
        key=key,
        index=1,
        description=f"Do {key}",
        expected_output="",
        agent_role="Worker",
        agent_key="worker",
        context=tuple(context),
    )


def loop(name: str = "refine", *body: str, **fields: object) -> LoopUnit:
    """A loop over tasks; of a writer and a critic where none are named. With a predicate."""
    keys = body or ("writer", "critic")
    return LoopUnit(
        **{"key": f"loop:{name}", "name": name, "body": keys, "body_names": keys, "has_until": True, **fields}  # type: ignore[arg-type]  # fields of a loop
    )


def nested(
    tasks: Mapping[str, Sequence[str]],
    *units: Unit,
    inside: Mapping[str, Sequence[str]] | None = None,
    workflow: str = "sequential",
    error_strategy: str = "fail_fast",
    cap: int | None = None,
) -> Plan:
    """A plan of plain tasks and units; tasks of loops are made, with the context that `inside` says."""
    context = dict(inside or {})
    for unit in units:
        for key in unit.body if isinstance(unit, LoopUnit) else ():
            context.setdefault(key, ())
    nodes = [node(key, needed) for key, needed in (*tasks.items(), *context.items())]
    return Plan(
        workflow=workflow,
        nodes=tuple(nodes),
        units=units,
        error_strategy=error_strategy,
        max_parallel_tasks=cap,
    )


@dataclass(kw_only=True)
class Nest:
    """A run of a nested plan; every step is checked, everything wanted is kept."""

    plan: Plan
    make: Callable[[Execution], UnitMachine] = make_machine
    wanted: list[Instruction] = field(default_factory=list)
    told: list[Sequence[Stimulus]] = field(default_factory=list)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.source = NestedSource(self.plan, self.make)

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Tell the source."""
        is_over = bool(self.ends)
        done = self.source.handle(*stimuli)
        assert not (is_over and done), done
        check(self.source)
        self.told.append(stimuli)
        self.wanted += done
        return done

    def begin(self) -> list[Instruction]:
        """Let it begin."""
        return self.handle(Begun(at=self.at))

    def complete(self, *instances: str, tokens: int = -1) -> list[Instruction]:
        """Let these tasks complete, together."""
        self.at += 1
        return self.handle(*(Completed(at=self.at, instance=each, total_tokens=tokens) for each in instances))

    def fail(self, instance: str) -> list[Instruction]:
        """Let a task fail."""
        self.at += 1
        return self.handle(Failed(at=self.at, instance=instance, error_type="ValueError"))

    def exit(
        self, instance: str, reason: ExitReason = ExitReason.USER_EXIT_EARLY, *, has_output: bool = False
    ) -> list[Instruction]:
        """Let a task, or the gate behind it, end the run early."""
        self.at += 1
        return self.handle(Exited(at=self.at, instance=instance, reason=reason, has_output=has_output))

    def stopped(self, instance: str) -> list[Instruction]:
        """Let a task have been stopped."""
        self.at += 1
        return self.handle(Cancelled(at=self.at, instance=instance))

    def cancel(self) -> list[Instruction]:
        """Ask for the end of the run."""
        self.at += 1
        return self.handle(CancelRequested(at=self.at))

    def answer(
        self,
        question: Question,
        answer: bool | None,  # noqa: FBT001  as the stimulus has it
        error_type: str = "",
        message: str = "",
    ) -> list[Instruction]:
        """Answer a question."""
        self.at += 1
        return self.handle(
            Evaluated(at=self.at, question=question, answer=answer, error_type=error_type, message=message)
        )

    def all(self, kind: type[Word]) -> list[Word]:
        """Everything of that kind that was wanted."""
        return [each for each in self.wanted if isinstance(each, kind)]

    @property
    def started(self) -> list[str]:
        """The instances that were started, in order."""
        return [start.instance for start in self.all(Start)]

    @property
    def asked(self) -> list[Question]:
        """What was asked, in order."""
        return [each.question for each in self.all(Evaluate)]

    @property
    def ends(self) -> list[End]:
        """How it ended."""
        return self.all(End)

    @property
    def end(self) -> End:
        """How it ended, once."""
        (end,) = self.ends
        return end

    def play(
        self, verdict: Callable[[Question], bool] = lambda _: False, *, tokens: int = -1, most: int = 10_000
    ) -> Nest:
        """Let everything complete, oldest first, until the run ended."""
        if not self.told:
            self.begin()
        for _ in range(most):
            if self.ends:
                return self
            todo = self.source.list_unanswered()
            first = todo[-1] if isinstance(todo[-1], Evaluate) else todo[0]
            if isinstance(first, Evaluate):
                self.answer(first.question, verdict(first.question))
            elif isinstance(first, Start | Cancel):
                self.complete(first.instance, tokens=tokens)
        raise AssertionError(f"it does not end: {self.wanted[-5:]}")


def announced(wanted: Sequence[Instruction]) -> list[Announce]:
    """The announcements among instructions."""
    return [each for each in wanted if isinstance(each, Announce)]


def cancelled(wanted: Sequence[Instruction]) -> list[str]:
    """What is to be stopped."""
    return [each.instance for each in wanted if isinstance(each, Cancel)]
