"""Prompts of the manager of a hierarchical run.

The manager's limits are in the description of its tool, which also enforces them.
"""

from __future__ import annotations

import inspect

from ensemble_ray.definition.ensemble import ManagerPromptContext, ManagerPromptStrategy
from ensemble_ray.prompts.task import context_section

#: Default user prompt, in place of a blank one (S-HIER-10).
_COORDINATE = "Coordinate the agents of your team: delegate the work to them, and put their results into one answer."
_DUTY = (
    "You lead a team of agents. You do not do the work yourself: you hand it to the agents below with the tool "
    "delegate_task, read what comes back, and answer with the whole."
)
_WAYS = (
    "How to delegate:\n"
    "- Call delegate_task with agent_role, which is one of the roles above, and task_description.\n"
    "- An agent sees nothing but your task_description: put everything into it that the agent needs, "
    "and results of other agents word for word.\n"
    "- Ask each agent for one thing at a time, and do not ask again for what you have.\n"
    "- If a call is refused or an agent fails, read why, then try something else."
)
_CLOSING = (
    "Now delegate each task to the agent that fits it best, a task after those whose results it needs. "
    "When all results are there, write the final answer yourself: one complete text that brings the results together. "
    "It is all that the reader will see."
)


class DefaultManagerPromptStrategy:
    """Lists the workers in the system prompt and the tasks in the user prompt.

    Examples:
        >>> DefaultManagerPromptStrategy().build_user_prompt(ManagerPromptContext()).splitlines()[0]
        'Get these tasks done by your agents:'
    """

    def build_system_prompt(self, context: ManagerPromptContext, /) -> str:
        """Return the manager's duty, its workers numbered from 1, and instructions for delegating."""
        agents: list[str] = []
        for number, agent in enumerate(context.agents, start=1):
            background = (agent.background or "").strip()
            more = f"\n   Background: {background}" if background else ""
            agents.append(f"{number}. {agent.role}\n   Goal: {agent.goal}{more}")
        purpose = (context.workflow_description or "").strip()
        parts = [_DUTY, f"What this is for: {purpose}" if purpose else "", "Your agents:", *agents, _WAYS]
        return "\n\n".join(part for part in parts if part)

    def build_user_prompt(self, context: ManagerPromptContext, /) -> str:
        """Return outputs from before the run, every task numbered from 1, and the form of the final answer."""
        numbers = {task.object_id: number for number, task in enumerate(context.tasks, start=1)}
        tasks: list[str] = []
        for number, task in enumerate(context.tasks, start=1):
            lines = [f"Task {number}: {task.description}", f"Expected output: {task.expected_output}"]
            if task.agent is not None:
                lines.append(f"Suggested agent: {task.agent.role}")
            needed = [f"Task {numbers[entry.object_id]}" for entry in task.context if entry.object_id in numbers]
            if needed:
                lines.append(f"Needs the results of: {', '.join(needed)}")
            tasks.append("\n".join(lines))
        parts = [context_section(context.previous_outputs), "Get these tasks done by your agents:", *tasks, _CLOSING]
        return "\n\n".join(part for part in parts if part)


def manager_prompts(strategy: ManagerPromptStrategy | None, context: ManagerPromptContext) -> tuple[str, str]:
    """Return the manager's background and its task's description (S-HIER-10); errors of the strategy propagate (S-HIER-13)."""
    chosen = DefaultManagerPromptStrategy() if strategy is None else strategy
    system = _text_of(chosen.build_system_prompt(context), chosen, "build_system_prompt")
    user = _text_of(chosen.build_user_prompt(context), chosen, "build_user_prompt")
    return system, user if user.strip() else _COORDINATE


def _text_of(value: object, strategy: object, method: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    shown, advice = type(value).__name__, ""
    if inspect.iscoroutine(value):
        value.close()  # avoids a warning
        advice = "; it must not be async"
    raise TypeError(f"{type(strategy).__name__}.{method} must return text, got: {shown}{advice}")
