"""What the user's own agent is asked, and what it answers: the values of the port `RunsTask`. Package: values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.values.messages import ChatMessage
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["TaskAnswer", "TaskRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """A task, as the runner of its agent is asked to do it.

    The conversation is the one that an agent with a model would send: the role and the goal, then the task with its
    context, memory and notes. A runner that is asked again has its earlier answer and what was wrong with it there.
    """

    #: the system prompt first, the latest question last, what was said before between them
    messages: tuple[ChatMessage, ...]
    description: str
    expected_output: str
    agent_role: str
    #: in context order
    context_outputs: tuple[TaskOutput, ...] = ()
    output_type: type[object] | None = None
    #: JSON schema of `output_type`; None: there is no type, or an endpoint could not be held to it
    output_schema: Mapping[str, object] | None = None
    run_id: str = ""
    #: key of the task in its plan, and the path of this execution
    task: str = ""
    instance: str = ""
    #: 0: the first time that this task asks its runner
    attempt: int = 0
    #: the same when the runner is asked again after a crash, so that it can do its work once; another for each attempt
    idempotency_key: str = ""
    #: whether pieces of the answer are passed on as they come
    is_streaming: bool = False

    @property
    def system_prompt(self) -> str:
        """Who the agent is, as text."""
        return self.messages[0].content or ""

    @property
    def prompt(self) -> str:
        """What is asked now, as text."""
        return self.messages[-1].content or ""

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """What was said before."""
        return self.messages[1:-1]

    @property
    def text(self) -> str:
        """The whole conversation as one text, for agents that take one."""
        said = (f"{each.role.capitalize()}: {each.content or ''}" for each in self.history)
        return "\n\n".join(part for part in (self.system_prompt, *said, self.prompt) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAnswer:
    """What a runner gives where a text says too little."""

    text: str = ""
    #: JSON-able data or an object of the task's `output_type`; its JSON is the answer where the task has such a type
    #: or there is no text
    structured_output: object = None
    #: that its models read and wrote for it; -1: unknown
    input_tokens: int = -1
    output_tokens: int = -1
    #: why its model stopped, in the words of its provider; `length` stands for an answer that was cut off
    finish_reason: str | None = None
