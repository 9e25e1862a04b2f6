"""The part of `plan` about delegation: a manager with its rules, and peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.view.terminal import count_noun, screen_line

if TYPE_CHECKING:
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.plan.planner import Planned

_ROLES, _NAMES = 200, 120


def manager_data(ensemble: Ensemble, planned: Planned) -> dict[str, Any] | None:
    """Return the manager and its rules as JSON data, or None without a manager."""
    from ensemble_ray.plan.plan import MANAGER_KEY  # the help does not need it

    rules = planned.plan.hierarchy
    if rules is None:
        return None
    manager = planned.agents[MANAGER_KEY]
    return {
        "model": repr(manager.llm),
        "max_iterations": manager.max_iterations,
        "prompts": None
        if ensemble.manager_prompt_strategy is None
        else type(ensemble.manager_prompt_strategy).__name__,
        "rules": asdict(rules),
    }


def delegation_data(ensemble: Ensemble, planned: Planned) -> dict[str, Any] | None:
    """Return the rules of all delegations as JSON data, or None without delegations."""
    peers = [entry.role for entry in planned.plan.agents if entry.allow_delegation]
    if planned.plan.hierarchy is None and not peers:
        return None
    limit = ensemble.delegation_timeout
    return {
        "peers": peers,
        "max_depth": ensemble.max_delegation_depth,
        "policies": [getattr(each, "__name__", type(each).__name__) for each in ensemble.delegation_policies],
        "timeout_s": None if limit is None else limit.total_seconds(),
        "retries": ensemble.delegation_retries,
    }


def manager_lines(manager: Mapping[str, Any], delegation: Mapping[str, Any]) -> list[str]:
    prompts = f", prompts by {manager['prompts']}" if manager["prompts"] else ""
    rules = [*_rules(manager["rules"]), *_describe_shared(delegation)]
    width = max(len(name) for name, _ in rules)
    return [
        "\nManager",
        f"  model {manager['model']}, at most {count_noun(manager['max_iterations'], 'tool call')}{prompts}",
        "\nRules",
        *(f"  {name:<{width}}  {text}" for name, text in rules),
    ]


def peer_lines(delegation: Mapping[str, Any]) -> list[str]:
    """Return the agents that may delegate without a manager, as text."""
    rules = [("may delegate", _join_roles(delegation["peers"])), ("depth", f"at most {delegation['max_depth']}")]
    rules += list(_describe_shared(delegation))
    width = max(len(name) for name, _ in rules)
    return ["\nDelegation", *(f"  {name:<{width}}  {text}" for name, text in rules)]


def _rules(rules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if rules["allowed_workers"]:
        yield "allowed", _join_roles(rules["allowed_workers"])
    if rules["required_stages"]:
        yield "stages", screen_line(" -> ".join(", ".join(stage) for stage in rules["required_stages"]), _ROLES)
    if rules["required_workers"]:
        ways = {"remind": "the manager is reminded once", "fail": "the manager is not reminded"}
        yield "required", f"{_join_roles(rules['required_workers'])} ({ways[rules['enforce_required']]})"
    if rules["max_calls_per_worker"]:
        caps = rules["max_calls_per_worker"].items()
        yield "calls", screen_line(", ".join(f"{role} at most {cap}" for role, cap in caps), _ROLES)
    if rules["global_max_delegations"]:
        yield "delegations", f"at most {rules['global_max_delegations']}"
    turns = rules["stall_turns"]
    yield "stall", f"ends after {count_noun(turns, 'turn')} without progress" if turns else "never ends the run"


def _describe_shared(delegation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if delegation["policies"]:
        yield "policies", screen_line(", ".join(delegation["policies"]), _NAMES)
    if delegation["timeout_s"] is not None:
        yield "timeout", f"{delegation['timeout_s']:g} s"


def _join_roles(roles: list[str]) -> str:
    return screen_line(", ".join(roles), _ROLES)
