"""Calls of the delegation tool of one task, carried out by other agents in tasks with their own instances."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import (
    AgentExecutionError,
    ExitEarlyError,
    IllegalStateError,
    ManagerStalledError,
    RecordError,
    StaleEpochError,
)
from ensemble_ray.errors.texts import brief, message_of
from ensemble_ray.errors.travel import interrupts_run
from ensemble_ray.events import DelegationCompletedEvent, DelegationFailedEvent, DelegationStartedEvent
from ensemble_ray.execute.delegation.decisions import (
    EXPECTED_OUTPUT,
    Decisions,
    DelegationDecision,
    DelegationGate,
    DelegationRefusal,
    ManagerGate,
    PeerGate,
    manager_tool,
    peer_tool,
)
from ensemble_ray.execute.effects import CallOutcome, DelegationEffect, ToolEffect, recorded_output, recorded_trace
from ensemble_ray.execute.orders import Peers, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.execute.review.gates import ReviewOpenError
from ensemble_ray.execute.scope import TaskScope, exit_of
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.schedule.hierarchy import DelegationEnforcer, rules_text
from ensemble_ray.values.delegation import DelegationResponse, DelegationStatus, Peer
from ensemble_ray.values.ids import delegated_instance
from ensemble_ray.values.messages import ToolCall, ToolSpec
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import TaskTrace
from ensemble_ray.values.value import utc_of

_log = bounded_logger(__name__)
_STOP_GRACE_S = 5.0  # time for a stopped worker to report its trace, s
_STOPPED = "Stopped before the worker completed"
_AT_GATE = "Waits for a review"


class Delegations:
    def __init__(self, scope: TaskScope, gate: DelegationGate, spec: ToolSpec) -> None:
        self._scope = scope
        self._order = scope.order
        self.gate = gate
        self.spec = spec
        self._context = scope.context.delegation
        text_field = "task_description" if scope.is_manager else "task"
        self.decisions = Decisions(scope, gate, text_field)
        cap = self._context.most_at_once if scope.is_manager else None  # S-HIER-89
        self._slots = nullcontext() if cap is None else asyncio.Semaphore(cap)
        self._open: dict[str, tuple[DelegationDecision, Peer]] = {}  # by name of the call: attempts without a result
        self._started: set[str] = set()
        self._fatal: BaseException | None = None  # error of a worker that also ends this task

    @classmethod
    def of(cls, scope: TaskScope, agent: Agent) -> Delegations | None:
        """Return the delegations of an agent's task; None: it must not delegate."""
        order, context = scope.order, scope.context.delegation
        if scope.is_manager:
            rules = scope.context.hierarchy or HierarchyRules()
            scope.effects.is_manager = True
            gate = ManagerGate(context, DelegationEnforcer(rules, context.roles))
            return cls(scope, gate, manager_tool(context, rules, rules_text(rules)))
        if not agent.allow_delegation:
            return None
        peer = PeerGate(context, role=agent.role, depth=order.depth)  # a manager's worker has depth 1 (S-HIER-27)
        return cls(scope, peer, peer_tool(context, agent.role))

    def turn_ended(self) -> None:
        """Count a turn; too many without progress raise `ManagerStalledError`."""
        if self.gate.turn_ended():
            rules = self._scope.context.hierarchy or HierarchyRules()
            texts = [each.text for each in self._scope.effects.delegations]
            raise ManagerStalledError(rules.stall_turns, texts[-rules.stall_turns :], self._order.task.description)

    async def call(self, call: ToolCall, name: str) -> tuple[ToolEffect, Persistence]:
        """Carry out a decision. Return the call's effect, and how safe its fact must be.

        Errors that also end this task are raised (S-DEL-5). Only a worker's failure must be committed.
        """
        decision = self.decisions.of(name)
        if isinstance(decision, str):
            now = self._scope.ports.clock.now()
            malformed = ToolEffect(call=call, outcome="failure", text=decision, started_at=now, duration_s=0.0)
            return malformed, Persistence.QUEUED
        if decision.worker is None:
            return self._refuse(call, decision), Persistence.QUEUED
        self._open[name] = (decision, decision.worker)
        async with self._slots:
            if self._fatal is not None:  # no worker starts when the run ends (S-PAR-30)
                del self._open[name]
                self._add_effect(decision, decision.worker.role, _STOPPED, errors=(_STOPPED,))
                raise self._fatal
            result = await self._perform(name, decision, decision.worker)
        effect = self._conclude(name, decision, decision.worker, result)
        return _tool_effect(call, effect), Persistence.COMMITTED if effect.output is None else Persistence.QUEUED

    async def reapply_recorded(self, call: ToolCall, name: str, recorded: ToolEffect) -> None:
        decision = self.decisions.of(name)
        if isinstance(decision, str):
            return
        if decision.worker is None:
            self._refuse(call, decision, took_s=recorded.duration_s)
            return
        self._announce_start(decision, decision.worker)
        result = await self._recorded_result(name, decision, decision.worker, recorded)
        effect = self._conclude(name, decision, decision.worker, result, took_s=recorded.duration_s)
        effect.text = recorded.text

    def record_stop(self) -> None:
        for name, (decision, worker) in self._open.items():
            effect = self._add_effect(decision, worker.role, _STOPPED, errors=(_STOPPED,))
            if name in self._started:
                effect.is_started, effect.instance = True, delegated_instance(name)
        self._open.clear()

    async def _perform(self, name: str, decision: DelegationDecision, worker: Peer) -> TaskResult:
        order = self._worker_order(name, decision, worker)
        self._announce_start(decision, worker)
        _log.info("Agent '%s' delegates to '%s' (depth %d)", self._order.agent_role, worker.role, order.depth)
        peers = self._scope.peers
        if peers is None:
            raise IllegalStateError("This process cannot reach other agents")
        self._started.add(name)
        work = asyncio.ensure_future(peers.perform(order))
        try:
            async with self._scope.slot.waiting():
                result = await self._wait(work, order, peers)
        finally:
            work.cancel()  # no effect on finished work
        del self._open[name]
        fatal = _fatal_error(result)
        if result.status != "waiting" and fatal is None:
            return result
        reason = _AT_GATE if fatal is None else message_of(fatal)
        effect = self._add_effect(decision, worker.role, reason, errors=(reason,))
        effect.is_started, effect.instance, effect.trace = True, order.instance, result.trace
        if fatal is None:
            raise ReviewOpenError(result.open_reviews)
        self._fatal = self._fatal or fatal
        if isinstance(fatal, IllegalStateError):  # an early end is no failure (S-DEL-52)
            self._announce_failure(effect, reason, fatal)
        raise fatal

    async def _wait(self, work: asyncio.Future[TaskResult], order: TaskOrder, peers: Peers) -> TaskResult:
        """Return the result, or a timeout with the worker's trace so far (S-HIER-85, S-TRC-43)."""
        limit_s = self._context.timeout_s
        await asyncio.wait([work], timeout=limit_s)
        if work.done() or limit_s is None:
            return work.result()
        peers.stop((order.instance,))
        await asyncio.wait([work], timeout=_STOP_GRACE_S)
        stopped = work.result() if work.done() else None
        if stopped is not None and stopped.status == "completed":
            return stopped  # it completed at the last moment
        text = f"Agent '{order.agent_role}' was stopped, since it did not finish within {limit_s:g} s"
        error = AgentExecutionError(text, order.agent_role, order.task.description)
        return self._failed_result(order, error, None if stopped is None else stopped.trace)

    async def _recorded_result(
        self, name: str, decision: DelegationDecision, worker: Peer, recorded: ToolEffect
    ) -> TaskResult:
        order = self._worker_order(name, decision, worker)
        facts = await self._scope.ports.journal.lookup_recorded(order.instance)
        if recorded.outcome != "success":
            error = AgentExecutionError(recorded.text.removeprefix("Error: "), worker.role, order.task.description)
            return self._failed_result(order, error, recorded_trace(facts, order.instance))
        output = recorded_output(facts, order.instance)
        if output is None:  # with durability `run`, the last facts may be lost
            output = TaskOutput(
                raw=recorded.text,
                task_description=order.task.description,
                agent_role=worker.role,
                completed_at=utc_of(recorded.started_at + recorded.duration_s),
                duration=timedelta(seconds=recorded.duration_s),
            )
        return order.result("completed", self._scope.ports.clock.now(), output=output)

    def _worker_order(self, name: str, decision: DelegationDecision, worker: Peer) -> TaskOrder:
        instance = delegated_instance(name)
        return TaskOrder(
            run_id=self._order.run_id,
            key=instance.rpartition("#")[0],
            instance=instance,
            epoch=self._order.epoch,
            index=0,
            task=Task(
                description=decision.request.task_description,
                expected_output=EXPECTED_OUTPUT,
                reuse=self._order.task.reuse,
            ),
            agent_key=worker.key,
            agent_role=worker.role,
            is_streaming=worker.is_streaming,
            depth=self._order.depth + 1,
            caller_role=self._order.agent_role,
            delegation_id=decision.request.task_id,
            is_resubmission=self._order.is_resubmission,
            directives=self._order.directives,
            switches=self._order.switches,
        )

    def _failed_result(self, order: TaskOrder, error: BaseException, trace: TaskTrace | None) -> TaskResult:
        return order.result("failed", self._scope.ports.clock.now(), failure=TaskFailure(error=error, trace=trace))

    def _refuse(self, call: ToolCall, decision: DelegationDecision, *, took_s: float | None = None) -> ToolEffect:
        refusal = decision.refusal or DelegationRefusal("")
        found = self._context.find(decision.request.agent_role)
        role = decision.request.agent_role if found is None else found.role
        effect = self._add_effect(decision, role, refusal.text, errors=(refusal.reason,), took_s=took_s)
        self._announce_failure(effect, refusal.reason, None)
        # a refusal is no error (S-EVT-14)
        return _tool_effect(call, effect, "error" if decision.is_error else "success")

    def _conclude(
        self, name: str, decision: DelegationDecision, worker: Peer, result: TaskResult, *, took_s: float | None = None
    ) -> DelegationEffect:
        output, error = result.output, result.error or RuntimeError("the worker returned no result")
        reason = message_of(error)
        if output is None:
            effect = self._add_effect(decision, worker.role, f"Error: {reason}", errors=(reason,), took_s=took_s)
        else:
            notice = self.gate.record_success(worker.role, decision.request.task_description)
            text = f"{output.raw}\n\n{notice}" if notice else output.raw
            effect = self._add_effect(decision, worker.role, text, raw=output.raw, took_s=took_s)
        effect.is_started, effect.instance, effect.output = True, delegated_instance(name), output
        effect.trace = result.trace if output is None else output.trace
        if output is None:
            self._announce_failure(effect, reason, error)
        else:
            self._announce_success(effect)
        return effect

    def _add_effect(
        self,
        decision: DelegationDecision,
        worker_role: str,
        text: str,
        *,
        errors: Sequence[str] = (),
        raw: str | None = None,
        took_s: float | None = None,
    ) -> DelegationEffect:
        """Add an attempt to the task's effects; with errors it failed."""
        took = self._scope.ports.clock.now() - decision.at if took_s is None else took_s
        response = DelegationResponse(
            task_id=decision.request.task_id,
            status=DelegationStatus.FAILURE if errors else DelegationStatus.SUCCESS,
            worker_role=worker_role,
            raw_output=raw,
            errors=tuple(errors),
            duration=timedelta(seconds=max(0.0, took)),
        )
        effect = DelegationEffect(
            request=decision.request,
            response=response,
            worker_role=worker_role,
            depth=self.gate.depth,
            started_at=decision.at,
            position=decision.position,
            text=text,
        )
        insort(self._scope.effects.delegations, effect, key=lambda each: each.position)  # request order (S-DEL-31)
        return effect

    def _announce_start(self, decision: DelegationDecision, worker: Peer) -> None:
        self._scope.emit(
            DelegationStartedEvent,
            lambda: DelegationStartedEvent(
                delegation_id=decision.request.task_id,
                delegating_agent_role=self._order.agent_role,
                worker_role=worker.role,
                task_description=decision.request.task_description,
                delegation_depth=self.gate.depth + 1,
                request=decision.request,
                run_id=self._order.run_id,
                instance=self._order.instance,
            ),
        )

    def _announce_success(self, effect: DelegationEffect) -> None:
        self._scope.emit(
            DelegationCompletedEvent,
            lambda: DelegationCompletedEvent(
                delegation_id=effect.request.task_id,
                delegating_agent_role=self._order.agent_role,
                worker_role=effect.worker_role,
                response=effect.response,
                duration=effect.response.duration,
                run_id=self._order.run_id,
                instance=self._order.instance,
            ),
        )

    def _announce_failure(self, effect: DelegationEffect, reason: str, cause: BaseException | None) -> None:
        _log.warning("Delegation by '%s' to '%s' failed: %s", self._order.agent_role, effect.worker_role, brief(reason))
        self._scope.emit(
            DelegationFailedEvent,
            lambda: DelegationFailedEvent(
                delegation_id=effect.request.task_id,
                delegating_agent_role=self._order.agent_role,
                worker_role=effect.worker_role,
                failure_reason=reason,
                cause=cause,
                response=effect.response,
                duration=effect.response.duration,
                run_id=self._order.run_id,
                instance=self._order.instance,
            ),
        )


def _tool_effect(call: ToolCall, effect: DelegationEffect, outcome: CallOutcome | None = None) -> ToolEffect:
    return ToolEffect(
        call=call,
        outcome=outcome or ("success" if effect.is_success else "error"),
        text=effect.text,
        started_at=effect.started_at,
        duration_s=effect.response.duration.total_seconds(),
    )


def _fatal_error(result: TaskResult) -> BaseException | None:
    """Return the error of a worker that also ends the delegating task, or None (S-DEL-5)."""
    error = result.error
    if result.status == "exited":
        return error if isinstance(error, ExitEarlyError) else exit_of(result.exit_reason)
    if isinstance(error, IllegalStateError | StaleEpochError | RecordError):
        return error
    if interrupts_run(error):  # the delegating agent would also be refused (S-DUR-152)
        return error
    cause = None if error is None else error.__cause__
    return cause if isinstance(error, AgentExecutionError) and isinstance(cause, IllegalStateError) else None
