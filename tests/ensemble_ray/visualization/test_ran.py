"""Runs as graphs of what ran."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest

from ensemble_ray import (
    DagExporter,
    DagModel,
    DevToolsExport,
    Ensemble,
    EnsembleDevTools,
    EnsembleOutput,
    ExecutionTrace,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    GraphRoutingContext,
    IllegalStateError,
    Loop,
    MapReduceEnsemble,
    Phase,
    Task,
    TaskExecutionError,
    TaskHandlerContext,
    ValidationError,
)
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.visualization.dev_tools import parse_file, trace_steps
from ensemble_ray.visualization.flow import Flow, FlowNode, flow_data, place_flow
from ensemble_ray.visualization.ran import ran_flow
from tests.builders import agent, answer, call, task

V = TypeVar("V", DagModel, ExecutionTrace)


def _done(_: TaskHandlerContext) -> str:
    return "x"


def _named(name: str, *context: object) -> Task:
    return task(f"Do {name}", name=name, context=list(context), handler=_done)


def _ran(team: Ensemble) -> Flow:
    plan = team.plan()
    return ran_flow(trace_steps(team.run(runtime="inline").trace, plan), plan)


def _read(kind: type[V], path: Path) -> V:
    return parse_file(kind, path.read_text(encoding="utf-8"), name=str(path))


def _ways(flow: Flow) -> set[tuple[str, str, str]]:
    return {(edge.source, edge.target, edge.kind) for edge in flow.edges}


def test_tasks_and_iterations_of_a_loop_are_nodes_and_frames() -> None:
    """S-VIZ-84."""
    plan, draft = _named("plan"), _named("draft")
    refine = Loop(name="refine", body=[draft, _named("critic", draft)], context=[plan], max_iterations=2)
    flow = _ran(Ensemble(tasks=[plan], loops=[refine], workflow="parallel"))
    assert [(node.id, node.group, node.kind, node.status) for node in flow.nodes] == [
        ("plan#0", None, "handler", "completed"),
        ("loop:refine#0/draft#0", "loop:refine#0", "handler", "completed"),
        ("loop:refine#0/critic#0", "loop:refine#0", "handler", "completed"),
        ("loop:refine#1/draft#0", "loop:refine#1", "handler", "completed"),
        ("loop:refine#1/critic#0", "loop:refine#1", "handler", "completed"),
    ]
    assert [(group.id, group.title, group.parent) for group in flow.groups] == [
        ("loop:refine", "LOOP refine, 2 of 2", None),
        ("loop:refine#0", "iteration 1", "loop:refine"),
        ("loop:refine#1", "iteration 2", "loop:refine"),
    ]
    assert _ways(flow) == {
        ("plan#0", "loop:refine", "dependency"),
        ("loop:refine#0/draft#0", "loop:refine#0/critic#0", "dependency"),
        ("loop:refine#0", "loop:refine#1", "loop"),
        ("loop:refine#1/draft#0", "loop:refine#1/critic#0", "dependency"),
    }


def test_of_many_iterations_the_first_and_the_last_are_shown() -> None:
    """S-VIZ-84."""
    flow = _ran(Ensemble(loops=[Loop(name="long", body=[_named("one")], max_iterations=20)]))
    titles = [group.title for group in flow.groups]
    assert titles == [
        "LOOP long, 20 of 20",
        *(f"iteration {number}" for number in (1, 2, 3, 18, 19, 20)),
    ]
    (folded,) = (node for node in flow.nodes if node.folded)
    assert (folded.title, folded.shown_count, folded.counts) == ("iterations 4 to 17", 14, {"completed": 14})
    assert ("loop:long#2", folded.id, "loop") in _ways(flow)
    assert (folded.id, "loop:long#17", "loop") in _ways(flow)
    data = flow_data(flow, place_flow(flow))
    assert data["mode"] == "dag"


def test_phases_that_ran_once_are_one_frame() -> None:
    """S-VIZ-84."""
    first = Phase(name="first", tasks=[_named("a"), _named("b")])
    second = Phase(name="second", tasks=[_named("c"), _named("d")], after=[first], workflow="parallel")
    flow = _ran(Ensemble(phases=[first, second]))
    assert [group.id for group in flow.groups] == ["phase:first#0", "phase:second#0"]
    assert _ways(flow) == {
        ("phase:first#0/a#0", "phase:first#0/b#0", "unconditional"),
        ("phase:first#0", "phase:second#0", "dependency"),
    }


def test_steps_of_a_graph_follow_its_edges_through_forks_joins_and_revisits() -> None:
    """S-VIZ-84."""

    def is_new(context: GraphRoutingContext) -> bool:
        return context.step_number < 3

    graph = Graph(
        name="fan",
        states={name: _named(name) for name in ("ask", "left", "right", "tell")},
        start="ask",
        edges=[
            GraphEdge(from_state="ask", to_state="ask", condition=is_new),
            GraphFork(from_state="ask", to_states=["left", "right"]),
            GraphJoin(from_states=["left", "right"], to_state="tell"),
            GraphEdge(from_state="tell", to_state=Graph.END),
        ],
    )
    flow = _ran(Ensemble(graph=graph))
    assert [node.badges for node in flow.nodes] == [
        ("STEP 1", "ask"),
        ("STEP 2", "ask"),
        ("STEP 3", "ask"),
        ("STEP 4", "left"),
        ("STEP 5", "right"),
        ("STEP 6", "tell"),
    ]
    assert {(source, target) for source, target, _ in _ways(flow)} == {
        ("graph:fan#0/ask#0", "graph:fan#1/ask#0"),
        ("graph:fan#1/ask#0", "graph:fan#2/ask#0"),
        ("graph:fan#2/ask#0", "graph:fan#3/left#0"),
        ("graph:fan#2/ask#0", "graph:fan#4/right#0"),
        ("graph:fan#3/left#0", "graph:fan#5/tell#0"),
        ("graph:fan#4/right#0", "graph:fan#5/tell#0"),
    }


def test_work_that_was_handed_on_stands_behind_who_asked() -> None:
    """S-VIZ-84: of a manager, and of peers."""
    arguments = '{"agent_role": "Writer", "task_description": "Write it"}'
    manager = ScriptedModel(answer("", calls=[call("delegate_task", arguments)]), answer("All done"))
    writer = agent(ScriptedModel(otherwise="text"), "Writer")
    team = Ensemble(tasks=[task("Make it", writer)], agents=[writer], workflow="hierarchical", manager_llm=manager)
    flow = _ran(team)
    boss, worker = flow.nodes
    assert (boss.id, boss.kind, worker.kind, worker.agent, worker.title) == (
        "manager#0",
        "manager",
        "delegation",
        "Writer",
        "Write it",
    )
    assert _ways(flow) == {("manager#0", worker.id, "delegation")}


def test_levels_of_a_map_reduce_are_nodes_when_no_plan_says_more() -> None:
    """S-VIZ-84, S-STU-240."""
    team = MapReduceEnsemble(
        items=["a", "b", "c"],
        map_task=lambda item: task(f"Map item {item}", handler=_done),
        reduce_task=lambda chunk: task("Reduce", context=chunk, handler=_done),
        chunk_size=2,
    )
    flow = ran_flow(trace_steps(team.run(runtime="inline").trace))
    assert flow.groups == ()
    assert [(node.kind, node.title, node.shown_count) for node in flow.nodes] == [
        ("map", "Map item…", 3),
        ("reduce", "Reduce", 2),
        ("final-reduce", "Reduce", None),
    ]
    maps, reduces, last = (node.id for node in flow.nodes)
    assert _ways(flow) == {(maps, reduces, "dependency"), (reduces, last, "dependency")}


def _item(number: int, status: str, title: str = "") -> FlowNode:
    key = f"map-{number}"
    return FlowNode(id=f"{key}#0", kind="map", title=title or key, agent="Reader", status=status, level=0)


def test_a_level_has_the_same_node_while_it_grows() -> None:
    """S-STU-240: with the items that were not read yet; its title comes from the tasks that have a text."""
    begun = [_item(0, "running"), _item(1, "pending")]
    later = [_item(0, "completed", "Summarise report 1"), _item(1, "failed", "Summarise report 2"), _item(2, "running")]
    (first,), (second,) = (ran_flow(steps, item_count=5, workflow="map").nodes for steps in (begun, later))
    assert first.id == second.id
    assert (first.title, first.counts) == ("items", {"running": 1, "pending": 4})
    assert (second.title, second.counts) == (
        "Summarise report…",
        {"completed": 1, "failed": 1, "running": 1, "pending": 2},
    )


def test_items_that_one_task_handles_together_are_no_node() -> None:
    """S-STU-240."""
    direct = FlowNode(id="direct#0", kind="direct", title="All at once", status="completed", level=0)
    flow = ran_flow([_item(0, "skipped"), direct], item_count=3)
    assert [node.id for node in flow.nodes] == ["direct#0"]


def test_failed_tasks_are_told_and_those_that_did_not_begin_are_left_out() -> None:
    """S-VIZ-84."""

    def fail(_: TaskHandlerContext) -> str:
        raise ValueError("no")

    broken = task("Do broken", name="broken", handler=fail)
    with pytest.raises(TaskExecutionError) as raised:
        Ensemble(tasks=[_named("fine"), broken, _named("never")]).run(runtime="inline")
    trace = raised.value.trace
    assert trace is not None
    flow = ran_flow(trace_steps(trace), workflow=trace.workflow)
    assert [(node.title, node.status) for node in flow.nodes] == [("Do fine", "completed"), ("Do broken", "failed")]
    steps = [
        FlowNode(id="a#0", kind="task", title="a", status="running"),
        FlowNode(id="loop:l#0", kind="iteration", title="1", status="running"),
        FlowNode(id="b#0", kind="task", title="b", status="pending"),
    ]
    assert [node.id for node in ran_flow(steps).nodes] == ["a#0"]


def test_files_of_graphs_and_traces_are_read_back(tmp_path: Path) -> None:
    """S-VIZ-60, S-VIZ-62, S-VIZ-70: a second export of the same second does not touch the first."""
    team = Ensemble(tasks=[_named("a")])
    output = team.run(runtime="inline")
    first = EnsembleDevTools.export(team, output, tmp_path / "new")
    second = EnsembleDevTools.export(team, output, tmp_path / "new")
    assert isinstance(first, DevToolsExport)
    assert len({first.dag_path, first.trace_path, second.dag_path, second.trace_path}) == 4
    assert first.dag_path.name.startswith("ensemble-dag-")
    assert first.dag_path.name.endswith(".dag.json")
    stamp = first.trace_path.name.removeprefix("ensemble-trace-").removesuffix(".trace.json")
    assert [len(part) for part in stamp.split("-")][:2] == [8, 6]
    assert str(first.dag_path) in first.describe()
    assert str(first.trace_path) in first.describe()
    assert _read(DagModel, second.dag_path).tasks == EnsembleDevTools.build_dag(team).tasks
    assert _read(ExecutionTrace, first.trace_path) == output.trace


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """S-VIZ-61."""
    team = Ensemble(tasks=[_named("a")])
    with pytest.raises(ValueError, match=r"^output must not be None$"):
        EnsembleDevTools.export_trace(None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^output_dir must not be None$"):
        EnsembleDevTools.export_dag(team, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^output_dir must not be None$"):
        EnsembleDevTools.export_trace(team.run(runtime="inline"), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^ensemble must not be None$"):
        EnsembleDevTools.export_dag(None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(IllegalStateError, match=r"^output has no execution trace attached: "):
        EnsembleDevTools.export_trace(EnsembleOutput(raw="x"), tmp_path)
    with pytest.raises(IllegalStateError, match=r"^output has no execution trace attached: "):
        EnsembleDevTools.export(team, EnsembleOutput(raw="x"), tmp_path / "new")
    with pytest.raises(ValueError, match=r"^output must not be None$"):
        EnsembleDevTools.export(team, None, tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_neither_is_refused_by_its_name(tmp_path: Path) -> None:
    """S-VIZ-88."""
    path = tmp_path / "other.json"
    path.write_text('{"type": "else"}', encoding="utf-8")
    with pytest.raises(ValidationError, match=r"other\.json: DagModel: "):
        _read(DagModel, path)
    with pytest.raises(ValidationError, match=r"other\.json: ExecutionTrace: "):
        _read(ExecutionTrace, path)
    path.write_text("not json", encoding="utf-8")
    with pytest.raises(ValidationError, match=r"other\.json: DagModel: "):
        _read(DagModel, path)


def test_a_trace_without_what_newer_ones_have_is_shown(tmp_path: Path) -> None:
    """S-VIZ-77: what a file lacks breaks nothing."""
    trace = Ensemble(tasks=[_named("a"), _named("b")]).run(runtime="inline").trace
    parts = ("schema_version", "ensemble_id", "workflow", "started_at", "completed_at", "total_duration")
    path = tmp_path / "old.trace.json"
    path.write_text(trace.model_dump_json(include={*parts, "task_traces"}), encoding="utf-8")
    found = _read(ExecutionTrace, path)
    assert isinstance(found, ExecutionTrace)
    flow = ran_flow(trace_steps(found), workflow=found.workflow)
    assert [node.title for node in flow.nodes] == ["Do a", "Do b"]
    assert len(DagExporter.build(found).tasks) == 2


def test_teams_and_runs_are_drawn_into_files(tmp_path: Path) -> None:
    """S-VIZ-63."""
    team = Ensemble(tasks=[_named("a"), _named("b")])
    path = EnsembleDevTools.draw(team, tmp_path / "new" / "team.svg")
    assert path.read_text(encoding="utf-8").startswith("<svg ")
    ran = EnsembleDevTools.draw(team.run(runtime="inline").trace, tmp_path / "new" / "team.svg")
    assert 'class="completed"' in ran.read_text(encoding="utf-8")
    mermaid = EnsembleDevTools.draw(team, str(tmp_path / "team.mmd")).read_text(encoding="utf-8")
    assert "n0 -.-> n1" in mermaid
    with pytest.raises(ValueError, match=r"^path must end in \.svg or \.mmd, got: team\.png$"):
        EnsembleDevTools.draw(team, "team.png")
