"""An agent of pydantic-ai in a team. It has its own tool, and an agent with a model uses its answer.

pip install "pydantic-ai-slim[openai]"
python examples/with_pydantic_ai.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

from pydantic_ai import Agent as PydanticAgent

from ensemble_ray import Agent, Ensemble, Task, TaskAnswer, TaskRequest


class Clerk:
    """A runner. It is pickled for its agent's process, so `run` creates clients there."""

    effect = "none"  # it only reads, so a repetition after a crash does no harm

    def __init__(self, model: str) -> None:
        self.model = model

    async def run(self, request: TaskRequest) -> AsyncIterator[str | TaskAnswer]:
        agent = PydanticAgent(f"openai-chat:{self.model}")

        @agent.tool_plain
        def in_stock(item: str) -> int:
            """Tell how many pieces of an item there are."""
            return {"tea": 12, "rice": 0}.get(item, 0)

        async with agent.run_stream(request.text) as answer:
            async for piece in answer.stream_text(delta=True):
                yield piece
        yield TaskAnswer(input_tokens=answer.usage.input_tokens, output_tokens=answer.usage.output_tokens)


def main(model: str = "gpt-4o-mini") -> None:
    clerk = Agent(role="Clerk", goal="Answer questions about the stock", runner=Clerk(model))
    writer = Agent(role="Writer", goal="Write short notes", llm=f"openai:{model}")
    look = Task(description="How much tea is there?", expected_output="A number", agent=clerk)
    note = Task(description="Write a note about it", expected_output="One sentence", agent=writer, context=[look])
    print(Ensemble(tasks=[look, note]).run())


if __name__ == "__main__":
    main(*sys.argv[1:])
