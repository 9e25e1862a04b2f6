"""A loop for each row of a file: write, criticise, rewrite.

python examples/loop_per_row.py [LLM] [FILE.jsonl]    without a file it has products of its own; a row has the field "text"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ensemble_ray import Agent, EnsembleOutput, Loop, MapEnsemble, Task, UnitOutput, Until

PRODUCTS = ["A kettle that boils in two minutes", "An umbrella that fits into a pocket", "A lamp without a switch"]


def main(llm: str = "openai:gpt-4o-mini", file: str = "") -> EnsembleOutput:
    writer = Agent(role="Writer", goal="Write slogans", llm=llm)
    critic = Agent(role="Critic", goal="Find what is weak in a slogan", llm=llm)

    def refine(product: Mapping[str, str]) -> UnitOutput:
        slogan = Task(
            name="slogan",
            description=f"Write a slogan for this product:\n\n{product['text']}",
            expected_output="One line",
            agent=writer,
        )
        review = Task(
            name="review",
            description="Criticise the slogan in one sentence. Say APPROVED, and nothing else, if it can be printed",
            expected_output="One sentence, or APPROVED",
            agent=critic,
            context=[slogan],
        )
        loop = Loop(
            name="refine",
            body=[slogan, review],
            until=Until.text_contains("APPROVED"),
            max_iterations=3,
        )
        # The output of a row is its last slogan; `return loop` would return the last review.
        return loop.output_of(slogan)

    slogans = MapEnsemble(items=file or [{"text": text} for text in PRODUCTS], map_task=refine, max_concurrency=8)
    output = slogans.run()
    for each in output.task_outputs:
        print(each.raw)
    return output


if __name__ == "__main__":
    main(*sys.argv[1:3])
