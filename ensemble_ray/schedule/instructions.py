"""Instructions: the output of every scheduling machine. The coordinator carries them out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Union

from msgspec import Struct

from ensemble_ray.values.outputs import ExitReason, RunState

CAPS = frozenset({"max_iterations", "budget_exhausted", "max_steps"})


class UnitFailure(Struct, frozen=True, kw_only=True):
    """A failure of a unit that no task's failure caused."""

    #: path without an occurrence: `loop:refine`, `graph:triage#3/loop:refine`
    unit: str
    at: float
    #: evaluation: a predicate or condition raised an error, or resetting memory failed
    reason: Literal["cap", "no_edge", "rejected", "evaluation"]
    #: number of outputs of the run at that time (S-PAR-22)
    completed_before: int
    #: of a graph; 0: no single step
    step: int = 0
    message: str = ""
    error_type: str = ""


class LoopResult(Struct, frozen=True, kw_only=True):
    unit: str
    #: completed instances in body order; the last iteration may be unfinished (S-LOOP-112)
    iterations: tuple[tuple[str, ...], ...]
    termination_reason: Literal["predicate", "max_iterations", "exit_early", "budget_exhausted"] | None


class PhaseResult(Struct, frozen=True, kw_only=True):
    unit: str
    status: Literal["running", "completed", "failed", "skipped"]
    #: instances of the accepted attempt, else of the last one (S-PHASE-41); for a loop, its path
    outputs: tuple[str, ...] = ()
    reviews: tuple[str, ...] = ()
    attempts: int = 0
    started_at: float = 0.0
    completed_at: float = 0.0


class StepResult(Struct, frozen=True, kw_only=True):
    state: str
    #: of the state's task; for a loop, its path without an occurrence
    instance: str
    #: `__END__`, or all states of a fork; None: the step was not routed
    next_state: str | None

    @property
    def number(self) -> int:
        """1-based; steps are numbered over all branches in the order of their starts (S-GRAPH-93)."""
        return int(self.instance.rpartition("/")[0].rpartition("#")[2]) + 1


class GraphResult(Struct, frozen=True, kw_only=True):
    unit: str
    steps: tuple[StepResult, ...]
    termination_reason: Literal["terminal", "max_steps"] | None


UnitResult = Union[LoopResult, PhaseResult, GraphResult]  # noqa: UP007  a name for the union, also at run time


def capped_units(results: Iterable[UnitResult]) -> tuple[str, ...]:
    """Return the unique keys of the loops and graphs that ended at a cap."""
    units = [each for each in results if not isinstance(each, PhaseResult)]
    return tuple(dict.fromkeys(each.unit.rpartition("/")[2] for each in units if each.termination_reason in CAPS))


#: Level and number of a task of a map-reduce, both from 0; maps are level 0.
Position = tuple[int, int]

#: first: a failed task ends the run; all_maps: no map completed; level: no output is left, or the final reduce failed;
#: source: user code raised an error; empty: the source had no items.
FailureReason = Literal["", "first", "all_maps", "level", "source", "empty"]


class TaskChanges(Struct, frozen=True, kw_only=True):
    attempt: int = 0
    feedback: str = ""
    #: instance whose output is added to the prompt; "": none
    prior: str = ""


class ContextPart(NamedTuple):
    instances: tuple[str, ...]
    #: as the iterations of a loop do (S-LOOP-72)
    is_joined: bool = False


class MapItem(Struct, frozen=True, kw_only=True):
    number: int


class ReduceGroup(Struct, frozen=True, kw_only=True):
    level: int
    number: int
    inputs: tuple[Position, ...]
    is_final: bool = False


Changes = Union[TaskChanges, MapItem, ReduceGroup]  # noqa: UP007  a name for the union, also at run time


class PullItems(Struct, frozen=True, kw_only=True):
    """Answered by `ItemsPulled`. At most one such question is open."""

    count: int


