"""What listeners and the log hear of one task: its beginning and its end. Package: execute.

Delegated work has events of its own (S-HIER-7): of it, only the log hears here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.errors import message_of
from ensemble_ray.errors.texts import brief
from ensemble_ray.events import Event, TaskCompleteEvent, TaskFailedEvent, TaskStartEvent
from ensemble_ray.events.tracing import TaskTracedEvent
from ensemble_ray.process.bounded_log import bounded_logger

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunContext, TaskOrder, TaskResult
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import TaskTrace

__all__ = ["announce_completion", "announce_failure", "announce_start", "announce_stop", "cut", "log_fields"]

_log = bounded_logger(__name__)


def cut(text: str, length: int) -> str:
    """Return the first characters of a text, `...` behind when something was cut."""
    return text if len(text) <= length else text[:length] + "..."


def announce_start(scope: TaskScope) -> None:
    """Tell that a task begins."""
    order = scope.order
    _emit(
        scope,
        TaskStartEvent,
        lambda: TaskStartEvent(
            task_description=order.task.description,
            agent_role=order.agent_role,
            task_index=order.index,
            total_tasks=_total(scope.context, order),
            run_id=order.run_id,
            instance=order.instance,
        ),
    )
    if _log.isEnabledFor(logging.INFO):  # for most runs nobody reads these
        title = _title(scope)
        _log.info("%s starting: %s [%s]", title, cut(order.task.description, 80), order.agent_role)
        _log.debug("%s has %d context outputs", title, len(order.context))


def announce_completion(scope: TaskScope, output: TaskOutput) -> None:
    """Tell that a task gave its output."""
    order = scope.order
    _emit(
        scope,
        TaskCompleteEvent,
        lambda: TaskCompleteEvent(
            task_description=order.task.description,
            agent_role=order.agent_role,
            task_index=order.index,
            total_tasks=_total(scope.context, order),
            task_output=output,
            duration=output.duration,
            run_id=order.run_id,
            instance=order.instance,
        ),
    )
    _trace(scope, output.trace, "completed")
    if _log.isEnabledFor(logging.INFO):
        seconds = output.duration.total_seconds()
        _log.info("%s completed in %.3f s, %d tool calls", _title(scope), seconds, output.tool_call_count)
        _log.log(logging.INFO if scope.context.is_verbose else logging.DEBUG, "Output: %s", cut(output.raw, 200))


def announce_failure(scope: TaskScope, result: TaskResult) -> None:
    """Tell that a task failed."""
    order, error = scope.order, result.error or RuntimeError("the task failed without an error")
    _emit(
        scope,
        TaskFailedEvent,
        lambda: TaskFailedEvent(
            task_description=order.task.description,
            agent_role=order.agent_role,
            task_index=order.index,
            total_tasks=_total(scope.context, order),
            cause=error,
            duration=timedelta(seconds=result.duration_s),
            run_id=order.run_id,
            instance=order.instance,
        ),
    )
    _trace(scope, result.trace, "failed", error)
    _log.info("%s failed: %s", _title(scope), brief(message_of(error)))  # whoever asked for it is told


def announce_stop(scope: TaskScope, result: TaskResult) -> TaskResult:
    """Tell whoever traces the run of a task that ended without an output and did not fail; give its result."""
    _trace(scope, result.trace, result.status, result.error)
    return result


def log_fields(context: RunContext, order: TaskOrder) -> Mapping[str, str]:
    """Return what each log line of a task carries."""
    fields = {**context.log_fields, "ensemble.id": order.run_id, "agent.role": order.agent_role}
    if order.depth:  # S-DEL-60
        fields["delegation.id"] = order.delegation_id
        if context.hierarchy is None or order.depth > 1:
            fields |= {"delegation.depth": str(order.depth), "delegation.parent": order.caller_role}
        return fields
    if context.workflow == "sequential":
        fields["task.index"] = f"{order.index}/{_total(context, order)}"
        fields["task.description"] = cut(order.task.description, 80)
    return fields


def _emit(scope: TaskScope, event_type: type[Event], build: Callable[[], Event]) -> None:
    if not scope.order.depth:
        scope.emit(event_type, build)


def _trace(scope: TaskScope, trace: TaskTrace | None, status: str, error: BaseException | None = None) -> None:
    """Tell whoever traces the run of an execution that is over (S-INT-31); of work that was handed on, too."""
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
            # What the user's types and others' work have no part in, so that it travels to any process.
            trace=trace.replace(parsed_output=None, delegations=()),
            status=status,
            error_type="" if error is None else type(error).__name__,
            error_message="" if error is None else message_of(error),
            call_ids=scope.effects.call_ids,
            is_handler=scope.effects.is_handler,
        ),
    )


def _title(scope: TaskScope) -> str:
    """Return the task's name in log lines."""
    order = scope.order
    if order.depth:
        return f"Delegated task of '{order.caller_role}'"
    total = _total(scope.context, order)
    is_named = (
        scope.context.has_plan and order.key.partition("~")[0] != f"task-{order.index}"
    )  # a made task has no name
    name = f" '{order.key}'" if is_named else ""
    return f"Task {order.index}/{total}{name}" if total else f"Task {order.index}{name}"


def _total(context: RunContext, order: TaskOrder) -> int:
    """Return how many tasks there are beside it, itself included; 0 where nobody knows yet."""
    return context.total_tasks if order.total_tasks is None else order.total_tasks
