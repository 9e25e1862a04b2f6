"""Instructions: the output of every scheduling machine. The coordinator carries them out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Union

from ensemble_ray.values.outputs import ExitReason, RunState

#: Termination reasons of a loop or a graph that reached a cap.
CAPS = frozenset({"max_iterations", "budget_exhausted", "max_steps"})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFailure:
    """Why a unit failed although no task in it did."""

    #: path of the unit without an occurrence: `loop:refine`, `graph:triage#3/loop:refine`
    unit: str
    at: float
    #: cap: a loop or graph reached its cap, and its cap raises; no_edge: no edge of a state matched; rejected: the review
    #: rejected the phase; evaluation: a predicate or condition raised an error, or resetting memory failed
    reason: Literal["cap", "no_edge", "rejected", "evaluation"]
    #: outputs of the run at the time of the failure (S-PAR-22)
    completed_before: int
    #: of a graph: the number of its last step; 0: no single step
    step: int = 0
    #: the reviewer's reason, or the text of the error
    message: str = ""
    #: of an evaluation: class of the error
    error_type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """The state of a loop that has begun."""

    unit: str
    #: completed instances per iteration, in body order; the last iteration may be unfinished (S-LOOP-112)
    iterations: tuple[tuple[str, ...], ...]
    #: None: it runs, failed or was cancelled
    termination_reason: Literal["predicate", "max_iterations", "exit_early", "budget_exhausted"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """The state of a phase that has begun or was skipped."""

    unit: str
    #: running: the run waits, or its record ends here
    status: Literal["running", "completed", "failed", "skipped"]
    #: instances with outputs of the accepted attempt, in the order of S-PHASE-41; for a loop, its path without an
    #: occurrence. If the phase runs, failed or was cut short: of its last attempt, with loops that may not have begun
    outputs: tuple[str, ...] = ()
    #: instances of its reviews, in order
    reviews: tuple[str, ...] = ()
    attempts: int = 0
    started_at: float = 0.0
    completed_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    state: str
    #: of the state's task; for a loop, its path without an occurrence
    instance: str
    #: `__END__`, a state, or all states of a fork; None: the step was not routed
    next_state: str | None

    @property
    def number(self) -> int:
        """Its number, 1-based. Steps are numbered over all branches in the order of their starts (S-GRAPH-93)."""
        return int(self.instance.rpartition("/")[0].rpartition("#")[2]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphResult:
    """The state of a graph that has begun."""

    unit: str
    #: of branches in declared order (S-GRAPH-99)
    steps: tuple[StepResult, ...]
    #: None: it runs, failed, exited early or was cancelled
    termination_reason: Literal["terminal", "max_steps"] | None


UnitResult = Union[LoopResult, PhaseResult, GraphResult]  # noqa: UP007  a name for the union, also at run time


def capped_units(results: Iterable[UnitResult]) -> tuple[str, ...]:
    """Return the keys of the loops and graphs that ended at a cap, without duplicates."""
    units = [each for each in results if not isinstance(each, PhaseResult)]
    return tuple(dict.fromkeys(each.unit.rpartition("/")[2] for each in units if each.termination_reason in CAPS))


#: Level and number of a task of a map-reduce. Maps are level 0, numbered in the order in which their items were pulled.
#: Reduces are numbered from 0 on their level, in the order in which their groups were made.
Position = tuple[int, int]

#: Why a map-reduce failed. first: a task failed, and its failure ends the run; all_maps: no map completed; level: no output
#: is left, or the final reduce failed; source: the user's code raised an error; empty: the source had no items.
FailureReason = Literal["", "first", "all_maps", "level", "source", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChanges:
    """Additions to a task for one execution of it."""

    #: 0: the first attempt
    attempt: int = 0
    #: feedback of a reviewer
    feedback: str = ""
    #: instance of an earlier attempt; its output is added to the prompt; "": none
    prior: str = ""


class ContextPart(NamedTuple):
    """One entry of a task's context."""

    #: of the outputs, in order
    instances: tuple[str, ...]
    #: whether the outputs arrive joined, as the iterations of a loop do (S-LOOP-72)
    is_joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MapItem:
    """The item of a map task."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceGroup:
    """The outputs that a reduce task combines."""

    level: int
    number: int
    #: in the order in which the task factory receives them
    inputs: tuple[Position, ...]
    is_final: bool = False


Changes = Union[TaskChanges, MapItem, ReduceGroup]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class PullItems:
    """Pull so many items from their source; answered by `ItemsPulled`. At most one such question is open."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokens:
    """Count the tokens of an output with the user's estimator; answered by their number."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilHolds:
    """Evaluate the predicate of a loop after an iteration; answered by its verdict (S-LOOP-50)."""

    #: path of the loop without an occurrence: `loop:refine`, `phase:draft#1/loop:refine`
    unit: str
    #: 1-based
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeMatches:
    """Evaluate the condition of a graph's edge after a step; answered by its verdict (S-GRAPH-42)."""

    unit: str
    #: 1-based
    step: int
    #: position among the graph's edges
    edge: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetMemory:
    """Reset the memory scopes of a loop's body before an iteration (S-LOOP-91, S-LOOP-93); answered by True."""

    unit: str
    #: the next iteration, 1-based
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflectOn:
    """Reflect on the outputs of an accepted attempt of a phase (S-REFL-19); answered by True, also after a failure."""

    unit: str
    #: 1-based
    execution: int


