"""An offer that waits for approval: one terminal writes it, another one decides.

First terminal:

    python examples/approval.py "twelve desk lamps"     writes the offer, and ends: the run waits in its record

Second terminal, at any time:

    ensemble-ray reviews                                lists open reviews of all runs
    ensemble-ray review RUN GATE                        shows the offer
    ensemble-ray review RUN GATE approve                or: edit FILE, or: exit

First terminal again; on a cluster the run continues by itself:

    python examples/approval.py --go-on RUN             puts the offer into a letter

Set LLM=local for the embedded model: no key, no network.
"""

from __future__ import annotations

import os
import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Review, RunState, Task, resume

GO_ON = "--go-on"


def make_team(llm: str) -> Ensemble:
    clerk = Agent(role="Clerk", goal="Write short, friendly offers", llm=llm)
    offer = Task(
        description="Write an offer for {goods}, with a price",
        expected_output="Three sentences",
        agent=clerk,
        review=Review(prompt="May this offer go out?", timeout=7 * 24 * 3600),
    )
    letter = Task(
        description="Put the approved offer into a letter to the customer",
        expected_output="A letter",
        agent=clerk,
        context=[offer],
    )
    return Ensemble(tasks=[offer, letter], review_wait="detach")


def main(
    goods: str = "twelve desk lamps", run_id: str = "", llm: str = os.environ.get("LLM", "openai:gpt-4o-mini")
) -> EnsembleOutput:
    """Write the offer, or resume the run that did."""
    team = make_team(llm)
    output = resume(run_id, team) if goods == GO_ON else team.run({"goods": goods})
    if output.state is not RunState.WAITING:
        print(output.raw)
    for gate in output.open_reviews:
        print(f"{gate.prompt}\n\n{gate.task_output}\n")
        print(f"Decide:   ensemble-ray review {gate.run_id} {gate.gate_id} approve")
        print(f"Then:     python examples/approval.py {GO_ON} {gate.run_id}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:])
