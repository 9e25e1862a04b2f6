"""What a trace says of loops and graphs, and where phases stand. Layer: above value."""

from __future__ import annotations

from enum import StrEnum

from ensemble_ray.values.value import Value

__all__ = ["GraphTrace", "GraphTraceStep", "LoopTrace", "PhaseStatus"]


class PhaseStatus(StrEnum):
    """What became of a phase (21)."""

    #: the run waits, or was interrupted
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    #: a phase before it failed, or the run ended before its turn
    SKIPPED = "skipped"


class LoopTrace(Value):
    """A loop that ran. A loop that ran several times, such as a graph's state, has one for each."""

    loop_name: str
    #: where it ran: `loop:refine`, or `graph:triage#3/loop:refine` in the fourth step of a graph
    path: str
    iterations_run: int
    max_iterations: int
    #: `predicate`, `max_iterations`, `budget_exhausted` or `exit_early`; None: it runs, failed or was cancelled
    termination_reason: str | None
    on_max_iterations: str
    output_mode: str
    memory_mode: str
    #: body keys of the tasks that completed, per iteration, in body order
    iterations: tuple[tuple[str, ...], ...] = ()


class GraphTraceStep(Value):
    """A step of a graph."""

    #: `graph:triage#4`
    path: str
    state_name: str
    #: 1-based
    step_number: int
    #: `__END__` included; None: the step was not routed
    next_state: str | None


class GraphTrace(Value):
    """A graph that ran."""

    graph_name: str
    path: str
    start_state: str
    #: `terminal` or `max_steps`; None: it runs, failed, exited early or was cancelled
    termination_reason: str | None
    steps_run: int
    max_steps: int
    steps: tuple[GraphTraceStep, ...] = ()
