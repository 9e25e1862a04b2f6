"""What was said before a task: questions and answers, in turns. Package: definition.

In: messages that the user gave, or kept of an earlier run. Out: the same, checked, fit to be sent before a new question.
"""

from __future__ import annotations

from ensemble_ray.definition.fields import to_tuple
from ensemble_ray.errors import ValidationError
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.messages import ChatMessage

__all__ = ["check_history"]

#: Whose turn it is, by turns; endpoints and chat templates refuse other orders.
_TURNS = ("user", "assistant")


def check_history(value: object) -> tuple[ChatMessage, ...]:
    """Return a conversation as a tuple of messages: question, answer, question, answer...

    Raises:
        ValidationError: it is no such conversation (S-DOM-76); the first bad message is named.
    """
    messages = tuple(_check_turn(entry, index, _TURNS[index % 2]) for index, entry in enumerate(to_tuple(value)))
    if len(messages) % 2:
        raise ValidationError("Task history must end with an answer (role 'assistant'): the new question follows it")
    return messages


def _check_turn(entry: object, index: int, role: str) -> ChatMessage:
    """Return the message, if it is the text of the one whose turn it is."""
    at = f"Task history element at index {index}"
    if not isinstance(entry, ChatMessage):
        raise ValidationError(f"{at} must be a ChatMessage, got: {type(entry).__name__}")
    if entry.role != role:
        raise ValidationError(
            f"{at} must have role '{role}', since questions and answers take turns, got: '{entry.role}'"
        )
    if entry.tool_calls or not isinstance(entry.content, str) or not entry.content.strip():
        raise ValidationError(f"{at} must have a text and no tool calls")
    return ChatMessage(role=entry.role, content=whole_text(entry.content))
