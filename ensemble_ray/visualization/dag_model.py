"""A team's or a run's graph of tasks as data, and its JSON form. Package: visualization.

In: what `DagExporter` found. Out: values with the fields of schema 1.3; what a field of ours adds is left out where it says
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ensemble_ray.values.value import Instant, Value, utc_now

__all__ = ["DagAgentNode", "DagGraphEdge", "DagModel", "DagPhase", "DagTaskNode", "NodeType"]

#: What a node is; None: a plain task.
NodeType = Literal["map", "reduce", "final-reduce", "direct", "loop", "graph-state", "graph-end"]


def _is_none(value: object) -> bool:
    return value is None


def _is_empty(value: object) -> bool:
    return not value


class DagAgentNode(Value):
    """An agent that takes part."""

    role: str
    goal: str
    background: str | None = None
    tool_names: tuple[str, ...] = ()
    allow_delegation: bool = False


class DagTaskNode(Value):
    """A task, a loop or a state.

    Attributes:
        id: Position among the tasks as text; of a task in a loop `{loop}.{position}`.
        agent_role: Of who does it; `(deterministic)` for a handler, `(synthesized)` before an agent is made, `(loop)`.
        depends_on: Ids of the tasks and loops that it waits for.
        parallel_group: Its level: 0 waits for nothing.
        on_critical_path: Whether it lies on the longest chain.
        node_type: None: a plain task.
        map_reduce_level: Its level in the tree of a map-reduce.
        loop_max_iterations: Of a loop: how often it runs at most.
        loop_body: Of a loop: its tasks in order.
        phase: Name of the phase that it is in.
        key: Name of the task or loop in plans, traces and records; None: it has none there.
    """

    id: str
    description: str
    expected_output: str = ""
    agent_role: str
    depends_on: tuple[str, ...] = ()
    parallel_group: int = 0
    on_critical_path: bool = False
    node_type: NodeType | None = None
    map_reduce_level: int | None = None
    loop_max_iterations: int | None = None
    loop_body: tuple[DagTaskNode, ...] = ()
    phase: str | None = None
    key: str | None = Field(default=None, exclude_if=_is_none)


class DagGraphEdge(Value):
    """What leads from one state of a graph to another.

    Attributes:
        condition_description: Its label.
        unconditional: Whether nothing is asked before it is taken.
        fired: Whether a run took it.
        branching: `fork` or `join`, of edges between branches that run side by side; None: an ordinary edge.
    """

    from_state_id: str
    to_state_id: str
    condition_description: str | None = None
    unconditional: bool = True
    fired: bool = False
    branching: Literal["fork", "join"] | None = Field(default=None, exclude_if=_is_none)


class DagPhase(Value):
    """A phase, and what it waits for.

    Attributes:
        after: Names of the phases that have to be completed first.
        review_id: Id of the task that reviews it; None: nothing does.
        key: Its name in plans, traces and records.
    """

    name: str
    workflow: str = "sequential"
    after: tuple[str, ...] = ()
    review_id: str | None = None
    key: str


class DagModel(Value):
    """A graph of tasks.

    Attributes:
        parallel_groups: Ids by level, in the order of the tasks.
        critical_path: Ids, from the first to the last; loops behind it.
        mode: `graph`: the tasks are states, and `graph_edges` leads from one to the other; None: `depends_on` does.
        phases: In declared order; empty: there are none.
    """

    schema_version: str = "1.3"
    type: Literal["dag"] = "dag"
    workflow: str
    generated_at: Instant = Field(default_factory=utc_now)
    agents: tuple[DagAgentNode, ...] = ()
    tasks: tuple[DagTaskNode, ...]
    parallel_groups: tuple[tuple[str, ...], ...] = ()
    critical_path: tuple[str, ...] = ()
    map_reduce_mode: Literal["static", "adaptive"] | None = None
    mode: Literal["graph"] | None = None
    graph_edges: tuple[DagGraphEdge, ...] = ()
    graph_start_state_id: str | None = None
    graph_termination_reason: str | None = None
    graph_steps_run: int | None = None
    phases: tuple[DagPhase, ...] = Field(default=(), exclude_if=_is_empty)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return pretty JSON text; with a path it is also written there, parent folders made.

        Raises:
            OSError: the file cannot be written.
        """
        text = self.model_dump_json(indent=2)
        if path is not None:
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return text
