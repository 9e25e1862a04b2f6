"""TaskRunner: carries out one task through ports. Room: execute. Async; knows no Ray, decides nothing about the run.

In: a `TaskOrder`. Out: a `TaskResult`, always; only cancellation of the whole house gets past it. Effects are noted in
the journal before the next step depends on them; a recorded effect is taken from there instead of being done again.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.context import Services, log_context, use_services
from ensemble_ray.errors import ExitEarlyError, TaskExecutionError, message_of
from ensemble_ray.events import Event, TaskCompleteEvent, TaskFailedEvent, TaskStartEvent
from ensemble_ray.execute.agent_loop import AgentLoop
from ensemble_ray.execute.checks import check_guardrails
from ensemble_ray.execute.effects import TaskEffects
from ensemble_ray.execute.handler import run_handler
from ensemble_ray.execute.orders import RunFrame, TaskOrder, TaskResult
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import TaskOutput

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.callables import Callables
    from ensemble_ray.ports import Clock, EventSink, Journal, ToolMetrics

__all__ = ["RunnerPorts", "TaskRunner", "cut"]

_log = logging.getLogger(__name__)


def cut(text: str, length: int) -> str:
    """The first characters of a text, `...` behind when something was cut."""
    return text if len(text) <= length else text[:length] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerPorts:
    """Everything a runner touches."""

    clock: Clock
    journal: Journal
    events: EventSink
    callables: Callables
    services: Services
    tool_metrics: ToolMetrics


class TaskRunner:
    """Runs tasks of one run in this process; any number at the same time."""

    def __init__(self, frame: RunFrame, ports: RunnerPorts, agents: Mapping[str, Agent]) -> None:
        self.frame = frame
        self.ports = ports
        self._agents = agents

    async def run(self, order: TaskOrder) -> TaskResult:
        """Run one task to its end, whatever that is."""
        started_at = self.ports.clock.now()
        effects = TaskEffects(
            task_description=order.task.description,
            expected_output=order.task.expected_output,
            agent_role=order.agent_role,
            started_at=started_at,
            capture_mode=self.frame.capture_mode,
            is_handler=order.agent_key is None,
        )
        with use_services(self.ports.services), log_context(self._log_fields(order)):
            try:
                self._announce(order)
                output = await self._execute(order, effects)
            except asyncio.CancelledError:
                return self._unfinished(order, effects, "cancelled", None)
            except ExitEarlyError as exit_early:
                return self._unfinished(order, effects, "exited", exit_early)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001  a failed task is a result, whatever was raised
                return await self._failed(order, effects, error)
            return await self._completed(order, output)

    async def _execute(self, order: TaskOrder, effects: TaskEffects) -> TaskOutput:
        if order.missing_context is not None:
            raise TaskExecutionError(
                f"Context task not yet completed: {order.missing_context}", order.missing_context, order.agent_role
            )
        await check_guardrails(order, self.ports.callables, kind="input")
        structured: object
        if order.agent_key is None:
            text, structured = await run_handler(order, self.ports.callables)
        else:
            loop = AgentLoop(self, order, self._agents[order.agent_key], effects)
            text, structured = await loop.run()
        await check_guardrails(order, self.ports.callables, kind="output", text=text, parsed=structured)
        return self._output(order, effects, text, structured)

    def _output(self, order: TaskOrder, effects: TaskEffects, text: str, structured: object) -> TaskOutput:
        completed_at = self.ports.clock.now()
        metrics = effects.metrics(self.frame.cost)
        trace = effects.trace(completed_at=completed_at, final_output=text, parsed_output=structured, metrics=metrics)
        return TaskOutput(
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

    # Endings.

    async def _completed(self, order: TaskOrder, output: TaskOutput) -> TaskResult:
        at = output.completed_at.timestamp()
        await self.note("output", order.instance, {"output": output}, order)
        self.emit(
            TaskCompleteEvent,
            lambda: TaskCompleteEvent(
                task_description=order.task.description,
                agent_role=order.agent_role,
                task_index=order.index,
                total_tasks=self.frame.total_tasks,
                task_output=output,
                duration=output.duration,
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
        seconds = output.duration.total_seconds()
        _log.info(
            "Task %d/%d completed in %.3f s, %d tool calls",
            order.index,
            self.frame.total_tasks,
            seconds,
            output.tool_call_count,
        )
        _log.log(logging.INFO if self.frame.is_verbose else logging.DEBUG, "Output: %s", cut(output.raw, 200))
        return TaskResult(
            key=order.key,
            instance=order.instance,
            status="completed",
            at=at,
            duration_s=seconds,
            output=output,
            total_tokens=output.metrics.total_tokens,
            tool_call_count=output.tool_call_count,
        )

    async def _failed(self, order: TaskOrder, effects: TaskEffects, error: BaseException) -> TaskResult:
        result = self._unfinished(order, effects, "failed", error)
        await self.note(
            "task_failed",
            order.instance,
            {
                "error_type": type(error).__name__,
                "message": message_of(error),
                "stack_trace": "".join(traceback.format_exception(error)),
                "trace": result.trace,
            },
            order,
        )
        self.emit(
            TaskFailedEvent,
            lambda: TaskFailedEvent(
                task_description=order.task.description,
                agent_role=order.agent_role,
                task_index=order.index,
                total_tasks=self.frame.total_tasks,
                cause=error,
                duration=timedelta(seconds=result.duration_s),
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
        _log.error("Task %d/%d failed: %s", order.index, self.frame.total_tasks, message_of(error))
        return result

    def _unfinished(
        self, order: TaskOrder, effects: TaskEffects, status: str, error: BaseException | None
    ) -> TaskResult:
        at = self.ports.clock.now()
        metrics = effects.metrics(self.frame.cost)
        return TaskResult(
            key=order.key,
            instance=order.instance,
            status="failed" if status == "failed" else "exited" if status == "exited" else "cancelled",
            at=at,
            duration_s=at - effects.started_at,
            error=error,
            trace=effects.trace(completed_at=at, final_output="", parsed_output=None, metrics=metrics),
            total_tokens=metrics.total_tokens,
            tool_call_count=effects.tool_call_count,
            is_timeout=isinstance(error, ExitEarlyError) and error.timed_out,
        )

    # What the parts of a task use.

    async def note(self, kind: str, name: str, data: Mapping[str, object], order: TaskOrder) -> None:
        """Put a fact into the journal."""
        fact = Fact(run=order.run_id, kind=kind, name=name, at=self.ports.clock.now(), data=data, epoch=order.epoch)
        await self.ports.journal.append((fact,), epoch=order.epoch)

    def emit(self, kind: type[Event], build: Callable[[], Event]) -> None:
        """Publish an event, building it only if somebody wants its type."""
        if self.ports.events.wants(kind):
            self.ports.events.emit(build())

    def _announce(self, order: TaskOrder) -> None:
        self.emit(
            TaskStartEvent,
            lambda: TaskStartEvent(
                task_description=order.task.description,
                agent_role=order.agent_role,
                task_index=order.index,
                total_tasks=self.frame.total_tasks,
                run_id=order.run_id,
                instance=order.instance,
            ),
        )
        _log.info(
            "Task %d/%d starting: %s [%s]",
            order.index, self.frame.total_tasks, cut(order.task.description, 80), order.agent_role,
        )  # fmt: skip
        _log.debug("Task %d/%d has %d context outputs", order.index, self.frame.total_tasks, len(order.context))

    def _log_fields(self, order: TaskOrder) -> Mapping[str, str]:
        fields = {**self.frame.log_fields, "ensemble.id": order.run_id, "agent.role": order.agent_role}
        if self.frame.workflow == "sequential":
            fields["task.index"] = f"{order.index}/{self.frame.total_tasks}"
            fields["task.description"] = cut(order.task.description, 80)
        return fields
