"""Loops, phases and graphs as units of a plan."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ensemble_ray import (
    Agent,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    Loop,
    MemoryStore,
    Phase,
    PhaseReview,
    Plan,
    PromptTemplateError,
    SynthesisContext,
    Task,
    UnitOutput,
)
from ensemble_ray.definition import EnsembleDefinition
from ensemble_ray.plan.plan import (
    EdgeEntry,
    ForkEntry,
    GraphUnit,
    JoinEntry,
    LoopUnit,
    PhaseUnit,
    StateEntry,
    in_waiting_order,
    members_of,
)
from ensemble_ray.plan.planner import Planned, plan_run, resolve_tasks, synthesize_agents
from ensemble_ray.testing import ScriptedModel
from tests.builders import task_after

MODEL = ScriptedModel()


def handle(context: Any) -> str:
    """A handler."""
    return "done"


def task(name: str, *context: Task | UnitOutput, **fields: object) -> Task:
    """A handler task of that name."""
    return task_after(name, *context, **{"name": name, "handler": handle, **fields})


def planned(definition: EnsembleDefinition, /, **inputs: object) -> Planned:
    """The plan without agents made for tasks."""
    return plan_run(definition, resolve_tasks(definition, inputs))


FACTS = task("facts")
WRITER = task("writer")
CRITIC = task("critic", WRITER)
REFINE = Loop(
    name="refine",
    body=[WRITER, CRITIC],
    until=bool,
    max_iterations=None,
    on_max_iterations="throw",
    output_mode="all_iterations",
    memory_mode="window",
    memory_window_size=3,
    inject_feedback=False,
    context=[FACTS],
    max_tokens=900,
)


def test_loop_is_a_unit_behind_the_plain_tasks() -> None:
    """S-LOOP-20, S-LOOP-47: the tasks of its body count among themselves."""
    made = planned(EnsembleDefinition(tasks=[task("report", REFINE.output), FACTS], loops=[REFINE]))
    plan = made.plan
    assert [(node.key, node.index, node.total) for node in plan.nodes] == [
        *(("report", 1, None), ("facts", 2, None)),
        *(("writer", 1, 2), ("critic", 2, 2)),
    ]
    assert {node.key: node.context for node in plan.nodes} == {
        "report": ("loop:refine",),
        "facts": (),
        "writer": (),
        "critic": ("writer",),
    }
    assert plan.units == (
        LoopUnit(
            key="loop:refine",
            name="refine",
            body=("writer", "critic"),
            body_names=("writer", "critic"),
            context=("facts",),
            max_iterations=5,
            has_until=True,
            on_max_iterations="throw",
            output_mode="all_iterations",
            memory_mode="window",
            memory_window_size=3,
            inject_feedback=False,
            max_tokens=900,
        ),
    )
    assert made.units == {"loop:refine": REFINE}
    assert [node.object_id for node in plan.nodes[2:]] == [WRITER.object_id, CRITIC.object_id]
    assert set(made.tasks) == {"report", "facts", "writer", "critic"}


def test_entry_for_one_body_task_is_the_loop_and_that_task() -> None:
    """S-LOOP-174: who names it waits for the loop; a plan without such an entry is the data that it was."""
    report = task("report", FACTS, REFINE.output_of(WRITER), REFINE.output)
    later = Loop(name="later", body=[task("polish")], context=[REFINE.output_of(CRITIC)])
    plan = planned(EnsembleDefinition(tasks=[FACTS, report], loops=[REFINE, later])).plan
    assert plan.nodes[1].context == ("facts", "loop:refine", "loop:refine")
    assert plan.nodes[1].context_tasks == ("", "writer", "")
    unit = plan.units[1]
    assert isinstance(unit, LoopUnit)
    assert (unit.context, unit.context_tasks) == (("loop:refine",), ("critic",))
    assert plan.top_level == ("facts", "loop:refine", "report", "loop:later")
    assert ["context_tasks" in node for node in plan.to_dict()["nodes"]] == [False, True, False, False, False]  # type: ignore[union-attr]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_plan_without_units_is_the_same_data_as_before_there_were_any() -> None:
    """S-DUR-36: what was recorded before goes on."""
    plan = planned(EnsembleDefinition(tasks=[FACTS, task("b", FACTS)])).plan
    assert "units" not in plan.to_dict()
    assert all("total" not in node for node in plan.to_dict()["nodes"])  # type: ignore[union-attr]
    assert plan.top_level == ("facts", "b")


def test_body_task_is_named_by_its_description_when_it_has_no_name() -> None:
    """S-LOOP-4: as it is written, so that a predicate finds it whatever the inputs are; its key is its place in the plan."""
    body = [Task(description="Write about {topic}", expected_output="e", handler=handle)]
    plan = planned(EnsembleDefinition(tasks=[FACTS], loops=[Loop(name="x", body=body)]), topic="tides").plan
    (unit,) = plan.units
    assert isinstance(unit, LoopUnit)
    assert (unit.body, unit.body_names) == (("task-2",), ("Write about {topic}",))
    assert plan.nodes[1].description == "Write about tides"


def test_variables_are_resolved_once_for_the_tasks_of_all_units() -> None:
    """S-LOOP-45, S-PHASE-34, S-GRAPH-54: what is missing is told before anything runs."""
    text = Task(name="t", description="About {topic}", expected_output="e", handler=handle)
    reader = task("reader", text)
    for definition in (
        EnsembleDefinition(loops=[Loop(name="x", body=[text, reader])]),
        EnsembleDefinition(phases=[Phase(name="p", tasks=[FACTS], review=PhaseReview.of(text))]),
        EnsembleDefinition(
            graph=Graph(name="g", states={"s": text}, edges=[GraphEdge(from_state="s", to_state=Graph.END)], start="s")
        ),
    ):
        assert planned(definition, topic="tides").tasks["t"].description == "About tides"
        with pytest.raises(PromptTemplateError) as caught:
            resolve_tasks(definition)
        assert caught.value.missing_variables == ("topic",)


def test_agents_are_made_once_for_the_tasks_of_all_units() -> None:
    """S-LOOP-46, S-GRAPH-54: one agent per task, however often it will run."""
    asked: list[str] = []

    def synthesize(of: Task, context: SynthesisContext) -> Agent:
        asked.append(of.description)
        return Agent(role=of.description, goal="g", llm=context.model)

    body, state = (Task.of(name) for name in ("body", "state"))
    for definition, expected in (
        (EnsembleDefinition(loops=[Loop(name="x", body=[body])], llm=MODEL, agent_synthesizer=synthesize), "body"),
        (
            EnsembleDefinition(
                graph=Graph(
                    name="g", states={"s": state}, edges=[GraphEdge(from_state="s", to_state=Graph.END)], start="s"
                ),
                llm=MODEL,
                agent_synthesizer=synthesize,
            ),
            "state",
        ),
    ):
        resolved = resolve_tasks(definition)
        agents = asyncio.run(synthesize_agents(resolved, definition))
        assert plan_run(definition, resolved, agents).plan.agents[0].role == expected
    assert asked == ["body", "state"]


def test_phases_are_units_whose_loops_and_reviews_lie_inside() -> None:
    """S-PHASE-33, S-PHASE-35, S-PHASE-38: context across phases by key, counts within the phase."""
    inner = Loop(name="polish", body=[task("polisher")], context=[FACTS])
    first = Phase(name="find", tasks=[FACTS, task("sort", FACTS)], workflow="parallel")
    last = task("last", FACTS, first.output, inner.output)
    second = Phase(
        name="write",
        tasks=[last, task("other")],
        loops=[inner],
        after=[first, first],
        review=PhaseReview(task=task("judge", last), max_retries=1, max_predecessor_retries=0),
    )
    made = planned(EnsembleDefinition(phases=[second, first]))
    assert [(node.key, node.index, node.total) for node in made.plan.nodes] == [
        *(("last", 1, 2), ("other", 2, 2), ("polisher", 1, 1), ("judge", 1, 1)),
        *(("facts", 1, 2), ("sort", 2, 2)),
    ]
    contexts = {node.key: node.context for node in made.plan.nodes if node.context}
    assert contexts == {
        "last": ("facts", "phase:find", "loop:polish"),
        "judge": ("last",),
        "sort": ("facts",),
    }
    write, polish, find = made.plan.units
    assert write == PhaseUnit(
        key="phase:write",
        name="write",
        members=("other", "loop:polish", "last"),
        after=("phase:find",),
        review="judge",
        max_retries=1,
        max_predecessor_retries=0,
    )
    assert isinstance(polish, LoopUnit)
    assert polish.context == ("facts",)
    assert isinstance(find, PhaseUnit)
    assert (find.members, find.workflow, find.after, find.review) == (("facts", "sort"), "parallel", (), None)
    assert made.plan.top_level == ("phase:write", "phase:find")
    assert set(made.units) == {"phase:write", "loop:polish", "phase:find"}


def test_phase_has_the_workflow_of_the_ensemble_when_it_names_none() -> None:
    """S-PHASE-33: else sequential, whatever the contexts of its tasks are; S-DET-43."""
    phase = Phase.of("p", FACTS, task("b", FACTS))
    for workflow, expected in (("parallel", "parallel"), ("sequential", "sequential"), (None, "sequential")):
        (unit,) = planned(EnsembleDefinition(phases=[phase], workflow=workflow)).plan.units
        assert isinstance(unit, PhaseUnit)
        assert unit.workflow == expected


def test_graph_is_a_unit_with_its_states_and_edges_in_declared_order() -> None:
    """S-GRAPH-1, S-GRAPH-55, S-GRAPH-110, S-GRAPH-111, S-GRAPH-115: a position among the edges is what finds a condition."""
    refine = Loop(name="refine", body=[WRITER, CRITIC], context=[FACTS])
    graph = Graph(
        name="a/b#c",
        states={"start": FACTS, "refine": refine, "end": task("end", FACTS, refine.output)},
        edges=[
            GraphEdge(from_state="start", to_state="end", condition=bool, label="done"),
            GraphFork(from_state="start", to_states=["refine", "end"]),
            GraphJoin(from_states=["refine", "end"], to_state=Graph.END, count=1),
        ],
        start="start",
        max_steps=9,
        on_max_steps="return_with_flag",
        no_feedback_states={"start", "end"},
    )
    made = planned(EnsembleDefinition(graph=graph))
    unit, loop = made.plan.units
    assert unit == GraphUnit(
        key="graph:a_b_c",
        name="a/b#c",
        states=(
            StateEntry(name="start", member="facts"),
            StateEntry(name="refine", member="loop:refine"),
            StateEntry(name="end", member="end"),
        ),
        edges=(
            EdgeEntry(from_state="start", to_state="end", label="done", has_condition=True),
            ForkEntry(from_state="start", to_states=("refine", "end")),
            JoinEntry(from_states=("refine", "end"), to_state="__END__", count=1),
        ),
        start="start",
        max_steps=9,
        on_max_steps="return_with_flag",
        no_feedback_states=("end", "start"),
    )
    assert isinstance(loop, LoopUnit)
    assert loop.context == ("facts",)
    assert [(node.key, node.index, node.total) for node in made.plan.nodes] == [
        *(("facts", 1, 1), ("writer", 1, 2), ("critic", 2, 2), ("end", 1, 1)),
    ]
    assert made.plan.nodes[3].context == ("facts", "loop:refine")
    assert made.units["graph:a_b_c"] is graph
    assert made.plan.top_level == ("graph:a_b_c",)


def test_keys_are_unique_over_the_whole_plan() -> None:
    """Units share the name space of tasks: a task may have the name that a unit wants."""
    named = task("loop:x")
    loops = [Loop(name="x", body=[task("writer")]), Loop(name="y", body=[task("writer")])]
    plan = planned(EnsembleDefinition(tasks=[named], loops=loops)).plan
    assert [node.key for node in plan.nodes] == ["loop:x", "writer", "writer~2"]
    assert [unit.key for unit in plan.units] == ["loop:x~2", "loop:y"]
    assert [members_of(unit) for unit in plan.units] == [("writer",), ("writer~2",)]


def test_plan_is_the_same_when_it_was_data_in_between() -> None:
    """A record holds the plan as JSON."""
    refine = Loop(name="refine", body=[WRITER, CRITIC])
    graph = Graph(
        name="g",
        states={"a": FACTS, "b": refine},
        edges=[GraphFork(from_state="a", to_states=["b", "a"]), GraphEdge(from_state="b", to_state=Graph.END)],
        start="a",
    )
    for definition in (
        EnsembleDefinition(tasks=[FACTS], loops=[REFINE]),
        EnsembleDefinition(phases=[Phase(name="p", tasks=[FACTS], loops=[refine])]),
        EnsembleDefinition(graph=graph),
    ):
        plan = planned(definition).plan
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_tasks_run_before_loops_when_they_wait_for_none() -> None:
    """S-LOOP-120, S-LOOP-168: whatever waits for a loop comes behind it, as soon as it can."""
    first, second = Loop(name="first", body=[WRITER]), Loop(name="second", body=[task("other")])
    tasks = [FACTS, task("of first", first.output), task("of second", second.output), task("plain")]
    plan = planned(EnsembleDefinition(tasks=tasks, loops=[first, second])).plan
    assert plan.top_level == ("facts", "plain", "loop:first", "of first", "loop:second", "of second")


def test_order_is_the_declared_one_but_for_what_waits() -> None:
    """S-LOOP-168: keys that are waited for elsewhere do not count."""
    assert in_waiting_order(("a", "b", "c"), {"a": ("c", "z"), "b": (), "c": ()}) == ("b", "c", "a")
    assert in_waiting_order(("a", "b"), {}) == ("a", "b")


def test_loop_knows_the_memory_scopes_of_its_body_when_there_is_a_store() -> None:
    """S-LOOP-94, S-LOOP-95: each once; those of tasks outside are not among them."""
    body = [task("a", memory_scopes=["facts", "style"]), task("b", memory_scopes=["facts"])]
    loop = Loop(name="x", body=body)
    outside = task("outside", memory_scopes=["other"])
    for store, expected in ((MemoryStore.in_memory(), ("facts", "style")), (None, ())):
        (unit,) = planned(EnsembleDefinition(tasks=[outside], loops=[loop], memory_store=store)).plan.units
        assert isinstance(unit, LoopUnit)
        assert unit.memory_scopes == expected
