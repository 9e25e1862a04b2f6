"""Plans with loops, phases and a graph, and what came of them, by hand."""

from collections.abc import Iterable
from datetime import timedelta

from ensemble_ray import Node, Plan, TaskMetrics, TaskOutput, TaskTrace
from ensemble_ray.plan.plan import EdgeEntry, GraphUnit, LoopUnit, PhaseUnit, StateEntry
from ensemble_ray.values.value import utc_of


def node(key: str, index: int = 1) -> Node:
    """Return a handler task that is described by its key."""
    return Node(
        key=key,
        index=index,
        object_id=f"id-{key}",
        description=f"Do {key}",
        expected_output="a text",
        agent_role=f"{key}er",
        agent_key=None,
    )


def output(raw: str, at: float = 1.0) -> TaskOutput:
    """Return what a task gave with one tool call and ten tokens."""
    metrics = TaskMetrics(input_tokens=7, output_tokens=3, total_tokens=10, llm_call_count=1)
    trace = TaskTrace(
        task_description=raw,
        expected_output="a text",
        agent_role="r",
        started_at=utc_of(at),
        completed_at=utc_of(at + 1),
        duration=timedelta(seconds=1),
        final_output=raw,
        metrics=metrics,
    )
    return TaskOutput(
        raw=raw,
        task_description=raw,
        agent_role="r",
        completed_at=utc_of(at + 1),
        duration=1,
        tool_call_count=1,
        parsed_output={"raw": raw},
        metrics=metrics,
        trace=trace,
    )


def outputs(instances: Iterable[str]) -> dict[str, TaskOutput]:
    """Return an output for each instance, in that order; its text is the instance."""
    return {name: output(name, at=float(at)) for at, name in enumerate(instances)}


#: Writer and critic, repeated.
REFINE = LoopUnit(
    key="loop:refine", name="refine", body=("write", "critic"), body_names=("write", "Do critic"), max_iterations=3
)
POLISH = LoopUnit(key="loop:polish", name="polish", body=("shine",), body_names=("shine",), max_iterations=2)


def loop_plan(*loops: LoopUnit, plain: Iterable[str] = ("facts",), workflow: str = "sequential", **how: str) -> Plan:
    """Return a plan of plain tasks and these loops."""
    names = list(plain)
    nodes = [node(key, index) for index, key in enumerate(names, start=1)]
    nodes += [node(key, index) for loop in loops for index, key in enumerate(loop.body, start=1)]
    return Plan(workflow=workflow, nodes=tuple(nodes), units=loops, error_strategy=how.get("strategy", "fail_fast"))


DRAFT = PhaseUnit(key="phase:draft", name="draft", members=("plan", "write"), review="check")
PRINT = PhaseUnit(key="phase:print", name="print", members=("layout",), after=("phase:draft",))


def phase_plan(*phases: PhaseUnit, loops: Iterable[LoopUnit] = (), strategy: str = "fail_fast") -> Plan:
    """Return a plan of phases, and of the loops in them."""
    inside = {loop.key: loop for loop in loops}
    nodes = [node(key) for phase in phases for key in phase.members if key not in inside]
    nodes += [node(key) for loop in inside.values() for key in loop.body]
    nodes += [node(phase.review) for phase in phases if phase.review]
    return Plan(workflow="sequential", nodes=tuple(nodes), units=(*phases, *inside.values()), error_strategy=strategy)


TRIAGE = GraphUnit(
    key="graph:triage",
    name="triage",
    states=(StateEntry(name="write", member="write"), StateEntry(name="critique", member="critic")),
    edges=(
        EdgeEntry(from_state="write", to_state="critique"),
        EdgeEntry(from_state="critique", to_state="write", label="again", has_condition=True),
        EdgeEntry(from_state="critique", to_state="__END__", has_condition=True),
    ),
    start="write",
    max_steps=4,
)


def graph_plan(graph: GraphUnit = TRIAGE, *loops: LoopUnit) -> Plan:
    """Return the plan of a graph, some states of which may be loops."""
    inside = {loop.key for loop in loops}
    nodes = [node(state.member) for state in graph.states if state.member not in inside]
    nodes += [node(key) for loop in loops for key in loop.body]
    return Plan(workflow="sequential", nodes=tuple(nodes), units=(graph, *loops))
