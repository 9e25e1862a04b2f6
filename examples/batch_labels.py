"""Label reviews through a provider's Batch API at half the price. A second run takes the labels of the first one.

python examples/batch_labels.py [LLM] [FILE] [SECONDS BETWEEN POLLS]    the file has one review per line
"""

from __future__ import annotations

import sys
from pathlib import Path

from ensemble_ray import Agent, BatchDelivery, EnsembleOutput, MapEnsemble, Task

REVIEWS = ["The kettle leaks.", "A fine lamp, and it arrived early.", "Broken on the second day."]


def main(llm: str = "openai:gpt-4o-mini", file: str = "", poll_s: str = "30") -> EnsembleOutput:
    """Print each label. If this process ends before the batch, `ensemble-ray runs` names the run that waits for it."""
    reviews = Path(file).read_text(encoding="utf-8").splitlines() if file else REVIEWS
    clerk = Agent(role="Clerk", goal="Label reviews as good or bad", llm=llm)

    def label(review: str) -> Task:
        return Task(description=f"Label this review: {review}", expected_output="good or bad", agent=clerk, reuse="30d")

    labels = MapEnsemble(items=reviews, map_task=label, delivery=BatchDelivery(poll_interval=float(poll_s)))
    output = labels.run(tags={"job": "labels"})
    for review, each in zip(reviews, output.task_outputs, strict=True):
        print(f"{each.raw:5} {review}")
    print(f"{output.metrics.total_llm_call_count} answers, {output.metrics.total_reused_calls} of an earlier run")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:4])