#: Questions to predicates and conditions.
UnitQuestion = Union[UntilHolds, EdgeMatches]  # noqa: UP007  as below
Question = Union[PullItems, CountTokens, UntilHolds, EdgeMatches, ResetMemory, ReflectOn]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpQuestions:
    """Questions that follow if a task completes. The process that runs the task can answer them in advance."""

    #: in this order, until one holds
    questions: tuple[UnitQuestion, ...]
    #: the entry that completion adds to the unit's history: body names, and instances of their outputs; the task's own is last
    names: tuple[str, ...]
    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Run a task; exactly one `Completed`, `Failed`, `Exited` or `Cancelled` answers it."""

    instance: str
    #: None: the plan's task as it is
    changes: Changes | None = None
    #: one part per context entry with outputs; None: the context of the plan's node
    context: tuple[ContextPart, ...] | None = None
    #: key of the first context entry without an output, if the task must not run without it
    missing: str | None = None
    #: whether `Completed.text` must hold the output's text
    wants_text: bool = False
    #: a hint: the machine asks these questions in any case
    asks_after: FollowUpQuestions | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Log that a task will not run, and why; no event (S-PAR-28)."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop a running task. A stimulus still reports its end."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Call user code in its own process; one `Evaluated` answers it."""

    question: Question


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
    #: of the state's task; for a loop, its path without an occurrence
    instance: str
    #: for a loop, the last output of its projection (S-GRAPH-120)
    output: ContextPart
    #: `__END__` included
    next_state: str
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Notify listeners before the instructions that follow."""

    what: IterationEnded | StepEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Inform:
    """Log a text for users at INFO."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Log a text for users at WARN."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnLeftOut:
    """Log at WARN that a task failed and the run continues without it (S-MR-101, S-MR-104)."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnOversized:
    """Log at WARN that an output alone exceeds the budget and forms its own group (S-MR-71)."""

    output: Position
    tokens: int
    #: of a group
    budget_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The last instruction; the machine ignores later stimuli.

    With the state `waiting`, no task can run before a decision at a gate. `Continued` starts suspended tasks again (S-REV-116).
    """

    state: RunState
    exit_reason: ExitReason
    failure: FailureReason = ""
    #: results of loops, phases and graphs, in the order in which they ended
    units: tuple[UnitResult, ...] = ()
    #: failures of units that no task's failure caused, in order
    unit_failures: tuple[UnitFailure, ...] = ()


Instruction = Union[  # noqa: UP007  a name for the union, also at run time
    Start, Skip, Cancel, Evaluate, Announce, Inform, Warn, WarnLeftOut, WarnOversized, End
]
