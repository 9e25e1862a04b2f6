"""What crosses processes inside a living cluster. Data of ours travels as it is, user objects as bytes.

A scheduler passes bytes on and never loads them, so it runs no user code. Nothing of this is written to disk.
"""

from __future__ import annotations

import copyreg
import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import cloudpickle

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import AgentExecutionError, message_of, portable
from ensemble_ray.execute.conductor import Assignment, Report
from ensemble_ray.execute.orders import RunFrame, TaskOrder, TaskResult
from ensemble_ray.execute.recorded import typed_output
from ensemble_ray.execute.reports import report_of
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.outputs import TaskOutput
from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.stores import StoreAddress

__all__ = [
    "UNKNOWN_KIND",
    "AgentCargo",
    "CallableCargo",
    "RunPackage",
    "RunPlace",
    "WireOrder",
    "WireReport",
    "cannot_leave",
    "load_agent",
    "load_callables",
    "pack_order",
    "pack_output",
    "pack_recorded",
    "pack_result",
    "unpack_order",
    "unpack_output",
    "unpack_report",
    "unpack_result",
]

WireReport = Report[bytes, bytes]
#: Status of a task that was not begun, since its agent's kind is not known in that process.
UNKNOWN_KIND = "unknown_kind"

# A dataclass of a program's own file travels by value, and with it the mark of fields without a default. It must stay
# the one object that everybody compares with; cloudpickle makes another of it, and the class cannot be read any more.
copyreg.pickle(type(dataclasses.MISSING), lambda _: "MISSING")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCargo:
    """One agent on its way: its bytes, and what housing needs to know."""

    key: str
    body: bytes
    #: agents of one kind may live in one house: same tools, same model
    kind: str
    isolation: str | None = None
    replicas: int = 1
    is_synthesized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableCargo:
    """The callables of a run on their way to the process that hosts them; one message, so that what they share stays shared."""

    #: tasks whose handlers or guardrails are asked, whole
    tasks: Mapping[str, Task]
    #: asked in order about each delegation
    policies: Sequence[object] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPackage:
    """A run on its way from the driver to the scheduler."""

    run_id: str
    plan: Plan
    frame: RunFrame
    header: PlanRecorded
    #: effects of before scheduling
    earlier: Sequence[Fact] = ()
    agents: Sequence[AgentCargo]
    #: task key -> the task's bytes, without context tasks, agent, handler and guardrails
    tasks: Mapping[str, bytes]
    #: task key -> (input guardrails, output guardrails)
    guardrails: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    #: its `CallableCargo`; None when nothing is asked
    callables: bytes | None = None
    #: where the run is recorded, seen from the cluster's nodes; None: nowhere
    store: StoreAddress | None = None
    #: whether it is in the record already and goes on
    is_resumed: bool = False
    #: whether it is taken from an owner that still holds it
    takes_over: bool = False
    #: whether its driver submitted it before and does not know how far that came
    is_again: bool = False
    #: whether only the scheduler's process was replaced
    is_restart: bool = False
    #: whether the driver listens: for events, or for requests to its services
    is_attended: bool = False
    #: whether agent processes are kept for the next run
    keeps_warm: bool = False


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Where a run is recorded, and which node its files lie on."""

    address: StoreAddress
    node_id: str


@dataclass(frozen=True, slots=True)
class WireOrder:
    """One task on its way to a house: from the scheduler, or from an agent that delegates it."""

    key: str
    instance: str
    epoch: int
    index: int
    task: bytes
    agent_key: str | None
    agent_role: str
    context: Sequence[bytes]
    missing_context: str | None
    is_streaming: bool
    input_guardrails: int = 0
    output_guardrails: int = 0
    #: of delegated work, which another agent's process sends: how deep it is, who asked, under which id
    depth: int = 0
    caller_role: str = ""
    delegation_id: str = ""
    #: of a task that was made while its run goes on: the data in which its agent differs from its kind's template
    overlay: bytes | None = None
    #: of such a task: as in its order
    total_tasks: int | None = None


def wire_order(assignment: Assignment[bytes], package: RunPackage) -> WireOrder:
    """The order for an assignment of that run."""
    node = assignment.node
    inputs, outputs = package.guardrails.get(node.key, (0, 0))
    return WireOrder(
        node.key,
        assignment.instance,
        assignment.epoch,
        node.index,
        package.tasks[node.key],
        node.agent_key,
        node.agent_role,
        assignment.context,
        assignment.missing_context,
        node.is_streaming,
        inputs,
        outputs,
    )


def unpack_order(run_id: str, order: WireOrder, agent: Agent | None = None) -> TaskOrder:
    """The order with its user objects, in the process that runs it; with the agent that it names no other way."""
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
    """An order of delegated work as bytes. Such work has no context and no guardrails."""
    return WireOrder(
        order.key,
        order.instance,
        order.epoch,
        order.index,
        pickle.dumps(order.task, protocol=5),
        order.agent_key,
        order.agent_role,
        (),
        None,
        order.is_streaming,
        depth=order.depth,
        caller_role=order.caller_role,
        delegation_id=order.delegation_id,
    )


def pack_output(output: TaskOutput) -> bytes:
    """An output as bytes, for a task that is given it."""
    return _dumps(output)


def pack_result(result: TaskResult) -> WireReport:
    """A result as bytes; one that cannot travel becomes a failure that says so."""
    try:
        return _packed(result)
    except Exception as error:  # noqa: BLE001  whatever pickling raised, the task must still be reported
        output = result.output
        task, role = (result.key, "") if output is None else (output.task_description, output.agent_role)
        cause = cannot_leave(task, role, error)
        return _packed(replace(result, status="failed", output=None, trace=None, error=cause))


def cannot_leave(task: str, agent_role: str, error: Exception) -> AgentExecutionError:
    """The failure of a task whose result no other process can have."""
    text = f"The result of task '{task}' cannot leave its agent's process: {message_of(error)}"
    return AgentExecutionError(text, agent_role, task)


def _packed(result: TaskResult) -> WireReport:
    error = None if result.error is None else portable(result.error)
    travelling = replace(result, error=error)
    output = None if result.output is None else _dumps(result.output)
    failure = None
    if output is None:  # what a manager's workers did travels beside it
        failure = _dumps(replace(travelling, delegated=(), lost_work=()))
    given = [(each.agent_role, _dumps(each)) for _, each in result.delegated]
    return report_of(travelling, output=output, failure=failure, delegated=given)


def _dumps(value: TaskOutput | TaskResult) -> bytes:
    """By reference where that works, by value where a class of the user's own script is in it."""
    plain = isinstance(value, TaskOutput) and value.output_type is None
    return pickle.dumps(value, protocol=5) if plain else cloudpickle.dumps(value)


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """An output as the record has it, with the task's bytes: whoever may run user code makes it one of its type."""

    data: Mapping[str, object]
    task: bytes


