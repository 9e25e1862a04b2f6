"""Follow a run while it works: tokens of the model, then the output.

python examples/streaming.py [LLM]
"""

from __future__ import annotations

import asyncio
import sys

from ensemble_ray import (
    Agent,
    Ensemble,
    EnsembleOutput,
    Task,
    TaskStartEvent,
    TokenEvent,
)


async def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput | None:
    """Print the tokens of two tasks. Leaving the loop early would cancel the run."""
    poet = Agent(role="Poet", goal="Write short poems", llm=llm)
    poem = Task(name="poem", description="Write four lines about {topic}", expected_output="A poem", agent=poet)
    title = Task(
        name="title", description="Give the poem a title", expected_output="A title", agent=poet, context=[poem]
    )
    ensemble = Ensemble(tasks=[poem, title], stream=True)
    output = None
    async for item in ensemble.stream({"topic": "the tides"}):
        match item:
            case TaskStartEvent():
                print(f"\n[{item.agent_role}] ", end="")
            case TokenEvent():
                print(item.token, end="", flush=True)
            case EnsembleOutput():
                output = item
                print(f"\n\n{item.metrics.total_llm_call_count} model calls, {item.metrics.total_tokens} tokens")
            case _:
                pass
    return output


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
