"""What loops, phases and a graph have to do with their ensemble, at the start of a run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ensemble_ray import Agent, Graph, GraphEdge, Loop, Phase, PhaseReview, Task, UnitOutput, ValidationError, Workflow
from ensemble_ray.definition import EnsembleDefinition, validate
from ensemble_ray.definition.validation import declared_agents, infer_workflow
from ensemble_ray.testing import ScriptedModel
from tests.builders import task_after

MODEL = ScriptedModel()


def handle(context: Any) -> str:
    """A handler."""
    return "done"


def task(description: str, *context: Task | UnitOutput, **fields: object) -> Task:
    """A handler task of that description."""
    return task_after(description, *context, **{"handler": handle, **fields})


def loop(name: str, *body: Task, **fields: object) -> Loop:
    """A loop of that name."""
    return Loop(**{"name": name, "body": body or (task(f"body of {name}"),), **fields})


def graph(**states: Task | Loop) -> Graph:
    """A graph that visits its states in order."""
    names = [*states, Graph.END]
    edges = [GraphEdge(from_state=here, to_state=there) for here, there in itertools.pairwise(names)]
    return Graph(name="g", states=states, edges=edges, start=names[0])


def refusal(**fields: object) -> str:
    """The text that validation refuses such an ensemble with."""
    with pytest.raises(ValidationError) as caught:
        validate(EnsembleDefinition(**fields))
    return str(caught.value)


A, B = task("a"), task("b")
PHASE = Phase.of("p", task("in p"))

LOOPS_AND_PHASES = (
    "Cannot mix loops and phases on the same Ensemble. Use loops within a flat task list, or compose phases instead."
)
TASKS_AND_PHASES = (
    "Cannot mix tasks and phases on the same Ensemble. Use flat tasks for simple pipelines, or phases for named workstreams "
    "with parallel execution -- but not both on the same ensemble."
)
GRAPH_AND_MORE = (
    "Cannot mix a graph with tasks, loops or phases on the same Ensemble. Graph is an exclusive orchestration style; "
    "pick one per ensemble."
)
HIERARCHICAL_LOOPS = "Workflow.HIERARCHICAL does not support Loop nodes. Use Workflow.SEQUENTIAL or Workflow.PARALLEL when declaring loops."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"loops": [], "phases": []}, "Ensemble must have at least one task", id="S-LOOP-36"),
        pytest.param({"phases": []}, "Ensemble must have at least one task", id="S-PHASE-45"),
        pytest.param({"tasks": [A], "phases": [PHASE]}, TASKS_AND_PHASES, id="S-PHASE-13"),
        pytest.param({"tasks": [A], "loops": [loop("x")], "phases": [PHASE]}, TASKS_AND_PHASES, id="S-PHASE-13-first"),
        pytest.param({"loops": [loop("x")], "phases": [PHASE]}, LOOPS_AND_PHASES, id="S-LOOP-30"),
        pytest.param({"loops": [loop("x")], "graph": graph(a=A)}, GRAPH_AND_MORE, id="S-LOOP-37"),
        pytest.param({"phases": [PHASE], "graph": graph(a=A)}, GRAPH_AND_MORE, id="S-PHASE-14"),
        pytest.param({"tasks": [B], "graph": graph(a=A)}, GRAPH_AND_MORE, id="S-GRAPH-30"),
        pytest.param(
            {"graph": graph(a=A), "workflow": "hierarchical"},
            "Workflow.HIERARCHICAL does not support a Graph. Use the default workflow when declaring a graph.",
            id="S-GRAPH-31",
        ),
        pytest.param({"loops": [loop("x"), loop("x")], "workflow": "hierarchical"}, HIERARCHICAL_LOOPS, id="S-LOOP-31"),
        pytest.param(
            {"phases": [PHASE], "workflow": "hierarchical"},
            "Workflow.HIERARCHICAL does not support phases. Use Workflow.SEQUENTIAL or Workflow.PARALLEL when declaring phases.",
            id="S-PHASE-112",
        ),
    ],
)
def test_constructs_are_refused_when_they_cannot_stand_together(fields: dict[str, object], message: str) -> None:
    """S-LOOP-30, S-LOOP-31, S-LOOP-36, S-LOOP-37, S-PHASE-13, S-PHASE-14, S-PHASE-45, S-PHASE-112, S-GRAPH-30, S-GRAPH-31."""
    assert refusal(**fields) == message


def test_ensemble_is_valid_when_it_has_loops_phases_or_a_graph_alone() -> None:
    """S-LOOP-2, S-LOOP-36, S-PHASE-3, S-GRAPH-3."""
    assert validate(EnsembleDefinition(loops=[loop("x")])) == []
    assert validate(EnsembleDefinition(tasks=[A], loops=[loop("x", context=[A])])) == []
    assert validate(EnsembleDefinition(phases=[PHASE])) == []
    assert validate(EnsembleDefinition(graph=graph(a=A, b=B))) == []


# Loops.

DUPLICATE_LOOP = "Duplicate loop name 'x' detected. Loop names must be unique within an ensemble."
NO_MODEL_IN_LOOP = "Loop 'x' body task 'w' has no LLM source. Set llm on the task, the ensemble, or provide an explicit agent or handler."


def test_loop_names_are_refused_when_two_are_the_same() -> None:
    """S-LOOP-32; it holds for loops of phases and of states too, and comes before S-LOOP-33."""
    asking = Task(name="w", description="Write", expected_output="e")
    assert refusal(loops=[loop("x", asking), loop("x")]) == DUPLICATE_LOOP
    phases = [Phase(name=name, loops=[loop("x")]) for name in ("p", "q")]
    assert refusal(phases=phases) == DUPLICATE_LOOP
    assert refusal(graph=graph(a=loop("x"), b=loop("x"))) == DUPLICATE_LOOP


def test_body_task_is_refused_when_no_model_can_do_it() -> None:
    """S-LOOP-33: handler, agent with a model, own model or the ensemble's."""
    asking = Task(name="w", description="Write", expected_output="e")
    assert refusal(loops=[loop("x", asking)]) == NO_MODEL_IN_LOOP
    team_agent = asking.replace(agent=Agent(role="Writer", goal="Write"))
    assert refusal(loops=[loop("x", team_agent)]) == NO_MODEL_IN_LOOP
    assert refusal(phases=[Phase(name="p", loops=[loop("x", asking)])]) == NO_MODEL_IN_LOOP
    assert refusal(graph=graph(a=loop("x", asking))) == NO_MODEL_IN_LOOP
    for body in (asking.replace(llm=MODEL), asking.replace(agent=Agent(role="Writer", goal="Write", llm=MODEL))):
        assert validate(EnsembleDefinition(loops=[loop("x", body)])) == []
    assert validate(EnsembleDefinition(loops=[loop("x", asking, team_agent.replace(name="v"))], llm=MODEL)) == []


