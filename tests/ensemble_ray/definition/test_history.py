"""What a task may be given as the conversation before it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ensemble_ray import ChatMessage, Task, ToolCall, ValidationError


def task(**fields: Any) -> Task:
    """A task with these fields."""
    return Task(description="Count", expected_output="A number", **fields)


ASKED, ANSWERED = ChatMessage(role="user", content="Two?"), ChatMessage(role="assistant", content="2")


@pytest.mark.parametrize(
    ("history", "told"),
    [
        ("Two?", "Task history element at index 0 must be a ChatMessage, got: str"),
        ([ASKED, "2"], "Task history element at index 1 must be a ChatMessage, got: str"),
        (
            [ASKED, ASKED],
            (
                "Task history element at index 1 must have role 'assistant', since questions and answers take turns, "
                "got: 'user'"
            ),
        ),
        (
            [ChatMessage(role="system", content="Be kind")],
            (
                "Task history element at index 0 must have role 'user', since questions and answers take turns, "
                "got: 'system'"
            ),
        ),
        ([ASKED], "Task history must end with an answer (role 'assistant'): the new question follows it"),
        (
            [ASKED, ChatMessage(role="assistant", content=" ")],
            "Task history element at index 1 must have a text and no tool calls",
        ),
        (
            [ASKED, ChatMessage(role="assistant", content="2", tool_calls=[ToolCall(id="1", name="count")])],
            "Task history element at index 1 must have a text and no tool calls",
        ),
    ],
)
def test_history_is_refused_when_it_is_no_conversation(history: object, told: str) -> None:
    """S-DOM-76: the first bad message is named, and what it should be."""
    with pytest.raises(ValidationError) as caught:
        task(history=history)
    assert str(caught.value) == told


def test_history_is_kept_when_it_is_a_conversation() -> None:
    """S-DOM-76: copied, without halves of characters; none is given by default; a handler has no use for one."""
    turns = [ASKED, ChatMessage(role="assistant", content="2\ud800")]
    kept = task(history=turns)
    turns.clear()
    assert kept.history == (ASKED, ChatMessage(role="assistant", content="2\ufffd"))
    assert pickle.loads(pickle.dumps(kept)).history == kept.history  # noqa: S301  its own
    assert task().history == ()
    with pytest.raises(ValidationError, match="both a handler and a history"):
        task(handler=len, history=[ASKED, ANSWERED])
