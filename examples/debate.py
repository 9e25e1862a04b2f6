"""A debate: two sides answer each other for three rounds, then a judge decides.

python examples/debate.py [LLM]
"""

from __future__ import annotations

import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Loop, Task


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    optimist = Agent(role="Optimist", goal="Argue for a proposal", llm=llm)
    sceptic = Agent(role="Sceptic", goal="Argue against a proposal", llm=llm)
    judge = Agent(role="Judge", goal="Weigh arguments", llm=llm)
    speech = Task(name="for", description="Argue for this: {proposal}", expected_output="One argument", agent=optimist)
    answer = Task(
        name="against",
        description="Answer the argument for this: {proposal}",
        expected_output="One argument",
        agent=sceptic,
        context=[speech],
    )
    # Without a predicate all rounds run. The judge receives all of them.
    debate = Loop(name="debate", body=[speech, answer], max_iterations=3, output_mode="all_iterations")
    verdict = Task(
        name="verdict",
        description="Decide who argued better on this: {proposal}",
        expected_output="A name and one sentence",
        agent=judge,
        context=[debate.output],
    )
    output = Ensemble(tasks=[verdict], loops=[debate], workflow="parallel").run({"proposal": "a four-day week"})
    print(output[verdict].raw)
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
