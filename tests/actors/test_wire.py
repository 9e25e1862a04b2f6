"""What crosses processes: orders and results as bytes, by value where the user's own script is meant."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import cast

import cloudpickle
import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from ensemble_ray import Agent, AgentExecutionError, GuardrailViolationError, Node, Plan, Task, TaskOutput, TaskTrace
from ensemble_ray.actors.driver.packing import dump
from ensemble_ray.actors.link.packing import (
    pack_order,
    pack_recorded,
    pack_result,
    unpack,
    unpack_failure,
    unpack_order,
    unpack_output,
    unpack_result,
)
from ensemble_ray.actors.link.wire import (
    AgentTemplate,
    CallableRef,
    CallablesUpdate,
    Submission,
    TaskCallables,
    WireOrder,
    WireResult,
)
from ensemble_ray.actors.scheduler.planned_run import body_of
from ensemble_ray.errors import message_of
from ensemble_ray.execute.orders import Revision, RunContext, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.value import utc_now


def output_of(raw: str, **fields: object) -> TaskOutput:
    """A task's output."""
    known: dict[str, object] = {
        "raw": raw,
        "task_description": "write",
        "agent_role": "Writer",
        "completed_at": utc_now(),
        "duration": timedelta(seconds=2),
        "tool_call_count": 3,
    }
    return TaskOutput(**{**known, **fields})  # type: ignore[arg-type]


def completed(output: TaskOutput) -> TaskResult:
    """The result of a task that went well."""
    return TaskResult(
        key="write", instance="write#0", status="completed", at=5.0, duration_s=2.0, total_tokens=9, output=output
    )


def failed(error: BaseException) -> TaskResult:
    """The result of a task that failed."""
    return TaskResult(
        key="write", instance="write#0", status="failed", at=5.0, duration_s=2.0, failure=TaskFailure(error=error)
    )


