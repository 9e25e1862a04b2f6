"""What a newcomer writes first: single values, fields by position, names of other frameworks; and what an editor shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import ensemble_ray
from ensemble_ray import (
    Agent,
    CalculatorTool,
    Ensemble,
    EnsembleListener,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    HierarchicalConstraints,
    Loop,
    MapEnsemble,
    MapReduceEnsemble,
    MemoryScope,
    Phase,
    PhaseReview,
    RemoteAgent,
    Task,
    ValidationError,
)
from ensemble_ray.values.value import FOREIGN_NAMES, Value

TOOL = CalculatorTool()
WRITER = Agent("Writer", "Write")
FACTS = Task("Find facts")
LOOP = Loop("refine", FACTS)
FIRST = Phase("first", FACTS)
LISTENER = EnsembleListener()


def allow(*_: object) -> None:
    """A guardrail, a policy and a callback."""


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Ensemble(tasks=FACTS).tasks, (FACTS,)),
        (Ensemble().with_tasks(FACTS).tasks, (FACTS,)),
        (Ensemble(agents=WRITER).agents, (WRITER,)),
        (Ensemble(agents=None).agents, None),
        (Ensemble(loops=LOOP).loops, (LOOP,)),
        (Ensemble(phases=FIRST).phases, (FIRST,)),
        (Ensemble(listeners=LISTENER).listeners, (LISTENER,)),
        (Ensemble(delegation_policies=allow).delegation_policies, (allow,)),
        (Ensemble(on_token=allow).on_token, (allow,)),
        (Agent("Writer", "Write", tools=TOOL).tools, (TOOL,)),
        (Task("Write", tools=TOOL).tools, (TOOL,)),
        (Task("Write", context=FACTS).context, (FACTS,)),
        (Task("Write", context=LOOP.output).context, (LOOP.output,)),
        (Task("Write", input_guardrails=allow).input_guardrails, (allow,)),
        (Task("Write", output_guardrails=allow).output_guardrails, (allow,)),
        (Task("Write", memory_scopes="notes").memory_scopes, (MemoryScope("notes"),)),
        (LOOP.body, (FACTS,)),
        (Loop("refine", Task("Write"), context=FACTS).context, (FACTS,)),
        (FIRST.tasks, (FACTS,)),
        (Phase("second", loops=LOOP).loops, (LOOP,)),
        (Phase("second", Task("Write"), after=FIRST).after, (FIRST,)),
        (GraphFork("a", "b").to_states, ("b",)),
        (GraphJoin("a", "b").from_states, ("a",)),
        (HierarchicalConstraints(required_workers="Writer").required_workers, ("Writer",)),
        (HierarchicalConstraints(required_stages=["A", ["B", "C"]]).required_stages, (("A",), ("B", "C"))),
        (RemoteAgent("https://a.example", hosts="b.example").hosts, ("b.example",)),
        (Ensemble(tasks={"a": FACTS}.values()).tasks, (FACTS,)),  # type: ignore[arg-type]
    ],
)
def test_a_single_value_is_a_list_of_one(found: object, expected: object) -> None:
    """S-DOM-100: wherever a list is taken."""
    assert found == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ensemble(tasks="Write"),  # type: ignore[arg-type]
        lambda: Ensemble(tasks={"a": FACTS}),  # type: ignore[arg-type]
        lambda: Task("Write", context="facts"),  # type: ignore[arg-type]
        lambda: Loop("refine", "Write"),  # type: ignore[arg-type]
        lambda: Ensemble(on_token=3),  # type: ignore[arg-type]
    ],
)
def test_a_single_value_of_another_kind_is_refused(make: Callable[[], object]) -> None:
    """S-DOM-100, S-CONV-12."""
    with pytest.raises(ValidationError):
        make()


def test_the_first_fields_have_a_place() -> None:
    """S-DOM-101, S-GRAPH-127."""
    agent, task = Agent("Writer", "Write"), Task("Do it", "A text")
    assert (agent.role, agent.goal) == ("Writer", "Write")
    assert (task.description, task.expected_output) == ("Do it", "A text")
    assert Task("Do it").expected_output == Task.of("Do it").expected_output
    assert Ensemble([task, FACTS]).tasks == (task, FACTS)
    assert PhaseReview(task).task == task
    edge = GraphEdge("a", "b", allow, label="on")  # type: ignore[arg-type]  # it is not asked
    assert (edge.from_state, edge.to_state, edge.condition, edge.label) == ("a", "b", allow, "on")
    graph = Graph("g", {"a": task, "b": FACTS}, edges=[("a", "b"), ("b", Graph.END)], start="a")
    assert graph.edges == (GraphEdge("a", "b"), GraphEdge("b", Graph.END))
    assert MapEnsemble(["x"], lambda item: Task(f"{item}")).items == ("x",)
    tree = MapReduceEnsemble(["x"], lambda item: Task(f"{item}"), reduce_task=lambda group: Task("Join", context=group))
    assert len(tree.node_types) == 2


def test_tuples_are_edges() -> None:
    """S-GRAPH-128: with a condition or without, and one alone."""
    states = {"a": FACTS, "b": Task("Write")}
    made = Graph("g", states, edges=[("a", "b", allow), ("a", Graph.END), ("b", "a")], start="a")  # type: ignore[list-item]
    assert [(each.condition, type(each)) for each in made.edges if isinstance(each, GraphEdge)] == [
        (allow, GraphEdge),
        (None, GraphEdge),
        (None, GraphEdge),
    ]
    assert Graph("g", {"a": FACTS}, edges=("a", Graph.END), start="a").edges == (GraphEdge("a", Graph.END),)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Agent("a", "b", backstory="c"), "Agent: unknown field 'backstory'. Here it is called 'background'"),
        (lambda: Agent("a", instructions="c"), "Agent: unknown field 'instructions'. Here it is called 'goal'"),
        (lambda: Agent("a", "b", model="m"), "Agent: unknown field 'model'. Here it is called 'llm'"),
        (lambda: Task("a", depends_on=[]), "Task: unknown field 'depends_on'. Here it is called 'context'"),
        (lambda: Task("a", human_input=True), "Task: unknown field 'human_input'. Here it is called 'review'"),
        (lambda: Ensemble(FACTS, process="x"), "Ensemble: unknown field 'process'. Here it is called 'workflow'"),
        (lambda: RemoteAgent("https://a.b", name="x"), "RemoteAgent: unknown field 'name'. Here it is called 'role'"),
        (
            lambda: Agent("a", "b", temperature=0),  # type: ignore[call-arg]
            (
                "Agent: unknown field 'temperature'. It is an option of the model: OpenAIChatModel(model, temperature=...), "
                "or a key of the section 'llm' of a team file"
            ),
        ),
    ],
)
def test_a_name_of_another_framework_is_told_as_ours(make: Callable[[], object], told: str) -> None:
    """S-ERR-60."""
    with pytest.raises(ValidationError) as caught:
        make()
    assert str(caught.value) == told


def _public_values() -> dict[str, type[Value]]:
    found = {name: getattr(ensemble_ray, name) for name in ensemble_ray.__all__}
    return {name: each for name, each in found.items() if isinstance(each, type) and issubclass(each, Value)}


def test_foreign_names_lead_to_fields_and_hide_none() -> None:
    """S-ERR-60: each is a field of the class, or a sentence; and none is a name of our own."""
    kinds = {
        each.__name__: each for kind in _public_values().values() for each in kind.__mro__ if issubclass(each, Value)
    }
    for kind, names in FOREIGN_NAMES.items():
        fields = {info.alias or name for name, info in kinds[kind].model_fields.items()}
        assert not fields & names.keys(), kind
        assert {own for own in names.values() if own.isidentifier()} <= fields, kind


@pytest.mark.parametrize(("name", "kind"), _public_values().items())
def test_the_signature_shows_the_fields(name: str, kind: type[Value]) -> None:
    """S-DOM-102: of every public class, before and after its first use."""
    parameters = inspect.signature(kind).parameters
    fields = {info.alias or field: info for field, info in kind.model_fields.items()}
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    assert parameters.keys() == fields.keys(), name
    assert not variable & {each.kind for each in parameters.values()}
    assert "Annotated" not in str(parameters)


def test_the_signature_of_a_subclass_may_name_a_type_that_comes_later() -> None:
    """S-DOM-102: such a type is shown as it is written."""

    class Own(Agent):
        other: Later | None = None  # type: ignore[name-defined]  # pyright: ignore[reportUndefinedVariable]  # noqa: F821

    assert "other" in inspect.signature(Own).parameters


def test_the_signature_shows_what_has_a_place() -> None:
    """S-DOM-101, S-DOM-102."""
    shown = str(inspect.signature(Task))
    assert shown.startswith("(description: str, expected_output: str = 'Produce")
    assert str(inspect.signature(Agent)).startswith("(role: str, goal: str, *, background: ")
    assert str(inspect.signature(RemoteAgent)).startswith("(url: 'str', *, role: ")


def test_guardrails_of_an_agent_are_named_as_the_tasks() -> None:
    """S-ERR-60: an agent has none here."""
    with pytest.raises(ValidationError, match="Tasks have guardrails"):
        Agent("Writer", "Write", guardrails=[])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
