"""A team whose model knows capitals, and cases for it."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray import Agent, Case, Ensemble, InlineRuntime, Task
from ensemble_ray.testing import ScriptedCall, ScriptedModel

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}


def capital_of(call: ScriptedCall) -> object:
    """Answer a team, a judge, or raise for a country that is unknown."""
    if "Judge an output" in call.text:
        return '{"reason": "short and right", "score": 0.75}'
    return next((city for land, city in CAPITALS.items() if land in call.text), RuntimeError("no such country"))


def make_team(model: ScriptedModel, question: str = "Name the capital of {country}") -> Ensemble:
    return Ensemble(tasks=[Task(question, agent=Agent("Geographer", "Answer in one word", llm=model))], llm=model)


def make_cases(*, wrong: Sequence[str] = ()) -> list[Case]:
    """Return one case per country; those of `wrong` expect another capital."""
    return [
        Case(
            land,
            {"country": land},
            expected="Bern" if land in wrong else city,
            tags=["south"] if land != "France" else [],
        )
        for land, city in CAPITALS.items()
    ]


def make_runtime(home: str) -> InlineRuntime:
    return InlineRuntime(home=home)
