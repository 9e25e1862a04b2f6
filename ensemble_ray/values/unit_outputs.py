"""What loops, phases and a graph gave, for the accessors of a run's output. Layer: between the output of a task and that of a run.

Each view holds outputs that the run has anyway, and copies none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ensemble_ray.values.task_output import TaskOutput

__all__ = ["GraphHistory", "GraphStep", "LoopHistory", "UnitOutputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStep:
    """A step of a graph.

    Attributes:
        state_name: The state that was run.
        step_number: 1-based.
        output: What the state gave.
        next_state: What routing chose, `Graph.END` included; None where the run ended before.
    """

    state_name: str
    step_number: int
    output: TaskOutput
    next_state: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHistory:
    """What the iterations of a loop gave, by body key in body order, and why it ended."""

    iterations: Sequence[Mapping[str, TaskOutput]]
    termination_reason: str | None
    #: it was ended by its cap, and asked to say so (S-LOOP-63)
    is_flagged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphHistory:
    """The steps of a graph, and why it ended."""

    steps: Sequence[GraphStep]
    termination_reason: str | None
    #: it was ended by its cap, and asked to say so (S-GRAPH-51)
    is_flagged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutputs:
    """What the units of a run gave beside its list of outputs."""

    #: by name; of a loop that ran several times, its last run
    loops: Mapping[str, LoopHistory] = field(default_factory=dict[str, LoopHistory])
    #: outputs of completed phases by name, in the order in which they completed
    phases: Mapping[str, Sequence[TaskOutput]] = field(default_factory=dict[str, Sequence[TaskOutput]])
    graph: GraphHistory | None = None
