"""A LangGraph graph as an agent of a team; it has its own tool.

pip install langgraph langchain-openai
python examples/with_langgraph.py [MODEL]
"""

import sys

from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from ensemble_ray import Agent, Ensemble, Task, TaskAnswer, TaskRequest


def in_stock(item: str) -> int:
    """Tell how many pieces of an item there are."""
    return {"tea": 12, "rice": 0}.get(item, 0)


class Clerk:
    """A runner. It is pickled for its agent's process, so `run` compiles the graph there."""

    effect = "none"  # it only reads, so a repetition after a crash does no harm

    def __init__(self, model: str) -> None:
        self.model = model

    async def run(self, request: TaskRequest) -> TaskAnswer:
        model = ChatOpenAI(model=self.model).bind_tools([in_stock])

        async def ask(state: MessagesState) -> dict[str, list[AIMessage]]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState).add_node("ask", ask).add_node("tools", ToolNode([in_stock]))
        graph.add_edge(START, "ask").add_conditional_edges("ask", tools_condition).add_edge("tools", "ask")
        asked = MessagesState(messages=[HumanMessage(request.text)])
        messages = (await graph.compile().ainvoke(asked))["messages"]
        used = [each.usage_metadata for each in messages if isinstance(each, AIMessage) and each.usage_metadata]
        return TaskAnswer(
            text=messages[-1].text,
            input_tokens=sum(each["input_tokens"] for each in used),
            output_tokens=sum(each["output_tokens"] for each in used),
        )


def main(model: str = "gpt-4o-mini") -> None:
    clerk = Agent(role="Clerk", goal="Answer questions about the stock", runner=Clerk(model))
    print(Ensemble(tasks=[Task(description="How much tea is there?", expected_output="A number", agent=clerk)]).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
