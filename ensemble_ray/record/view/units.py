"""The tasks of a trace in their loops, phases and graph. Pure.

In: a trace, whose tasks name their executions (S-TRC-14). Out: branches: a unit, and below it its iterations, attempts or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from ensemble_ray.values.ids import node_key
from ensemble_ray.values.trace import TaskTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ensemble_ray.values.trace import ExecutionTrace


@dataclass(slots=True, kw_only=True)
class UnitBranch:
    """A unit, or one execution of it."""

    #: `loop:refine`, or `loop:refine#2` of an execution
    path: str
    entries: list[Entry] = field(default_factory=list["Entry"])

    @property
    def is_unit(self) -> bool:
        """Whether it is a unit, and not one execution."""
        return "#" not in self.path.rpartition("/")[2]

    def tasks(self) -> Iterator[TaskTrace]:
        """Return the tasks in it, however deep."""
        for entry in self.entries:
            if isinstance(entry, UnitBranch):
                yield from entry.tasks()
            else:
                yield entry


Entry = Union[TaskTrace, UnitBranch]  # noqa: UP007  a name for the union, also at run time


def branches_of(traces: Iterable[TaskTrace]) -> list[Entry]:
    """Return tasks in their units, each where its first task stands."""
    root = UnitBranch(path="")
    known: dict[str, UnitBranch] = {"": root}
    for trace in traces:
        path = str(trace.metadata.get("instance", "")).rpartition("/")[0]
        _branch(path, known).entries.append(trace)
    return root.entries


def _branch(path: str, known: dict[str, UnitBranch]) -> UnitBranch:
    """Return the branch of a path, made with those above it."""
    found = known.get(path)
    if found is None:
        before, _, last = path.rpartition("/")
        key, mark, _ = last.rpartition("#")
        above = path.rpartition("#")[0] if mark and key else before
        found = known[path] = UnitBranch(path=path)
        _branch(above, known).entries.append(found)
    return found


def describe_unit(trace: ExecutionTrace, path: str) -> tuple[str, ...]:
    """Return what a trace says of a unit or of one execution of it, in few words."""
    for loop in trace.loop_traces:
        if loop.path == path:
            ran = f"{loop.iterations_run} of at most {loop.max_iterations} iterations"
            return (ran, loop.termination_reason) if loop.termination_reason else (ran,)
    for phase in trace.phases:
        if phase.path == path and not phase.name.startswith("__review__"):
            attempts = f"{phase.attempts} attempt{'' if phase.attempts == 1 else 's'}"
            return (phase.status.value, attempts) if phase.attempts else (phase.status.value,)
    graph = trace.graph_trace
    if graph is None:
        return ()
    if graph.path == path:
        ran = f"{graph.steps_run} of at most {graph.max_steps} steps"
        return (ran, graph.termination_reason) if graph.termination_reason else (ran,)
    step = next((step for step in graph.steps if step.path == path), None)
    if step is None:
        return ()
    return (step.state_name,) if step.next_state is None else (f"{step.state_name} → {step.next_state}",)


def is_named(name: str, instance: str) -> bool:
    """Whether a person who writes that name means that execution of a task, among others or alone (S-LOOP-184).

    Examples:
        >>> [is_named(name, "loop:refine#2/writer#0") for name in ("writer", "loop:refine", "loop:refine#2", "critic")]
        [True, True, True, False]
    """
    return node_key(instance) == name or instance == name or instance.startswith((f"{name}/", f"{name}#"))
