"""Watch a team in the browser, and approve its draft there.

python examples/live_dashboard.py [LLM] [PORT] [MINUTES]
"""

from __future__ import annotations

import sys

from ensemble_ray import Agent, Ensemble, Review, Task, WebDashboard


def main(llm: str = "openai:gpt-4o-mini", port: str = "7329", minutes: str = "5") -> str:
    """Run a team whose draft waits for a decision. Without a decision in time, the run continues."""
    researcher = Agent(role="Researcher", goal="Find what matters", llm=llm)
    writer = Agent(role="Writer", goal="Write short and plain texts", llm=llm)
    facts = Task(name="facts", description="List five facts about {topic}", expected_output="A list", agent=researcher)
    draft = Task(
        name="draft",
        description="Write a paragraph about {topic} from these facts",
        expected_output="One paragraph",
        agent=writer,
        context=[facts],
        review=Review(prompt="Is it right, and kind?", timeout=60 * float(minutes), on_timeout="continue"),
    )
    title = Task(name="title", description="Find a title", expected_output="One line", agent=writer, context=[draft])
    dashboard = WebDashboard.on_port(int(port))
    ensemble = Ensemble(tasks=[facts, draft, title], stream=True, dashboard=dashboard)
    with dashboard:  # stays until the program ends, not only during a run
        print(f"Open http://localhost:{dashboard.actual_port} - the draft waits {minutes} minutes for your decision")
        output = ensemble.run({"topic": "tides"})
    print(output.raw)
    return output.raw


if __name__ == "__main__":
    main(*sys.argv[1:])
