"""Reviews to themes: one task per review, and tasks that join the results until one list is left.

python examples/map_reduce.py [LLM] [FILE.jsonl]    without a file it reads reviews of its own; a row has the field "text"
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ensemble_ray import Agent, EnsembleOutput, MapReduceEnsemble, Task, TaskCompleteEvent

REVIEWS = [
    "The kettle boils quickly, but its lid came off after a week.",
    "Quiet and quick. The handle stays cool.",
    "Lid broke. Support sent a new one within two days.",
    "I like how it looks; it drips when you pour.",
    "Boils in two minutes. Drips a little.",
    "Support never answered about the lid.",
]
#: Tokens of the notes in one group.
BUDGET = 400


def show(event: TaskCompleteEvent) -> None:
    """Print that a task is done. This process calls it, wherever the task ran."""
    print(f"{event.instance.partition('#')[0]}: {event.duration.total_seconds():.1f} s")


def main(llm: str = "openai:gpt-4o-mini", file: str = "") -> EnsembleOutput:
    reader = Agent(role="Reader", goal="Note what a review praises and what it blames", llm=llm)
    editor = Agent(role="Editor", goal="Join notes into a short list of themes", llm=llm)

    def read(review: Mapping[str, str]) -> Task:
        return Task(
            # A reduce receives the first paragraph, so the review comes after it.
            description=f"Name what this review praises and blames.\n\n{review['text']}",
            expected_output="At most two short lines",
            agent=reader,
        )

    def join(notes: list[Task]) -> Task:
        return Task(
            description="Join the notes into themes, each with how many reviews name it",
            expected_output="A list of themes",
            agent=editor,
            context=notes,
        )

    themes = MapReduceEnsemble(
        items=file or [{"text": review} for review in REVIEWS],
        map_task=read,
        reduce_task=join,
        target_token_budget=BUDGET,
        on_item_error="collect",
        max_concurrency=8,
        on_task_complete=show,
    )
    output = themes.run()
    for failed in output.failed_items:
        print(f"left out: review {failed.index}: {failed.message}")
    print(f"\n{output.raw}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:])
