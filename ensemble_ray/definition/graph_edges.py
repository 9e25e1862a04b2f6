"""What leads from state to state of a graph: edges, forks and joins. Package: definition.

In: what the user declares. Out: frozen values; a graph checks them against its states, since only it knows its name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, cast

from pydantic import Field, SkipValidation, model_validator

from ensemble_ray.definition.fields import OneOrMany, StrictInt, StrictText, to_tuple
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.iterations import GraphRoutingContext
from ensemble_ray.values.value import Value

__all__ = ["END", "Condition", "GraphEdge", "GraphFork", "GraphJoin", "check_edges"]

#: Where a run of a graph ends; no state may have this name.
END = "__END__"
#: Whether an edge is taken, sync or async.
Condition: TypeAlias = Callable[[GraphRoutingContext], bool | Awaitable[bool]]
#: Fewer branches than that are no fork and no join.
_LEAST_BRANCHES = 2


class _Entry(Value):
    @model_validator(mode="before")
    @classmethod
    def _keep_blanks(cls, data: Any) -> Any:
        """Keep a state that is missing as a blank one: the graph refuses it, and names itself and the edge (S-GRAPH-14)."""
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        for field in ("from_state", "to_state"):
            if field in cls.model_fields and arguments.get(field) is None:
                arguments[field] = ""
        for field in ("from_states", "to_states"):
            if field in cls.model_fields:
                arguments[field] = to_tuple(arguments.get(field))
        condition = arguments.get("condition")
        if condition is not None and not callable(condition):
            raise ValidationError(f"GraphEdge condition must be a callable, got: {type(condition).__name__}")
        return arguments


class GraphEdge(_Entry):
    """From one state to the next.

    Attributes:
        from_state: Name of a state.
        to_state: Name of a state, or `Graph.END`.
        condition: Asked with a `GraphRoutingContext`, sync or async: whether to go there; None: always.
        label: What plans, traces and messages call it.
    """

    from_state: StrictText = Field(kw_only=False)
    to_state: StrictText = Field(kw_only=False)
    condition: Annotated[Condition | None, SkipValidation] = Field(default=None, kw_only=False)
    label: StrictText | None = None


class GraphFork(_Entry):
    """From one state to several that run side by side.

    Attributes:
        from_state: Name of a state.
        to_states: Names of the first states of the branches, at least two.
    """

    from_state: StrictText = Field(kw_only=False)
    to_states: OneOrMany[StrictText] = Field(kw_only=False)


class GraphJoin(_Entry):
    """From several branches to one state, when enough of them have arrived.

    Attributes:
        from_states: Names of the last states of the branches, at least two.
        to_state: Name of a state, or `Graph.END`.
        count: How many branches have to arrive; the others are cancelled then. None: all.
    """

    from_states: OneOrMany[StrictText] = Field(kw_only=False)
    to_state: StrictText = Field(kw_only=False)
    count: StrictInt | None = None


def check_edges(graph: str, edges: Sequence[GraphEdge | GraphFork | GraphJoin], states: Sequence[str]) -> None:
    """Check the edges of a graph against its states (S-GRAPH-14, S-GRAPH-15, S-GRAPH-112 to S-GRAPH-114).

    Args:
        graph: How messages begin: `Graph 'triage'`.
        edges: In declared order.
        states: Names, in declared order.

    Raises:
        ValidationError: the first edge that leads from or to nowhere; states that nothing leads out of.
    """
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
                raise ValidationError(
                    f"{subject} count must be between 1 and {len(edge.from_states)} when set, got: {edge.count}"
                )
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
