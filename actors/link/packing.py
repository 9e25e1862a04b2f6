"""Orders, outputs and results as bytes and back, in processes that may run user code.

Bytes are of our own cluster: whoever can put others there can run code in it anyway.
"""

from __future__ import annotations

import copyreg
import dataclasses
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import cloudpickle

from ensemble_ray.actors.link.wire import WireOrder, WireReport
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import AgentExecutionError, message_of, portable
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.execute.recorded import typed_output
from ensemble_ray.execute.reports import report_of
from ensemble_ray.values.outputs import TaskOutput

__all__ = [
    "cannot_leave",
    "load_agent",
    "pack_order",
    "pack_output",
    "pack_recorded",
    "pack_result",
    "unpack_order",
    "unpack_output",
    "unpack_report",
    "unpack_result",
]

# A dataclass of a program's own file travels by value, and with it the mark of fields without a default. It must stay
# the one object that everybody compares with; cloudpickle makes another of it, and the class cannot be read any more.
copyreg.pickle(type(dataclasses.MISSING), lambda _: "MISSING")


def unpack_order(run_id: str, order: WireOrder, agent: Agent | None = None) -> TaskOrder:
    """Return an order with its user objects and its agent, in the process that runs it."""
    return TaskOrder(
        run_id=run_id,
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        index=order.index,
        task=cast("Task", pickle.loads(order.task)),  # noqa: S301  bytes of our own driver, inside one cluster
        agent_key=order.agent_key,
        agent_role=order.agent_role,
        agent=agent,
        context=tuple(unpack_output(body) for body in order.context),
        missing_context=order.missing_context,
        is_streaming=order.is_streaming,
        input_guardrails=order.input_guardrails,
        output_guardrails=order.output_guardrails,
        depth=order.depth,
        caller_role=order.caller_role,
        delegation_id=order.delegation_id,
        total_tasks=order.total_tasks,
    )


def pack_order(order: TaskOrder) -> WireOrder:
    """Return an order of delegated work as bytes. Such work has no context and no guardrails."""
    return WireOrder(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        index=order.index,
        task=pickle.dumps(order.task, protocol=5),
        agent_key=order.agent_key,
        agent_role=order.agent_role,
        is_streaming=order.is_streaming,
        depth=order.depth,
        caller_role=order.caller_role,
        delegation_id=order.delegation_id,
    )


def pack_output(output: TaskOutput) -> bytes:
    """Return an output as bytes, for a task that is given it."""
    return _dumps(output)


def pack_result(result: TaskResult) -> WireReport:
    """Return a result as bytes; one that cannot travel becomes a failure that says so."""
    try:
        return _pack(result)
    except Exception as error:  # noqa: BLE001  whatever pickling raised, the task must still be reported
        output = result.output
        task, role = (result.key, "") if output is None else (output.task_description, output.agent_role)
        cause = cannot_leave(task, role, error)
        return _pack(replace(result, status="failed", output=None, trace=None, error=cause))


def cannot_leave(task: str, agent_role: str, error: Exception) -> AgentExecutionError:
    """Return the failure of a task whose result no other process can have."""
    text = f"The result of task '{task}' cannot leave its agent's process: {message_of(error)}"
    return AgentExecutionError(text, agent_role, task)


def _pack(result: TaskResult) -> WireReport:
    error = None if result.error is None else portable(result.error)
    travelling = replace(result, error=error)
    output = None if result.output is None else _dumps(result.output)
    failure = None
    if output is None:  # what a manager's workers did travels beside it
        failure = _dumps(replace(travelling, delegated=(), failed_delegations=()))
    delegated = [(each.agent_role, _dumps(each)) for _, each in result.delegated]
    return report_of(travelling, output=output, failure=failure, delegated=delegated)


def _dumps(value: TaskOutput | TaskResult) -> bytes:
    """Pickle by reference where that works, by value where a class of the user's own script is in it."""
    plain = isinstance(value, TaskOutput) and value.output_type is None
    return pickle.dumps(value, protocol=5) if plain else cloudpickle.dumps(value)


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """An output as the record has it, with the task's bytes: whoever may run user code makes it one of its type."""

    data: Mapping[str, object]
    task: bytes


def pack_recorded(data: Mapping[str, object], task: bytes) -> bytes:
    """Return a recorded output as the bytes that a scheduler holds of any output."""
    return pickle.dumps(RecordedOutput(data, task), protocol=5)


def unpack_output(body: bytes) -> TaskOutput:
    """Return the output behind its bytes."""
    held: object = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    if isinstance(held, RecordedOutput):
        if not held.task:  # of a manager's worker, whose task declares no type
            return typed_output(held.data)
        task = cast("Task", pickle.loads(held.task))  # noqa: S301  bytes of our own driver
        return typed_output(held.data, task.output_type)
    return cast("TaskOutput", held)


def unpack_result(body: bytes) -> TaskResult:
    """Return the result behind its bytes."""
    return cast("TaskResult", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def unpack_report(report: WireReport) -> TaskResult:
    """Return the result behind a report, in the process that asked for it."""
    if report.output is None:
        return unpack_result(report.failure or b"")
    return TaskResult(
        key=report.key,
        instance=report.instance,
        epoch=report.epoch,
        status="completed",
        at=report.at,
        duration_s=report.duration_s,
        output=unpack_output(report.output),
        total_tokens=report.total_tokens,
        tool_call_count=report.tool_call_count,
    )


def load_agent(body: bytes) -> Agent:
    """Return the agent behind its bytes."""
    return cast("Agent", pickle.loads(body))  # noqa: S301  bytes of our own driver
