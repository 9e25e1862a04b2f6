"""Whether context budgets can hold what they never cut, before a run spends anything. Pure.

Only what is known by then counts: descriptions of tools and revision feedback come later, and are checked with the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.execute.agent.context_window import check_context_budget
from ensemble_ray.prompts.task import build_system_prompt, fixed_parts, render_parts

if TYPE_CHECKING:
    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.plan.planner import Planned


def check_context_budgets(definition: EnsembleDefinition, planned: Planned) -> None:
    """Refuse a run with a task whose own texts are larger than its budget (S-MEM-137).

    Raises:
        ValidationError: there is one; the first one is told.
    """
    for node in planned.plan.nodes:
        task = planned.tasks[node.key]
        budget = task.context_budget or definition.context_budget
        if budget is None or node.agent_key is None:
            continue
        instructions = build_system_prompt(planned.agents[node.agent_key])
        check_context_budget(node.key, budget, len(instructions) + len(render_parts(fixed_parts(task))))
