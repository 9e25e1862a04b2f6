"""Many readers and one editor: a task summarises each text, and a last task joins the results.

python examples/parallel_digest.py [LLM] [FILE...]    without files it reads three short texts of its own
"""

from __future__ import annotations

import sys
from pathlib import Path

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Task, TaskCompleteEvent

TEXTS = [
    "Twice a day the sea rises and falls. The moon pulls the water nearest to it, and the earth turns below.",
    "Kelp is an alga, not a plant. A forest of it can grow half a metre in a day and shelters fish and otters.",
    "Rivers carry salts from the rocks to the sea. Water leaves the sea as vapour; the salts stay behind.",
]


def show(event: TaskCompleteEvent) -> None:
    """Print that a task is done. This process calls it, wherever the task ran."""
    print(f"[{event.task_index}/{event.total_tasks}] {event.agent_role}: {event.duration.total_seconds():.1f} s")


def main(llm: str = "openai:gpt-4o-mini", *files: str) -> EnsembleOutput:
    texts = [Path(name).read_text(encoding="utf-8") for name in files] or TEXTS
    reader = Agent(role="Reader", goal="Say in two sentences what a text says", llm=llm)
    editor = Agent(role="Editor", goal="Join summaries into one short digest", llm=llm)
    readings = [
        Task(
            name=f"read_{number}",
            # The text is an input, so that its braces are no variables.
            description=f"Summarise this text:\n\n{{text_{number}}}",
            expected_output="Two sentences",
            agent=reader,
        )
        for number in range(1, len(texts) + 1)
    ]
    digest = Task(
        name="digest",
        description="Join the summaries into one digest",
        expected_output="One paragraph",
        agent=editor,
        context=readings,
    )
    ensemble = Ensemble(
        tasks=[*readings, digest],
        workflow="parallel",
        max_parallel_tasks=8,
        on_task_complete=show,
    )
    output = ensemble.run({f"text_{number}": text for number, text in enumerate(texts, start=1)})
    print(f"\n{output.raw}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:])
