"""Questions to an agent: what is asked, and what is given for it. Package: definition.

In: a question, a conversation. Out: the texts of the task that asks it; its output as an answer. What runs the task stands
far above, and is known here by what is asked of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ensemble_ray.definition.fields import check_text
from ensemble_ray.definition.templates import escape_template, unescape_template
from ensemble_ray.errors import ValidationError
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.agent_output import AgentOutput
from ensemble_ray.values.messages import ChatMessage
from ensemble_ray.values.outputs import EnsembleOutput, RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ensemble_ray.events import Event

    #: What `history=` takes: an earlier output, or questions and answers in turns.
    History: TypeAlias = AgentOutput[Any] | Sequence[ChatMessage]

__all__ = ["build_answer", "build_description", "get_messages", "stream_answer"]

#: How long a run that was left early may take to let go of what it holds, s.
_RELEASE_S = 10.0


class AskedTask(Protocol):
    """The task that asks a question."""

    @property
    def description(self) -> str:
        """The question, as a template."""
        ...

    @property
    def history(self) -> Sequence[ChatMessage]:
        """The conversation before it."""
        ...


class BegunRun(Protocol):
    """A run that asks a question."""

    @property
    def state(self) -> RunState:
        """Where it stands."""
        ...

    def events(self) -> Iterable[Event]:
        """Give its events as they happen."""
        ...

    def result(self) -> EnsembleOutput:
        """Wait for its output."""
        ...

    def cancel(self) -> None:
        """Ask for its end."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait until it has released everything."""
        ...


def build_description(question: object) -> str:
    """Return the description of the task that asks a question: the question, word for word.

    Raises:
        ValidationError: the question is no text (S-DOM-78).
    """
    if not isinstance(question, str):
        raise ValidationError(f"Agent question must be a text, got: {type(question).__name__}")
    check_text(question, "Agent question must not be blank")
    return escape_template(question)


def get_messages(history: History | None) -> Sequence[ChatMessage]:
    """Return the conversation that a question continues.

    Raises:
        ValidationError: it does not end with an answer (S-DOM-81).
    """
    if not isinstance(history, AgentOutput):
        return history or ()
    if not history.is_complete:
        raise ValidationError(
            f"Agent history must end with an answer, and run '{history.run_id}' ended early "
            f"({history.output.exit_reason.value}): give the output before it"
        )
    return history.messages


def build_answer(tasks: Sequence[AskedTask], output: EnsembleOutput) -> AgentOutput[Any]:
    """Return the output of a question, with the conversation so far."""
    (task,) = tasks
    turns = [ChatMessage(role="user", content=unescape_template(task.description))]
    if output.is_complete:
        turns.append(ChatMessage(role="assistant", content=whole_text(output.raw)))
    return AgentOutput(output=output, messages=(*task.history, *turns))


def stream_answer(tasks: Sequence[AskedTask], start: Callable[[], BegunRun]) -> Iterator[Event | AgentOutput[Any]]:
    """Begin a run, give its events and then its output; left early, end it."""
    begun = start()
    try:
        yield from begun.events()
        yield build_answer(tasks, begun.result())
    finally:
        if begun.state.is_going_on:
            begun.cancel()
            begun.join(_RELEASE_S)
