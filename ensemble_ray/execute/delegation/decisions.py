"""What is decided of the calls that hand work on, before anybody is asked. Package: execute.

In: a turn's calls of the delegation tool. Out: a decision for each, on record. Rules:
1. Calls are decided in request order, and the decisions are on record, before any worker of that turn starts
   (S-SET-45): a cap of three lets three of fifty calls pass, also when the process dies in between.
2. A decision that is on record is recalled, never made again: no policy is asked twice about one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import ExitEarlyError, IllegalStateError, message_of
from ensemble_ray.errors.texts import user_traceback
from ensemble_ray.execute.callables import callable_path
from ensemble_ray.execute.delegation.calls import AskedDelegation, read_call
from ensemble_ray.execute.delegation.gates import DelegationGate, DelegationRefusal
from ensemble_ray.facts.effects import DelegationDecided, RecordedRefusal, read_request
from ensemble_ray.ports import Persistence
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.threads import USER_ERRORS
from ensemble_ray.text.foreign_text import TextLine
from ensemble_ray.values.delegation import (
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationRequest,
    Peer,
)
from ensemble_ray.values.ids import effect_name, uuid_of

if TYPE_CHECKING:
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.values.messages import ToolCall

__all__ = ["Decisions", "DelegationDecision"]

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
