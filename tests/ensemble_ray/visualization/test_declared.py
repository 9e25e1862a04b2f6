"""Teams as graphs to be drawn."""

from __future__ import annotations

from ensemble_ray import (
    DagExporter,
    Ensemble,
    Graph,
    GraphEdge,
    Loop,
    MapReduceEnsemble,
    Phase,
    PhaseReview,
    Task,
)
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.visualization.declared import dag_flow, declared_flow
from ensemble_ray.visualization.flow import Flow, FlowNode, flow_data, place_flow
from tests.builders import agent, task


def _flow(ensemble: Ensemble | Graph | MapReduceEnsemble) -> Flow:
    return dag_flow(DagExporter.build(ensemble))


def _ways(flow: Flow) -> list[tuple[str, str, str]]:
    return [(edge.source, edge.target, edge.kind) for edge in flow.edges]


def _nodes(flow: Flow) -> dict[str, FlowNode]:
    return {node.id: node for node in flow.nodes}


def _named(name: str, *context: object) -> Task:
    return task(f"Do {name}", name=name, context=list(context))


def test_sequential_tasks_stand_behind_each_other_and_say_what_they_wait_for() -> None:
    """S-VIZ-82: what only comes next is `unconditional`."""
    a, b = _named("a"), _named("b")
    flow = _flow(Ensemble(tasks=[a, b, _named("c", a)]))
    assert _ways(flow) == [("a", "c", "dependency"), ("a", "b", "unconditional"), ("b", "c", "unconditional")]
    assert all(node.badges == () and not node.is_critical for node in flow.nodes)


def test_a_plan_marks_no_critical_path() -> None:
    """S-VIZ-82, S-VIZ-71: before a run no times are known; the data has the longest chain as an estimate."""
    a, b = _named("a"), _named("b")
    flow = _flow(Ensemble(tasks=[a, b, _named("c", a, b)], workflow="parallel"))
    assert _ways(flow) == [("a", "c", "dependency"), ("b", "c", "dependency")]
    assert not any(each.is_critical for each in (*flow.nodes, *flow.edges))
    assert [(node.level, node.badges) for node in flow.nodes] == [(0, ()), (0, ()), (1, ())]
    assert flow.critical_path == ()


def test_a_loop_is_a_frame_with_a_way_back() -> None:
    """S-VIZ-82, S-LOOP-133."""
    plan, draft = _named("plan"), _named("draft")
    refine = Loop(name="refine", body=[draft, _named("critic", draft)], context=[plan], max_iterations=3)
    flow = _flow(Ensemble(tasks=[plan], loops=[refine], workflow="parallel"))
    (group,) = flow.groups
    assert (group.id, group.kind, group.title) == ("loop:refine", "loop", "LOOP ≤3 refine")
    assert {node.id: node.group for node in flow.nodes} == {
        "plan": None,
        "draft": "loop:refine",
        "critic": "loop:refine",
    }
    assert ("plan", "loop:refine", "dependency") in _ways(flow)
    (back,) = (edge for edge in flow.edges if edge.kind == "loop")
    assert (back.source, back.target, back.is_back) == ("critic", "draft", True)


def test_phases_are_frames_with_what_runs_in_them() -> None:
    """S-VIZ-82: a loop's frame lies in its phase's; a review stands behind what nothing else waits for."""
    research = Phase(name="research", tasks=[_named("facts"), _named("figures")], workflow="parallel")
    polish = Loop(name="polish", body=[_named("text")])
    draft = Phase(
        name="draft",
        tasks=[_named("outline")],
        loops=[polish],
        after=[research],
        review=PhaseReview(task=_named("good?")),
    )
    flow = _flow(Ensemble(phases=[research, draft]))
    assert [(group.id, group.parent) for group in flow.groups] == [
        ("phase:research", None),
        ("phase:draft", None),
        ("loop:polish", "phase:draft"),
    ]
    assert _ways(flow) == [
        ("text", "text", "loop"),
        ("outline", "loop:polish", "unconditional"),
        ("loop:polish", "good?", "unconditional"),
        ("phase:research", "phase:draft", "dependency"),
    ]
    assert _nodes(flow)["good?"].badges == ("REVIEW",)


def test_a_graph_has_labels_and_ways_back_and_its_end() -> None:
    """S-VIZ-82, S-VIZ-72: what needs no condition is dashed; what was not taken is told apart after a run only."""
    states = {"ask": _named("ask"), "again": Loop(name="again", body=[_named("solve")]), "tell": _named("tell")}
    graph = Graph(
        name="triage",
        states=states,
        start="ask",
        edges=[
            GraphEdge(from_state="ask", to_state="again", condition=lambda _: True, label="technical"),
            GraphEdge(from_state="ask", to_state="tell"),
            GraphEdge(from_state="again", to_state="ask"),
            GraphEdge(from_state="tell", to_state=Graph.END),
        ],
    )
    flow = _flow(graph)
    assert flow.mode == "graph"
    assert _nodes(flow)["ask"].badges == ("START",)
    assert _nodes(flow)["END"].kind == "end"
    assert [group.title for group in flow.groups] == ["STATE again: LOOP ≤5 again"]
    edges = [(edge.source, edge.target, edge.kind, edge.label, edge.is_back) for edge in flow.edges]
    assert edges[1:] == [
        ("ask", "loop:again", "conditional", "technical", False),
        ("ask", "tell", "unconditional", None, False),
        ("loop:again", "ask", "unconditional", None, True),
        ("tell", "END", "unconditional", None, False),
    ]
    assert all(edge.fired is None for edge in flow.edges)


