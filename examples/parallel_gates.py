"""A campaign in three languages, each with its own approval, at any time and in any order.

    python examples/parallel_gates.py "a tea that wakes you up"    writes all three, and ends: three gates are open
    ensemble-ray reviews                                           lists open reviews; in Python: pending_reviews()
    ensemble-ray review RUN GATE approve --role "French editor"    or: edit FILE; from any terminal
    python examples/parallel_gates.py --go-on RUN                  continues after decisions, and waits for the rest

After the last decision, a task plans the campaign from all three texts. No text is written twice.
Set LLM=local for the embedded model: no key, no network.
"""

from __future__ import annotations

import os
import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Review, RunState, Task, resume

GO_ON = "--go-on"
LANGUAGES = ("English", "French", "German")


def make_team(llm: str) -> Ensemble:
    writer = Agent(role="Copywriter", goal="Write slogans that people remember", llm=llm)
    slogans = [
        Task(
            description=f"Write a slogan in {language} for {{product}}",
            expected_output="One line",
            agent=writer,
            review=Review(prompt=f"Good {language}?", timeout=7 * 24 * 3600, required_role=f"{language} editor"),
        )
        for language in LANGUAGES
    ]
    plan = Task(
        description="Say for each slogan where it should be seen first",
        expected_output="A line for each slogan",
        agent=writer,
        context=slogans,
    )
    return Ensemble(tasks=[*slogans, plan], workflow="parallel", review_wait="detach")


def main(
    product: str = "a tea that wakes you up", run_id: str = "", llm: str = os.environ.get("LLM", "openai:gpt-4o-mini")
) -> EnsembleOutput:
    """Write the slogans, or resume the run that did."""
    team = make_team(llm)
    output = resume(run_id, team) if product == GO_ON else team.run({"product": product})
    for gate in output.open_reviews:
        print(f"{gate.required_role}: {gate.prompt} {gate.task_output}")
        print(f"    ensemble-ray review {gate.run_id} {gate.gate_id} approve --role '{gate.required_role}'")
    if output.state is RunState.WAITING:
        print(f"Then: python examples/parallel_gates.py {GO_ON} {output.run_id}")
    else:
        print(output.raw)
    return output


if __name__ == "__main__":
    main(*sys.argv[1:])
