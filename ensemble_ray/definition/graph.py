"""Graphs: state machines with tasks and loops as states, and edges between them.

The start of a run checks a graph against its ensemble (`validation`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field, SkipValidation

from ensemble_ray.definition import fields
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.task_output import GraphRoutingContext
from ensemble_ray.values.value import Accepts, OneOrMany, Value, to_tuple

END = "__END__"  # no state may have this name
Condition: TypeAlias = Callable[[GraphRoutingContext], bool | Awaitable[bool]]  # sync or async
_LEAST_BRANCHES = 2  # of a fork or a join
_EDGE_LENGTHS = (2, 3)  # tuples in place of an edge, without and with a condition


class _Entry(Value):
    @fields.checks_arguments
    @classmethod
    def _keep_blanks(cls, arguments: dict[str, Any]) -> None:
        """Let the graph refuse a missing state, with a message that names the edge (S-GRAPH-14)."""
        for field in ("from_state", "to_state"):
            if field in cls.model_fields and arguments.get(field) is None:
                arguments[field] = ""
        for field in ("from_states", "to_states"):
            if field in cls.model_fields:
                arguments[field] = to_tuple(arguments.get(field))
        condition = arguments.get("condition")
        if condition is not None and not callable(condition):
            raise ValidationError(f"GraphEdge condition must be a callable, got: {type(condition).__name__}")


class GraphEdge(_Entry):
    """From one state to the next.

    Attributes:
        from_state: Name of a state.
        to_state: Name of a state, or `Graph.END`.
        condition: Decides about the edge: a function of a `GraphRoutingContext`, sync or async; None: always.
        label: Its name in plans, traces and messages.
    """

    from_state: fields.StrictText = Field(kw_only=False)
    to_state: fields.StrictText = Field(kw_only=False)
    condition: Annotated[Condition | None, SkipValidation] = Field(default=None, kw_only=False)
    label: fields.StrictText | None = None


class GraphFork(_Entry):
    """From one state to several that run side by side.

    Attributes:
        from_state: Name of a state.
        to_states: Names of the first states of the branches, at least two.
    """

    from_state: fields.StrictText = Field(kw_only=False)
    to_states: OneOrMany[fields.StrictText] = Field(kw_only=False)


class GraphJoin(_Entry):
    """From several branches to one state, after enough of them have arrived.

    Attributes:
        from_states: Names of the last states of the branches, at least two.
        to_state: Name of a state, or `Graph.END`.
        count: Branches that must arrive; then the others are cancelled. None: all.
    """

    from_states: OneOrMany[fields.StrictText] = Field(kw_only=False)
    to_state: fields.StrictText = Field(kw_only=False)
    count: fields.StrictInt | None = None


class MaxStepsAction(StrEnum):
    """Result of a graph that reaches its limit."""

    RETURN_LAST = "return_last"  # the output of the last step
    THROW = "throw"  # fails with `MaxGraphStepsExceededError`
    RETURN_WITH_FLAG = "return_with_flag"  # and `was_graph_terminated_by_max_steps` is true


Edge: TypeAlias = GraphEdge | GraphFork | GraphJoin
EdgeTuple: TypeAlias = tuple[str, str] | tuple[str, str, Condition | None]  # from, to, and the condition

if TYPE_CHECKING:
    _Action = Accepts[MaxStepsAction, MaxStepsAction | str]
    _Names = Accepts[frozenset[str], str | frozenset[str] | set[str] | Sequence[str] | None]
    _Edges = Accepts[Sequence[Edge], Edge | EdgeTuple | Sequence[Edge | EdgeTuple] | None]
else:
    _Edges = Annotated[Sequence[Edge], SkipValidation]
    _Action = Annotated[MaxStepsAction, BeforeValidator(fields.to_member(MaxStepsAction, "on_max_steps"))]
    _Names = Annotated[frozenset[str], BeforeValidator(lambda value: frozenset(to_tuple(value)))]


class Graph(fields.Identified):
    """A state machine: after each state, the first of its edges that matches names the next state.

    Like a task it is equal only to itself.

    Attributes:
        name: Its name in histories, traces and messages.
        states: A task or a loop for each state, by the state's name.
        edges: From state to state, tried in this order: `GraphEdge`s, or tuples of two states and a condition. Forks and
            joins are in the same list.
        start: Name of the first state.
        max_steps: Most steps.
        on_max_steps: Result if that limit ends it: `"return_last"`, `"throw"` or `"return_with_flag"`.
        inject_feedback_on_revisit: Whether a state that is visited again sees its previous output.
        no_feedback_states: Names of states that never see it.
    """

    END: ClassVar[str] = END  # ends the graph

    name: fields.StrictText = Field(kw_only=False)
    states: Annotated[Mapping[str, Task | Loop], SkipValidation] = Field(kw_only=False)
    edges: _Edges
    start: fields.StrictText
    max_steps: fields.StrictInt = 50
    on_max_steps: _Action = fields.initially(MaxStepsAction.RETURN_LAST)
    inject_feedback_on_revisit: bool = True
    no_feedback_states: _Names = fields.initially(frozenset())

    __hash__ = fields.Identified.__hash__

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The states that are loops, in declared order."""
        return tuple(state for state in self.states.values() if isinstance(state, Loop))

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """The tasks of its states, in declared order; a loop is replaced by its body."""
        return tuple(
            task for state in self.states.values() for task in (state.body if isinstance(state, Loop) else (state,))
        )

    def with_tasks_of(self, tasks: Mapping[str, Task]) -> Self:
        """Return this graph with rewritten tasks, by their ids. For the library only."""
        return self.rewritten(
            states={
                name: state.with_tasks_of(tasks) if isinstance(state, Loop) else tasks[state.object_id]
                for name, state in self.states.items()
            }
        )

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        """In the order of S-GRAPH-10 to S-GRAPH-16."""
        name = arguments.get("name")
        fields.check_text(name, "Graph name must be non-blank")
        states = arguments["states"] = _check_states(f"Graph '{name}'", arguments.get("states"))
        fields.check_least(arguments.get("max_steps"), 1, f"Graph '{name}' max_steps")
        subject, start = f"Graph '{name}'", arguments.get("start")
        fields.check_text(start, f"{subject} must declare a start state")
        if start == END:
            raise ValidationError(f"{subject} start state cannot be Graph.END (the graph would never run)")
        if start not in states:
            msg = f"{subject} start state '{start}' is not a declared state. Known states: [{', '.join(states)}]"
            raise ValidationError(msg)
        edges = arguments["edges"] = _to_edges(f"Graph '{name}'", arguments.get("edges"))
        _check_edges(f"Graph '{name}'", edges, list(states))
        silent = arguments.get("no_feedback_states")
        for state in sorted(map(str, silent)) if isinstance(silent, set | frozenset) else to_tuple(silent):
            if state not in states:
                raise ValidationError(f"Graph '{name}' no_feedback state '{state}' is not a declared state")