def pack_recorded(data: Mapping[str, object], task: bytes) -> bytes:
    """A recorded output as the bytes that a scheduler holds of any output."""
    return pickle.dumps(RecordedOutput(data, task), protocol=5)


def unpack_output(body: bytes) -> TaskOutput:
    """The output behind its bytes."""
    held: object = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    if isinstance(held, RecordedOutput):
        if not held.task:  # of a manager's worker, whose task declares no type
            return typed_output(held.data)
        task = cast("Task", pickle.loads(held.task))  # noqa: S301  bytes of our own driver
        return typed_output(held.data, task.output_type)
    return cast("TaskOutput", held)


def unpack_result(body: bytes) -> TaskResult:
    """The result behind its bytes."""
    return cast("TaskResult", pickle.loads(body))  # noqa: S301  bytes of our own cluster


def unpack_report(report: WireReport, instance: str) -> TaskResult:
    """The result behind a report of delegated work, in the process that asked for it."""
    if report.output is None:
        return unpack_result(report.failure or b"")
    return TaskResult(
        key=report.key,
        instance=instance,
        epoch=report.epoch,
        status="completed",
        at=report.at,
        duration_s=report.duration_s,
        output=unpack_output(report.output),
        total_tokens=report.total_tokens,
        tool_call_count=report.tool_call_count,
    )


def load_agent(body: bytes) -> Agent:
    """The agent behind its bytes."""
    return cast("Agent", pickle.loads(body))  # noqa: S301  bytes of our own driver


def load_callables(body: bytes) -> CallableCargo:
    """The callables that this process hosts."""
    return cast("CallableCargo", pickle.loads(body))  # noqa: S301  bytes of our own driver
