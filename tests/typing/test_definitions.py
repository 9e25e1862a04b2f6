"""What an editor and a type checker see of the definitions: constructors take more than fields give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

from ensemble_ray import (
    Agent,
    AgentTool,
    ChatModel,
    EnsembleListener,
    Graph,
    GraphEdge,
    GraphFork,
    GraphJoin,
    HierarchicalConstraints,
    Loop,
    LoopOutputMode,
    MaxIterationsAction,
    MaxStepsAction,
    MemoryScope,
    OpenAIChatModel,
    Phase,
    PhaseReview,
    Task,
    TaskStartEvent,
    ToolResult,
    UnitOutput,
    Workflow,
    tool,
)
from ensemble_ray.definition import EnsembleDefinition


@tool
def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


class Echo(AgentTool):
    """An `AgentTool` of a user."""

    name = "echo"
    description = "Repeats."

    def execute(self, text: str, /) -> ToolResult:
        """Repeat it."""
        return ToolResult.success(text)


async def slow_handler(context: Any) -> str:
    """A handler may be async."""
    return str(context)


def test_model_is_written_as_a_string_and_read_as_a_model() -> None:
    """S-CONV-19."""
    short = Agent(role="x", goal="y", llm="openai:m")
    full = Agent(role="x", goal="y", llm=OpenAIChatModel("m"), tools=[word_count, Echo()], max_iterations=3)
    assert_type(short.llm, ChatModel)
    assert_type(full.tools, tuple[object, ...])
    assert_type(Task.of("d").llm, ChatModel | None)
    assert_type(EnsembleDefinition(llm="openai:m").llm, ChatModel | None)
    assert_type({short: 1}, dict[Agent, int])


def test_tasks_are_linked_by_lists_and_read_as_sequences() -> None:
    """The first example of the README, without a run."""
    facts = Task(name="facts", description="Find facts", expected_output="A list", tools=[word_count])
    article = Task(description="Write", expected_output="Prose", context=[facts], output_type=dict[str, int])
    check = Task(description="Check", expected_output="Yes", context=(facts, article), handler=slow_handler)
    echo = Task(description="Echo", expected_output="Same", handler=Echo(), input_guardrails=[str])
    assert_type(check.context[0], Task | UnitOutput)
    assert_type(article, Task[dict[str, int]])
    assert_type(facts, Task)
    assert_type(facts, Task[Any])
    mixed = [facts, article, echo]
    every: list[Task] = [*mixed, check, *EnsembleDefinition(tasks=mixed).tasks]
    assert len({*every}) == 4


def test_words_are_written_and_members_are_read() -> None:
    """S-CONV-6."""
    seen: list[int] = []
    made = EnsembleDefinition(
        tasks=[Task.of("d")],
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        capture_mode="full",
        on_task_start=lambda event: seen.append(event.task_index),
        on_ensemble_started=[lambda _run, _workflow, tasks: seen.append(tasks)],
        inputs={"topic": "tides"},
    )
    assert_type(made.workflow, Workflow | None)
    for callback in made.on_task_start:
        callback(TaskStartEvent(task_description="d", agent_role="r", task_index=1, total_tasks=1))
    made.on_ensemble_started[0]("id", "parallel", 2)
    assert seen == [1, 2]


def test_units_are_written_as_lists_and_words_and_read_as_values() -> None:
    """S-CONV-38: loops, phases and graphs complete in an editor."""
    draft = Task(description="Write", expected_output="Prose", handler=slow_handler)
    loop = Loop(
        name="refine",
        body=[draft],
        until=lambda context: context.iteration_number > 1,
        output_mode="all_iterations",
        on_max_iterations=MaxIterationsAction.THROW,
        memory_mode="accumulate",
    )
    reader = Task(description="Read", expected_output="Text", context=[draft, loop.output], handler=slow_handler)
    first = Phase(name="first", tasks=[draft], workflow="parallel", loops=[])
    second = Phase(name="second", tasks=[reader], after=[first], review=PhaseReview.of(draft))
    graph = Graph(
        name="g",
        states={"draft": draft, "refine": loop},
        edges=[
            GraphEdge(from_state="draft", to_state="refine", condition=lambda step: step.step_number < 3, label="more"),
            GraphFork(from_state="draft", to_states=["draft", "refine"]),
            GraphJoin(from_states=["draft", "refine"], to_state=Graph.END, count=1),
        ],
        start="draft",
        no_feedback_states=["draft"],
        on_max_steps="throw",
    )
    assert_type(loop.output_mode, LoopOutputMode)
    assert_type(loop.body[0], Task)
    assert_type(second.after[0], Phase)
    assert_type(first.workflow, Workflow | None)
    assert_type(graph.states["draft"], Task | Loop)
    assert_type(graph.on_max_steps, MaxStepsAction)
    assert_type(graph.no_feedback_states, frozenset[str])
    assert_type(graph.edges[0], GraphEdge | GraphFork | GraphJoin)
    made = EnsembleDefinition(phases=[first, second], graph=graph, loops=[loop])
    assert_type(made.loops[0], Loop)
    assert_type(made.graph, Graph | None)
    assert len(made.all_tasks) == 6


def test_single_values_and_positions_are_typed() -> None:
    """S-DOM-100, S-DOM-101, S-GRAPH-127, S-GRAPH-128: what is written; lists are read."""
    agent = Agent("Writer", "Write", llm="openai:m", tools=word_count)
    facts = Task("Find facts", "A list", agent=agent, tools=Echo(), input_guardrails=str)
    article = Task("Write", context=facts, output_type=int, output_guardrails=str)
    assert_type(article, Task[int])
    assert_type(article.context, Sequence[Task | UnitOutput])
    loop = Loop("refine", facts, until=lambda context: context.iteration_number > 1, context=article)
    first = Phase("first", facts)
    second = Phase("second", [article], after=first, loops=loop, review=PhaseReview(facts))
    assert_type(second.after, Sequence[Phase])
    assert_type(GraphEdge("a", "b", lambda step: step.step_number < 3), GraphEdge)
    graph = Graph(
        "g",
        {"a": facts, "b": loop},
        edges=[("a", "b", lambda step: step.step_number < 3), ("a", "b"), GraphEdge("b", Graph.END)],
        start="a",
        no_feedback_states="a",
    )
    assert_type(graph.edges, Sequence[GraphEdge | GraphFork | GraphJoin])
    assert len(Graph("h", {"a": facts}, edges=("a", Graph.END), start="a").edges) == 1
    assert GraphFork("a", "b").to_states == ("b",)
    made = EnsembleDefinition(
        facts,
        agents=agent,
        loops=loop,
        phases=second,
        on_task_start=lambda event: event.task_index,
        listeners=EnsembleListener(),
    )
    assert_type(made.tasks, Sequence[Task])
    assert_type(made.agents, Sequence[Agent] | None)
    rules = HierarchicalConstraints(required_workers="Writer", required_stages=["Writer", {"A", "B"}])
    assert_type(rules.required_stages, tuple[tuple[str, ...], ...])
    assert_type(MemoryScope("notes").name, str)
