"""What an agent refuses to be asked, and what it makes of a question; no run begins here."""

from __future__ import annotations

import pickle

import pytest

from ensemble_ray import Agent, AgentOutput, ChatMessage, EnsembleOutput, Task, ValidationError
from ensemble_ray.testing import ScriptedModel

WRITER = Agent(role="Writer", goal="Write", llm=ScriptedModel(otherwise="unused"))


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("", "Agent question must not be blank"),
        (" \n", "Agent question must not be blank"),
        (None, "Agent question must be a text, got: NoneType"),
        (Task.of("Write"), "Agent question must be a text, got: Task"),
    ],
)
def test_question_is_refused_when_it_is_no_text(question: str, told: str) -> None:
    """S-DOM-78: by every way to ask, before anything runs; `stream` when it is called."""
    for ask in (WRITER.to_ensemble, WRITER.run, WRITER.stream):
        with pytest.raises(ValidationError) as caught:
            ask(question)
        assert str(caught.value) == told


def test_agent_is_asked_by_an_ensemble_of_one_task() -> None:
    """S-DOM-78: of the question, this agent, and what was said before."""
    said = (ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b"))
    ensemble = WRITER.to_ensemble("Why {x}?", output_type=dict[str, int], history=said)
    (task,) = ensemble.tasks
    assert (task.agent, task.output_type, task.history) == (WRITER, dict[str, int], said)
    assert task.expected_output == Task.of("x").expected_output
    assert ensemble.plan().nodes[0].description == "Why {x}?"


def test_output_is_history_when_it_has_an_answer() -> None:
    """S-DOM-81: its messages; those of an answer without a text are refused."""
    said = [ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="b")]
    output = AgentOutput(output=EnsembleOutput(raw="b"), messages=said)
    assert WRITER.to_ensemble("c", history=output).tasks[0].history == tuple(said)
    silent = output.replace(messages=[said[0], ChatMessage(role="assistant", content="")])
    with pytest.raises(ValidationError, match="index 1 must have a text"):
        WRITER.to_ensemble("c", history=silent)
    assert pickle.loads(pickle.dumps(output)) == output  # noqa: S301  its own
    assert (output.text, output.tool_calls, output.run_id) == ("b", (), None)


def test_agent_has_its_fields_beside_the_ways_to_ask_it() -> None:
    """S-CONV-31, S-STR-1: `stream` is written as a field and read under another name."""
    assert pickle.loads(pickle.dumps(WRITER)) == WRITER  # noqa: S301  its own
    assert type(WRITER.replace(goal="Draw", stream=True)) is Agent
    assert WRITER.replace(stream=True).is_streaming is True
