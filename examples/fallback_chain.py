"""Answer questions with a large model, and with a small one when the large one cannot answer or half of the budget is spent.

python examples/fallback_chain.py [LARGE] [SMALL]
"""

from __future__ import annotations

import sys

from ensemble_ray import Agent, Ensemble, EnsembleOutput, Fallback, Task, When

QUESTIONS = ["What is a tide?", "What is a neap tide?", "What is a tidal bore?"]


def main(large: str = "openai:gpt-5", small: str = "openai:gpt-5-mini") -> EnsembleOutput:
    """Print each answer with the models that gave it, then the cost if the prices of the models are known."""
    models = Fallback([large, small], when=When(budget_above=0.5))
    teacher = Agent(role="Teacher", goal="Explain in one sentence", llm=models)
    team = Ensemble([Task(question, agent=teacher) for question in QUESTIONS])
    output = team.run(max_tokens=20_000)
    for each in output.task_outputs:
        print(f"{', '.join(each.metrics.answers_by_model or ())}: {each.raw}")
    cost = output.metrics.total_cost_estimate
    print(f"{output.metrics.total_tokens} tokens, {'cost unknown' if cost is None else f'{cost.total_cost} USD'}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:3])
