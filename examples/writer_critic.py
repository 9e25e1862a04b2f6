"""A writer and a critic in a loop: draft, criticise, rewrite, until the critic approves or after five rounds.

python examples/writer_critic.py [LLM]
"""

from __future__ import annotations

import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Loop, LoopIterationCompletedEvent, Task, Until


def show(event: LoopIterationCompletedEvent) -> None:
    print(f"Round {event.iteration_number} of {event.max_iterations}: {event.iteration_outputs['review'].raw}")


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    writer = Agent(role="Writer", goal="Write plainly", llm=llm)
    critic = Agent(role="Critic", goal="Find what is weak in a text", llm=llm)
    draft = Task(
        name="draft", description="Write three sentences on {topic}", expected_output="Three sentences", agent=writer
    )
    review = Task(
        name="review",
        description="Criticise the draft in one sentence. Say APPROVED, and nothing else, if it can be printed",
        expected_output="One sentence, or APPROVED",
        agent=critic,
        context=[draft],
    )
    refine = Loop(name="refine", body=[draft, review], until=Until.text_contains("APPROVED"), max_iterations=5)
    output = Ensemble(loops=[refine], on_loop_iteration_completed=show).run({"topic": "tides"})
    print(f"\n{output[draft].raw}\n\nEnded by: {output.get_loop_termination_reason('refine')}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
