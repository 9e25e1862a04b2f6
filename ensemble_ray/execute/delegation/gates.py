"""Who may be asked by whom: the guards before any policy, and what a policy's change must still pass. Package: execute.

Pure. In: the role that a model wrote. Out: the agent it means, or the sentence that the model is told instead.
Must never happen: a worker that is asked although a rule forbids it, however its role is spelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ensemble_ray.schedule.hierarchy import DelegationEnforcer
from ensemble_ray.values.delegation import DelegationContext, Peer, spoken_role

__all__ = ["DelegationGate", "DelegationRefusal", "ManagerGate", "PeerGate"]


@dataclass(frozen=True, slots=True)
class DelegationRefusal:
    """Why a worker is not asked."""

    #: what events and the response say
    reason: str
    #: what helps the model to do better, told behind the reason
    hint: str = ""

    @property
    def text(self) -> str:
        """What the model is told."""
        return f"{self.reason}\n{self.hint}" if self.hint else self.reason


class DelegationGate(Protocol):
    """The rules of one delegating task."""

    @property
    def depth(self) -> int:
        """How deep the delegating task is; 0 for one of the plan (S-DEL-11)."""
        ...

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that may be asked, as policies see them (S-DEL-44)."""
        ...

    def find(self, role: str) -> Peer | DelegationRefusal:
        """Apply the guards (S-DEL-73 to S-DEL-75, S-HIER-21)."""
        ...

    def approve(self, worker: Peer) -> DelegationRefusal | None:
        """Apply the checks before the policies; an approved attempt counts from here on (S-HIER-41)."""
        ...

    def change(self, asked: Peer, role: str) -> Peer | DelegationRefusal:
        """Who is asked after the policies, which may have changed the target (S-DEL-77, S-DEL-78, S-HIER-46)."""
        ...

    def reapply_recorded(self, charged: str) -> None:
        """Count an attempt again that the record says was approved for that role."""
        ...

    def record_success(self, role: str, description: str) -> str:
        """Note that a worker returned its result; return a notice for the asking model, or nothing."""
        ...

    def turn_ended(self) -> bool:
        """All calls of a turn returned; whether nothing has been achieved for so long that it should end."""
        ...

    def reminder(self) -> str | None:
        """Return the reminder for an asking model that wants to finish too early; None if it may."""
        ...


def _join_roles(roles: tuple[str, ...]) -> str:
    return f"[{', '.join(roles)}]"


def _describe_change(role: str) -> str:
    return f"A policy modified agent_role to '{role}'"


class PeerGate:
    """An agent with `allow_delegation` asks a colleague."""

    def __init__(self, context: DelegationContext, *, role: str, depth: int) -> None:
        self._context = context
        self._role = role
        self.depth = depth
        self.roles = tuple(each for each in context.roles if not self._is_self(each))

    def find(self, role: str) -> Peer | DelegationRefusal:
        """Depth, then self, then unknown."""
        most = self._context.max_depth
        if self.depth >= most:
            return DelegationRefusal(
                f"Delegation depth limit reached (max: {most}, current: {self.depth}). "
                "Complete this task yourself without further delegation."
            )
        if self._is_self(role):
            return DelegationRefusal(f"Cannot delegate to yourself (role: '{self._role}'). Choose a different agent.")
        roles = _join_roles(self._context.roles)
        found = self._context.find(role)
        return found or DelegationRefusal(f"Agent not found with role '{role.strip()}'. Available roles: {roles}")

    def approve(self, worker: Peer) -> DelegationRefusal | None:  # noqa: ARG002  between peers nothing is counted
        """Nothing stands before the policies."""
        return None

    def change(self, asked: Peer, role: str) -> Peer | DelegationRefusal:  # noqa: ARG002  nothing was charged
        """Unknown, then self."""
        found = self._context.find(role)
        if found is None:
            roles = _join_roles(self._context.roles)
            return DelegationRefusal(
                f"{_describe_change(role)} but no agent found with that role. Available roles: {roles}"
            )
        if self._is_self(role):
            return DelegationRefusal(
                f"{_describe_change(role)} which results in self-delegation. Choose a different agent."
            )
        return found

    def reapply_recorded(self, charged: str) -> None:
        """Nothing is counted."""

    def record_success(self, role: str, description: str) -> str:  # noqa: ARG002  nothing is counted
        """No notice."""
        return ""

    def turn_ended(self) -> bool:
        """Leave the end to the agent's own limit of tool calls."""
        return False

    def reminder(self) -> str | None:
        """Let it finish when it likes."""
        return None

    def _is_self(self, role: str) -> bool:
        return spoken_role(role) == spoken_role(self._role)


class ManagerGate:
    """A manager asks a worker, under its constraints."""

    depth = 0

    def __init__(self, context: DelegationContext, enforcer: DelegationEnforcer) -> None:
        self._context = context
        self._enforcer = enforcer
        self.roles = context.roles

    def find(self, role: str) -> Peer | DelegationRefusal:
        """Only whether there is one."""
        roles = _join_roles(self._context.roles)
        found = self._context.find(role)
        return found or DelegationRefusal(f"No agent found with role '{role.strip()}'. Available roles: {roles}")

    def approve(self, worker: Peer) -> DelegationRefusal | None:
        """Check the constraints, by the worker's own role (S-HIER-45)."""
        reason = self._enforcer.approve(worker.role)
        return None if reason is None else self._reject(reason)

    def change(self, asked: Peer, role: str) -> Peer | DelegationRefusal:
        """Unknown, then the constraints of the new target, which is charged instead (S-HIER-46)."""
        found = self._context.find(role)
        if found is None:
            roles = _join_roles(self._context.roles)
            return DelegationRefusal(
                f"{_describe_change(role)} but no agent found with that role. Available roles: {roles}"
            )
        if found.key != asked.key and (reason := self._enforcer.move(asked.role, found.role)) is not None:
            return self._reject(reason)
        return found

    def reapply_recorded(self, charged: str) -> None:
        """Count the attempt as when it was approved."""
        self._enforcer.reapply_recorded(charged)

    def record_success(self, role: str, description: str) -> str:
        """Tell a manager that repeats itself."""
        notice = self._enforcer.check_repetition(role, description)
        self._enforcer.record_success(role, description)
        return notice or ""

    def turn_ended(self) -> bool:
        """So many turns without progress are a stall."""
        return self._enforcer.turn_ended()

    def reminder(self) -> str | None:
        """Once, of required workers that are missing."""
        return self._enforcer.reminder()

    def _reject(self, reason: str) -> DelegationRefusal:
        return DelegationRefusal(f"Delegation rejected by policy: {reason}", self._enforcer.hint())
