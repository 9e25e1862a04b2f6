"""A team calls another one over the A2A protocol: `ensemble-ray serve far.yaml` serves it at http://127.0.0.1:8000/a2a/far.

python examples/remote_agent.py URL [LLM]
"""

from __future__ import annotations

import sys

from ensemble_ray import Agent, Ensemble, RemoteAgent, Task


def main(url: str, llm: str = "openai:gpt-4o-mini") -> None:
    # Its card has its name, and whether a message may be repeated after a crash.
    analyst = RemoteAgent.discover(url)
    writer = Agent(role="Writer", goal="Write plainly", llm=llm)
    figures = Task(description="Which tea sold best?", expected_output="A tea and a figure", agent=analyst)
    report = Task(description="Report on it", expected_output="One sentence", agent=writer, context=[figures])
    print(Ensemble(tasks=[figures, report]).run().raw)


if __name__ == "__main__":
    main(*sys.argv[1:])
