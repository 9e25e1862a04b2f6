"""Runs as tasks of the A2A protocol (S-INT-73, S-INT-74). Pure.

A task's id is its run's. Everything is made of how the run stands now, so that every replica tells the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from a2a.types import (
    Artifact,
    Message,
    Part,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from google.protobuf.json_format import Parse, ParseError
from google.protobuf.struct_pb2 import Value

from ensemble_ray.serve.a2a.inputs import HOW_TO_DECIDE
from ensemble_ray.serve.answers import json_text
from ensemble_ray.serve.run_schemas import RunStatus

if TYPE_CHECKING:
    from ensemble_ray.serve.run_schemas import RunDetail

#: The run's tag that keeps the conversation that a client named.
CONTEXT_TAG = "a2a.context"
_OUTPUT = "output"
#: Messages of the protocol around a value are read to a depth of 100.
_DEEPEST = 80
_STATES: Mapping[RunStatus, TaskState] = {
    RunStatus.ACCEPTED: TaskState.TASK_STATE_SUBMITTED,
    RunStatus.RUNNING: TaskState.TASK_STATE_WORKING,
    RunStatus.WAITING: TaskState.TASK_STATE_INPUT_REQUIRED,
    RunStatus.COMPLETED: TaskState.TASK_STATE_COMPLETED,
    RunStatus.FAILED: TaskState.TASK_STATE_FAILED,
    RunStatus.CANCELLED: TaskState.TASK_STATE_CANCELED,
    RunStatus.REJECTED: TaskState.TASK_STATE_REJECTED,
    RunStatus.BUDGET_EXHAUSTED: TaskState.TASK_STATE_FAILED,
    RunStatus.INTERRUPTED: TaskState.TASK_STATE_FAILED,
}


def context_of(run: RunDetail) -> str:
    """Return the conversation that a run belongs to: the client's, else one of its own."""
    return run.tags.get(CONTEXT_TAG, run.run_id)


def task_of(run: RunDetail) -> Task:
    """Return a run as a task, with its output when it has one."""
    artifact = _artifact(run)
    return Task(
        id=run.run_id,
        context_id=context_of(run),
        status=_status(run),
        artifacts=[] if artifact is None else [artifact],
    )


def status_event(run: RunDetail) -> TaskStatusUpdateEvent:
    """Return how a run stands, for a stream."""
    return TaskStatusUpdateEvent(task_id=run.run_id, context_id=context_of(run), status=_status(run))


def working_event(run: RunDetail, text: str = "") -> TaskStatusUpdateEvent:
    """Return that a run goes on, and what was done last."""
    status = TaskStatus(state=TaskState.TASK_STATE_WORKING)
    status.timestamp.GetCurrentTime()
    if text:
        status.message.CopyFrom(_message(run, RunStatus.RUNNING, [Part(text=text)]))
    return TaskStatusUpdateEvent(task_id=run.run_id, context_id=context_of(run), status=status)


def text_event(run: RunDetail, text: str, *, is_first: bool) -> TaskArtifactUpdateEvent:
    """Return a piece of a run's output while it is said."""
    artifact = Artifact(artifact_id=_OUTPUT, name=_OUTPUT, parts=[Part(text=text)])
    return TaskArtifactUpdateEvent(
        task_id=run.run_id, context_id=context_of(run), artifact=artifact, append=not is_first
    )


def artifact_event(run: RunDetail) -> TaskArtifactUpdateEvent | None:
    """Return the whole output of a run, which takes the place of what was said of it; None: it has none."""
    artifact = _artifact(run)
    if artifact is None:
        return None
    return TaskArtifactUpdateEvent(
        task_id=run.run_id, context_id=context_of(run), artifact=artifact, append=False, last_chunk=True
    )


def _status(run: RunDetail) -> TaskStatus:
    status = TaskStatus(state=_STATES[run.status])
    status.timestamp.FromDatetime(run.ended_at or run.created_at)
    parts = _describe_status(run)
    if parts:
        status.message.CopyFrom(_message(run, run.status, parts))
    return status


def _message(run: RunDetail, status: RunStatus, parts: list[Part]) -> Message:
    return Message(
        message_id=f"{run.run_id}:{status}",
        context_id=context_of(run),
        task_id=run.run_id,
        role=Role.ROLE_AGENT,
        parts=parts,
    )


def _describe_status(run: RunDetail) -> list[Part]:
    """Return what a status says beside its name: the questions at open gates, or why there is no output."""
    if run.status is RunStatus.WAITING:
        return _questions(run)
    if run.error is not None:
        causes = f" Causes: {'; '.join(run.error.causes)}" if run.error.causes else ""
        return [Part(text=f"{run.error.error}: {run.error.message}{causes}")]
    match run.status:
        case RunStatus.BUDGET_EXHAUSTED:
            return [Part(text="The budget of the run was spent before it was done")]
        case RunStatus.INTERRUPTED:
            return [Part(text="The run was interrupted. What is recorded of it is kept")]
        case _:
            return []


def _questions(run: RunDetail) -> list[Part]:
    gates = [
        {"gate_id": each.gate_id, "timing": each.timing, "prompt": each.prompt, "task": each.task_description,
         "output": each.task_output, "expires_at": None if each.expires_at is None else each.expires_at.isoformat()}
        for each in run.reviews
    ]  # fmt: skip
    texts = [
        "\n\n".join(filter(None, (each.prompt, f"Task: {each.task_description}", each.task_output)))
        for each in run.reviews
    ]
    return [Part(text="\n\n".join((*texts, HOW_TO_DECIDE))), Part(data=_value({"gates": gates}))]


def _artifact(run: RunDetail) -> Artifact | None:
    """Return the output of a run: its text, and its data where the last task has a type."""
    result = run.result
    if result is None or (run.status is not RunStatus.COMPLETED and not result.raw):
        return None
    parts = [Part(text=result.raw)]
    structured = next((each.structured for each in reversed(result.tasks) if each.text == result.raw), None)
    if structured is not None:
        with contextlib.suppress(ParseError, RecursionError):  # its text has it all (S-INT-97)
            parts.append(Part(data=_value(structured)))
    return Artifact(artifact_id=_OUTPUT, name=_OUTPUT, parts=parts)


def _value(data: object) -> Value:
    """Return JSON data as the protocol has it.

    Raises:
        ParseError: it is nested too deeply for a message around it.
    """
    return Parse(json_text(data), Value(), max_recursion_depth=_DEEPEST)