def test_loops_are_checked_before_the_rules_of_a_workflow() -> None:
    """S-LOOP-34."""
    fields: dict[str, object] = {"tasks": [A], "workflow": "parallel", "parallel_error_strategy": None}
    assert refusal(**fields, loops=[loop("x"), loop("x")]) == DUPLICATE_LOOP
    assert "parallel_error_strategy" in refusal(**fields, loops=[loop("x")])


def test_loop_is_refused_when_it_waits_for_a_task_outside_of_the_ensemble() -> None:
    """S-LOOP-35: it names loop and task."""
    message = "Loop 'x' declares context on task 'b', which is not in the ensemble's tasks"
    assert refusal(tasks=[A], loops=[loop("x", context=[A, B])]) == message
    copied = B.replace()
    assert refusal(tasks=[copied], loops=[loop("x", context=[B])]) == message


@pytest.mark.parametrize("workflow", ["sequential", "parallel", None])
def test_task_may_wait_for_a_loop_of_the_ensemble_alone(workflow: str | None) -> None:
    """S-LOOP-167."""
    here, there = loop("here"), loop("there")
    after = task("after", here.output)
    assert validate(EnsembleDefinition(tasks=[after, A], loops=[here], workflow=workflow)) == []
    second = loop("second", context=[after, here.output])
    assert validate(EnsembleDefinition(tasks=[after], loops=[second, here], workflow=workflow)) == []
    outside = "the output of loop 'there' which is not in the ensemble's loops"
    assert refusal(tasks=[task("t", there.output)], loops=[here]) == f"Task 't' references {outside}"
    assert refusal(loops=[loop("x", context=[there.output])]) == f"Loop 'x' references {outside}"
    assert refusal(tasks=[task("t", PHASE.output)]) == (
        "Task 't' references the output of phase 'p' which is not in the ensemble's phases"
    )


