"""Decisions about delegations. Those of a turn are recorded in order before any worker starts (S-SET-45)."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, message_of
from ensemble_ray.errors.texts import user_traceback
from ensemble_ray.execute.callables import callable_path
from ensemble_ray.execute.scope import TaskScope
from ensemble_ray.facts.effects import DelegationDecided, RecordedRefusal, read_request
from ensemble_ray.facts.fact import Fact
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import USER_ERRORS
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.schedule.hierarchy import DelegationEnforcer
from ensemble_ray.text.foreign_text import TextLine
from ensemble_ray.values.delegation import (
    DelegationContext,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Peer,
    spoken_role,
)
from ensemble_ray.values.ids import effect_name, uuid_of
from ensemble_ray.values.messages import ToolCall, ToolSpec

_log = bounded_logger(__name__)

EXPECTED_OUTPUT = "A complete and accurate result of the delegated task, which its asker can use as it is."


class DelegationRefusal(Struct, frozen=True):
    reason: str
    hint: str = ""  # advice for the model after the reason

    @property
    def text(self) -> str:
        return f"{self.reason}\n{self.hint}" if self.hint else self.reason


class DelegationGate(ABC):
    depth: int = 0  # 0 for a task of the plan (S-DEL-11)
    roles: tuple[str, ...]  # possible workers, for policies (S-DEL-44)

    @abstractmethod
    def find(self, role: str) -> Peer | DelegationRefusal:
        """Return the worker of that role, if the guards allow it (S-DEL-73 to S-DEL-75, S-HIER-21)."""

    @abstractmethod
    def change(self, asked: Peer, role: str) -> Peer | DelegationRefusal:
        """Return the worker after the policies changed the role (S-DEL-77, S-DEL-78, S-HIER-46)."""

    def approve(self, worker: Peer) -> DelegationRefusal | None:  # noqa: ARG002
        """Check the constraints before the policies, and count the attempt (S-HIER-41)."""
        return None

    def reapply_recorded(self, charged: str) -> None:  # noqa: B027
        """Count a recorded attempt for the role that it was charged to."""

    def record_success(self, role: str, description: str) -> str:  # noqa: ARG002
        """Count a worker's result. Return a notice for the model, or ""."""
        return ""

    def turn_ended(self) -> bool:
        """Count a turn. Return whether too many turns made no progress."""
        return False

    def reminder(self) -> str | None:
        """Return a reminder for a model that finishes too early."""
        return None


class PeerGate(DelegationGate):
    """Rules of an agent with `allow_delegation`: no constraints."""

    def __init__(self, context: DelegationContext, *, role: str, depth: int) -> None:
        self._context = context
        self._role = role
        self.depth = depth
        self.roles = tuple(each for each in context.roles if not self._is_self(each))

    def find(self, role: str) -> Peer | DelegationRefusal:
        most = self._context.max_depth
        if self.depth >= most:
            return DelegationRefusal(
                f"Delegation depth limit reached (max: {most}, current: {self.depth}). "
                "Complete this task yourself without further delegation."
            )
        if self._is_self(role):
            return DelegationRefusal(f"Cannot delegate to yourself (role: '{self._role}'). Choose a different agent.")
        unknown = f"Agent not found with role '{role.strip()}'. {_available(self._context)}"
        return self._context.find(role) or DelegationRefusal(unknown)

    def change(self, asked: Peer, role: str) -> Peer | DelegationRefusal:  # noqa: ARG002
        found = self._context.find(role)
        if found is None:
            return _unknown_after_change(role, self._context)
        if self._is_self(role):
            return DelegationRefusal(
                f"A policy modified agent_role to '{role}' which results in self-delegation. Choose a different agent."
            )
        return found

    def _is_self(self, role: str) -> bool:
        return spoken_role(role) == spoken_role(self._role)


