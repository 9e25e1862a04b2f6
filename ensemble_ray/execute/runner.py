"""Run one task through ports."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from msgspec.structs import replace

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.validation import with_model, with_task_model
from ensemble_ray.errors import (
    AgentExecutionError,
    ExitEarlyError,
    RecordError,
    StaleEpochError,
    TaskExecutionError,
    message_of,
)
from ensemble_ray.errors.texts import agent_failure, brief
from ensemble_ray.errors.travel import interrupts_run
from ensemble_ray.events import TaskCompleteEvent, TaskFailedEvent, TaskStartEvent, TaskTracedEvent
from ensemble_ray.events.telemetry.listener import NO_SPAN, execution_span
from ensemble_ray.execute.agent.loop import AgentLoop
from ensemble_ray.execute.agent.reuse import offer_answers
from ensemble_ray.execute.callables import check_guardrails
from ensemble_ray.execute.effects import MemoryUse, TaskEffects, is_work, recorded_output, recorded_workers
from ensemble_ray.execute.handler import run_handler
from ensemble_ray.execute.memory import reflect, remember
from ensemble_ray.execute.orders import (
    Peers,
    RunContext,
    TaskFailure,
    TaskOrder,
    TaskResult,
    TaskStatus,
    count_incomplete,
)
from ensemble_ray.execute.review.gates import (
    ReviewedOutput,
    ReviewOpenError,
    is_not_review,
    recorded_exit,
    review_before_task,
    review_output,
    work_ended_at,
)
from ensemble_ray.execute.scope import RequestDeferredError, RunnerPorts, Slot, TaskScope, exit_of, reason_of
from ensemble_ray.facts.effects import began_at
from ensemble_ray.facts.fact import Fact, find_fact
from ensemble_ray.facts.runs import ExitRecorded, FailureRecorded, OutputRecorded, read_trace
from ensemble_ray.ports import SERVICES, Persistence, use_services
from ensemble_ray.process.context import LOG_FIELDS, bounded_logger
from ensemble_ray.process.run_context import CURRENT_RUN, use_run
from ensemble_ray.values.error_data import error_data, error_from
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.reviews import model_for
from ensemble_ray.values.task_output import TaskOutput, join_iterations
from ensemble_ray.values.trace import TaskTrace

T = TypeVar("T")

_log = bounded_logger(__name__)


class TaskRunner:
    """Runs tasks of one run in this process, several at the same time."""

    def __init__(
        self, context: RunContext, ports: RunnerPorts, agents: Mapping[str, Agent], peers: Peers | None = None
    ) -> None:
        self.context = context
        self.ports = ports
        self.peers = peers
        self.current_run = context.current_run()
        self._agents = agents

    async def run(self, order: TaskOrder, *, is_stopped: Callable[[], bool], slot: Slot | None = None) -> TaskResult:
        """Run one task; errors are results. Unless `is_stopped`, a `CancelledError` is of user code."""
        order = apply_changes(order)
        slot = slot or Slot()
        scope = self._scope(order, {}, slot)
        # A task that was delegated inside this process must not inherit its caller's log fields.
        fields, used = LOG_FIELDS.set(_log_fields(self.context, order)), SERVICES.set(self.ports.services)
        shown = CURRENT_RUN.set(self.current_run)
        try:
            if self.context.deps is not None and not self.context.deps.is_open:
                await self.current_run.open_deps()
            if order.epoch or order.is_resubmission:  # an earlier process may have recorded something
                scope = self._scope(order, await self.ports.journal.lookup_recorded(order.instance), slot)
            if order.reflects_on is not None:  # an output that was accepted after its task had ended
                await reflect(scope, order.reflects_on, self._agent_of(order), is_stopped=is_stopped)
                return order.result("completed", self.ports.clock.now())
            has_gates = self.context.review_policy is not None or bool(scope.recorded_facts)
            if has_gates:
                await review_before_task(scope)
            _announce_start(scope)
            if scope.recorded_facts and (ended := await self._recorded_end(scope)) is not None:
                return ended
            try:
                with NO_SPAN if self.context.tracing is None else execution_span(self.context.tracing, order.instance):
                    output = await self._execute(scope)
            finally:
                scope.effects.memory_listener = None
            reviewed = await review_output(scope, output) if has_gates else ReviewedOutput(output)
            if order.task.reflection_config is not None and not order.is_reflected_later:
                await reflect(scope, reviewed.output, self._agent_of(order), is_stopped=is_stopped)
            if order.task.reuse is not None:
                await offer_answers(scope)
            exits = () if reviewed.exit_reason is None else (ExitRecorded(reason=reviewed.exit_reason),)
            until = Persistence.COMMITTED if scope.effects.has_effect else self.ports.report_after
            await scope.note_end(OutputRecorded(output=reviewed.output), *exits, until=until)
            return self._completed(scope, reviewed)
        except BaseException as error:  # noqa: BLE001  each error is a result
            return await self._end(scope, error, is_stopped)
        finally:
            LOG_FIELDS.reset(fields)
            SERVICES.reset(used)
            CURRENT_RUN.reset(shown)

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call user code of the run outside its tasks, such as a predicate."""
        await self.current_run.open_deps()
        with use_run(self.current_run), use_services(self.ports.services):
            return await function()

    async def _end(self, scope: TaskScope, error: BaseException, is_stopped: Callable[[], bool]) -> TaskResult:
        match error:
            case asyncio.CancelledError() if is_stopped():
                result = self._unfinished(scope, "cancelled", None)
                _announce_trace(scope, result.trace, "cancelled")
                return result
            case asyncio.CancelledError():  # user code raised the error, or cancelled its own asyncio task
                order = scope.order
                text = agent_failure(order.agent_role, error)
                failure = AgentExecutionError(text, order.agent_role, order.task.description)
                failure.__cause__ = error
                return await self._fail(scope, failure)
            case RequestDeferredError():
                return self._unfinished(scope, "waiting", None)
            case ReviewOpenError():
                return replace(self._unfinished(scope, "waiting", None), open_reviews=error.reviews)
            case ExitEarlyError():
                result = self._unfinished(scope, "exited", error)
                call, text = scope.effects.early_exit
                await scope.note_end(ExitRecorded(reason=result.exit_reason, call=call, text=text))
                _announce_trace(scope, result.trace, "exited", error)
                return result
            case _:
                return await self._fail(scope, error)

    def _scope(self, order: TaskOrder, recorded_facts: Mapping[tuple[str, str], Fact], slot: Slot) -> TaskScope:
        started_at, is_recorded = self.ports.clock.now(), False
        for fact in recorded_facts.values():
            is_recorded = is_recorded or is_work(fact.data)
            if is_not_review(fact):
                started_at = min(started_at, began_at(fact))
        effects = TaskEffects(
            task_description=order.task.description,
            expected_output=order.task.expected_output,
            agent_role=order.agent_role,
            started_at=started_at,
            capture_mode=self.context.capture_mode,
            is_handler=order.agent_key is None,
            instance=order.instance,
            is_recorded=is_recorded,
        )
        return TaskScope(
            context=self.context,
            ports=self.ports,
            order=order,
            effects=effects,
            recorded_facts=recorded_facts,
            slot=slot,
            peers=self.peers,
            is_manager=self.context.hierarchy is not None and not order.depth,
        )

    def _agent_of(self, order: TaskOrder) -> Agent | None:
        """Return the agent with the model that a directive or the task chooses; None: a handler."""
        if order.agent_key is None:
            return None
        agent = order.agent or self._agents[order.agent_key]
        if agent.runner is not None:  # a runner chooses its own model
            return agent
        chosen = model_for(order.switches, agent.role) if order.switches else None
        if chosen is not None:
            return with_model(agent, self.context.models.get(chosen))
        return agent if order.task.llm is None else with_task_model(agent, order.task.llm)

    async def _execute(self, scope: TaskScope) -> TaskOutput:
        """Do the work between the gates."""
        order, callables = scope.order, self.ports.callables
        if order.missing_context is not None:
            raise TaskExecutionError(
                f"Context task not yet completed: {order.missing_context}", order.missing_context, order.agent_role
            )
        if order.input_guardrails:
            await self.ports.journal.flush()  # user code depends on the context from here on
            await check_guardrails(order, callables, stage="input")
        uses_memory = self.context.memory is not None and not scope.is_manager
        if uses_memory:
            scope.effects.memory_listener = scope.effects.memory = MemoryUse()  # in every capture mode (S-MEM-100)
        loop: AgentLoop | None = None
        structured: object
        if (agent := self._agent_of(order)) is None:
            text, structured = await run_handler(scope)
        else:
            loop = AgentLoop(scope, agent)
            text, structured = await loop.answer(await loop.prepare())
        while order.output_guardrails:
            await self.ports.journal.flush()  # user code depends on the answer from here on
            may_ask_again = loop is not None and loop.may_ask_again
            objection = await check_guardrails(
                order, callables, stage="output", text=text, parsed=structured, may_ask_again=may_ask_again
            )
            if objection is None or loop is None:
                break
            text, structured = await loop.answer(loop.refuse_answer(objection))
        metrics = scope.effects.metrics(self.context.cost)
        trace = scope.effects.trace(
            completed_at=work_ended_at(scope) if scope.recorded_facts else self.ports.clock.now(),
            final_output=text,
            parsed_output=structured,
            metrics=metrics,
        )
        output = TaskOutput.unchecked(
            raw=text,
            task_description=order.task.description,
            agent_role=order.agent_role,
            completed_at=trace.completed_at,
            duration=trace.duration,
            tool_call_count=metrics.tool_call_count,
            parsed_output=structured,
            output_type=order.task.output_type,
            metrics=metrics,
            trace=trace,
        )
        return await remember(scope, output) if uses_memory else output

    async def _recorded_end(self, scope: TaskScope) -> TaskResult | None:
        """Return the end that an earlier process recorded, or None."""
        instance, recorded_facts = scope.order.instance, scope.recorded_facts
        if (output := recorded_output(recorded_facts, instance, scope.order.task.output_type)) is not None:
            reviewed = ReviewedOutput(output, recorded_exit(recorded_facts, instance))
            return await self._with_workers(scope, self._completed(scope, reviewed))
        if (fact := find_fact(recorded_facts, instance, FailureRecorded)) is not None:
            error = error_from(fact.data.error_data, output_type=scope.order.task.output_type)
            failed = await self._with_workers(scope, self._unfinished(scope, "failed", error))
            failed = _counted(
                replace(
                    failed,
                    at=fact.at,
                    duration_s=max(0.0, fact.at - scope.effects.started_at),
                    failure=TaskFailure(error=error, trace=read_trace(fact) or failed.trace),
                    attempts=fact.data.attempts,
                )
            )
            _announce_failure(scope, failed)
            return failed
        exited = find_fact(recorded_facts, instance, ExitRecorded)
        if exited is None or exited.data.reason is ExitReason.BUDGET_EXHAUSTED:  # the budget may be larger now
            return None
        return await self._with_workers(scope, self._unfinished(scope, "exited", exit_of(exited.data.reason)))

    async def _with_workers(self, scope: TaskScope, result: TaskResult) -> TaskResult:
        if not scope.is_manager:
            return result
        delegated, failed_delegations = await recorded_workers(self.ports.journal, scope.recorded_facts)
        return _counted(replace(result, delegated=delegated, failed_delegations=failed_delegations))

    def _completed(self, scope: TaskScope, reviewed: ReviewedOutput) -> TaskResult:
        order, output = scope.order, reviewed.output
        _announce_completion(scope, output)
        result = order.result(
            "completed" if reviewed.exit_reason is None else "exited",
            output.completed_at.timestamp(),
            exit_reason=reviewed.exit_reason or ExitReason.USER_EXIT_EARLY,
            duration_s=output.duration.total_seconds(),
            output=output,
            text=output.raw if order.wants_text else None,
            total_tokens=output.metrics.total_tokens,
            tool_call_count=output.tool_call_count,
            delegated=scope.delegated if scope.is_manager else (),
            failed_delegations=scope.failed_delegations if scope.is_manager else (),
        )
        return _counted(result)

    async def _fail(self, scope: TaskScope, error: BaseException) -> TaskResult:
        order, result = scope.order, self._unfinished(scope, "failed", error)
        # Both end the run, which can be resumed: the task has not failed (S-DUR-151).
        is_interruption = self.context.has_plan and order.agent_key is not None and interrupts_run(error)
        if is_interruption or isinstance(error, RecordError):
            _announce_failure(scope, result)
            return result
        failure = FailureRecorded(
            error_type=type(error).__name__,
            message=message_of(error),
            stack_trace="".join(traceback.format_exception(error)),
            trace=result.trace,
            error=error_data(error),
            attempts=result.attempts,
            waits=tuple(scope.effects.waits),
            max_attempts=scope.effects.max_attempts if scope.effects.waits else 0,
            is_of_callable=order.task.handler is not None,
        )
        try:
            await scope.note_end(failure)
        except StaleEpochError as stale:  # another process runs this task now, and announces its end
            return replace(result, failure=TaskFailure(error=stale, trace=result.trace))
        except RecordError as unwritten:  # report the first failure
            _log.warning("The failure of task '%s' is not in the record: %s", order.key, brief(str(unwritten)))
        _announce_failure(scope, result)
        return result

    def _unfinished(self, scope: TaskScope, status: TaskStatus, error: BaseException | None) -> TaskResult:
        order, effects = scope.order, scope.effects
        at = self.ports.clock.now()
        metrics = effects.metrics(self.context.cost)
        trace = effects.trace(completed_at=at, final_output="", parsed_output=None, metrics=metrics)
        shown = effects.cancelled_trace(trace) if status == "cancelled" else trace
        result = order.result(
            status,
            at,
            duration_s=max(0.0, at - effects.started_at),
            failure=None if shown is None else TaskFailure(error=error, trace=shown),
            total_tokens=metrics.total_tokens,
            tool_call_count=effects.tool_call_count,
            attempts=effects.attempts,
            exit_reason=reason_of(error),
            delegated=scope.delegated if scope.is_manager else (),
            failed_delegations=scope.failed_delegations if scope.is_manager else (),
        )
        return _counted(result)


