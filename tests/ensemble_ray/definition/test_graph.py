"""What a graph is, and what it refuses to be."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest

from ensemble_ray import (
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    GraphRoutingContext,
    Loop,
    MaxStepsAction,
    Task,
    TaskOutput,
    Until,
    ValidationError,
)
from ensemble_ray.values.value import utc_of

A, B, C = Task.of("a"), Task.of("b"), Task.of("c")
STATES = {"a": A, "b": B}
ON, OUT = GraphEdge(from_state="a", to_state="b"), GraphEdge(from_state="b", to_state=Graph.END)


def graph(**fields: object) -> Graph:
    """A graph named `g`."""
    return Graph(**{"name": "g", "states": STATES, "edges": [ON, OUT], "start": "a", **fields})  # type: ignore[arg-type]


def refusal(**fields: object) -> str:
    """The text that a graph of these fields is refused with."""
    with pytest.raises(ValidationError) as caught:
        graph(**fields)
    return str(caught.value)


def edge(from_state: str | None, to_state: str | None) -> GraphEdge:
    """An edge that the graph judges."""
    return GraphEdge(from_state=from_state, to_state=to_state)  # type: ignore[arg-type]


def test_fields_have_their_defaults_when_only_what_is_needed_is_given() -> None:
    """S-GRAPH-1: states and edges keep their order."""
    made = graph()
    assert (made.name, list(made.states.items()), made.edges, made.start) == ("g", list(STATES.items()), (ON, OUT), "a")
    assert (made.max_steps, made.on_max_steps) == (50, MaxStepsAction.RETURN_LAST)
    assert (made.inject_feedback_on_revisit, made.no_feedback_states) == (True, frozenset())
    assert graph(on_max_steps="throw", no_feedback_states={"a"}).on_max_steps is MaxStepsAction.THROW
    assert Graph.END == "__END__"
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301  our own
    assert made != graph()


def test_edge_is_unconditional_when_it_has_no_condition() -> None:
    """S-GRAPH-2."""
    assert (ON.condition, ON.label) == (None, None)
    assert GraphEdge(from_state="a", to_state="b", condition=bool, label="ok").label == "ok"
    with pytest.raises(ValidationError, match="GraphEdge condition must be a callable, got: str"):
        GraphEdge(from_state="a", to_state="b", condition="yes")  # type: ignore[arg-type]


def test_state_is_allowed_when_no_edge_reaches_it() -> None:
    """S-GRAPH-18."""
    assert list(graph(start="b").states) == ["a", "b"]


_END_STATE = "Graph 'g' cannot use the reserved state name '__END__'. END is implicit; declare an edge targeting Graph.END instead."
_STUCK = (
    "Graph 'g' has state(s) with no outgoing edges: [a, b]. Every non-END state must have at least one edge "
    "(use Graph.END as the target for terminal transitions)."
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"name": ""}, "Graph name must be non-blank", id="S-GRAPH-10"),
        pytest.param({"states": {}}, "Graph 'g' must declare at least one state", id="S-GRAPH-11"),
        pytest.param({"states": {" ": A}}, "Graph 'g' has a blank state name", id="S-GRAPH-11-blank"),
        pytest.param({"states": {Graph.END: A}}, _END_STATE, id="S-GRAPH-11-end"),
        pytest.param({"states": {"a": None}}, "Graph 'g' state 'a' has a null Task", id="S-GRAPH-11-null"),
        pytest.param({"max_steps": 0}, "Graph 'g' max_steps must be >= 1, got: 0", id="S-GRAPH-12"),
        pytest.param({"start": None}, "Graph 'g' must declare a start state", id="S-GRAPH-13"),
        pytest.param(
            {"start": Graph.END},
            "Graph 'g' start state cannot be Graph.END (the graph would never run)",
            id="S-GRAPH-13-end",
        ),
        pytest.param(
            {"start": "x"},
            "Graph 'g' start state 'x' is not a declared state. Known states: [a, b]",
            id="S-GRAPH-13-unknown",
        ),
        pytest.param({"edges": [ON, edge(None, "a")]}, "Graph 'g' edge[1] has a blank 'from' state", id="S-GRAPH-14"),
        pytest.param({"edges": [edge("a", " ")]}, "Graph 'g' edge[0] has a blank 'to' state", id="S-GRAPH-14-to"),
        pytest.param(
            {"edges": [edge(Graph.END, "a")]},
            "Graph 'g' edge[0] has 'from' = __END__. END is terminal; no edges originate from it.",
            id="S-GRAPH-14-end",
        ),
        pytest.param(
            {"edges": [edge("x", "a")]},
            "Graph 'g' edge[0] 'from' = 'x' is not a declared state. Known: [a, b]",
            id="S-GRAPH-14-from-unknown",
        ),
        pytest.param(
            {"edges": [edge("a", "x")]},
            "Graph 'g' edge[0] 'to' = 'x' is neither Graph.END nor a declared state. Known: [a, b]",
            id="S-GRAPH-14-to-unknown",
        ),
        pytest.param({"edges": []}, _STUCK, id="S-GRAPH-15"),
        pytest.param(
            {"no_feedback_states": {"x"}}, "Graph 'g' no_feedback state 'x' is not a declared state", id="S-GRAPH-16"
        ),
        pytest.param(
            {"states": {"a": "A"}}, "Graph 'g' state 'a' must be a Task or a Loop, got: str", id="state-of-text"
        ),
        pytest.param(
            {"edges": [("a",)]},
            "Graph 'g' edge[0] must be a tuple (from, to) or (from, to, condition), got 1 values",
            id="edge-of-short-tuple",
        ),
        pytest.param(
            {"edges": [("a", "b", "when")]},
            "Graph 'g' edge[0]: GraphEdge condition must be a callable, got: str",
            id="edge-of-wrong-tuple",
        ),
        pytest.param(
            {"edges": [["a", "b"]]},
            "Graph 'g' edge[0] must be a GraphEdge, GraphFork or GraphJoin, got: list",
            id="edge-of-list",
        ),
    ],
)
def test_graph_is_refused_when_a_check_fails(fields: dict[str, object], message: str) -> None:
    """S-GRAPH-10 to S-GRAPH-16: exact texts."""
    assert refusal(**fields) == message


def test_first_check_counts_when_several_fail() -> None:
    """S-GRAPH-10 to S-GRAPH-16 run in their order."""
    assert refusal(name="", states={}) == "Graph name must be non-blank"
    assert refusal(states={}, max_steps=0).endswith("at least one state")
    assert refusal(max_steps=0, start="x").startswith("Graph 'g' max_steps")
    assert refusal(start="x", edges=[]).startswith("Graph 'g' start state")
    assert refusal(edges=[edge("a", "x")]).startswith("Graph 'g' edge[0]")
    assert refusal(edges=[], no_feedback_states={"x"}) == _STUCK


def test_graph_forks_and_joins_when_states_are_named_for_it() -> None:
    """S-GRAPH-110, S-GRAPH-111: both lead out of their states."""
    states = {"a": A, "b": B, "c": C, "d": Task.of("d")}
    fork = GraphFork(from_state="a", to_states=["b", "c"])
    join = GraphJoin(from_states=["b", "c"], to_state="d", count=1)
    made = graph(states=states, edges=[fork, join, edge("d", Graph.END)])
    assert made.edges[:2] == (fork, join)
    assert (fork.to_states, join.from_states, join.count) == (("b", "c"), ("b", "c"), 1)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        pytest.param(
            GraphFork(from_state="a", to_states=["b"]), " must fork at least two states, got: [b]", id="S-GRAPH-112"
        ),
        pytest.param(
            GraphJoin(from_states=["a"], to_state="b"),
            " must join at least two states, got: [a]",
            id="S-GRAPH-112-join",
        ),
        pytest.param(
            GraphFork(from_state="a", to_states=["b", "b"]), " names a state more than once: [b, b]", id="twice"
        ),
        pytest.param(
            GraphFork(from_state="a", to_states=["b", Graph.END]),
            " forks to __END__. A branch begins with a declared state.",
            id="S-GRAPH-113",
        ),
        pytest.param(
            GraphJoin(from_states=["a", "b"], to_state="b", count=3),
            " count must be between 1 and 2 when set, got: 3",
            id="S-GRAPH-114",
        ),
        pytest.param(
            GraphFork(from_state="a", to_states=["b", "x"]),
            " 'to' = 'x' is neither Graph.END nor a declared state. Known: [a, b]",
            id="fork-unknown",
        ),
        pytest.param(
            GraphJoin(from_states=["a", "x"], to_state="b"),
            " 'from' = 'x' is not a declared state. Known: [a, b]",
            id="join-unknown",
        ),
    ],
)
def test_fork_or_join_is_refused_when_its_states_make_none(entry: object, message: str) -> None:
    """S-GRAPH-112 to S-GRAPH-114; S-GRAPH-14 holds for forks and joins too."""
    assert refusal(edges=[ON, OUT, entry]) == f"Graph 'g' edge[2]{message}"


def test_state_is_a_loop_when_one_is_declared() -> None:
    """S-GRAPH-115: the tasks of its body stand in its place."""
    refine = Loop(name="refine", body=[B, C])
    made = graph(states={"a": A, "b": refine})
    assert (made.loops, made.all_tasks) == ((refine,), (A, B, C))


def after(*texts: str) -> GraphRoutingContext:
    """What a condition is given after that many visits of one state."""
    outputs = [
        TaskOutput(
            raw=text,
            task_description="a",
            agent_role="A",
            completed_at=utc_of(0),
            duration=timedelta(),
            tool_call_count=0,
        )
        for text in texts
    ]
    return GraphRoutingContext(
        current_state="a", last_output=outputs[-1], step_number=len(outputs), state_history={"a": outputs}
    )


def test_built_in_predicate_is_a_condition_too() -> None:
    """S-GRAPH-117."""
    assert GraphEdge(from_state="a", to_state="b", condition=Until.text_contains("x")).condition is not None
    assert Until.text_contains("REJECT")(after("REJECT: too long")) is True
    assert Until.unchanged()(after("same")) is False
    assert Until.unchanged()(after("same", "same ")) is True
    assert Until.unchanged()(after("same", "other")) is False