def test_circle_is_refused_when_it_goes_through_a_loop() -> None:
    """S-DOM-62, S-LOOP-167: followed through the outputs of loops."""
    around = loop("x")
    waiting = task("waits", around.output)
    closed = around.rewritten(context=(waiting,))
    assert refusal(tasks=[waiting], loops=[closed], workflow="parallel").startswith("Circular context dependency")


def test_workflow_is_inferred_from_the_contexts_of_tasks_alone() -> None:
    """S-LOOP-125, S-DET-43: neither a loop's context nor a loop's output makes it parallel; phases and graphs never."""
    refine = loop("x", context=[A])
    for tasks in ([A], [A, task("b", refine.output)]):
        assert infer_workflow(EnsembleDefinition(tasks=tasks, loops=[refine], workflow=None)) is Workflow.SEQUENTIAL
    linked = EnsembleDefinition(tasks=[A, task("b", A)], loops=[refine], workflow=None)
    assert infer_workflow(linked) is Workflow.PARALLEL
    linked_phase = Phase.of("p", A, task("b", A))
    assert infer_workflow(EnsembleDefinition(phases=[linked_phase], workflow=None)) is Workflow.SEQUENTIAL
    assert infer_workflow(EnsembleDefinition(graph=graph(a=A), workflow=None)) is Workflow.SEQUENTIAL


def test_agents_take_part_when_only_tasks_of_units_have_them() -> None:
    """S-DOM-64, S-DOM-65: bodies, phases, reviewers and states count."""
    names = ("task", "body", "phase", "review", "state")
    agents = {name: Agent(role=name, goal="g", llm=MODEL) for name in names}
    done = {name: Task(description=name, expected_output="e", agent=agent) for name, agent in agents.items()}
    flat = EnsembleDefinition(tasks=[done["task"]], loops=[loop("x", done["body"])])
    assert declared_agents(flat) == (agents["task"], agents["body"])
    phase = Phase(name="p", tasks=[done["phase"]], review=PhaseReview.of(done["review"]))
    assert declared_agents(EnsembleDefinition(phases=[phase])) == (agents["phase"], agents["review"])
    visited = EnsembleDefinition(graph=graph(a=done["state"], b=loop("x", done["body"])), agents=[agents["state"]])
    with pytest.raises(
        ValidationError, match="Task 'body' references agent 'body' which is not in the ensemble's agent"
    ):
        validate(visited)
    assert validate(visited.replace(agents=[agents["state"], agents["body"]])) == []


# Phases.


def test_phases_are_refused_when_two_have_one_name() -> None:
    """S-PHASE-15."""
    phases = [Phase.of("p", A), Phase.of("p", B)]
    assert refusal(phases=phases) == "Duplicate phase name 'p' detected. Phase names must be unique within an ensemble."


def test_phases_are_refused_when_they_come_after_each_other() -> None:
    """S-PHASE-16: before S-PHASE-17."""
    asking = Task.of("asks")
    first = Phase.of("first", asking)
    second = Phase(name="second", tasks=[B], after=[first])
    circle = first.rewritten(after=(second,))
    assert refusal(phases=[circle, second]) == (
        "Circular phase dependency detected involving phase 'first'. "
        "Phase dependencies must form a directed acyclic graph (DAG)."
    )


def test_task_of_a_phase_is_refused_when_no_model_can_do_it() -> None:
    """S-PHASE-17: reviewers too; before S-PHASE-18."""
    asking = Task.of("asks")
    advice = "Provide an explicit agent, a task-level llm, an ensemble-level llm, or configure a deterministic handler."
    message = f"Task 'asks' in phase 'p' has no LLM available. {advice}"
    assert refusal(phases=[Phase.of("p", task("t", B), asking)]) == message
    assert refusal(phases=[Phase(name="p", tasks=[A], review=PhaseReview.of(asking))]) == message