class ManagerGate(DelegationGate):
    def __init__(self, context: DelegationContext, enforcer: DelegationEnforcer) -> None:
        self._context = context
        self._enforcer = enforcer
        self.roles = context.roles

    def find(self, role: str) -> Peer | DelegationRefusal:
        unknown = f"No agent found with role '{role.strip()}'. {_available(self._context)}"
        return self._context.find(role) or DelegationRefusal(unknown)

    def change(self, asked: Peer, role: str) -> Peer | DelegationRefusal:
        found = self._context.find(role)
        if found is None:
            return _unknown_after_change(role, self._context)
        # The attempt counts for the new worker instead (S-HIER-46).
        if found.key != asked.key and (reason := self._enforcer.move(asked.role, found.role)) is not None:
            return self._reject(reason)
        return found

    def approve(self, worker: Peer) -> DelegationRefusal | None:
        reason = self._enforcer.approve(worker.role)  # in the worker's own spelling (S-HIER-45)
        return None if reason is None else self._reject(reason)

    def reapply_recorded(self, charged: str) -> None:
        self._enforcer.reapply_recorded(charged)

    def record_success(self, role: str, description: str) -> str:
        notice = self._enforcer.check_repetition(role, description)
        self._enforcer.record_success(role, description)
        return notice or ""

    def turn_ended(self) -> bool:
        return self._enforcer.turn_ended()

    def reminder(self) -> str | None:
        return self._enforcer.reminder()

    def _reject(self, reason: str) -> DelegationRefusal:
        return DelegationRefusal(f"Delegation rejected by policy: {reason}", self._enforcer.hint())


def _unknown_after_change(role: str, context: DelegationContext) -> DelegationRefusal:
    return DelegationRefusal(
        f"A policy modified agent_role to '{role}' but no agent found with that role. {_available(context)}"
    )


def _available(context: DelegationContext) -> str:
    return f"Available roles: [{', '.join(context.roles)}]"


def manager_tool(context: DelegationContext, rules: HierarchyRules, constraints: str) -> ToolSpec:
    """Describe the manager's only tool (S-HIER-20)."""
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
    if roles:  # JSON schema forbids an empty enum
        role["enum"] = list(roles)
    properties = {"agent_role": role, text_field: {"type": "string", "description": "What to do, with all details."}}
    parameters = {"type": "object", "properties": properties, "required": ["agent_role", text_field]}
    return ToolSpec(name, description, parameters)


class DelegationCall(Struct, frozen=True):
    agent_role: str
    task_description: str


def read_call(arguments: str, text_field: str, roles: Sequence[str]) -> DelegationCall | str:
    """Return the arguments, or the error text for the model (S-HIER-21, S-DEL-71, S-DEL-72)."""

    def malformed(problem: str) -> str:
        return f'Error: {problem}. Call it with {{"agent_role": "...", "{text_field}": "..."}}.'

    try:
        data: object = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return malformed(f"the arguments are no valid JSON ({error})")
    if not isinstance(data, dict):
        return malformed("the arguments are no JSON object")
    fields = cast("Mapping[str, object]", data)
    texts: list[str] = []
    for name in ("agent_role", text_field):
        value = fields.get(name)
        if value is not None and not isinstance(value, str):
            return malformed(f"{name} must be a string")
        if value is None or not value.strip():
            shown = "task_description" if name == text_field else name
            advice = f" Give both agent_role (one of [{', '.join(roles)}]) and task."
            return f"Error: {shown} must not be None or blank." + ("" if text_field == "task_description" else advice)
        texts.append(value)
    return DelegationCall(texts[0], texts[1])


class DelegationDecision(Struct, frozen=True, kw_only=True):
    request: DelegationRequest
    worker: Peer | None  # None: refused
    at: float  # Unix time of the request, s
    position: tuple[int, int]
    charged: str | None = None
    refusal: DelegationRefusal | None = None
    is_error: bool = False  # a policy failed


