"""An agent of the OpenAI Agents SDK in a team. It has its own tool, and returns an object.

pip install openai-agents
python examples/with_openai_agents.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

from agents import Agent as OpenAIAgent
from agents import OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel

from ensemble_ray import Agent, Ensemble, Task, TaskAnswer, TaskRequest


class Stock(BaseModel):
    """What there is of an item."""

    item: str
    pieces: int


@function_tool
def in_stock(item: str) -> int:
    """Tell how many pieces of an item there are."""
    return {"tea": 12, "rice": 0}.get(item, 0)


class Clerk:
    """A runner. It is pickled for its agent's process, so `run` creates clients there."""

    effect = "none"  # it only reads, so a repetition after a crash does no harm

    def __init__(self, model: str) -> None:
        self.model = model

    async def run(self, request: TaskRequest) -> AsyncIterator[str | TaskAnswer]:
        model = OpenAIChatCompletionsModel(self.model, AsyncOpenAI())
        agent = OpenAIAgent(request.agent_role, model=model, tools=[in_stock], output_type=request.output_type)
        # Without this the SDK would send its traces to OpenAI; the run's record has them.
        doing = Runner.run_streamed(agent, request.text, run_config=RunConfig(tracing_disabled=True))
        async for event in doing.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                yield event.data.delta
        used = doing.context_wrapper.usage
        yield TaskAnswer(
            structured_output=doing.final_output, input_tokens=used.input_tokens, output_tokens=used.output_tokens
        )


def main(model: str = "gpt-4o-mini") -> None:
    clerk = Agent(role="Clerk", goal="Answer questions about the stock", runner=Clerk(model))
    task = Task(description="How much tea is there?", expected_output="The stock", agent=clerk, output_type=Stock)
    output = Ensemble(tasks=[task]).run()
    print(output[task].parsed)


if __name__ == "__main__":
    main(*sys.argv[1:])