def _counted(result: TaskResult) -> TaskResult:
    count = count_incomplete(result)
    return result if count == result.incomplete_answers else replace(result, incomplete_answers=count)


def apply_changes(order: TaskOrder) -> TaskOrder:
    """Return the order with joined iterations (S-LOOP-72) and its revised task (S-LOOP-100)."""
    revision, task = order.revision, order.task
    if revision is None and not order.joined:
        return order
    if revision is not None:
        prior = None if revision.prior is None else revision.prior.raw
        task = task.with_revision_feedback(revision.feedback, prior, revision.attempt)
    context: list[TaskOutput] = []
    position = 0
    for begin, end in order.joined:
        context += [*order.context[position:begin], join_iterations(order.context[begin:end])]
        position = end
    context += order.context[position:]
    return replace(order, task=task, revision=None, context=tuple(context), joined=())


_SHOWN = 80


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."


def _log_fields(context: RunContext, order: TaskOrder) -> Mapping[str, str]:
    fields = {**context.log_fields, "ensemble.id": order.run_id, "agent.role": order.agent_role}
    if order.depth:  # S-DEL-60
        fields["delegation.id"] = order.delegation_id
        if context.hierarchy is None or order.depth > 1:
            fields |= {"delegation.depth": str(order.depth), "delegation.parent": order.caller_role}
    elif context.workflow == "sequential":
        fields["task.index"] = f"{order.index}/{_total(context, order)}"
        fields["task.description"] = cut(order.task.description, _SHOWN)
    return fields


