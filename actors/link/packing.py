"""Pickles orders, outputs and results, in processes that may run user code.

A task is one message of bytes, since Ray pickles each argument in Python: a call takes 0.99 ms instead of 1.25 ms. A
process that can send bytes can run code in this cluster anyway. Functions with `unpack` in their names load no user code
unless their docstring says so.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.actors.link.wire import WireFailure, WireOrder, WireResult
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import AgentExecutionError, message_of, portable
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart, TaskFailure, TaskOrder, TaskResult, TaskStatus
from ensemble_ray.process.config import dumps
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.schedule.instructions import EdgeMatches, UntilHolds
from ensemble_ray.values.task_output import TaskOutput

T = TypeVar("T")
_log = bounded_logger(__name__)

# Dataclasses of scripts are pickled by value. `dataclasses.MISSING` is compared by identity, so it must not be copied.
copyreg.pickle(type(dataclasses.MISSING), lambda _: "MISSING")


def pack(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def unpack(body: bytes, kind: type[T]) -> T:  # noqa: ARG001  for the type
    """Load the output of `pack`. The source of the bytes must be trusted: this cluster, or a sealed submission."""
    try:
        return cast("T", pickle.loads(body))  # noqa: S301  see above
    except pickle.UnpicklingError:
        from ensemble_ray.actors.link.older_pickles import OlderUnpickler

        return cast("T", OlderUnpickler(io.BytesIO(body)).load())


def unpack_order(order: WireOrder, agent: Agent | None = None) -> TaskOrder:
    """May load user code."""
    task = cast("Task", pickle.loads(order.task))  # noqa: S301  bytes of our own driver, inside one cluster
    return order.convert(task, agent, unpack_output)


def pack_order(order: TaskOrder) -> WireOrder:
    """Delegated work has no context and no guardrails."""
    return order.convert(pack(order.task), None, pack_output)


def pack_output(output: TaskOutput) -> bytes:
    return _dumps(output)


def pack_result(result: TaskResult) -> WireResult:
    """A result that cannot be pickled becomes a failure."""
    output = result.output
    try:
        return result.convert(_dumps, pack_failure)
    except Exception as error:  # noqa: BLE001  whatever pickling raised, the task must still be reported
        if output is not None and output.output_type is None and output.parsed_output is not None:
            kind = type(cast("object", output.parsed_output)).__name__
            _log.warning(
                "Task '%s': its handler returned a %s, which cannot leave its process. Other tasks see only its text: %s",
                result.key, kind, brief(message_of(error)),
            )  # fmt: skip
            trace = None if output.trace is None else output.trace.replace(parsed_output=None)
            return pack_result(replace(result, output=output.replace(parsed_output=None, trace=trace)))
        task, role = (result.key, "") if output is None else (output.task_description, output.agent_role)
        failure = TaskFailure(error=cannot_leave(task, role, error))
        failed = replace(result, status="failed", output=None, failure=failure)
        return failed.convert(_dumps, pack_failure)


def pack_failure(failure: TaskFailure) -> WireFailure:
    travelling = failure if failure.error is None else replace(failure, error=portable(failure.error))
    return WireFailure(
        body=_dumps(travelling),
        error_type=travelling.error_type,
        message=travelling.message,
        reason=failure.reason,
        newer_epoch=travelling.newer_epoch,
        interrupts_run=failure.interrupts_run,
    )


def packed_evaluation(failed: EvaluationFailed) -> EvaluationFailed:
    if isinstance(failed.error, bytes):
        return failed
    packed = pack_failure(TaskFailure(error=failed.error))
    return EvaluationFailed(
        error_type=packed.error_type, message=packed.message, error=packed.body, reason=packed.reason
    )


def cannot_leave(task: str, agent_role: str, error: Exception) -> AgentExecutionError:
    text = f"The result of task '{task}' cannot leave its agent's process: {message_of(error)}"
    return AgentExecutionError(text, agent_role, task)


def _dumps(value: TaskOutput | TaskFailure) -> bytes:
    """Pickle by value if the value may contain a class of the user's script."""
    plain = isinstance(value, TaskOutput) and value.output_type is None and value.parsed_output is None
    return pickle.dumps(value, protocol=5) if plain else dumps(value)


class PackedRecordedOutput(Struct, frozen=True):
    """A recorded output with its task's bytes, from which a process that may run user code gets the type."""

    data: Mapping[str, object]
    task: bytes


def pack_recorded(data: Mapping[str, object], task: bytes) -> bytes:
    return pickle.dumps(PackedRecordedOutput(data, task), protocol=5)


def unpack_output(body: bytes) -> TaskOutput:
    """May load user code."""
    held: object = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    if isinstance(held, PackedRecordedOutput):
        if not held.task:  # of a manager's worker, whose task declares no type
            return typed_output(held.data)
        task = cast("Task", pickle.loads(held.task))  # noqa: S301  bytes of our own driver
        return typed_output(held.data, task.output_type)
    return cast("TaskOutput", held)


def unpack_failure(failure: WireFailure) -> TaskFailure:
    """May load user code."""
    return cast("TaskFailure", pickle.loads(failure.body))  # noqa: S301  bytes of our own cluster


def unpack_result(result: WireResult) -> TaskResult:
    """May load user code."""
    return result.convert(unpack_output, unpack_failure)


#: The run, a question, the number of parts of the history that were sent before, and the new parts.
PackedQuestion: TypeAlias = tuple[str, UntilHolds | EdgeMatches, int, Sequence[HistoryPart[bytes]]]


def make_undone_result(
    order: TaskOrder | WireOrder, error: BaseException | None, status: TaskStatus = "failed"
) -> TaskResult:
    return TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status=status,
        at=time.time(),
        failure=None if error is None else TaskFailure(error=error),
    )
