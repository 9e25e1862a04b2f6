"""Three phases. The review of the last one may repeat its phase or the previous one.

python examples/three_phases.py [LLM]
"""

from __future__ import annotations

import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Phase, PhaseReview, Task


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    researcher = Agent(role="Researcher", goal="Find facts", llm=llm)
    writer = Agent(role="Writer", goal="Write plainly", llm=llm)
    editor = Agent(role="Editor", goal="Decide what may be printed", llm=llm)
    causes = Task(name="causes", description="What causes {topic}?", expected_output="Facts", agent=researcher)
    effects = Task(name="effects", description="What do {topic} change?", expected_output="Facts", agent=researcher)
    outline = Task(
        name="outline",
        description="Outline an article on {topic}",
        expected_output="Five lines",
        agent=writer,
        context=[causes, effects],
    )
    article = Task(
        name="article",
        description="Write the article on {topic}",
        expected_output="200 words",
        agent=writer,
        context=[outline],
    )
    check = Task(
        name="check",
        description=(
            "May the article be printed? Answer APPROVE, or RETRY: and what to change, or RETRY_PREDECESSOR outline: and "
            "what the outline lacks"
        ),
        expected_output="APPROVE, RETRY: ..., or RETRY_PREDECESSOR outline: ...",
        agent=editor,
        context=[article],
    )
    research = Phase(name="research", tasks=[causes, effects], workflow="parallel")
    plan = Phase(name="outline", tasks=[outline], after=[research])
    write = Phase(name="write", tasks=[article], after=[plan], review=PhaseReview.of(check))
    output = Ensemble(phases=[research, plan, write]).run({"topic": "tides"})
    for phase in output.trace.phases:
        print(f"{phase.name}: {phase.status.value} after {phase.attempts} attempt(s)")
    print(f"\n{output[article].raw}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
