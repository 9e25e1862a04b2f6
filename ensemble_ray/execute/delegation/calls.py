"""What a model writes to hand work to another agent, and what it is told of the tool. Package: execute. Pure.

In: a call's argument text. Out: the role and the text, or what is wrong with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ensemble_ray.values.delegation import spoken_role
from ensemble_ray.values.messages import ToolSpec

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import HierarchyRules
    from ensemble_ray.values.delegation import DelegationContext

__all__ = ["EXPECTED_OUTPUT", "AskedDelegation", "manager_tool", "peer_tool", "read_call"]

#: What every delegated task is to give (S-HIER-23, S-DEL-3).
EXPECTED_OUTPUT = "A complete and accurate result of the delegated task, which its asker can use as it is."


@dataclass(frozen=True, slots=True)
class AskedDelegation:
    """What a call asks for."""

    agent_role: str
    task_description: str


def manager_tool(context: DelegationContext, rules: HierarchyRules, constraints: str) -> ToolSpec:
    """Describe the manager's only tool (S-HIER-20); `constraints` are its constraints in words."""
    allowed = set(rules.allowed_workers)
    roles = [role for role in context.roles if not allowed or role in allowed]
    text = (
        "Give a task to a worker of your team and get its result. The worker knows nothing but the text you write: put "
        "everything it needs into task_description, results of other workers included. Calls of one turn run at the same "
        "time."
    )
    return _spec("delegate_task", f"{text} {constraints}".strip(), "task_description", roles)


def peer_tool(context: DelegationContext, role: str) -> ToolSpec:
    """Describe the tool of an agent with `allow_delegation` (S-DEL-1)."""
    roles = [each for each in context.roles if spoken_role(each) != spoken_role(role)]
    text = (
        "Let a colleague do a part of your task and get the result. The colleague knows nothing but the text you write: "
        "put everything it needs into task."
    )
    return _spec("delegate", text, "task", roles)


def _spec(name: str, description: str, text_field: str, roles: Sequence[str]) -> ToolSpec:
    role: dict[str, object] = {"type": "string", "description": "Role of the agent that shall do it."}
    if roles:  # an empty enum is no valid schema
        role["enum"] = list(roles)
    properties = {"agent_role": role, text_field: {"type": "string", "description": "What to do, with all details."}}
    parameters = {"type": "object", "properties": properties, "required": ["agent_role", text_field]}
    return ToolSpec(name, description, parameters)


def read_call(arguments: str, text_field: str, roles: Sequence[str]) -> AskedDelegation | str:
    """Return what a call asks for, or the error text for the model (S-HIER-21, S-DEL-71, S-DEL-72)."""
    try:
        data: object = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:  # the latter: nested beyond reason
        return _describe_malformed(text_field, f"the arguments are no valid JSON ({error})")
    if not isinstance(data, dict):
        return _describe_malformed(text_field, "the arguments are no JSON object")
    fields = cast("Mapping[str, object]", data)
    texts: list[str] = []
    for name in ("agent_role", text_field):
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            return _describe_malformed(text_field, f"{name} must be a string")
        if value is None or not value.strip():
            return f"Error: {'task_description' if name == text_field else name} must not be None or blank." + (
                ""
                if text_field == "task_description"
                else f" Give both agent_role (one of [{', '.join(roles)}]) and task."
            )
        texts.append(value)
    return AskedDelegation(texts[0], texts[1])


def _describe_malformed(text_field: str, what: str) -> str:
    return f'Error: {what}. Call it with {{"agent_role": "...", "{text_field}": "..."}}.'