class Decisions:
    def __init__(self, scope: TaskScope, gate: DelegationGate, text_field: str) -> None:
        self._scope = scope
        self._order = scope.order
        self._context = scope.context.delegation
        self._gate = gate
        self._text_field = text_field
        self._decisions: dict[str, DelegationDecision] = {}
        self._malformed: dict[str, str] = {}  # error texts of malformed calls

    def of(self, name: str) -> DelegationDecision | str:
        return self._malformed[name] if name in self._malformed else self._decisions[name]

    async def make(self, calls: Mapping[int, ToolCall], turn: int) -> None:
        """Decide calls of a turn, by index, and commit the decisions. Recorded decisions stay."""
        is_new = False
        for index in sorted(calls):
            name = effect_name(self._order.instance, turn, f"call-{index}")
            call = read_call(calls[index].arguments, self._text_field, self._context.roles)
            if isinstance(call, str):
                self._malformed[name] = call
                continue
            fact = self._scope.find_recorded(name, DelegationDecided)
            if fact is not None:
                self._decisions[name] = self._recall(fact, (turn, index))
                continue
            decision = self._decisions[name] = await self._decide(name, call, (turn, index))
            refusal = decision.refusal
            fact_data = DelegationDecided(
                request=decision.request.model_dump(mode="json"),
                worker=None if decision.worker is None else decision.worker.key,
                charged=decision.charged,
                started_at=decision.at,
                refusal=None if refusal is None else RecordedRefusal(refusal.reason, refusal.hint),
                is_error=None if refusal is None else decision.is_error,
            )
            await self._scope.note(name, fact_data)
            is_new = True
        if is_new:
            await self._commit()

    def _recall(self, fact: Fact[DelegationDecided], position: tuple[int, int]) -> DelegationDecision:
        data = fact.data
        if data.charged is not None:
            self._gate.reapply_recorded(data.charged)
        return DelegationDecision(
            request=read_request(fact),
            worker=next((each for each in self._context.peers if each.key == data.worker), None),
            at=data.started_at,
            position=position,
            charged=data.charged,
            refusal=None if data.refusal is None else DelegationRefusal(*data.refusal),
            is_error=data.is_error is True,
        )

    async def _commit(self) -> None:
        await self._scope.ports.journal.append((), epoch=self._order.epoch, until=Persistence.COMMITTED)

    async def _decide(self, name: str, call: DelegationCall, position: tuple[int, int]) -> DelegationDecision:
        request = DelegationRequest(
            task_id=uuid_of(f"{self._order.run_id}/{name}"),
            agent_role=call.agent_role,
            task_description=call.task_description,
        )
        decision = DelegationDecision(request=request, worker=None, at=self._scope.ports.clock.now(), position=position)
        worker = self._gate.find(call.agent_role)
        if isinstance(worker, DelegationRefusal):
            return replace(decision, refusal=worker)
        if (refusal := self._gate.approve(worker)) is not None:
            return replace(decision, refusal=refusal)
        return await self._apply_policies(replace(decision, charged=worker.role), worker)

    async def _apply_policies(self, decision: DelegationDecision, worker: Peer) -> DelegationDecision:
        """Evaluate the policies; the attempt counts for the final worker (S-DEL-41, S-HIER-46)."""
        if self._context.policies:  # user code depends on the model's answer, and on earlier decisions
            await self._commit()
        for index, name in enumerate(self._context.policies):
            try:
                verdict = await self._evaluate_policy(index, decision.request)
            except (ExitEarlyError, IllegalStateError, asyncio.CancelledError):
                raise
            except USER_ERRORS as error:
                # The failure of the delegation reports the error; this line has its place in the user's code.
                where = TextLine(f"\n{user_traceback(error)}")
                _log.warning("Delegation policy '%s' raised %s%s", name, type(error).__name__, where)
                return replace(decision, refusal=DelegationRefusal(f"Error: {message_of(error)}"), is_error=True)
            if verdict.verdict == "reject":
                return replace(decision, refusal=DelegationRefusal(f"Delegation rejected by policy: {verdict.reason}"))
            if verdict.request is not None:
                decision = replace(decision, request=verdict.request)  # which keeps its id (S-DEL-50)
        target = self._gate.change(worker, decision.request.agent_role)
        if isinstance(target, DelegationRefusal):
            return replace(decision, refusal=target)
        return replace(decision, worker=target, charged=target.role)

    async def _evaluate_policy(self, index: int, request: DelegationRequest) -> DelegationPolicyResult:
        context = DelegationPolicyContext(
            delegating_agent_role=self._order.agent_role,
            current_depth=self._gate.depth,
            max_depth=self._context.max_depth,
            available_worker_roles=self._gate.roles,
        )
        answer = await self._scope.ports.callables.evaluate(callable_path("", "policy", index), (request, context))
        return cast("DelegationPolicyResult", answer)
