"""Questions to an agent: what is run for one, and what is given for it. Package: definition.

In: a question, a conversation. Out: an ensemble of one task; its output as an answer. What runs it stands far above, so it
is found by its name on the face: the one call upwards, made when a user asks and never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ensemble_ray.definition.fields import check_text
from ensemble_ray.definition.templates import escape_template
from ensemble_ray.errors import ValidationError
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.agent_output import AgentOutput
from ensemble_ray.values.messages import ChatMessage
from ensemble_ray.values.outputs import EnsembleOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ensemble_ray import Agent, Ensemble, RunOptions, Runtime
    from ensemble_ray.events import Event

    #: What `history=` takes: an earlier output, or questions and answers in turns.
    History: TypeAlias = AgentOutput[Any] | Sequence[ChatMessage]

__all__ = ["build_answer", "build_ensemble", "stream_events"]

#: How long a run that was left early may take to let go of what it holds, s.
_RELEASE_S = 10.0


def build_ensemble(
    agent: Agent, question: object, *, output_type: type[Any] | None, history: History | None
) -> Ensemble:
    """Return the ensemble of one task that asks an agent.

    Raises:
        ValidationError: the question is no text, or the history no conversation (S-DOM-78, S-DOM-81).
    """
    import ensemble_ray as face

    if not isinstance(question, str):
        raise ValidationError(f"Agent question must be a text, got: {type(question).__name__}")
    check_text(question, "Agent question must not be blank")
    asked = face.Task.of(escape_template(question))
    return face.Ensemble(tasks=[asked.replace(agent=agent, output_type=output_type, history=_messages_of(history))])


def build_answer(asked: Ensemble, output: EnsembleOutput) -> AgentOutput[Any]:
    """Return the output of a question, with the conversation so far."""
    import ensemble_ray as face

    (task,) = asked.tasks
    turns = [ChatMessage(role="user", content=face.resolve_template(task.description, {}))]
    if output.is_complete:
        turns.append(ChatMessage(role="assistant", content=whole_text(output.raw)))
    return AgentOutput(output=output, messages=(*task.history, *turns))


def stream_events(
    asked: Ensemble, *, runtime: Runtime | str | None, run_id: str | None, options: RunOptions | None
) -> Iterator[Event | AgentOutput[Any]]:
    """Begin a run, give its events and then its output; left early, end it."""
    begun = asked.start(runtime=runtime, run_id=run_id, options=options)
    try:
        yield from begun.events()
        yield build_answer(asked, begun.result())
    finally:
        if begun.state.is_going_on:
            begun.cancel()
            begun.join(_RELEASE_S)


def _messages_of(history: History | None) -> Sequence[ChatMessage]:
    """Return the conversation to continue."""
    if not isinstance(history, AgentOutput):
        return history or ()
    if not history.is_complete:
        raise ValidationError(
            f"Agent history must end with an answer, and run '{history.run_id}' ended early "
            f"({history.output.exit_reason.value}): give the output before it"
        )
    return history.messages
