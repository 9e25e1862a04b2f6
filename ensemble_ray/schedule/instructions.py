"""What a source wants done. Verbs; carried out by the coordinator, never here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Union

from ensemble_ray.values.outputs import ExitReason, RunState

#: Why a loop or a graph ends at a cap.
CAPS = frozenset({"max_iterations", "budget_exhausted", "max_steps"})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFailure:
    """Why a unit failed where none of its tasks did."""

    #: path of the unit without an occurrence: `loop:refine`, `graph:triage#3/loop:refine`
    unit: str
    at: float
    #: cap: the cap of a loop or graph that raises; no_edge: no edge of a state matched; rejected: the review of a phase
    #: refused it; evaluation: the user's predicate or condition raised, or memory could not be reset
    reason: Literal["cap", "no_edge", "rejected", "evaluation"]
    #: how many outputs the run had when it failed (S-PAR-22)
    completed_before: int
    #: of a graph: the number of the step after which it failed; 0: of no single one
    step: int = 0
    #: of a rejected phase: the reviewer's reason; of an evaluation: what the error says
    message: str = ""
    #: of an evaluation: class of the error
    error_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """A loop that was begun."""

    unit: str
    #: per iteration the instances that completed, in body order; the last one may be unfinished (S-LOOP-112)
    iterations: tuple[tuple[str, ...], ...]
    #: None: it runs, failed or was cancelled
    termination_reason: Literal["predicate", "max_iterations", "exit_early", "budget_exhausted"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """A phase that began or was skipped."""

    unit: str
    #: running: the run waits, or its record ends here
    status: Literal["running", "completed", "failed", "skipped"]
    #: instances with outputs of the accepted attempt, of a loop its path without an occurrence; of a phase that runs, failed or
    #: was cut short, of its last attempt, and then also of loops that may not have begun; in the order of S-PHASE-41
    outputs: tuple[str, ...] = ()
    #: instances of its review's executions, in order
    reviews: tuple[str, ...] = ()
    attempts: int = 0
    started_at: float = 0.0
    completed_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step of a graph."""

    state: str
    #: of the state's task; of a state that is a loop, its path without an occurrence
    instance: str
    #: what routing chose, `__END__` included; of a fork all its states; None: the step was not routed
    next_state: str | None

    @property
    def number(self) -> int:
        """Return its number, 1-based; steps are numbered over all branches in the order of their starts (S-GRAPH-93)."""
        return int(self.instance.rpartition("/")[0].rpartition("#")[2]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphResult:
    """A graph that was begun."""

    unit: str
    #: of branches in declared order (S-GRAPH-99)
    steps: tuple[StepResult, ...]
    #: None: it runs, failed, exited early or was cancelled
    termination_reason: Literal["terminal", "max_steps"] | None


UnitResult = Union[LoopResult, PhaseResult, GraphResult]  # noqa: UP007  a name for the union, also at run time


def capped_units(results: Iterable[UnitResult]) -> tuple[str, ...]:
    """Return the keys of the loops and graphs that ended at a cap, each once."""
    units = [each for each in results if not isinstance(each, PhaseResult)]
    return tuple(dict.fromkeys(each.unit.rpartition("/")[2] for each in units if each.termination_reason in CAPS))


#: Level and number of a task of a map-reduce. Level 0 is the maps; the number of a map is the place of its item in the
#: order in which items were pulled. Reduces are numbered from 0 on each level, in the order in which their groups are made.
Position = tuple[int, int]

#: Why a map-reduce failed. first: a task failed whose failure ends the run; all_maps: no map completed; level: no output is
#: left, or the final reduce failed; source: the user's code raised; empty: the source had no items.
FailureReason = Literal["", "first", "all_maps", "level", "source", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChanges:
    """What an execution of a task has beside the task itself; it rides on the order."""

    #: 0: the first attempt
    attempt: int = 0
    #: of a reviewer, for the next attempt
    feedback: str = ""
    #: instance of an earlier attempt whose output goes along; "": none
    prior: str = ""


class ContextPart(NamedTuple):
    """One entry of a task's context: the outputs that arrive in its place."""

    #: whose outputs, in order
    instances: tuple[str, ...]
    #: whether they arrive as one, as the iterations of a loop do (S-LOOP-72)
    is_joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MapItem:
    """The item that a map is made of."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceGroup:
    """The outputs that a reduce is made of."""

    level: int
    number: int
    #: place of each, in the order in which the factory gets them
    inputs: tuple[Position, ...]
    is_final: bool = False


Changes = Union[TaskChanges, MapItem, ReduceGroup]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class PullItems:
    """How many items to take from their source; answered by `ItemsPulled`. Only one such question is open at a time."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokens:
    """Whose output's tokens the user's estimator is to count; answered by their number."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilHolds:
    """Ask the predicate of a loop after an iteration; answered by its verdict (S-LOOP-50)."""

    #: path of the loop without an occurrence: `loop:refine`, `phase:draft#1/loop:refine`
    unit: str
    #: 1-based
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeMatches:
    """Ask the condition of a graph's edge after a step; answered by its verdict (S-GRAPH-42)."""

    unit: str
    #: 1-based
    step: int
    #: position among the graph's edges
    edge: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetMemory:
    """Clear or cut the memory scopes of a loop's body before an iteration (S-LOOP-91, S-LOOP-93); answered by True."""

    unit: str
    #: the iteration that follows, 1-based
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectOn:
    """Have the outputs of an accepted attempt of a phase reflected on (S-REFL-19); answered by True, whatever came of it."""

    unit: str
    #: 1-based
    execution: int


#: What predicates and conditions are asked.
UnitQuestion = Union[UntilHolds, EdgeMatches]  # noqa: UP007  as below
Question = Union[PullItems, CountTokens, UntilHolds, EdgeMatches, ResetMemory, ReflectOn]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class AsksAfter:
    """What `Evaluate` will ask if a task completes, for those who can have it answered where the task is done."""

    #: asked in this order, until one holds
    questions: tuple[UnitQuestion, ...]
    #: what its completion adds to the history of its unit: body names, and whose outputs; the last one is its own
    names: tuple[str, ...]
    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Have a task done; exactly one completed, failed, exited or cancelled answers it."""

    instance: str
    #: None: the task as it stands in the plan
    changes: Changes | None = None
    #: what its context gives, one part per entry that has outputs; None: what the plan's node says
    context: tuple[ContextPart, ...] | None = None
    #: key of the first entry of its context that has no output yet, where it may not run without
    missing: str | None = None
    #: whether the source reads the text of its output: `Completed.text` has it
    wants_text: bool = False
    #: no part of what is wanted: the questions are asked all the same where nobody heeds this
    asks_after: AsksAfter | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Tell the log that the task will not run, and why; no event (S-PAR-28)."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop a running task; its end is told all the same."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Ask the user's code where it lives; one `Evaluated` answers it."""

    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Wait for a decision about a gate; one `Decided` answers it. Holds no process, thread or slot."""

    gate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Let the outputs of these go: nothing will ask for them."""

    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationEnded:
    """A loop finished an iteration (S-LOOP-107)."""

    unit: str
    #: 1-based
    iteration: int
    #: of the body's tasks, in body order
    instances: tuple[str, ...]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A graph finished a step and chose the next state (S-GRAPH-75)."""

    unit: str
    #: 1-based
    step: int
    state: str
    #: of the state's task; of a state that is a loop, its path without an occurrence
    instance: str
    #: of a loop, the last of what it projects (S-GRAPH-120)
    output: ContextPart
    #: `__END__` included
    next_state: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell listeners; before anything that the source wants after it."""

    what: IterationEnded | StepEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Inform:
    """Say this to people, as an INFO."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Say this to people, as a WARN."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnLeftOut:
    """Say as a WARN that this task failed and that the others go on without it (S-MR-101, S-MR-104)."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnOversized:
    """Say as a WARN that this output alone has more tokens than the budget, and has a group of its own (S-MR-71)."""

    output: Position
    tokens: int
    #: of a group
    budget_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Nothing runs any more and nothing will. The last instruction of a run; whatever is told later is ignored.

    With the state `waiting`, nothing will run before somebody decided at gates: a source that is told that the run goes on
    does so (S-REV-116).
    """

    state: RunState
    exit_reason: ExitReason
    failure: FailureReason = ""
    #: what became of loops, phases and graphs, in the order in which they ended
    units: tuple[UnitResult, ...] = ()
    #: of units where no task's failure is the reason, in order
    unit_failures: tuple[UnitFailure, ...] = ()


Instruction = Union[  # noqa: UP007  a name for the union, also at run time
    Start, Skip, Cancel, Evaluate, Wait, Forget, Announce, Inform, Warn, WarnLeftOut, WarnOversized, End
]
