"""What is decided of the calls that hand work on, before anybody is asked.

In: a turn's calls of the delegation tool. Out: a decision for each, on record. Rules:
1. Calls are decided in request order, and the decisions are on record, before any worker of that turn starts
   (S-SET-45): a cap of three lets three of fifty calls pass, also when the process dies in between.
2. A decision that is on record is recalled, never made again: no policy is asked twice about one call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, message_of
from ensemble_ray.errors.texts import user_traceback
from ensemble_ray.execute.callables import callable_path
from ensemble_ray.facts.effects import DelegationDecided, RecordedRefusal, read_request
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import USER_ERRORS
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
from ensemble_ray.values.messages import ToolSpec

if TYPE_CHECKING:
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import HierarchyRules
    from ensemble_ray.values.messages import ToolCall


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


_log = bounded_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationDecision:
    """What was decided of one call."""

    request: DelegationRequest
    #: who is asked; None: nobody
    worker: Peer | None
    #: when the request was made, Unix time, s
    at: float
    #: turn and index of the call
    position: tuple[int, int]
    #: role whose cap it counts for; None: none's
    charged: str | None = None
    refusal: DelegationRefusal | None = None
    #: whether a policy failed, so that the model is told of an error
    is_error: bool = False


class Decisions:
    """The decisions of one task."""

    def __init__(self, scope: TaskScope, gate: DelegationGate, text_field: str) -> None:
        self._scope = scope
        self._order = scope.order
        self._context = scope.context.delegation
        self._gate = gate
        self._text_field = text_field
        self._decisions: dict[str, DelegationDecision] = {}
        #: error texts of calls that ask for nothing
        self._malformed: dict[str, str] = {}

    def of(self, name: str) -> DelegationDecision | str:
        """Return what was decided of the call of that name, or the error text of one that asks for nothing."""
        return self._malformed[name] if name in self._malformed else self._decisions[name]

    async def make(self, calls: Mapping[int, ToolCall], turn: int) -> None:
        """Decide these calls of a turn, by their index, in request order; return when that is on record.

        Raises:
            IllegalStateError: a policy gave no verdict (S-DEL-43).
        """
        is_new = False
        for index in sorted(calls):
            name = effect_name(self._order.instance, turn, f"call-{index}")
            asked = read_call(calls[index].arguments, self._text_field, self._context.roles)
            if isinstance(asked, str):
                self._malformed[name] = asked
                continue
            fact = self._scope.find_recorded(name, DelegationDecided)
            if fact is not None:
                self._decisions[name] = self._recall(fact, (turn, index))
                continue
            decision = self._decisions[name] = await self._decide(name, asked, (turn, index))
            await self._scope.note(name, _fact_of(decision))
            is_new = True
        if is_new:
            await self._write()

    async def _write(self) -> None:
        """Return when everything that the task noted is on record."""
        await self._scope.ports.journal.append((), epoch=self._order.epoch, until=Persistence.COMMITTED)

    async def _decide(self, name: str, asked: AskedDelegation, position: tuple[int, int]) -> DelegationDecision:
        at = self._scope.ports.clock.now()
        request = DelegationRequest(
            task_id=uuid_of(f"{self._order.run_id}/{name}"),
            agent_role=asked.agent_role,
            task_description=asked.task_description,
        )
        found = self._gate.find(asked.agent_role)
        refusal = found if isinstance(found, DelegationRefusal) else self._gate.approve(found)
        if refusal is not None:
            return DelegationDecision(request=request, worker=None, at=at, position=position, refusal=refusal)
        return await self._under_policies(request, cast("Peer", found), at, position)

    async def _under_policies(
        self, request: DelegationRequest, worker: Peer, at: float, position: tuple[int, int]
    ) -> DelegationDecision:
        """Ask the policies in order; the attempt counts for the worker that it ends with (S-DEL-41, S-HIER-46)."""
        charged = worker.role
        if self._context.policies:  # user code depends on the answer, and on what was decided before, from here on
            await self._write()
        for index, name in enumerate(self._context.policies):
            try:
                verdict = await self._asked_policy(index, request)
            except (ExitEarlyError, IllegalStateError, asyncio.CancelledError):
                raise
            except USER_ERRORS as error:
                # What it raised is told with the delegation's failure; here is where it did.
                where = TextLine(f"\n{user_traceback(error)}")
                _log.warning("Delegation policy '%s' raised %s%s", name, type(error).__name__, where)
                reason = DelegationRefusal(f"Error: {message_of(error)}")
                return DelegationDecision(
                    request=request,
                    worker=None,
                    at=at,
                    position=position,
                    charged=charged,
                    refusal=reason,
                    is_error=True,
                )
            if verdict.verdict == "reject":
                reason = DelegationRefusal(f"Delegation rejected by policy: {verdict.reason}")
                return DelegationDecision(
                    request=request, worker=None, at=at, position=position, charged=charged, refusal=reason
                )
            if verdict.request is not None:
                request = verdict.request  # under the id that it has (S-DEL-50)
        target = self._gate.change(worker, request.agent_role)
        if isinstance(target, DelegationRefusal):
            return DelegationDecision(
                request=request, worker=None, at=at, position=position, charged=charged, refusal=target
            )
        return DelegationDecision(request=request, worker=target, at=at, position=position, charged=target.role)

    async def _asked_policy(self, index: int, request: DelegationRequest) -> DelegationPolicyResult:
        context = DelegationPolicyContext(
            delegating_agent_role=self._order.agent_role,
            current_depth=self._gate.depth,
            max_depth=self._context.max_depth,
            available_worker_roles=self._gate.roles,
        )
        answer = await self._scope.ports.callables.evaluate(callable_path("", "policy", index), (request, context))
        return cast("DelegationPolicyResult", answer)

    def _recall(self, fact: Fact[DelegationDecided], position: tuple[int, int]) -> DelegationDecision:
        """Return the decision that is on record; what it counted for counts again."""
        data = fact.data
        worker = next((each for each in self._context.peers if each.key == data.worker), None)
        if data.charged is not None:
            self._gate.reapply_recorded(data.charged)
        return DelegationDecision(
            request=read_request(fact),
            worker=worker,
            at=data.started_at,
            position=position,
            charged=data.charged,
            refusal=None if data.refusal is None else DelegationRefusal(*data.refusal),
            is_error=data.is_error is True,
        )


def _fact_of(decision: DelegationDecision) -> DelegationDecided:
    """Return what is recorded of a decision."""
    refusal = decision.refusal
    return DelegationDecided(
        request=decision.request.model_dump(mode="json"),
        worker=None if decision.worker is None else decision.worker.key,
        charged=decision.charged,
        started_at=decision.at,
        refusal=None if refusal is None else RecordedRefusal(refusal.reason, refusal.hint),
        is_error=None if refusal is None else decision.is_error,
    )
