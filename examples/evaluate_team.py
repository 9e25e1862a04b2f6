"""An evaluation: a team reads bills, three scorers check it, and a second prompt is compared with the first.

python examples/evaluate_team.py [LLM]
"""

from __future__ import annotations

import sys

from pydantic import BaseModel

from ensemble_ray import Agent, Case, Ensemble, EnsembleOutput, Evaluation, EvaluationResult, Judge, Score, Task


class Bill(BaseModel):
    """What the team reads in a bill."""

    total: float
    currency: str


CASES = [
    Case("plain", {"bill": "Total: 12.50 EUR"}, expected={"total": 12.5, "currency": "EUR"}, tags=["short"]),
    Case("sum", {"bill": "Tea 3 USD, rice 4 USD"}, expected={"total": 7, "currency": "USD"}),
    Case("symbol", {"bill": "In all £20"}, expected={"total": 20, "currency": "GBP"}, tags=["short"]),
]


def positive(output: EnsembleOutput, case: Case) -> Score:
    """Score with a function: a total is never negative."""
    total = output.task_outputs[-1].parsed.total
    return Score(float(total >= 0), f"{case.id}: {total}")


def evaluate(llm: str, name: str, description: str) -> EvaluationResult:
    """Run all cases twice; a second call with the same name asks no model."""
    clerk = Agent(role="Clerk", goal="Read bills exactly", llm=llm)
    team = Ensemble(tasks=[Task(description, agent=clerk, output_type=Bill)], llm=llm, name="bills")
    scorers = ["json_fields", positive, Judge("The currency is the one of the bill, as an ISO code")]
    return Evaluation(team, CASES, scorers, id=name, repeats=2).run()


def main() -> None:
    """Evaluate two prompts, and compare them."""
    llm = sys.argv[1] if len(sys.argv) > 1 else "openai:gpt-4o-mini"
    first = evaluate(llm, "bills-1", "Read the total of this bill: {bill}")
    print(first.table())
    second = evaluate(llm, "bills-2", "Add up this bill, and use ISO codes of currencies: {bill}")
    print(second.compare(first).table())


if __name__ == "__main__":
    main()
