"""Graphs on both runtimes: ways through the states, revisits, branches, caps and failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    ExitEarlyError,
    ExitReason,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    GraphNoEdgeMatchedError,
    GraphRoutingContext,
    GraphStateCompletedEvent,
    Loop,
    MaxGraphStepsExceededError,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskStartEvent,
    Until,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, task
from tests.scenarios.answering import answering, fail_of, raws, run_of
from tests.scenarios.teams import Watcher, prompt_of, task_of

Condition = Callable[[GraphRoutingContext], bool]


def edge(begin: str, end: str, condition: object = None, label: str | None = None) -> GraphEdge:
    """An edge."""
    return GraphEdge(from_state=begin, to_state=end, condition=condition, label=label)  # type: ignore[arg-type]


def graph(states: Mapping[str, object], *edges: object, **fields: object) -> Ensemble:
    """A team of a graph that starts in its first state."""
    whole = Graph(name="g", states=states, edges=edges, start=next(iter(states)), **fields)  # type: ignore[arg-type]
    return Ensemble(graph=whole)


def ended(ensemble: Ensemble, runtime: Runtime) -> tuple[list[str], str | None, bool]:
    """The states that a run visited, why it ended, and whether it says that its cap did."""
    output = run_of(ensemble, runtime)
    states = [step.state_name for step in output.graph_history]
    return states, output.graph_termination_reason, output.was_graph_terminated_by_max_steps


def test_critic_sends_the_writer_back_once(runtime: Runtime) -> None:
    """S-GRAPH-40 to S-GRAPH-42, S-GRAPH-60, S-GRAPH-61, S-GRAPH-70 to S-GRAPH-76, S-GRAPH-82: by real prompts."""
    texts = ("facts", "draft one", "REJECT dull", "draft two", "fine", "printed")
    model = ScriptedModel(*(answer(text, 10, 1) for text in texts))
    by = agent(model)
    research, publish = task("research", by), task("publish", by)
    write = task("write", by, context=[research])
    critique = task("critique", by, context=[write])
    asked: list[tuple[str, int, str, dict[str, int]]] = []

    def is_rejected(routing: GraphRoutingContext) -> bool:
        counts = {name: len(outputs) for name, outputs in routing.state_history.items()}
        asked.append((routing.current_state, routing.step_number, routing.last_output.raw, counts))
        return routing.last_output.raw.startswith("REJECT")

    states = {"research": research, "write": write, "critique": critique, "publish": publish}
    edges = [
        edge("research", "write"), edge("write", "critique"), edge("critique", "write", is_rejected, "rejected"),
        edge("critique", "publish"), edge("publish", Graph.END),
    ]  # fmt: skip
    watcher = Watcher()
    output = run_of(graph(states, *edges), runtime, watcher)
    assert raws(output) == list(texts)
    assert [(each.state_name, each.step_number, each.output.raw, each.next_state) for each in output.graph_history] == [
        ("research", 1, "facts", "write"),
        ("write", 2, "draft one", "critique"),
        ("critique", 3, "REJECT dull", "write"),
        ("write", 4, "draft two", "critique"),
        ("critique", 5, "fine", "publish"),
        ("publish", 6, "printed", Graph.END),
    ]
    assert (output.raw, output.graph_termination_reason) == ("printed", "terminal")
    found = output.get_output(write)
    assert found is not None
    assert found.raw == "draft two"
    prompts = [prompt_of(each) for each in model.calls]
    assert [task_of(each) for each in model.calls] == ["research", "write", "critique", "write", "critique", "publish"]
    again = prompts[3]
    assert "## Revision Instructions (Attempt 2)" in again
    note = "Graph state 'write' visit #2. Prior visit's output is provided above; refine your response based on it."
    assert (note in again, "draft one" in again, "REJECT dull" in again, "facts" in again) == (True, True, False, True)
    assert ("REJECT dull" in prompts[4], "draft two" in prompts[4]) == (True, True)
    assert output.metrics.total_input_tokens == 60
    trace = output.trace
    assert trace is not None
    assert trace.workflow == "graph"
    assert trace.graph_trace is not None
    assert (trace.graph_trace.start_state, trace.graph_trace.steps_run, trace.graph_trace.max_steps) == (
        "research",
        6,
        50,
    )
    assert [each.path for each in trace.graph_trace.steps] == [f"graph:g#{number}" for number in range(6)]
    assert len(trace.task_traces) == 6
    events = watcher.of(GraphStateCompletedEvent)
    assert [(each.state_name, each.step_number, each.next_state, each.max_steps) for each in events] == [
        (each.state_name, each.step_number, each.next_state, 50) for each in output.graph_history
    ]
    assert all(each.step_duration > timedelta() for each in events)
    order = [
        event
        for _, event in watcher.heard
        if isinstance(event, TaskStartEvent | TaskCompleteEvent | GraphStateCompletedEvent)
    ]
    assert [type(each) for each in order] == [TaskStartEvent, TaskCompleteEvent, GraphStateCompletedEvent] * 6
    if runtime.__class__.__name__ == "InlineRuntime":  # on Ray the conditions run where a list of this process is not
        assert asked == [
            ("critique", 3, "REJECT dull", {"research": 1, "write": 1, "critique": 1}),
            ("critique", 5, "fine", {"research": 1, "write": 2, "critique": 2}),
        ]


def test_caps_and_ends(inline_runtime: Runtime) -> None:
    """S-GRAPH-43, S-GRAPH-48, S-GRAPH-49, S-GRAPH-51, S-GRAPH-62, S-GRAPH-80, S-GRAPH-81, S-GRAPH-102."""
    three = {name: answering(name) for name in "abc"}
    way = [edge("a", "b"), edge("b", "c"), edge("c", Graph.END)]
    assert ended(graph(three, *way), inline_runtime) == (["a", "b", "c"], "terminal", False)
    assert ended(graph(three, *way, max_steps=3, on_max_steps="throw"), inline_runtime) == (
        ["a", "b", "c"],
        "terminal",
        False,
    )
    one = {"a": answering("a", "a1", "a2", "a3", "a4", "a5")}
    assert ended(graph(one, edge("a", "a"), edge("a", Graph.END, lambda _: True), max_steps=4), inline_runtime) == (
        ["a"] * 4, "max_steps", False,
    )  # fmt: skip
    flagged = graph(one, edge("a", "a"), max_steps=2, on_max_steps="return_with_flag")
    assert ended(flagged, inline_runtime) == (["a", "a"], "max_steps", True)
    error = fail_of(
        graph(three, edge("a", "b"), edge("b", "a"), edge("c", "a"), max_steps=2, on_max_steps="throw"), inline_runtime
    )
    assert isinstance(error, MaxGraphStepsExceededError)
    assert str(error) == "Graph 'g' did not reach a terminal state after 2 step(s). Last state: 'b'."
    assert (error.graph_name, error.max_steps, error.last_state) == ("g", 2, "b")
    assert [each.raw for each in error.completed_task_outputs] == ["a[]", "b[]"]


def test_cap_that_raises_is_that_error(inline_runtime: Runtime) -> None:
    """S-GRAPH-50: with its attributes, the outputs of all steps, and the trace of what ran."""
    error = fail_of(graph({"a": answering("a")}, edge("a", "a"), max_steps=2, on_max_steps="throw"), inline_runtime)
    assert isinstance(error, MaxGraphStepsExceededError)
    assert error.trace is not None
    assert error.trace.graph_trace is not None
    assert (error.trace.graph_trace.steps_run, error.trace.graph_trace.termination_reason) == (2, "max_steps")


def test_step_without_a_matching_edge_fails_the_run(inline_runtime: Runtime) -> None:
    """S-GRAPH-45, S-GRAPH-47: on the last allowed step too; the text is cut, the attribute is not."""
    states = {"a": answering("a", "x" * 300)}
    edges = [edge("a", Graph.END, lambda _: False, "done"), edge("a", "a", lambda _: False)]
    error = fail_of(graph(states, *edges, max_steps=1), inline_runtime)
    assert isinstance(error, GraphNoEdgeMatchedError)
    assert str(error) == (
        "Graph 'g' state 'a' has no matching outgoing edge for the produced output. Candidate edges: → __END__ (done); "
        f"→ a (predicate) Output preview: {'x' * 200}…"
    )
    assert (error.graph_name, error.current_state, error.output_preview) == ("g", "a", "x" * 300)
    assert [each.raw for each in error.completed_task_outputs] == ["x" * 300]


def test_what_a_condition_raises_leaves_the_run(runtime: Runtime) -> None:
    """S-GRAPH-46: with its own type."""

    def boom(_: GraphRoutingContext) -> bool:
        raise KeyError("boom")

    states = {"a": answering("a"), "b": answering("b")}
    with pytest.raises(KeyError) as caught:
        run_of(graph(states, edge("a", "b"), edge("b", Graph.END, boom)), runtime)
    assert caught.value.args == ("boom",)


def test_failed_or_unready_state_fails_the_run(inline_runtime: Runtime) -> None:
    """S-GRAPH-52, S-GRAPH-55: as in a sequential run."""
    states = {"a": answering("a"), "b": answering("b", ValueError("broke"))}
    error = fail_of(graph(states, edge("a", "b"), edge("b", "a")), inline_runtime)
    assert isinstance(error, TaskExecutionError)
    assert str(error) == "Task 'b' failed: Deterministic task handler threw an exception: broke (ValueError)"
    assert isinstance(error.__cause__, AgentExecutionError)
    assert [each.raw for each in error.completed_task_outputs] == ["a[]"]
    later = answering("later")
    early = {"early": answering("early", context=[later]), "later": later}
    error = fail_of(graph(early, edge("early", "later"), edge("later", Graph.END)), inline_runtime)
    assert (type(error), str(error)) == (TaskExecutionError, "Context task not yet completed: do later")


def test_exit_in_a_state_ends_the_graph(inline_runtime: Runtime) -> None:
    """S-GRAPH-53, S-GRAPH-71: no reason; what was never visited has no output."""
    states = {"a": answering("a"), "b": answering("b", ExitEarlyError("enough")), "c": answering("c")}
    team = graph(states, edge("a", "b"), edge("b", "c"), edge("c", Graph.END))
    output = run_of(team, inline_runtime)
    assert (output.exit_reason, output.graph_termination_reason) == (ExitReason.USER_EXIT_EARLY, None)
    assert [(each.state_name, each.next_state) for each in output.graph_history] == [("a", "b")]
    assert (raws(output), output.get_output(states["c"])) == (["a[]"], None)


def test_branches_meet_and_give_their_outputs_in_declared_order(inline_runtime: Runtime) -> None:
    """S-GRAPH-91, S-GRAPH-95, S-GRAPH-99, S-GRAPH-103, S-GRAPH-110, S-GRAPH-111."""
    a, b, c = answering("a"), answering("b", "b1", "b2"), answering("c")
    states = {"a": a, "b": b, "c": c, "d": answering("d", context=[c, b])}
    team = graph(
        states,
        GraphFork(from_state="a", to_states=["b", "c"]),
        edge("b", "b", lambda routing: len(routing.state_history["b"]) < 2),
        GraphJoin(from_states=["b", "c"], to_state="d"),
        edge("d", Graph.END),
    )
    watcher = Watcher()
    output = run_of(team, inline_runtime, watcher)
    assert raws(output) == ["a[]", "b1", "b2", "c[]", "d[c[],b2]"]
    assert [(each.state_name, each.step_number, each.next_state) for each in output.graph_history] == [
        ("a", 1, "b, c"), ("b", 2, "b"), ("b", 4, "d"), ("c", 3, "d"), ("d", 5, Graph.END),
    ]  # fmt: skip
    assert output.graph_termination_reason == "terminal"
    assert sorted(each.step_number for each in watcher.of(GraphStateCompletedEvent)) == [1, 2, 3, 4, 5]


def test_states_may_be_loops(runtime: Runtime) -> None:
    """S-GRAPH-105, S-GRAPH-115, S-GRAPH-116, S-GRAPH-120: a visit is a whole loop, and a later one is told of the one before."""
    model = ScriptedModel("w1", "w2", "out", "w3", "w4", "done")
    by = agent(model)
    loop = Loop(name="refine", body=[task("write", by)], max_iterations=2, output_mode="all_iterations")
    show = task("show", by, context=[loop.output])
    is_joined = "--- iteration 2 ---"
    team = graph(
        {"draft": loop, "show": show},
        edge("draft", "show", lambda routing: is_joined in routing.last_output.raw),
        edge("show", Graph.END, Until.text_contains("done")),
        edge("show", "draft", lambda routing: is_joined in routing.state_history["draft"][-1].raw),
    )
    watcher = Watcher()
    output = run_of(team, runtime, watcher)
    first, second = "w1\n\n--- iteration 2 ---\n\nw2", "w3\n\n--- iteration 2 ---\n\nw4"
    assert raws(output) == [first, "out", second, "done"]
    assert [each.output.raw for each in output.graph_history] == [first, "out", second, "done"]
    assert [each.output.raw for each in watcher.of(GraphStateCompletedEvent)] == [first, "out", second, "done"]
    prompts = [prompt_of(each) for each in model.calls]
    assert ("w1" in prompts[2], "w2" in prompts[2], "w3" in prompts[2]) == (True, True, False)
    assert ("w3" in prompts[5], "w4" in prompts[5], "w1" in prompts[5]) == (True, True, False)
    assert "Graph state 'draft' visit #2." in prompts[3]
    assert "w2" in prompts[3]
    assert output.trace is not None
    assert [each.path for each in output.trace.loop_traces] == ["graph:g#0/loop:refine", "graph:g#2/loop:refine"]


def test_trace_of_a_graph_is_json(inline_runtime: Runtime) -> None:
    """S-GRAPH-54, S-GRAPH-74: templates are resolved once for every state."""
    plain = task("{topic} again", name="a", handler=lambda asked: asked.description)
    output = run_of(graph({"a": plain}, edge("a", Graph.END, Until.unchanged()), edge("a", "a")), inline_runtime)
    assert raws(output) == ["bees again", "bees again"]
    assert output.trace is not None
    found = json.loads(output.trace.model_dump_json())["graph_trace"]
    assert [(each["state_name"], each["next_state"]) for each in found["steps"]] == [("a", "a"), ("a", Graph.END)]
