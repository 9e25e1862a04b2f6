"""DagExporter: teams as graphs of tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    DagExporter,
    DagModel,
    DagTaskNode,
    Ensemble,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    GraphTrace,
    GraphTraceStep,
    Loop,
    MapEnsemble,
    MapReduceEnsemble,
    Phase,
    PhaseReview,
    Task,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task


def _by_id(dag: DagModel) -> dict[str, DagTaskNode]:
    return {each.id: each for each in dag.tasks}


def _five() -> list[Task]:
    a, b = task("a"), task("b")
    c = task("c", context=[a, b])
    d, e = task("d", context=[c]), task("e", context=[b])
    return [a, b, c, d, e]


def test_levels_groups_and_the_critical_path_follow_from_dependencies() -> None:
    """S-VIZ-11 to S-VIZ-15."""
    dag = DagExporter.build(Ensemble(tasks=_five(), workflow="parallel"))
    assert [each.id for each in dag.tasks] == ["0", "1", "2", "3", "4"]
    assert [each.parallel_group for each in dag.tasks] == [0, 0, 1, 2, 1]
    assert dag.parallel_groups == (("0", "1"), ("2", "4"), ("3",))
    assert dag.critical_path == ("0", "2", "3")
    assert [each.id for each in dag.tasks if each.on_critical_path] == ["0", "2", "3"]
    assert _by_id(dag)["2"].depends_on == ("0", "1")


def test_the_critical_path_ends_at_the_last_task_of_the_highest_level_and_takes_the_first_of_equals() -> None:
    """S-VIZ-14."""
    a, b = task("a"), task("b")
    dag = DagExporter.build(Ensemble(tasks=[a, b, task("c", context=[b, a]), task("d", context=[b, a])]))
    assert dag.critical_path == ("1", "3")


def test_dependencies_outside_the_ensemble_are_ignored() -> None:
    """S-VIZ-12."""
    dag = DagExporter.build(Ensemble(tasks=[task("b", context=[task("elsewhere")])]))
    assert dag.tasks[0].parallel_group == 0
    assert dag.tasks[0].depends_on == ()


def test_roles_say_who_does_a_task_and_agents_have_the_names_of_their_tools() -> None:
    """S-VIZ-16, S-VIZ-18, S-VIZ-3; the model is never asked (S-VIZ-10), nor needed (S-VIZ-52)."""

    @tool
    def shout(text: str) -> str:
        """Say it loudly."""
        return text.upper()

    model = ScriptedModel()
    writer = agent(model, "Writer", tools=[shout], background="Ten years", allow_delegation=True)
    tasks = [
        task("a", writer),
        task("b", handler=lambda _: "x"),
        task("c"),
        task("d", Agent(role="Editor", goal="edit")),
    ]
    dag = DagExporter.build(Ensemble(tasks=tasks))
    assert [each.agent_role for each in dag.tasks] == ["Writer", "(deterministic)", "(synthesized)", "Editor"]
    first = dag.agents[0]
    assert (first.role, first.goal, first.background) == ("Writer", "be a good Writer", "Ten years")
    assert first.tool_names == ("shout",)
    assert first.allow_delegation
    assert model.calls == ()


def test_the_workflow_is_the_ensembles_and_sequential_when_unset() -> None:
    """S-VIZ-17."""
    assert DagExporter.build(Ensemble(tasks=_five(), workflow=None)).workflow == "sequential"
    assert DagExporter.build(Ensemble(tasks=_five(), workflow="parallel")).workflow == "parallel"


def test_without_an_ensemble_or_tasks_there_is_nothing_to_build() -> None:
    """S-VIZ-10."""
    with pytest.raises(ValueError, match=r"^ensemble must not be None$"):
        DagExporter.build(None)
    with pytest.raises(ValueError, match=r"^ensemble must have at least one task or loop$"):
        DagExporter.build(Ensemble(tasks=[]))


def test_texts_with_variables_are_drawn_as_they_are() -> None:
    """S-VIZ-52."""
    dag = DagExporter.build(Ensemble(tasks=[task("About {topic}")]))
    assert dag.tasks[0].description == "About {topic}"


def test_a_loop_is_one_node_with_its_body() -> None:
    """S-VIZ-20 to S-VIZ-23, S-LOOP-133."""
    plan, draft = task("plan"), task("draft")
    refine = Loop(name="refine", body=[draft, task("critic", context=[draft])], context=[plan], max_iterations=3)
    dag = DagExporter.build(Ensemble(tasks=[plan, task("aside")], loops=[Loop(name="free", body=[task("x")]), refine]))
    free, loop = dag.tasks[2:]
    assert (loop.id, loop.description, loop.agent_role, loop.node_type) == ("3", "Loop: refine", "(loop)", "loop")
    assert (loop.loop_max_iterations, loop.depends_on, loop.parallel_group) == (3, ("0",), 1)
    assert [(each.id, each.depends_on, each.parallel_group) for each in loop.loop_body] == [
        ("3.0", (), 0),
        ("3.1", ("3.0",), 1),
    ]
    assert (free.id, free.depends_on, free.parallel_group) == ("2", (), 0)
    assert dag.parallel_groups == (("0", "1", "2"), ("3",))
    assert dag.critical_path == ("1", "2", "3")
    assert free.on_critical_path
    assert loop.on_critical_path


def test_the_critical_path_leads_through_a_loop_that_a_task_waits_for() -> None:
    """S-VIZ-24."""
    refine = Loop(name="refine", body=[task("draft")])
    dag = DagExporter.build(Ensemble(tasks=[task("first"), task("after", context=[refine.output])], loops=[refine]))
    assert _by_id(dag)["1"].depends_on == ("2",)
    assert _by_id(dag)["1"].parallel_group == 1
    assert dag.critical_path == ("2", "1")


def _triage() -> Graph:
    return Graph(
        name="triage",
        states={"ask": task("Ask"), "solve": task("Solve"), "tell": task("Tell")},
        start="ask",
        edges=[
            GraphEdge(from_state="ask", to_state="solve", condition=lambda _: True, label="technical"),
            GraphEdge(from_state="ask", to_state="tell"),
            GraphEdge(from_state="solve", to_state="ask"),
            GraphEdge(from_state="tell", to_state=Graph.END),
        ],
    )


def _trace(*ways: tuple[str, str]) -> GraphTrace:
    steps = tuple(
        GraphTraceStep(path=f"graph:triage#{at}", state_name=source, step_number=at + 1, next_state=target)
        for at, (source, target) in enumerate(ways)
    )
    return GraphTrace(
        graph_name="triage",
        path="graph:triage",
        start_state="ask",
        termination_reason="terminal",
        steps_run=len(steps),
        max_steps=50,
        steps=steps,
    )


def test_a_graph_is_its_states_its_edges_and_an_end() -> None:
    """S-VIZ-30, S-VIZ-31."""
    for source in (_triage(), Ensemble(graph=_triage())):
        dag = DagExporter.build(source)
        assert (dag.mode, dag.workflow, dag.parallel_groups, dag.critical_path) == ("graph", "sequential", (), ())
        assert [(each.id, each.description, each.node_type) for each in dag.tasks] == [
            ("0", "ask: Ask", "graph-state"),
            ("1", "solve: Solve", "graph-state"),
            ("2", "tell: Tell", "graph-state"),
            ("END", "END", "graph-end"),
        ]
        assert dag.graph_start_state_id == "0"
        ways = [(edge.from_state_id, edge.to_state_id, edge.condition_description) for edge in dag.graph_edges]
        assert ways == [("0", "1", "technical"), ("0", "2", None), ("1", "0", None), ("2", "END", None)]
        assert [edge.unconditional for edge in dag.graph_edges] == [False, True, True, True]
        assert not any(edge.fired for edge in dag.graph_edges)
        assert (dag.graph_termination_reason, dag.graph_steps_run) == (None, None)


def test_the_trace_of_a_graph_tells_which_edges_were_taken() -> None:
    """S-VIZ-32."""
    dag = DagExporter.build(_triage(), _trace(("ask", "solve"), ("solve", "ask"), ("ask", "solve")))
    assert [edge.fired for edge in dag.graph_edges] == [True, False, True, False]
    assert (dag.graph_termination_reason, dag.graph_steps_run) == ("terminal", 3)


def test_forks_and_joins_have_an_edge_for_each_of_their_states() -> None:
    """S-VIZ-6."""
    graph = Graph(
        name="fan",
        states={"a": task("A"), "b": task("B"), "c": task("C"), "d": task("D")},
        start="a",
        edges=[
            GraphFork(from_state="a", to_states=["b", "c"]),
            GraphJoin(from_states=["b", "c"], to_state="d", count=1),
            GraphEdge(from_state="d", to_state=Graph.END),
        ],
    )
    trace = _trace(("a", "b, c"), ("b", "d"), ("d", "__END__"))
    found = [
        (each.from_state_id, each.to_state_id, each.branching, each.condition_description, each.fired)
        for each in DagExporter.build(graph, trace).graph_edges
    ]
    assert found == [
        ("0", "1", "fork", None, True),
        ("0", "2", "fork", None, True),
        ("1", "3", "join", "first 1", True),
        ("2", "3", "join", "first 1", False),
        ("3", "END", None, None, True),
    ]


def test_a_state_that_is_a_loop_has_its_body() -> None:
    """S-VIZ-33."""
    states = {"refine": Loop(name="polish", body=[task("x")], max_iterations=2)}
    edges = [GraphEdge(from_state="refine", to_state=Graph.END)]
    state = DagExporter.build(Graph(name="g", states=states, start="refine", edges=edges)).tasks[0]
    assert (state.description, state.node_type) == ("refine: Loop: polish", "graph-state")
    assert state.loop_max_iterations == 2
    assert [each.id for each in state.loop_body] == ["0.0"]


def _over(count: int, chunk_size: int) -> MapReduceEnsemble:
    return MapReduceEnsemble(
        items=list(range(count)),
        map_task=lambda item: task(f"Map {item}"),
        reduce_task=lambda chunk: task("Reduce", context=chunk),
        chunk_size=chunk_size,
        llm=ScriptedModel(otherwise="x"),
    )


def test_a_static_map_reduce_is_its_tree() -> None:
    """S-VIZ-4, S-VIZ-40."""
    dag = DagExporter.build(_over(7, 3))
    assert (len(dag.tasks), dag.map_reduce_mode) == (11, "static")
    types = [each.node_type for each in dag.tasks]
    assert [types.count(kind) for kind in ("map", "reduce", "final-reduce")] == [7, 3, 1]
    assert {(each.node_type, each.map_reduce_level) for each in dag.tasks} == {
        ("map", 0),
        ("reduce", 1),
        ("final-reduce", 2),
    }
    assert [len(group) for group in dag.parallel_groups] == [7, 3, 1]


def test_a_map_reduce_whose_tasks_are_made_while_it_runs_is_built_from_its_trace() -> None:
    """S-VIZ-41, S-VIZ-42."""
    adaptive = MapReduceEnsemble(
        items=["a", "b", "c"],
        map_task=lambda item: task(f"Map {item}"),
        reduce_task=lambda chunk: task("Reduce", context=chunk),
        target_token_budget=1000,
        token_estimator=lambda _: 400,
        llm=ScriptedModel(otherwise="x"),
    )
    with pytest.raises(NotImplementedError, match=r"DagExporter\.build\(output\.trace\)"):
        DagExporter.build(adaptive)
    with pytest.raises(NotImplementedError):
        DagExporter.build(MapEnsemble(items=[1], map_task=lambda item: task(str(item)), llm=ScriptedModel()))
    trace = adaptive.run(runtime="inline").trace
    dag = DagExporter.build(trace)
    assert dag.map_reduce_mode == "adaptive"
    assert dag.generated_at == trace.completed_at
    assert [each.id for each in dag.tasks] == [str(at) for at in range(len(trace.task_traces))]
    assert all(each.depends_on == () for each in dag.tasks)
    assert dag.critical_path == ()
    assert [(each.node_type, each.parallel_group) for each in dag.tasks][:3] == [("map", 0)] * 3
    assert dag.tasks[-1].node_type == "final-reduce"
    assert dag.parallel_groups[0] == ("0", "1", "2")


def test_a_trace_without_tasks_is_refused() -> None:
    """S-VIZ-42."""
    trace = Ensemble(tasks=[task("a", handler=lambda _: "x")]).run(runtime="inline").trace
    assert DagExporter.build(trace).map_reduce_mode is None
    with pytest.raises(ValueError, match=r"^trace must contain at least one task trace$"):
        DagExporter.build(trace.replace(task_traces=()))


def test_tasks_of_phases_wait_for_the_last_tasks_of_the_phases_before() -> None:
    """S-VIZ-50, S-VIZ-51."""
    facts, figures = task("facts"), task("figures")
    research = Phase(name="research", tasks=[facts, figures, task("sum", context=[facts])], workflow="parallel")
    draft = Phase(
        name="draft", tasks=[task("outline"), task("text")], after=[research], review=PhaseReview(task=task("good?"))
    )
    publish = Phase(name="publish", tasks=[task("publish")], after=[draft])
    dag = DagExporter.build(Ensemble(phases=[research, draft, publish]))
    assert [(each.description, each.phase, each.node_type) for each in dag.tasks] == [
        ("facts", "research", None),
        ("figures", "research", None),
        ("sum", "research", None),
        ("outline", "draft", None),
        ("text", "draft", None),
        ("good?", "draft", None),
        ("publish", "publish", None),
    ]
    waits_for = [each.depends_on for each in dag.tasks]
    assert waits_for == [(), (), ("0",), ("1", "2"), ("1", "2"), ("3", "4", "1", "2"), ("5",)]
    assert [(each.name, each.workflow, each.after, each.review_id) for each in dag.phases] == [
        ("research", "parallel", (), None),
        ("draft", "sequential", ("research",), "5"),
        ("publish", "sequential", ("draft",), None),
    ]


def test_a_graph_as_json_has_its_fields_and_reads_back(tmp_path: Path) -> None:
    """S-VIZ-1, S-VIZ-2, S-VIZ-5, S-VIZ-6."""
    dag = DagExporter.build(Ensemble(tasks=_five(), loops=[Loop(name="refine", body=[task("x", name="writer")])]))
    path = tmp_path / "deep" / "team.dag.json"
    text = dag.to_json(path)
    assert path.read_text(encoding="utf-8") == text
    data = json.loads(text)
    assert list(data) == [
        *("schema_version", "type", "workflow", "generated_at", "agents", "tasks", "parallel_groups"),
        *("critical_path", "map_reduce_mode", "mode", "graph_edges", "graph_start_state_id"),
        *("graph_termination_reason", "graph_steps_run"),
    ]
    assert (data["schema_version"], data["type"]) == ("1.3", "dag")
    assert data["generated_at"].endswith("Z")
    assert list(data["tasks"][0]) == [
        *("id", "description", "expected_output", "agent_role", "depends_on", "parallel_group", "on_critical_path"),
        *("node_type", "map_reduce_level", "loop_max_iterations", "loop_body", "phase", "key"),
    ]
    assert data["tasks"][-1]["key"] == "loop:refine"
    assert data["tasks"][-1]["loop_body"][0]["key"] == "writer"
    assert "\n  " in text
    assert DagModel.model_validate_json(text) == dag
