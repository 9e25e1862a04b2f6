"""A state graph: a triage chooses the next state, until the question is answered.

python examples/tool_router.py [LLM]
"""

from __future__ import annotations

import sys

from ensemble_ray import (
    Agent,
    CalculatorTool,
    DateTimeTool,
    Ensemble,
    EnsembleOutput,
    Graph,
    GraphEdge,
    GraphRoutingContext,
    GraphStateCompletedEvent,
    Task,
)


def says(word: str, context: GraphRoutingContext) -> bool:
    """Whether the last answer begins with a word."""
    return context.last_output.raw.strip().upper().startswith(word)


def show(event: GraphStateCompletedEvent) -> None:
    print(f"{event.step_number}. {event.state_name} -> {event.next_state}")


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    triage = Agent(role="Triage", goal="Decide who can work on a question", llm=llm)
    clerk = Agent(role="Clerk", goal="Calculate with the tool", tools=[CalculatorTool()], llm=llm)
    calendar = Agent(role="Calendar", goal="Work out dates with the tool", tools=[DateTimeTool()], llm=llm)
    calculate = Task(
        name="calculate", description="Calculate what {question} needs", expected_output="A number", agent=clerk
    )
    date = Task(
        name="date", description="Find the dates that {question} needs", expected_output="A date", agent=calendar
    )
    decide = Task(
        name="decide",
        description=(
            "Question: {question}\nSay CALCULATE if it still needs arithmetic, DATE if it still needs a date, "
            "or ANSWER and the answer"
        ),
        expected_output="CALCULATE, DATE, or ANSWER with the answer",
        agent=triage,
    )
    graph = Graph(
        name="router",
        states={"decide": decide, "calculate": calculate, "date": date},
        start="decide",
        edges=[
            GraphEdge(
                from_state="decide",
                to_state="calculate",
                condition=lambda context: says("CALCULATE", context),
                label="arithmetic",
            ),
            GraphEdge(
                from_state="decide",
                to_state="date",
                condition=lambda context: says("DATE", context),
                label="dates",
            ),
            GraphEdge(from_state="decide", to_state=Graph.END),
            GraphEdge(from_state="calculate", to_state="decide"),
            GraphEdge(from_state="date", to_state="decide"),
        ],
        max_steps=9,
    )
    question = {"question": "how many hours lie between 3 March 2024 and 5 April 2024?"}
    output = Ensemble(graph=graph, on_graph_state_completed=show).run(question)
    print(f"\n{output.raw}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