class CountTokens(Struct, frozen=True, kw_only=True):
    """Count the tokens of an output with the user's estimator."""

    instance: str


class UntilHolds(Struct, frozen=True, kw_only=True):
    unit: str
    #: 1-based
    iteration: int


class EdgeMatches(Struct, frozen=True, kw_only=True):
    unit: str
    #: 1-based
    step: int
    edge: int


class ResetMemory(Struct, frozen=True, kw_only=True):
    """Reset the memory scopes of a loop's body before an iteration (S-LOOP-91, S-LOOP-93)."""

    unit: str
    iteration: int


class ReflectOn(Struct, frozen=True, kw_only=True):
    """Reflect on the outputs of an accepted attempt of a phase (S-REFL-19); answered by True, also after a failure."""

    unit: str
    #: 1-based
    execution: int


UnitQuestion = Union[UntilHolds, EdgeMatches]  # noqa: UP007  as below
Question = Union[PullItems, CountTokens, UntilHolds, EdgeMatches, ResetMemory, ReflectOn]  # noqa: UP007  a name for the union, also at run time


class FollowUpQuestions(Struct, frozen=True, kw_only=True):
    """Questions that follow when a task completes. The process of the task can answer them in advance."""

    questions: tuple[UnitQuestion, ...]
    #: the entry that completion adds to the unit's history; the task's own output is last
    names: tuple[str, ...]
    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run a task; exactly one `Completed`, `Failed`, `Exited` or `Cancelled` answers it."""

    instance: str
    changes: Changes | None = None
    #: None: the context of the plan's node
    context: tuple[ContextPart, ...] | None = None
    #: key of the first context entry without an output; the task then fails
    missing: str | None = None
    wants_text: bool = False
    asks_after: FollowUpQuestions | None = field(default=None, compare=False)


class Skip(Struct, frozen=True, kw_only=True):
    """Log that a task will not run; no event (S-PAR-28)."""

    instance: str
    reason: str


class Cancel(Struct, frozen=True, kw_only=True):
    """Stop a running task. A stimulus still reports its end."""

    instance: str


class Evaluate(Struct, frozen=True, kw_only=True):
    """Call user code in its own process; one `Evaluated` answers it."""

    question: Question


class IterationEnded(Struct, frozen=True, kw_only=True):
    unit: str
    #: 1-based
    iteration: int
    instances: tuple[str, ...]
    duration_s: float


class StepEnded(Struct, frozen=True, kw_only=True):
    unit: str
    #: 1-based
    step: int
    state: str
    #: of the state's task; for a loop, its path without an occurrence
    instance: str
    output: ContextPart
    next_state: str
    duration_s: float


class Announce(Struct, frozen=True, kw_only=True):
    """Notify listeners before the instructions that follow."""

    what: IterationEnded | StepEnded


class Inform(Struct, frozen=True, kw_only=True):
    """Log at INFO."""

    text: str


class Warn(Struct, frozen=True, kw_only=True):
    """Log at WARN."""

    text: str


class WarnLeftOut(Struct, frozen=True, kw_only=True):
    """Log at WARN that a task failed and the run continues without it (S-MR-101, S-MR-104)."""

    instance: str


class WarnOversized(Struct, frozen=True, kw_only=True):
    """Log at WARN that an output alone exceeds the budget of a group (S-MR-71)."""

    output: Position
    tokens: int
    budget_tokens: int


class End(Struct, frozen=True, kw_only=True):
    """The last instruction; the machine ignores later stimuli. After `waiting`, `Continued` starts suspended tasks (S-REV-116)."""

    state: RunState
    exit_reason: ExitReason
    failure: FailureReason = ""
    #: in the order in which they ended
    units: tuple[UnitResult, ...] = ()
    unit_failures: tuple[UnitFailure, ...] = ()


Instruction = Union[  # noqa: UP007  a name for the union, also at run time
    Start, Skip, Cancel, Evaluate, Announce, Inform, Warn, WarnLeftOut, WarnOversized, End
]
