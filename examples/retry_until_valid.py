"""Repeat a task until its answer is valid: a loop whose predicate is your own check.

python examples/retry_until_valid.py [LLM]
"""

from __future__ import annotations

import sys

from pydantic import BaseModel, Field

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Loop, Task, Until


class Route(BaseModel):
    """A tour that has to fit into a day."""

    stops: list[str] = Field(description="Places in the order of the visit")
    hours: float = Field(description="How long the tour takes in all, hours")


MOST_HOURS, FEWEST_STOPS = 8, 4


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    """Plan a tour of at most eight hours; more than four attempts are an error."""
    guide = Agent(role="Guide", goal="Plan tours on foot", llm=llm)
    plan = Task(
        name="plan",
        description="Plan a tour of {city} with at least four stops that takes eight hours at most",
        expected_output="The stops and the hours",
        agent=guide,
        output_type=Route,
    )
    fits = Loop(
        name="fits",
        body=[plan],
        until=Until.parsed(lambda route: route.hours <= MOST_HOURS and len(route.stops) >= FEWEST_STOPS),
        max_iterations=4,
        on_max_iterations="throw",
    )
    output = Ensemble(loops=[fits]).run({"city": "Lisbon"})
    route = output[plan].parsed
    print(f"{' - '.join(route.stops)}: {route.hours} h, attempt {len(output.get_loop_history('fits'))}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
