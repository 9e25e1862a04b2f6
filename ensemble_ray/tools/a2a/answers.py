"""RemoteTask: what an agent of the A2A protocol has told of one task. Package: tools. Pure.

In: what a stream or an answer brings. Out: pieces of text as they come, and the answer when it is there. Rule: an artifact that is sent
anew takes the place of the one before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.a2a.plain_values import plain_value

if TYPE_CHECKING:
    from a2a.types import Artifact, Message, Part, StreamResponse, Task, TaskStatus

__all__ = ["RemoteAnswer", "RemoteTask", "is_final"]

#: Names of states, as the protocol has them.
_DONE = "TASK_STATE_COMPLETED"
_CANCELLED = "TASK_STATE_CANCELED"
_OVER = frozenset({_DONE, "TASK_STATE_FAILED", _CANCELLED, "TASK_STATE_REJECTED"})
_ASKING = frozenset({"TASK_STATE_INPUT_REQUIRED", "TASK_STATE_AUTH_REQUIRED"})
#: As version 0.3 has them.
_OLD_OVER = frozenset({"completed", "failed", "canceled", "rejected"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAnswer:
    """How a task of a remote agent ended, or what it asks."""

    text: str
    #: what its data parts say; None: there are none
    data: object = None
    #: why there is no answer; None: there is one
    failure: str | None = None

    @property
    def shown(self) -> str:
        """The answer as text: data where there is nothing else."""
        return self.text if self.text or self.data is None else json.dumps(self.data, ensure_ascii=False)


class RemoteTask:
    """What is known of one task."""

    def __init__(self) -> None:
        self.task_id: str | None = None
        #: whether the agent may have the message, and may have done what it asks for
        self.may_have_begun = False
        self._state = ""
        self._told: Message | None = None
        self._reply: Message | None = None
        self._artifacts: dict[str, list[Part]] = {}

    @property
    def is_settled(self) -> bool:
        """Whether nothing more comes by itself."""
        return self._reply is not None or self._state in _OVER | _ASKING

    @property
    def is_over(self) -> bool:
        """Whether the remote agent works on it no more."""
        return self._reply is not None or self._state in _OVER

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled there."""
        return self._state == _CANCELLED

    def forget(self) -> None:
        """Begin as if nothing had been sent."""
        self.task_id, self.may_have_begun = None, False
        self._state, self._told, self._reply, self._artifacts = "", None, None, {}

    def take(self, told: StreamResponse) -> str:
        """Take what came, and return the text that it adds to the answer."""
        match told.WhichOneof("payload"):
            case "message":
                self._reply = told.message
                return _text_of(told.message.parts)
            case "task":
                return self.take_task(told.task)
            case "status_update":
                self.task_id = told.status_update.task_id
                self._take_status(told.status_update.status)
                return ""
            case "artifact_update":
                self.task_id = told.artifact_update.task_id
                return self._take_artifact(told.artifact_update.artifact, appends=told.artifact_update.append)
            case _:
                return ""

    def take_task(self, task: Task) -> str:
        """Take how a task stands, and return its text where none was told before."""
        is_first = not self._artifacts
        self.task_id = task.id
        self._take_status(task.status)
        self._artifacts = {each.artifact_id: list(each.parts) for each in task.artifacts} or self._artifacts
        return self._text() if is_first else ""

    def answer(self) -> RemoteAnswer:
        """Return what came of it.

        Raises:
            ValueError: it has numbers that JSON has not.
        """
        if self._reply is not None:
            return RemoteAnswer(text=_text_of(self._reply.parts), data=_data_of(self._reply.parts))
        told = "" if self._told is None else _text_of(self._told.parts)
        parts = [part for artifact in self._artifacts.values() for part in artifact]
        text, data = self._text(), _data_of(parts)
        if self._state == _DONE:
            return RemoteAnswer(text=text or ("" if data is not None else told), data=data)
        return RemoteAnswer(text=text, data=data, failure=self._why(told))

    def _why(self, told: str) -> str:
        reason = f": {told}" if told else ""
        match self._state:
            case "TASK_STATE_INPUT_REQUIRED":
                return f"it waits for input on its task '{self.task_id}', which a team cannot give{reason}"
            case "TASK_STATE_AUTH_REQUIRED":
                return f"it wants to be authorised for its task '{self.task_id}'{reason}"
            case "TASK_STATE_FAILED":
                return f"it failed{reason}"
            case "TASK_STATE_CANCELED":
                return f"its task '{self.task_id}' was cancelled there{reason}"
            case "TASK_STATE_REJECTED":
                return f"it refused the task{reason}"
            case _:
                return f"it ended its answer while the task went on{reason}"

    def _take_status(self, status: TaskStatus) -> None:
        from a2a.types import TaskState

        self._state = TaskState.Name(status.state)
        self._told = status.message if status.HasField("message") else None

    def _take_artifact(self, artifact: Artifact, *, appends: bool) -> str:
        known = self._artifacts.get(artifact.artifact_id)
        if appends and known is not None:
            known.extend(artifact.parts)
            return _pieces_of(artifact.parts)
        self._artifacts[artifact.artifact_id] = list(artifact.parts)
        return "" if known is not None else _pieces_of(artifact.parts)

    def _text(self) -> str:
        return "\n\n".join(filter(None, map(_pieces_of, self._artifacts.values())))


def is_final(answer: str) -> bool:
    """Return whether an answer as it came ends its task, or is a message in place of one; False where JSON alone does not show it."""
    try:
        told: object = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    for name in ("result", "task", "statusUpdate"):
        told = _member(told, name) or told
    if _member(told, "message") is not None or _member(told, "kind") == "message":
        return True
    state = _member(_member(told, "status"), "state")
    return isinstance(state, str) and state in _OVER | _OLD_OVER


def _member(value: object, name: str) -> object:
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None


def _pieces_of(parts: Iterable[Part]) -> str:
    """Return the text of an artifact, whose parts are pieces of one text."""
    return "".join(whole_text(part.text) for part in parts if part.WhichOneof("content") == "text")


def _text_of(parts: Iterable[Part]) -> str:
    """Return the text of a message; files are named."""
    texts: list[str] = []
    for part in parts:
        match part.WhichOneof("content"):
            case "text":
                texts.append(whole_text(part.text))
            case "url":
                texts.append(f"[file {part.url}]")
            case "raw":
                texts.append(f"[file {part.filename or part.media_type or 'without a name'}, {len(part.raw)} bytes]")
            case _:
                pass
    return "\n\n".join(texts)


def _data_of(parts: Iterable[Part]) -> object:
    """Return the data of a message: that of its one data part, or all as a list.

    Raises:
        ValueError: JSON has no such numbers.
    """
    found: list[object] = [plain_value(part.data) for part in parts if part.WhichOneof("content") == "data"]
    return found[0] if len(found) == 1 else found or None