def _check_states(subject: str, value: object) -> dict[str, Task | Loop]:
    """S-GRAPH-11."""
    if value is not None and not isinstance(value, Mapping):
        raise ValidationError(f"{subject} states must be a dict of names and tasks, got: {type(value).__name__}")
    states = dict(cast("Mapping[object, object]", value or {}))
    if not states:
        raise ValidationError(f"{subject} must declare at least one state")
    for state, member in states.items():
        if state is None or (isinstance(state, str) and not state.strip()):
            raise ValidationError(f"{subject} has a blank state name")
        if not isinstance(state, str):
            raise ValidationError(f"{subject} state names must be texts, got: {type(state).__name__}")
        if state == END:
            raise ValidationError(
                f"{subject} cannot use the reserved state name '{END}'. END is implicit; declare an edge targeting "
                "Graph.END instead."
            )
        if member is None:
            raise ValidationError(f"{subject} state '{state}' has a null Task")
        if not isinstance(member, Task | Loop):
            raise ValidationError(f"{subject} state '{state}' must be a Task or a Loop, got: {type(member).__name__}")
    return cast("dict[str, Task | Loop]", states)


def _to_edges(subject: str, value: object) -> tuple[Edge, ...]:
    entries = to_tuple(value)
    if isinstance(value, tuple) and isinstance(entries[0] if entries else None, str):
        entries = (entries,)  # one edge
    edges: list[Edge] = []
    for index, entry in enumerate(entries):
        edge: object = entry
        if isinstance(entry, tuple):  # S-GRAPH-128
            parts, at = entry, f"{subject} edge[{index}]"
            if len(parts) not in _EDGE_LENGTHS:
                msg = f"{at} must be a tuple (from, to) or (from, to, condition), got {len(parts)} values"
                raise ValidationError(msg)
            try:
                edge = GraphEdge(*parts)
            except ValidationError as error:
                raise ValidationError(f"{at}: {error}") from None
        if not isinstance(edge, GraphEdge | GraphFork | GraphJoin):
            found = "None" if entry is None else type(entry).__name__
            raise ValidationError(f"{subject} edge[{index}] must be a GraphEdge, GraphFork or GraphJoin, got: {found}")
        edges.append(edge)
    return tuple(edges)


