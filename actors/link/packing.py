"""Pickles orders, outputs and results, in processes that may run user code.

Each task is sent as one message of bytes, although it contains only values: Ray pickles each argument separately, with a pickler in
Python. Measured between actors: a call with an order and its reply takes 1.25 ms, and 0.99 ms as bytes; Ray alone needs 0.86 ms of
that for an empty call. All bytes come from this cluster: a process that can send others can run code in it anyway.

Functions with `unpack` in their names load no user code unless their docstring says so.
"""

from __future__ import annotations

import copyreg
import dataclasses
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from ensemble_ray.actors.link.wire import (
    Binding,
    CallablesUpdate,
    Dispatch,
    EndPage,
    Submission,
    WireFailure,
    WireOrder,
    WireResult,
)
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import AgentExecutionError, message_of, portable
from ensemble_ray.errors.texts import brief
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.execute.orders import EvaluationFailed, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.process.config import dumps
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.task_output import TaskOutput

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import HistoryPart, TaskStatus
    from ensemble_ray.schedule.instructions import EdgeMatches, UntilHolds


_log = bounded_logger(__name__)

# A dataclass of a script is pickled by value, together with `dataclasses.MISSING`. Dataclasses compare it by identity, and
# cloudpickle would copy it, so that the class could not be loaded.
copyreg.pickle(type(dataclasses.MISSING), lambda _: "MISSING")


_NO_TEMPLATES: Mapping[str, bytes] = {}


def pack_binding(binding: Binding) -> bytes:
    return pickle.dumps(binding, protocol=5)


def unpack_binding(body: bytes) -> Binding:
    return cast("Binding", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_update(run_id: str, update: CallablesUpdate) -> bytes:
    return pickle.dumps((run_id, update), protocol=5)


def unpack_update(body: bytes) -> tuple[str, CallablesUpdate]:
    return cast("tuple[str, CallablesUpdate]", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_dispatch(run_id: str, orders: Sequence[WireOrder], templates: Mapping[str, bytes] = _NO_TEMPLATES) -> bytes:
    return pickle.dumps(Dispatch(run_id, orders, templates), protocol=5)


def unpack_dispatch(body: bytes) -> Dispatch:
    return cast("Dispatch", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_report(report: WireResult) -> bytes:
    return pickle.dumps(report, protocol=5)


def unpack_report(body: bytes) -> WireResult:
    return cast("WireResult", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_end(page: EndPage) -> bytes:
    return pickle.dumps(page, protocol=5)


def unpack_end(body: bytes) -> EndPage:
    return cast("EndPage", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def dump_submission(submission: Submission) -> bytes:
    return pickle.dumps(submission, protocol=5)


def load_submission(body: bytes) -> Submission:
    """Load a submission. The source of the bytes must be trusted. No user code is loaded."""
    return cast("Submission", pickle.loads(body))  # noqa: S301  of our own driver, or sealed by the scheduler's user


def unpack_order(order: WireOrder, agent: Agent | None = None) -> TaskOrder:
    """Return an order with its task, which may load user code, and its agent."""
    task = cast("Task", pickle.loads(order.task))  # noqa: S301  bytes of our own driver, inside one cluster
    return order.convert(task, agent, unpack_output)


def pack_order(order: TaskOrder) -> WireOrder:
    """Pack an order of delegated work, which has no context and no guardrails."""
    return order.convert(pickle.dumps(order.task, protocol=5), None, pack_output)


def pack_output(output: TaskOutput) -> bytes:
    return _dumps(output)


def pack_result(result: TaskResult) -> WireResult:
    """Pack a result. One that cannot be pickled becomes a failure."""
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
    """Pack a failure, with the fields that a scheduler needs."""
    travelling = failure if failure.error is None else replace(failure, error=portable(failure.error))
    return WireFailure(
        body=_dumps(travelling),
        error_type=travelling.error_type,
        message=travelling.message,
        reason=failure.reason,
        newer_epoch=travelling.newer_epoch,
        is_out_of_credit=failure.is_out_of_credit,
    )


def packed_evaluation(failed: EvaluationFailed) -> EvaluationFailed:
    """Return a failed evaluation with its error as bytes, for processes that load no user code."""
    if isinstance(failed.error, bytes):
        return failed
    packed = pack_failure(TaskFailure(error=failed.error))
    return EvaluationFailed(
        error_type=packed.error_type, message=packed.message, error=packed.body, reason=packed.reason
    )


def cannot_leave(task: str, agent_role: str, error: Exception) -> AgentExecutionError:
    """Return the failure of a task with a result that cannot be pickled."""
    text = f"The result of task '{task}' cannot leave its agent's process: {message_of(error)}"
    return AgentExecutionError(text, agent_role, task)


def _dumps(value: TaskOutput | TaskFailure) -> bytes:
    """Pickle by reference if that works, and by value if the value may contain a class of the user's script."""
    plain = isinstance(value, TaskOutput) and value.output_type is None and value.parsed_output is None
    return pickle.dumps(value, protocol=5) if plain else dumps(value)


@dataclass(frozen=True, slots=True)
class PackedRecordedOutput:
    """A recorded output with its task's bytes. A process that may run user code converts it to the task's type."""

    data: Mapping[str, object]
    task: bytes


def pack_recorded(data: Mapping[str, object], task: bytes) -> bytes:
    """Pack a recorded output in the form that a scheduler stores for any output."""
    return pickle.dumps(PackedRecordedOutput(data, task), protocol=5)


def unpack_output(body: bytes) -> TaskOutput:
    """Load an output. May load user code."""
    held: object = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    if isinstance(held, PackedRecordedOutput):
        if not held.task:  # of a manager's worker, whose task declares no type
            return typed_output(held.data)
        task = cast("Task", pickle.loads(held.task))  # noqa: S301  bytes of our own driver
        return typed_output(held.data, task.output_type)
    return cast("TaskOutput", held)


def unpack_failure(failure: WireFailure) -> TaskFailure:
    """Load a failure. May load user code."""
    return cast("TaskFailure", pickle.loads(failure.body))  # noqa: S301  bytes of our own cluster


def unpack_result(result: WireResult) -> TaskResult:
    """Load a result with its objects. May load user code."""
    return result.convert(unpack_output, unpack_failure)


def pack_question(
    run_id: str, question: UntilHolds | EdgeMatches, sent_count: int, new: Sequence[HistoryPart[bytes]]
) -> bytes:
    """Pack a question to a run's user code and the new part of its history."""
    return pickle.dumps((run_id, question, sent_count, tuple(new)), protocol=5)


def unpack_question(body: bytes) -> tuple[str, UntilHolds | EdgeMatches, int, tuple[HistoryPart[bytes], ...]]:
    """Return the run, the question, the number of parts that were sent before, and the new parts."""
    held: object = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    return cast("tuple[str, UntilHolds | EdgeMatches, int, tuple[HistoryPart[bytes], ...]]", held)


def load_agent(body: bytes) -> Agent:
    return cast("Agent", pickle.loads(body))  # noqa: S301  bytes of our own driver


def make_undone_result(
    order: TaskOrder | WireOrder, error: BaseException | None, status: TaskStatus = "failed"
) -> TaskResult:
    """Return the result of a task that ends without an output."""
    return TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status=status,
        at=time.time(),
        failure=None if error is None else TaskFailure(error=error),
    )
