"""Messages about work that agents hand on. Package: record. Pure.

In: decisions about calls, and what came of them. Out: the three messages of a delegation; and who does the work of an instance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.events import messages
from ensemble_ray.events.messages import Message
from ensemble_ray.facts.effects import read_request
from ensemble_ray.record.delegation_fold import worker_role
from ensemble_ray.values.ids import delegated_instance

if TYPE_CHECKING:
    from ensemble_ray.facts.effects import DelegationDecided, ToolReturned
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import Plan

__all__ = ["DelegationMessages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """Work that was handed on."""

    data: Mapping[str, object]
    worker: str
    work: str
    is_refused: bool


class DelegationMessages:
    """What a run's facts tell of delegations."""

    def __init__(self) -> None:
        self._roles: Mapping[str, str] = {}
        #: by the name of the call
        self._open: dict[str, _Open] = {}
        #: role of the worker and its work, by instance
        self._workers: dict[str, tuple[str, str]] = {}

    def begin(self, plan: Plan) -> None:
        """Take the recorded plan."""
        self._roles = {agent.key: agent.role for agent in plan.agents}

    def role_of(self, instance: str) -> str:
        """Return the role of who does work that was handed on; empty for any other."""
        return self._workers.get(instance, ("", ""))[0]

    def work_of(self, instance: str) -> str:
        """Return what was handed on; empty for any other instance."""
        return self._workers.get(instance, ("", ""))[1]

    def decide(self, fact: Fact[DelegationDecided], asking_role: str, instance: str) -> list[Message]:
        """Take a decision, and return its message.

        Args:
            fact: The decision.
            asking_role: Who hands on.
            instance: Whose work it is.

        Raises:
            RecordError: its request is damaged.
        """
        if fact.name in self._open:  # decided again by nobody: a fork has copied it
            return []
        request, role = read_request(fact), worker_role(fact, self._roles)
        refusal = fact.data.refusal
        data: dict[str, object] = {
            "delegation_id": request.task_id,
            "delegating_agent_role": asking_role,
            "worker_role": role,
            "instance": instance,
        }
        self._open[fact.name] = _Open(
            data=data, worker=role, work=request.task_description, is_refused=fact.data.worker is None
        )
        if fact.data.worker is None:
            reason = refusal.reason if refusal else "refused"
            return [messages.delegation_failed(data, duration_s=0, reason=reason)]
        self._workers[delegated_instance(fact.name)] = (role, request.task_description)
        return [messages.delegation_started(data, task_description=request.task_description)]

    def is_open(self, name: str) -> bool:
        """Return whether a call wants to hand on work, and has not come back."""
        return name in self._open

    def close(self, name: str, result: ToolReturned) -> list[Message]:
        """Take what a call came to, and return the message where the call had handed work on.

        Args:
            name: Of the call.
            result: What the asking model is told.
        """
        delegation = self._open.pop(name, None)
        if delegation is None or delegation.is_refused:
            return []
        if result.is_success:
            return [messages.delegation_completed(delegation.data, duration_s=result.duration_s)]
        reason = result.text.removeprefix("Error: ")
        return [messages.delegation_failed(delegation.data, duration_s=result.duration_s, reason=reason)]