def in_a_fresh_process(body: bytes, expression: str, folder: Path) -> str:
    """What an expression of `value` gives where only our own modules can be found."""
    place = folder / "body"
    place.write_bytes(body)
    script = f"import pickle, sys; value = pickle.load(open(sys.argv[1], 'rb')); print({expression})"
    done = subprocess.run(  # noqa: S603  our own text
        [sys.executable, "-c", script, str(place)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_completed_task_travels_as_bytes_with_what_scheduling_needs_beside_it() -> None:
    """The scheduler reads numbers and loads nothing."""
    output = output_of("text")
    report = pack_result(completed(output))
    assert (report.key, report.status, report.at, report.duration_s) == ("write", "completed", 5.0, 2.0)
    assert report.total_tokens == 9
    assert isinstance(report.output, bytes)
    assert report.failure is None
    assert unpack_output(report.output) == output


def test_result_of_the_users_own_class_is_understood_where_it_is_unknown(tmp_path: Path) -> None:
    """S-CONV-34: a class of the user's script goes by value."""

    class City(BaseModel):
        name: str

    report = pack_result(completed(output_of("{}", parsed_output=City(name="Graz"), output_type=City)))
    assert report.output is not None
    assert in_a_fresh_process(report.output, "value.parsed_output.name", tmp_path) == "Graz"


def test_failure_travels_with_its_class_fields_and_causes() -> None:
    """S-CONV-32, S-ERR-15: error and chain; class and text are beside the bytes for the record."""
    error = AgentExecutionError("it broke", "Writer", "write")
    error.__cause__ = OSError("disk full")
    report = pack_result(failed(error))
    assert report.output is None
    assert report.failure is not None
    told = (report.status, report.failure.error_type, report.failure.message)
    assert told == ("failed", "AgentExecutionError", "it broke")
    found = unpack_result(report).error
    assert isinstance(found, AgentExecutionError)
    assert (found.agent_role, found.task_description, str(found.__cause__)) == ("Writer", "write", "disk full")


def test_failure_whose_cause_cannot_travel_is_told_by_a_stand_in() -> None:
    """S-ERR-31: class name and text are kept, and the report goes out."""

    class LockedError(Exception):
        def __init__(self) -> None:
            super().__init__("held")
            self.lock = threading.Lock()

    report = pack_result(failed(LockedError()))
    assert report.failure is not None
    assert (report.failure.error_type, report.failure.message) == ("LockedError", "held")
    found = unpack_result(report).error
    assert found is not None
    assert (type(found).__name__, message_of(found)) == ("LockedError", "held")


@pytest.mark.parametrize("held", [threading.Lock(), [threading.Lock()], {"rows": (each for each in "ab")}])
def test_object_is_dropped_when_it_cannot_leave_the_process(held: object, caplog: pytest.LogCaptureFixture) -> None:
    """S-LLM-49: without an output type the text is the result; one WARN line."""
    report = pack_result(completed(output_of("x", parsed_output=held)))
    output = unpack_result(report).output
    assert output is not None
    assert (output.raw, output.parsed_output) == ("x", None)
    assert f"Task 'write': its handler returned a {type(held).__name__}, which cannot leave" in caplog.text


def test_task_fails_when_its_result_cannot_leave_the_process() -> None:
    """S-PAR-34: a result that cannot be pickled becomes a failure that says so, not silence."""
    report: WireResult = pack_result(completed(output_of("x", parsed_output=threading.Lock(), output_type=object)))
    assert report.status == "failed"
    assert report.output is None
    assert report.failure is not None
    assert report.failure.error_type == "AgentExecutionError"
    assert "The result of task 'write' cannot leave its agent's process" in report.failure.message
    found = cast("AgentExecutionError", unpack_result(report).error)
    assert (found.agent_role, found.task_description) == ("Writer", "write")


@pytest.mark.parametrize("guardrails", [(0, 0), (2, 1)])
def test_order_arrives_with_everything_that_its_task_needs(guardrails: tuple[int, int]) -> None:
    """Task, place, agent, context in order; guardrails only as numbers."""
    task = Task(description="write about {x}", expected_output="a text", name="write")
    node = Node(
        key="write",
        index=2,
        description="write about it",
        expected_output="a text",
        agent_role="Writer",
        agent_key="writer",
        is_streaming=True,
    )
    inputs, outputs = (tuple(CallableRef("x", n) for n in range(count)) for count in guardrails)
    asked = TaskCallables(input_guardrails=inputs, output_guardrails=outputs)
    submission = Submission(
        run_id="r",
        plan=Plan(workflow="sequential", nodes=(node,)),
        context=RunContext(run_id="r", workflow="sequential", total_tasks=2),
        header=PlanRecorded(),
        templates=(),
        tasks={"write": dump(task, "Task 'write'")},
        callables=None if guardrails == (0, 0) else CallablesUpdate(bundles={"x": b""}, tasks={"write": asked}),
    )
    context = [pickle.dumps(output_of(raw)) for raw in ("one", "two")]
    body = body_of(submission, "write")
    sent: WireOrder = TaskOrder(
        run_id="r",
        key="write",
        instance="write#0",
        epoch=3,
        index=2,
        task=body.task,
        agent_key="writer",
        agent_role="Writer",
        context=context,
        missing_context="gone",
        joined=((0, 2),),
        revision=Revision(attempt=1, feedback="shorter", prior=context[1]),
        wants_text=True,
        is_streaming=True,
        input_guardrails=body.input_guardrails,
        output_guardrails=body.output_guardrails,
    )
    order = unpack_order(pickle.loads(pickle.dumps(sent)))  # noqa: S301  our own
    assert (order.run_id, order.key, order.instance, order.epoch, order.index) == ("r", "write", "write#0", 3, 2)
    assert order.task == task
    assert (order.agent_key, order.agent_role, order.is_streaming) == ("writer", "Writer", True)
    assert [each.raw for each in order.context] == ["one", "two"]
    assert order.missing_context == "gone"
    assert (order.joined, order.wants_text) == (((0, 2),), True)
    assert order.revision is not None
    assert order.revision.prior is not None
    assert (order.revision.attempt, order.revision.feedback, order.revision.prior.raw) == (1, "shorter", "two")
    assert (order.input_guardrails, order.output_guardrails) == guardrails


def test_delegated_order_arrives_with_who_asked_and_how_deep() -> None:
    """S-DEL-12, S-DEL-60: depth, asker and id travel with the call."""
    order = TaskOrder(
        run_id="r",
        key="a#0/1/call-0/delegate",
        instance="a#0/1/call-0/delegate#0",
        epoch=110,
        index=0,
        task=Task(description="dig", expected_output="gold"),
        agent_key="digger",
        agent_role="Digger",
        is_streaming=True,
        depth=2,
        caller_role="Writer",
        delegation_id="id-1",
    )
    assert unpack_order(pickle.loads(pickle.dumps(pack_order(order)))) == order  # noqa: S301  our own


def test_result_of_delegated_work_is_the_same_at_its_asker() -> None:
    """S-DEL-3: output and counts; a failure with its error and what it did."""
    done = replace(completed(output_of("gold")), epoch=7, tool_call_count=3)
    assert unpack_result(pack_result(done)) == done
    error = GuardrailViolationError("input", "rude", "write", "Writer")
    found = unpack_result(pack_result(replace(failed(error), epoch=7)))
    assert isinstance(found.error, GuardrailViolationError)
    assert (found.status, found.epoch, str(found.error)) == ("failed", 7, str(error))


@pytest.mark.parametrize("status", ["completed", "failed", "unpicklable"])
def test_work_of_a_managers_team_travels_beside_its_result(status: str) -> None:
    """S-HIER-6, S-HIER-60: role and output in completion order, whatever came of the manager; once, and not in its failure."""
    team = [(raw, output_of(raw, agent_role=raw)) for raw in ("B", "A")]
    trace = TaskTrace(
        task_description="dig",
        expected_output="gold",
        agent_role="C",
        started_at=utc_now(),
        completed_at=utc_now(),
        duration=timedelta(),
    )
    result = failed(ValueError("no")) if status == "failed" else completed(output_of("done"))
    if status == "unpicklable":
        result = completed(output_of("x", parsed_output=threading.Lock(), output_type=object))
    report = pack_result(replace(result, delegated=team, failed_delegations=(trace,)))
    assert report.status == ("completed" if status == "completed" else "failed")
    assert [(role, unpack_output(body).raw) for role, body in report.delegated] == [("B", "B"), ("A", "A")]
    assert report.failed_delegations == (trace,)
    if report.failure is not None:
        assert isinstance(unpack_failure(report.failure).error, Exception)


def test_recorded_output_of_a_worker_needs_no_task() -> None:
    """S-HIER-6: what a manager's worker gave before a crash; its task declares no type."""
    data = output_of("gold").model_dump(mode="json")
    assert unpack_output(pack_recorded(data, b"")).raw == "gold"


def test_agent_and_tasks_keep_their_identity_when_they_travel() -> None:
    """S-CONV-30: equality is by identity, and pickling keeps it."""
    writer = Agent(role="Writer", goal="write", llm=ScriptedModel())
    template = AgentTemplate(key="writer", body=dump(writer, "Agent 'Writer'"), category="k")
    assert unpack(template.body, Agent) == writer
    task = Task(description="d", expected_output="e", agent=writer)
    found = pickle.loads(cloudpickle.dumps(task))  # noqa: S301  our own
    assert found == task
    assert found.agent == writer