def test_task_of_a_phase_waits_for_its_own_phase_and_for_those_before() -> None:
    """S-PHASE-18, S-PHASE-113: transitive ones too, by task, loop or phase."""
    refine = loop("refine")
    first = Phase(name="first", tasks=[A], loops=[refine])
    second = Phase.of("second", B).replace(after=[first])
    own = task("own")
    third = Phase(
        name="third",
        tasks=[own, task("t", own, A, B, first.output, refine.output)],
        loops=[loop("more", context=[own, A, second.output])],
        after=[second],
        review=PhaseReview.of(task("judge", own, A)),
    )
    assert validate(EnsembleDefinition(phases=[third, second, first])) == []


@pytest.mark.parametrize(
    ("fields", "subject", "where"),
    [
        ({"tasks": [task("t", A)]}, "Task 't'", "is neither in it nor in a phase before it"),
        ({"tasks": [task("t", B), B]}, "Task 't'", "comes later in that phase"),
        ({"tasks": [B], "loops": [loop("x", context=[A])]}, "Loop 'x'", "is neither in it nor in a phase before it"),
        (
            {"tasks": [B], "review": PhaseReview.of(task("judge", A))},
            "Review task 'judge'",
            "is neither in it nor in a phase before it",
        ),
    ],
)
def test_context_is_refused_when_it_is_out_of_reach_of_a_phase(
    fields: dict[str, object], subject: str, where: str
) -> None:
    """S-PHASE-18: a phase that does not come before is out of reach, and so is a later task of a sequential one."""
    phases = [Phase.of("other", A), Phase(**{"name": "p", **fields})]
    named = "b" if "later" in where else "a"
    assert refusal(phases=phases) == f"{subject} in phase 'p' references context task '{named}' which {where}"


def test_later_task_is_context_when_the_phase_is_parallel() -> None:
    """S-PHASE-18, S-PHASE-33: by its own workflow or by that of the ensemble."""
    tasks = [task("t", B), B]
    assert validate(EnsembleDefinition(phases=[Phase(name="p", tasks=tasks, workflow="parallel")])) == []
    assert validate(EnsembleDefinition(phases=[Phase.of("p", tasks)], workflow="parallel")) == []
    with pytest.raises(ValidationError, match="comes later in that phase"):
        validate(EnsembleDefinition(phases=[Phase(name="p", tasks=tasks, workflow="sequential")], workflow="parallel"))


def test_phase_is_refused_when_it_comes_after_one_outside_of_the_ensemble() -> None:
    """S-PHASE-19: before S-PHASE-20."""
    outside = Phase.of("outside", A)
    phases = [Phase(name="p", tasks=[B], after=[outside]), Phase.of("q", B)]
    assert refusal(phases=phases) == "Phase 'p' comes after phase 'outside', which is not in the ensemble's phases"


def test_task_is_refused_when_it_is_in_two_phases() -> None:
    """S-PHASE-20: by identity, in loops too."""
    message = "Task 'a' is in phase 'p' and in phase 'q'. A task belongs to one phase."
    assert refusal(phases=[Phase.of("p", A), Phase.of("q", A)]) == message
    assert refusal(phases=[Phase.of("p", A), Phase(name="q", loops=[loop("x", A)])]) == message
    assert validate(EnsembleDefinition(phases=[Phase.of("p", A), Phase.of("q", A.replace())])) == []


# Graphs.


def test_state_is_refused_when_no_model_can_do_it() -> None:
    """S-GRAPH-32."""
    assert refusal(graph=graph(a=A, b=Task.of("asks"))) == (
        "Graph 'g' state 'b' Task has no LLM source. "
        "Set llm on the task, the ensemble, or provide an explicit agent or handler."
    )


def test_state_waits_for_states_of_its_graph_alone() -> None:
    """S-GRAPH-55, S-GRAPH-116: tasks and loops."""
    refine = loop("x", context=[A])
    assert validate(EnsembleDefinition(graph=graph(a=A, x=refine, b=task("b", A, refine.output)))) == []
    message = "Graph 'g' state 'a' declares context on '{}', which is no state of the graph"
    assert refusal(graph=graph(a=task("t", B))) == message.format("b")
    assert refusal(graph=graph(a=loop("x", context=[B]))) == message.format("b")
    assert refusal(graph=graph(a=task("t", loop("y").output))) == message.format("output of loop 'y'")
