"""Units of a plan that are not single tasks: loops, phases and a graph. Package: plan. Data only.

A plan is a tree of units. A unit has a key in the name space of the tasks, such as `loop:refine`, and its members are tasks
or units by key. Its executions are occurrences of that key: `loop:refine#2` is the third iteration, `phase:draft#1` the
second attempt, `graph:triage#4` the fifth step; what runs inside has a path below it, `loop:refine#2/writer#0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, Union

__all__ = [
    "EdgeEntry",
    "ForkEntry",
    "GraphEntry",
    "GraphUnit",
    "JoinEntry",
    "LoopUnit",
    "PhaseUnit",
    "StateEntry",
    "Unit",
    "in_waiting_order",
    "members_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopUnit:
    """Tasks that are repeated in order until a predicate holds or a cap is reached (20)."""

    unit: Literal["loop"] = "loop"
    key: str
    name: str
    #: in declared order
    body: tuple[str, ...]
    #: names of the body in histories and events (S-LOOP-4), in the same order
    body_names: tuple[str, ...]
    #: tasks or units outside that it waits for, and whose outputs its first task is shown (S-LOOP-124)
    context: tuple[str, ...] = ()
    #: as `Node.context_tasks`
    context_tasks: tuple[str, ...] = ()
    #: at least 1; never None, since no loop is without a cap (S-LOOP-20)
    max_iterations: int = 5
    #: whether the user's predicate is asked after each iteration
    has_until: bool = False
    on_max_iterations: Literal["return_last", "throw", "return_with_flag"] = "return_last"
    output_mode: Literal["last_iteration", "final_task_only", "all_iterations"] = "last_iteration"
    memory_mode: Literal["accumulate", "fresh_per_iteration", "window"] = "accumulate"
    memory_window_size: int = 0
    #: names of the memory scopes that the body declares, each once; empty where the ensemble has no store
    memory_scopes: tuple[str, ...] = ()
    inject_feedback: bool = True
    #: tokens that its iterations may spend together; None: no limit
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUnit:
    """A named group of tasks and loops; phases form a dependency graph (21)."""

    unit: Literal["phase"] = "phase"
    key: str
    name: str
    #: tasks in declared order, then loops; in a sequential phase what waits for a loop stands behind it (S-LOOP-168)
    members: tuple[str, ...]
    workflow: Literal["sequential", "parallel"] = "sequential"
    #: keys of the phases that have to be completed first
    after: tuple[str, ...] = ()
    #: the task whose answer is the decision about an attempt; None: every attempt is accepted
    review: str | None = None
    max_retries: int = 2
    max_predecessor_retries: int = 2
    #: tasks inside of it whose outputs are reflected on when an attempt was accepted; without a review that is when they
    #: have completed, and nothing stands here (S-REFL-19)
    reflecting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """A state of a graph."""

    name: str
    #: the task or the loop that is run at each visit
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeEntry:
    """From one state to the next; tried in declared order (S-GRAPH-42)."""

    entry: Literal["edge"] = "edge"
    from_state: str
    to_state: str
    label: str | None = None
    #: whether the user's condition is asked; else it matches always
    has_condition: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkEntry:
    """From one state to several that run side by side."""

    entry: Literal["fork"] = "fork"
    from_state: str
    to_states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEntry:
    """From several branches to one state, when enough of them have arrived."""

    entry: Literal["join"] = "join"
    from_states: tuple[str, ...]
    to_state: str
    #: None: all; else as many as that, and the others are cancelled
    count: int | None = None


GraphEntry = Union[EdgeEntry, ForkEntry, JoinEntry]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphUnit:
    """A state machine of tasks (22)."""

    unit: Literal["graph"] = "graph"
    key: str
    name: str
    #: in declared order
    states: tuple[StateEntry, ...]
    #: in declared order; the index of one is its position here
    edges: tuple[GraphEntry, ...]
    start: str
    max_steps: int = 50
    on_max_steps: Literal["return_last", "throw", "return_with_flag"] = "return_last"
    inject_feedback_on_revisit: bool = True
    no_feedback_states: tuple[str, ...] = ()


Unit = Union[LoopUnit, PhaseUnit, GraphUnit]  # noqa: UP007  a name for the union, also at run time


def members_of(unit: Unit) -> tuple[str, ...]:
    """Return the keys of what runs inside a unit; of a loop in it the loop alone."""
    match unit:
        case LoopUnit():
            return unit.body
        case PhaseUnit():
            return unit.members if unit.review is None else (*unit.members, unit.review)
        case GraphUnit():
            return tuple(state.member for state in unit.states)


def in_waiting_order(keys: Sequence[str], waits_for: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the keys such that each stands behind those it waits for; the first that can go goes first.

    Args:
        keys: In declared order. What waits in a circle is left out; such definitions are refused.
        waits_for: Keys by key; those that are not among `keys` are waited for elsewhere.
    """
    listed = set(keys)
    waiting = {key: {each for each in waits_for.get(key, ()) if each in listed} for key in keys}
    rank = {key: position for position, key in enumerate(keys)}
    dependents: dict[str, list[str]] = {}
    for key, needed in waiting.items():
        for each in needed:
            dependents.setdefault(each, []).append(key)
    ready = [rank[key] for key in keys if not waiting[key]]
    ordered: list[str] = []
    while ready:
        key = keys[heappop(ready)]
        ordered.append(key)
        for dependent in dependents.get(key, ()):
            waiting[dependent].discard(key)
            if not waiting[dependent]:
                heappush(ready, rank[dependent])
    return tuple(ordered)
