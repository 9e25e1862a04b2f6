"""What became of the units of a run, as their machines know it: instances, and no outputs. Package: schedule. Data only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Union

__all__ = [
    "CAPS",
    "GraphResult",
    "LoopResult",
    "PhaseResult",
    "StepResult",
    "UnitFailure",
    "UnitResult",
    "capped_units",
]


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
