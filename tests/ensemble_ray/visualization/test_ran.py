"""Runs as graphs of what ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

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
from ensemble_ray.values.ids import delegated_instance, effect_name, node_key
from ensemble_ray.visualization.declared import dag_flow
from ensemble_ray.visualization.dev_tools import parse_file, trace_steps
from ensemble_ray.visualization.flow import Flow, FlowNode, flow_data, mark_path, place_flow
from ensemble_ray.visualization.ran import critical_path, ran_flow
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
    assert [(node.badges, node.title) for node in flow.nodes] == [
        (("STEP 1",), "ask: Do ask"),
        (("STEP 2",), "ask: Do ask"),
        (("STEP 3",), "ask: Do ask"),
        (("STEP 4",), "left: Do left"),
        (("STEP 5",), "right: Do right"),
        (("STEP 6",), "tell: Do tell"),
    ]
    assert {(source, target) for source, target, _ in _ways(flow)} == {
        ("graph:fan#0/ask#0", "graph:fan#1/ask#0"),
        ("graph:fan#1/ask#0", "graph:fan#2/ask#0"),
        ("graph:fan#2/ask#0", "graph:fan#3/left#0"),
        ("graph:fan#2/ask#0", "graph:fan#4/right#0"),
        ("graph:fan#3/left#0", "graph:fan#5/tell#0"),
        ("graph:fan#4/right#0", "graph:fan#5/tell#0"),
    }


def _step(name: str, started_at: float, ended_at: float | None, **fields: Any) -> FlowNode:
    return FlowNode(
        **{"kind": "task", "title": name, "status": "completed", **fields},
        id=name,
        started_at=started_at,
        ended_at=ended_at,
    )


def _marked(flow: Flow) -> tuple[tuple[str, ...], set[tuple[str, str]]]:
    assert set(flow.critical_path) == {node.id for node in flow.nodes if node.is_critical}
    return flow.critical_path, {(edge.source, edge.target) for edge in flow.edges if edge.is_critical}


def test_the_critical_path_is_the_slowest_chain_and_not_the_longest() -> None:
    """S-VIZ-90: three short tasks in a chain end before the one long task that the last one waits for, too."""
    a, slow = _named("a"), _named("slow")
    b = _named("b", a)
    c = _named("c", b)
    plan = Ensemble(tasks=[a, b, c, slow, _named("end", c, slow)], workflow="parallel").plan()
    steps = [_step("a#0", 0, 1), _step("slow#0", 0, 9), _step("b#0", 1, 2), _step("c#0", 2, 3), _step("end#0", 9, 10)]
    assert _marked(ran_flow(steps, plan)) == (("slow#0", "end#0"), {("slow#0", "end#0")})
    assert critical_path(steps, plan) == [((), ("slow#0",)), (("slow#0",), ("end#0",))]


def test_the_critical_path_leads_through_frames() -> None:
    """S-VIZ-90: from the last step of a phase to the first step of the next; the back edge of a loop is on it."""
    quick, late, draft = _named("quick"), _named("late"), _named("draft")
    first = Phase(name="first", tasks=[quick, late], workflow="parallel")
    refine = Loop(name="refine", body=[draft, _named("critic", draft)], max_iterations=2)
    team = Ensemble(phases=[first, Phase(name="second", tasks=[_named("title")], loops=[refine], after=[first])])
    inside = "phase:second#0/loop:refine"
    steps = [
        _step("phase:first#0/quick#0", 0, 1),
        _step("phase:first#0/late#0", 0, 2),
        _step("phase:second#0/title#0", 2, 3),
        _step(f"{inside}#0/draft#0", 3, 4),
        _step(f"{inside}#0/critic#0", 4, 5),
        _step(f"{inside}#1/draft#0", 5, 6),
    ]
    path, ways = _marked(ran_flow(steps, team.plan()))
    assert path == tuple(step.id for step in steps[1:])
    assert ways == {
        ("phase:first#0", "phase:second#0"),
        ("phase:second#0/title#0", inside),
        (f"{inside}#0/draft#0", f"{inside}#0/critic#0"),
        (f"{inside}#0", f"{inside}#1"),
    }
    keys = {step.id: node_key(step.id) for step in steps}
    found = [([keys[one] for one in a], [keys[one] for one in b]) for a, b in critical_path(steps, team.plan())]
    declared = mark_path(dag_flow(DagExporter.build(team)), found)
    assert _marked(declared) == (
        ("late", "title", "draft", "critic"),
        {("phase:first", "phase:second"), ("title", "loop:refine"), ("draft", "critic"), ("critic", "draft")},
    )


def test_the_critical_path_has_the_delegated_work_that_its_step_waited_for() -> None:
    """S-VIZ-90: of two workers that were asked at the same time, the one that answered last."""
    steps = [
        _step("manager#0", 0, 9, kind="manager"),
        *(
            _step(delegated_instance(effect_name("manager#0", 0, number)), *times, kind="delegation")
            for number, times in enumerate([(1, 3), (3, 8), (3, 5)])
        ),
    ]
    flow = ran_flow(steps)
    manager, first, slow, quick = (node.id for node in flow.nodes)
    assert _marked(flow) == ((manager, first, slow), {(manager, slow), (manager, first)})
    assert quick not in flow.critical_path


def test_a_run_that_goes_on_or_has_one_way_marks_no_critical_path() -> None:
    """S-VIZ-90: its end is not known; and where all steps are on the path, it says nothing."""
    plan = Ensemble(tasks=[_named("a"), _named("b"), _named("c")], workflow="parallel").plan()
    steps = [_step("a#0", 0, 5), _step("b#0", 0, 2)]
    assert ran_flow(steps, plan).critical_path == ("a#0",)
    assert critical_path([*steps, _step("c#0", 0, None, status="running")], plan) == []
    assert critical_path(steps[:1], plan) == []
    stopped = _step("c#0", 0, 9, status="cancelled")
    assert ran_flow([*steps, stopped], plan).critical_path == ("a#0",)


def test_a_dependency_that_ended_after_a_step_began_is_not_before_it() -> None:
    """S-VIZ-90: clocks of machines may differ."""
    phase = Phase(name="first", tasks=[_named("quick"), _named("late")], workflow="parallel")
    team = Ensemble(phases=[phase, Phase(name="second", tasks=[_named("b")], after=[phase])])
    steps = [
        _step("phase:first#0/quick#0", 0, 1),
        _step("phase:first#0/late#0", 0, 3),
        _step("phase:second#0/b#0", 2, 9),
    ]
    assert ran_flow(steps, team.plan()).critical_path == ("phase:first#0/quick#0", "phase:second#0/b#0")
    skewed = [_step("a#0", 0, 5), _step("other#0", 0, 1), _step("b#0", 4.9, 9)]
    a = _named("a")
    plan = Ensemble(tasks=[a, _named("other"), _named("b", a)], workflow="parallel").plan()
    assert ran_flow(skewed, plan).critical_path == ("a#0", "b#0")


def test_levels_of_a_map_reduce_mark_no_critical_path() -> None:
    """S-VIZ-90, S-VIZ-83: each level waits for the one before it, so that all nodes would be on the path."""
    maps = [_step(f"map-{at}#0", 0, at + 1, kind="map", level=0) for at in range(4)]
    reduces = [_step("r-0#0", 2, 5, kind="reduce", level=1), _step("r-1#0", 4, 4.5, kind="reduce", level=1)]
    steps = [*maps, *reduces, _step("last#0", 5, 6, kind="final-reduce", level=2)]
    flow = ran_flow(steps)
    assert _marked(flow) == ((), set())
    assert [(node.started_at, node.ended_at) for node in flow.nodes] == [(0, 4), (2, 5), (5, 6)]
    team = MapReduceEnsemble(
        items=[1, 2, 3, 4],
        map_task=lambda item: task(f"Map {item}", handler=_done),
        reduce_task=lambda chunk: task("Reduce", context=chunk, handler=_done),
        chunk_size=2,
    )
    declared = dag_flow(DagExporter.build(team))
    maps_id, reduces_id, last_id = (node.folded[-1] if node.folded else node.id for node in declared.nodes)
    path = [((), (maps_id,)), ((maps_id,), (reduces_id,)), ((reduces_id,), (last_id,))]
    assert _marked(mark_path(declared, path[:2]))[0] == tuple(node.id for node in declared.nodes[:2])
    assert _marked(mark_path(declared, path)) == ((), set())


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
