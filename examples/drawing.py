"""Draw a team before and after its run: phases, a loop in one of them, a review at the end.

python examples/drawing.py [LLM] [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from ensemble_ray import Agent, Ensemble, EnsembleDevTools, Loop, Phase, PhaseReview, Task, Until


def make_team(llm: str) -> Ensemble:
    researcher = Agent(role="Researcher", goal="Find facts", llm=llm)
    writer = Agent(role="Writer", goal="Write plainly", llm=llm)
    editor = Agent(role="Editor", goal="Decide what may be printed", llm=llm)

    def task(description: str, agent: Agent, *context: Task) -> Task:
        return Task(description=description, expected_output="A short text", agent=agent, context=context)

    causes, effects = task("What causes {topic}?", researcher), task("What do {topic} change?", researcher)
    compare = task("Put causes and effects side by side", researcher, causes, effects)
    draft = task("Write three sentences on {topic}", writer)
    critic = task("Say what is weak, or APPROVED", editor, draft)
    research = Phase(name="research", tasks=[causes, effects, compare], workflow="parallel")
    writing = Phase(
        name="writing",
        tasks=[task("Find a title for an article on {topic}", writer)],
        loops=[Loop(name="polish", body=[draft, critic], until=Until.text_contains("APPROVED"), max_iterations=3)],
        after=[research],
    )
    check = task("May it be printed? APPROVE, or RETRY: and what to change", editor)
    layout = Phase(
        name="layout", tasks=[task("Set it in two columns", editor)], after=[writing], review=PhaseReview.of(check)
    )
    return Ensemble(phases=[research, writing, layout])


def main(llm: str = "openai:gpt-4o-mini", folder: str = "drawings") -> list[Path]:
    team, inputs = make_team(llm), {"topic": "tides"}
    drawn = [EnsembleDevTools.draw(team, Path(folder) / "team.svg")]
    output = team.run(inputs)
    drawn.append(EnsembleDevTools.draw(output.trace, Path(folder) / "run.svg", plan=team.plan(inputs)))
    print("\n".join(map(str, drawn)))
    return drawn


if __name__ == "__main__":
    main(*sys.argv[1:3])