def _check_edges(graph: str, edges: Sequence[GraphEdge | GraphFork | GraphJoin], states: Sequence[str]) -> None:
    """S-GRAPH-14, S-GRAPH-15, S-GRAPH-112 to S-GRAPH-114."""
    leaving: set[str] = set()
    for index, edge in enumerate(edges):
        subject = f"{graph} edge[{index}]"
        sources = edge.from_states if isinstance(edge, GraphJoin) else (edge.from_state,)
        targets = edge.to_states if isinstance(edge, GraphFork) else (edge.to_state,)
        _check_ends(subject, sources, targets, states)
        if isinstance(edge, GraphFork):
            _check_branches(subject, "fork", edge.to_states)
            if END in edge.to_states:
                raise ValidationError(f"{subject} forks to {END}. A branch begins with a declared state.")
        if isinstance(edge, GraphJoin):
            _check_branches(subject, "join", edge.from_states)
            if edge.count is not None and not 1 <= edge.count <= len(edge.from_states):
                msg = f"{subject} count must be between 1 and {len(edge.from_states)} when set, got: {edge.count}"
                raise ValidationError(msg)
        leaving.update(sources)
    stuck = [state for state in states if state not in leaving]
    if stuck:
        raise ValidationError(
            f"{graph} has state(s) with no outgoing edges: [{', '.join(stuck)}]. Every non-END state must have at least "
            "one edge (use Graph.END as the target for terminal transitions)."
        )


def _check_ends(subject: str, sources: Sequence[str], targets: Sequence[str], states: Sequence[str]) -> None:
    known = f"Known: [{', '.join(states)}]"
    if any(not state.strip() for state in sources):
        raise ValidationError(f"{subject} has a blank 'from' state")
    if any(not state.strip() for state in targets):
        raise ValidationError(f"{subject} has a blank 'to' state")
    if END in sources:
        raise ValidationError(f"{subject} has 'from' = {END}. END is terminal; no edges originate from it.")
    for state in sources:
        if state not in states:
            raise ValidationError(f"{subject} 'from' = '{state}' is not a declared state. {known}")
    for state in targets:
        if state not in states and state != END:
            raise ValidationError(f"{subject} 'to' = '{state}' is neither Graph.END nor a declared state. {known}")


def _check_branches(subject: str, verb: str, branches: Sequence[str]) -> None:
    if len(branches) < _LEAST_BRANCHES:
        raise ValidationError(f"{subject} must {verb} at least two states, got: [{', '.join(branches)}]")
    if len(set(branches)) < len(branches):
        raise ValidationError(f"{subject} names a state more than once: [{', '.join(branches)}]")
