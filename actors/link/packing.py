"""Orders, outputs and results as bytes and back, in processes that may run user code.

What is sent for each task is one message of bytes, although it holds values only: Ray pickles each argument by itself, with a
pickler that is written in Python. Measured from actor to actor: 1.25 ms for a call with an order and its reply, 0.99 ms with both
as bytes, of which 0.86 ms are Ray's for nothing at all. Bytes are of our own cluster: whoever can put others there can run
code in it anyway.
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

# A dataclass of a program's own file travels by value, and with it the mark of fields without a default. It must stay
# the one object that everybody compares with; cloudpickle makes another of it, and the class cannot be read any more.
copyreg.pickle(type(dataclasses.MISSING), lambda _: "MISSING")


_NO_TEMPLATES: Mapping[str, bytes] = {}


def pack_binding(binding: Binding) -> bytes:
    """Return what a process is told of a run as bytes."""
    return pickle.dumps(binding, protocol=5)


def unpack_binding(body: bytes) -> Binding:
    """Return what a process is told of a run; nothing of the user's is loaded."""
    return cast("Binding", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_update(run_id: str, update: CallablesUpdate) -> bytes:
    """Return what the host of a run's callables is told as bytes."""
    return pickle.dumps((run_id, update), protocol=5)


def unpack_update(body: bytes) -> tuple[str, CallablesUpdate]:
    """Return the run and what the host of its callables is told; no callable is loaded."""
    return cast("tuple[str, CallablesUpdate]", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_dispatch(run_id: str, orders: Sequence[WireOrder], templates: Mapping[str, bytes] = _NO_TEMPLATES) -> bytes:
    """Return what a process is sent to do as bytes."""
    return pickle.dumps(Dispatch(run_id, orders, templates), protocol=5)


def unpack_dispatch(body: bytes) -> Dispatch:
    """Return what is to be done behind its bytes; nothing of the user's is loaded."""
    return cast("Dispatch", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_report(report: WireResult) -> bytes:
    """Return the report of one task as bytes."""
    return pickle.dumps(report, protocol=5)


def unpack_report(body: bytes) -> WireResult:
    """Return the report behind its bytes; nothing of the user's is loaded."""
    return cast("WireResult", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def pack_end(page: EndPage) -> bytes:
    """Return a page of how a run ended as bytes."""
    return pickle.dumps(page, protocol=5)


def unpack_end(body: bytes) -> EndPage:
    """Return the page behind its bytes; nothing of the user's is loaded."""
    return cast("EndPage", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def dump_submission(submission: Submission) -> bytes:
    """Return a submission as bytes, for the way to the scheduler and for its store."""
    return pickle.dumps(submission, protocol=5)


def load_submission(body: bytes) -> Submission:
    """Return the submission behind its bytes; nothing of the user's is loaded. Whoever gives them must be trusted."""
    return cast("Submission", pickle.loads(body))  # noqa: S301  of our own driver, or sealed by the scheduler's user


def unpack_order(order: WireOrder, agent: Agent | None = None) -> TaskOrder:
    """Return an order with its user objects and its agent, in the process that runs it."""
    task = cast("Task", pickle.loads(order.task))  # noqa: S301  bytes of our own driver, inside one cluster
    return order.convert(task, agent, unpack_output)


def pack_order(order: TaskOrder) -> WireOrder:
    """Return an order of delegated work as bytes. Such work has no context and no guardrails."""
    return order.convert(pickle.dumps(order.task, protocol=5), None, pack_output)


def pack_output(output: TaskOutput) -> bytes:
    """Return an output as bytes, for a task that is given it."""
    return _dumps(output)


def pack_result(result: TaskResult) -> WireResult:
    """Return a result as bytes; one that cannot travel becomes a failure that says so."""
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
    """Return a failure as bytes, and what a scheduler needs to know of it."""
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
    """Return what user code raised with the error as bytes, for processes that load none of the user's."""
    if isinstance(failed.error, bytes):
        return failed
    packed = pack_failure(TaskFailure(error=failed.error))
    return EvaluationFailed(
        error_type=packed.error_type, message=packed.message, error=packed.body, reason=packed.reason
    )


def cannot_leave(task: str, agent_role: str, error: Exception) -> AgentExecutionError:
    """Return the failure of a task whose result no other process can have."""
    text = f"The result of task '{task}' cannot leave its agent's process: {message_of(error)}"
    return AgentExecutionError(text, agent_role, task)


def _dumps(value: TaskOutput | TaskFailure) -> bytes:
    """Pickle by reference where that works, by value where a class of the user's own script is in it."""
    plain = isinstance(value, TaskOutput) and value.output_type is None and value.parsed_output is None
    return pickle.dumps(value, protocol=5) if plain else dumps(value)


@dataclass(frozen=True, slots=True)
class PackedRecordedOutput:
    """An output as the record has it, with the task's bytes: whoever may run user code makes it one of its type."""

    data: Mapping[str, object]
    task: bytes


def pack_recorded(data: Mapping[str, object], task: bytes) -> bytes:
    """Return a recorded output as the bytes that a scheduler holds of any output."""
    return pickle.dumps(PackedRecordedOutput(data, task), protocol=5)


def unpack_output(body: bytes) -> TaskOutput:
    """Return the output behind its bytes."""
    held: object = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    if isinstance(held, PackedRecordedOutput):
        if not held.task:  # of a manager's worker, whose task declares no type
            return typed_output(held.data)
        task = cast("Task", pickle.loads(held.task))  # noqa: S301  bytes of our own driver
        return typed_output(held.data, task.output_type)
    return cast("TaskOutput", held)


def unpack_failure(failure: WireFailure) -> TaskFailure:
    """Return the failure behind its bytes."""
    return cast("TaskFailure", pickle.loads(failure.body))  # noqa: S301  bytes of our own cluster


def unpack_result(result: WireResult) -> TaskResult:
    """Return a result with its objects, in the process that asked for it."""
    return result.convert(unpack_output, unpack_failure)


def pack_question(
    run_id: str, question: UntilHolds | EdgeMatches, sent_count: int, new: Sequence[HistoryPart[bytes]]
) -> bytes:
    """Return a question to a run's user code and what it needs, as one message of bytes."""
    return pickle.dumps((run_id, question, sent_count, tuple(new)), protocol=5)


def unpack_question(body: bytes) -> tuple[str, UntilHolds | EdgeMatches, int, tuple[HistoryPart[bytes], ...]]:
    """Return the run and the question behind its bytes, how much of its history was sent before, and what is new."""
    held: object = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    return cast("tuple[str, UntilHolds | EdgeMatches, int, tuple[HistoryPart[bytes], ...]]", held)


def load_agent(body: bytes) -> Agent:
    """Return the agent behind its bytes."""
    return cast("Agent", pickle.loads(body))  # noqa: S301  bytes of our own driver


def make_undone_result(
    order: TaskOrder | WireOrder, error: BaseException | None, status: TaskStatus = "failed"
) -> TaskResult:
    """Return the result of a task that ends here."""
    return TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status=status,
        at=time.time(),
        failure=None if error is None else TaskFailure(error=error),
    )
