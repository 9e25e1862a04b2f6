"""A team that improves its instructions from run to run.

python examples/improving.py tides      the first run stores what it learns in notes.db of this directory
python examples/improving.py tides      the next run starts with that

Set LLM=local for the embedded model: no key, no network.
"""

from __future__ import annotations

import os
import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, SqliteReflectionStore, Task, TaskReflectedEvent


def show(event: TaskReflectedEvent) -> None:
    learned = event.reflection
    print(f"Learned in execution {learned.run_count}: {learned.refined_description}")
    for line in (*learned.observations, *learned.suggestions):
        print(f"- {line}")


def main(topic: str = "tides", llm: str = os.environ.get("LLM", "openai:gpt-4o-mini")) -> EnsembleOutput:
    teacher = Agent(role="Teacher", goal="Explain things to children", llm=llm)
    explain = Task(
        description="Explain {topic} to a child of eight",
        expected_output="A few short sentences",
        agent=teacher,
        reflection_config=True,
    )
    team = Ensemble(tasks=[explain], reflection_store=SqliteReflectionStore("notes.db"), on_task_reflected=show)
    output = team.run({"topic": topic})
    print(output.raw)
    return output


if __name__ == "__main__":
    main(*sys.argv[1:3])