def _total(context: RunContext, order: TaskOrder) -> int:
    """Return the number of tasks of the run or level; 0: unknown."""
    return context.total_tasks if order.total_tasks is None else order.total_tasks


def _title(scope: TaskScope) -> str:
    order = scope.order
    if order.depth:
        return f"Delegated task of '{order.caller_role}'"
    total = _total(scope.context, order)
    is_named = scope.context.has_plan and order.key.partition("~")[0] != f"task-{order.index}"
    name = f" '{order.key}'" if is_named else ""
    return f"Task {order.index}/{total}{name}" if total else f"Task {order.index}{name}"


def _announce_start(scope: TaskScope) -> None:
    order = scope.order
    if not order.depth:  # a delegated task has delegation events
        scope.emit(TaskStartEvent, lambda: TaskStartEvent(**_fields_of_events(scope)))
    if _log.isEnabledFor(logging.INFO):  # the title is built only if it is logged
        title = _title(scope)
        _log.info("%s starting: %s [%s]", title, cut(order.task.description, _SHOWN), order.agent_role)
        _log.debug("%s has %d context outputs", title, len(order.context))


def _announce_completion(scope: TaskScope, output: TaskOutput) -> None:
    if not scope.order.depth:
        scope.emit(
            TaskCompleteEvent,
            lambda: TaskCompleteEvent(task_output=output, duration=output.duration, **_fields_of_events(scope)),
        )
    if scope.context.tracing is not None:
        _announce_trace(scope, output.trace, "completed")
    if _log.isEnabledFor(logging.INFO):
        seconds = output.duration.total_seconds()
        _log.info("%s completed in %.3f s, %d tool calls", _title(scope), seconds, output.tool_call_count)
        _log.log(logging.INFO if scope.context.is_verbose else logging.DEBUG, "Output: %s", cut(output.raw, 200))