def test_a_manager_stands_between_its_tasks_and_its_workers() -> None:
    """S-VIZ-82; also of a plan, which knows the manager alone."""
    model = ScriptedModel()
    workers = [agent(model, "Researcher"), agent(model, "Writer")]
    team = Ensemble(tasks=[_named("facts")], agents=workers, workflow="hierarchical", llm=model)
    flow = _flow(team)
    delegations = [
        ("manager", "worker:Researcher", "delegation"),
        ("manager", "worker:Writer", "delegation"),
    ]
    assert _ways(flow) == [("manager:tasks", "manager", "unconditional"), *delegations]
    assert _nodes(flow)["facts"].group == "manager:tasks"
    assert _nodes(flow)["manager"].kind == "manager"
    planned = declared_flow(team.plan())
    assert _ways(planned) == delegations
    assert {node.id for node in planned.nodes} == {"manager", "worker:Researcher", "worker:Writer"}


def test_a_plan_and_its_team_have_the_same_graph() -> None:
    """S-VIZ-82: what a record holds is drawn as the team is."""
    draft = _named("draft")
    team = Ensemble(
        tasks=[_named("plan")],
        loops=[Loop(name="refine", body=[draft, _named("critic", draft)])],
        llm=ScriptedModel(),
    )
    assert declared_flow(team.plan()) == _flow(team)


def test_levels_of_a_map_reduce_are_folded_to_counts() -> None:
    """S-VIZ-83, S-VIZ-71."""
    flow = _flow(
        MapReduceEnsemble(
            items=list(range(100)),
            map_task=lambda item: task(f"Summarise chapter {item}"),
            reduce_task=lambda chunk: task("Bring together", context=chunk),
            chunk_size=50,
            llm=ScriptedModel(),
        )
    )
    maps, reduces, last = flow.nodes
    assert (maps.shown_count, maps.title, maps.badges) == (100, "Summarise chapter…", ("MAP",))
    assert (reduces.shown_count, reduces.title, reduces.badges) == (2, "Bring together", ("REDUCE L1",))
    assert (last.shown_count, last.badges) == (None, ("AGGREGATE",))
    assert _ways(flow) == [(maps.id, reduces.id, "dependency"), (reduces.id, last.id, "dependency")]


def test_graphs_of_many_nodes_or_edges_stay_small() -> None:
    """S-VIZ-83: a chain of 5,000 tasks, and levels of which each task waits for all of the level before."""
    chain = _flow(Ensemble(tasks=[task(f"Step {at}") for at in range(5000)]))
    assert len(chain.nodes) <= 1000
    assert sum(node.shown_count or 1 for node in chain.nodes) == 5000
    levels = [[task("root")]]
    for level in range(6):
        levels.append([task(f"{level}: {at}", context=levels[-1]) for at in range(30)])
    dense = _flow(Ensemble(tasks=[each for level in levels for each in level], workflow="parallel"))
    assert len(dense.edges) <= 600
    assert sum(node.shown_count or 1 for node in dense.nodes) == 181


def test_the_data_of_a_graph_has_the_steps_of_a_run() -> None:
    """S-VIZ-81: what ran of a declared node; of a folded one how many steps there are of each status."""
    tasks = [_named("first"), *[task(f"Item number {at}", name=f"item-{at}") for at in range(50)]]
    flow = _flow(Ensemble(tasks=tasks, workflow="parallel"))
    steps = {"item-3": [("item-3#0", "failed")], "item-4": [("item-4#0", "completed"), ("item-4#1", "completed")]}
    data = flow_data(flow, place_flow(flow), steps)
    assert list(data) == ["width", "height", "nodes", "edges", "groups", "mode", "critical_path"]
    (folded,) = data["nodes"]  # type: ignore[misc]
    assert isinstance(folded, dict)
    assert (folded["steps"], folded["count"]) == (None, 51)
    assert folded["counts"] == {"failed": 1, "completed": 2}
    plain = _flow(Ensemble(tasks=[_named("first"), _named("second")]))
    ran = {"first": [("first#0", "running")]}
    first, second = flow_data(plain, place_flow(plain), ran)["nodes"]  # type: ignore[misc]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["steps"], first["count"], first["counts"]) == (["first#0"], None, None)
    assert second["steps"] == []
    assert first["y"] + first["h"] < second["y"]  # type: ignore[operator]
