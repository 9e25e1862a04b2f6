"""A team as `module:attribute`, with tasks from a loop, handlers and types, which a file cannot have.

cd examples/teams
ensemble-ray plan article_team:team
ensemble-ray run article_team:team --input topic=tides
ensemble-ray run article_team:make_team --input topic=tides --llm local
"""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray import Agent, Ensemble, Task, TaskHandlerContext

QUESTIONS = ("What is it?", "Who needs it?", "What goes wrong with it?")


def join(context: TaskHandlerContext) -> str:
    pairs = zip(QUESTIONS, context.context_outputs, strict=True)
    return "\n\n".join(f"{question}\n{output.raw}" for question, output in pairs)


def make_team(questions: Sequence[str] = QUESTIONS) -> Ensemble:
    """Return one task per question, and one that joins the answers."""
    expert = Agent(role="Expert", goal="Answer in two sentences", llm="openai:gpt-4o-mini")
    answers = [
        Task(
            name=f"answer-{number}", description=f"{{topic}}: {question}", expected_output="Two sentences", agent=expert
        )
        for number, question in enumerate(questions, start=1)
    ]
    page = Task(name="page", description="Join the answers", expected_output="A page", handler=join, context=answers)
    return Ensemble(tasks=[*answers, page], workflow="parallel")


team = make_team()