def _announce_failure(scope: TaskScope, result: TaskResult) -> None:
    error = result.error or RuntimeError("the task failed without an error")
    duration = timedelta(seconds=result.duration_s)
    if not scope.order.depth:
        scope.emit(TaskFailedEvent, lambda: TaskFailedEvent(cause=error, duration=duration, **_fields_of_events(scope)))
    _announce_trace(scope, result.trace, "failed", error)
    _log.info("%s failed: %s", _title(scope), brief(message_of(error)))  # INFO: the caller receives the error


def _announce_trace(scope: TaskScope, trace: TaskTrace | None, status: str, error: BaseException | None = None) -> None:
    """Send the trace of an execution if the run is traced (S-INT-31)."""
    tracing = scope.context.tracing
    if tracing is None or trace is None:
        return
    order = scope.order
    scope.emit(
        TaskTracedEvent,
        lambda: TaskTracedEvent(
            run_id=order.run_id,
            instance=order.instance,
            tracing=tracing,
            # Each process can load a trace without values of user types.
            trace=trace.replace(parsed_output=None, delegations=()),
            status=status,
            error_type="" if error is None else type(error).__name__,
            error_message="" if error is None else message_of(error),
            call_ids=scope.effects.call_ids,
            is_handler=scope.effects.is_handler,
        ),
    )


def _fields_of_events(scope: TaskScope) -> dict[str, Any]:
    order = scope.order
    return {
        "task_description": order.task.description,
        "agent_role": order.agent_role,
        "task_index": order.index,
        "total_tasks": _total(scope.context, order),
        "run_id": order.run_id,
        "instance": order.instance,
    }
