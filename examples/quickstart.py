"""Two tasks, one of them with an agent and a tool.

python examples/quickstart.py                         a model behind OPENAI_API_KEY, or behind OPENAI_BASE_URL
python examples/quickstart.py local                   the embedded model: no key, no network
"""

from __future__ import annotations

import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Task, tool


@tool
def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    writer = Agent(role="Writer", goal="Write plainly", tools=[word_count], llm=llm)
    facts = Task(name="facts", description="Find five facts about {topic}", expected_output="A list")
    article = Task(
        name="article",
        description="Write 200 words on {topic}",
        expected_output="Prose",
        agent=writer,
        context=[facts],
    )
    output = Ensemble(tasks=[facts, article], llm=llm, workflow="parallel").run({"topic": "tides"})
    print(output.raw)
    print(f"\n{output.metrics.total_tokens} tokens; look at the run with: ensemble-ray trace {output.run_id}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
