"""Who was asked to do delegated work. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.facts.effects import read_request
from ensemble_ray.values.delegation import spoken_role

if TYPE_CHECKING:
    from ensemble_ray.facts.effects import DelegationDecided
    from ensemble_ray.facts.fact import Fact


def worker_role(decision: Fact[DelegationDecided], roles: Mapping[str, str]) -> str:
    """Role of who was asked; of a refused attempt that of the one who is meant, or what the model wrote.

    Args:
        decision: What was decided.
        roles: Roles by agent key.
    """
    found = roles.get(decision.data.worker or "")
    if found is not None:
        return found
    asked = read_request(decision).agent_role
    return next((role for role in roles.values() if spoken_role(role) == spoken_role(asked)), asked)
