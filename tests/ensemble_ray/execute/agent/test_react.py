"""The loop of one task as a machine: steps in, steps out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ensemble_ray import Audio, ChatMessage, ChatResponse, Image, ToolCall
from ensemble_ray.execute.agent.react import (
    MAX_STOPS,
    AnswerReceived,
    CallModel,
    CallTools,
    Fail,
    Finish,
    ReactMachine,
    StepInstruction,
    ToolsReturned,
    stop_text,
)

STOP = (
    "STOP: Maximum tool iterations (2) reached. "
    "You must provide your best final answer now based on information gathered so far."
)


def machine(*, max_iterations: int = 2, has_tools: bool = True) -> ReactMachine:
    """A loop that has asked the model for the first time."""
    begun = ReactMachine(
        system_prompt="You are a clerk", user_prompt="Count", max_iterations=max_iterations, has_tools=has_tools
    )
    assert begun.start() == CallModel(turn=0)
    return begun


def test_earlier_turns_stand_before_the_question() -> None:
    """S-DOM-77: as turns of their own, between the system prompt and the user prompt."""
    earlier = (ChatMessage(role="user", content="Two?"), ChatMessage(role="assistant", content="2"))
    begun = ReactMachine(
        system_prompt="You are a clerk", user_prompt="Three?", max_iterations=1, has_tools=False, history=earlier
    )
    assert [(each.role, each.content) for each in begun.messages] == [
        ("system", "You are a clerk"),
        ("user", "Two?"),
        ("assistant", "2"),
        ("user", "Three?"),
    ]


def requests(*ids: str) -> tuple[ToolCall, ...]:
    """Tool requests of these ids."""
    return tuple(ToolCall(id=each, name="search", arguments=f'{{"q": "{each}"}}') for each in ids)


def asks(loop: ReactMachine, *ids: str, text: str | None = None) -> StepInstruction:
    """The model asks for tools."""
    return loop.handle(AnswerReceived(response=ChatResponse(text=text, tool_calls=requests(*ids))))


def answers(loop: ReactMachine, text: str | None) -> StepInstruction:
    """The model answers with a text."""
    return loop.handle(AnswerReceived(response=ChatResponse(text=text)))


def returns(loop: ReactMachine, *texts: str) -> StepInstruction:
    """The allowed tools are done."""
    return loop.handle(ToolsReturned(texts=texts))


def results(loop: ReactMachine) -> list[tuple[str | None, str | None]]:
    """Id and text of every tool result in the conversation."""
    return [(message.tool_call_id, message.content) for message in loop.messages if message.role == "tool"]


def allowed(*ids: str, turn: int = 0) -> CallTools:
    """Run these, all within the limit."""
    return CallTools(turn=turn, allowed=requests(*ids), stopped=(), stop_count=0)


def test_first_call_has_system_and_user_prompt_only() -> None:
    """S-ENG-31: exactly [system, user]."""
    assert machine().messages == [
        ChatMessage(role="system", content="You are a clerk"),
        ChatMessage(role="user", content="Count"),
    ]


@pytest.mark.parametrize("response", [ChatResponse(text="42"), ChatResponse(text="42", tool_calls=requests("1"))])
def test_one_call_is_made_when_the_agent_has_no_tools(response: ChatResponse) -> None:
    """S-ENG-31: tool requests in its answer are ignored."""
    loop = machine(has_tools=False)
    assert loop.handle(AnswerReceived(response=response)) == Finish(text="42")
    assert loop.messages[-1] == ChatMessage(role="assistant", content="42")
    assert loop.tool_call_count == 0


def test_loop_ends_at_the_first_response_without_requests() -> None:
    """S-ENG-33: text that comes with requests is not the answer."""
    loop = machine()
    assert asks(loop, "1", text="Let me look") == allowed("1")
    assert returns(loop, "3 hits") == CallModel(turn=1)
    assert answers(loop, "Three") == Finish(text="Three")


def test_attachments_follow_the_results_when_tools_return_some() -> None:
    """S-ATT-61: one message after all results of the turn, also after stopped ones; none without attachments."""
    loop = machine(max_iterations=2)
    asks(loop, "1", "2", "3")
    found = [("search", Image(b"GIF89a", name="a.gif")), ("search", Audio(b"ID3", name="b.mp3"))]
    assert loop.handle(ToolsReturned(texts=("x", "y"), attachments=found)) == CallModel(turn=1)
    *_, stopped, shown = loop.messages
    assert (stopped.role, stopped.tool_call_id) == ("tool", "3")
    text = "Attached, in this order:\n- a.gif, from the tool 'search'\n- b.mp3, from the tool 'search'"
    assert shown == ChatMessage(role="user", content=text, attachments=(found[0][1], found[1][1]))
    plain = machine()
    asks(plain, "1")
    returns(plain, "x")
    assert [message.role for message in plain.messages] == ["system", "user", "assistant", "tool"]


def test_answer_stays_in_the_conversation_when_it_is_refused() -> None:
    """S-GRD-17: as it was corrected, with the reason behind it; the call has the next free number."""
    loop = machine()
    answers(loop, "Tree")
    assert loop.ask_again("A number, please", answer="Three", turn=2) == CallModel(turn=2)
    assert loop.messages[2:] == [
        ChatMessage(role="assistant", content="Three"),
        ChatMessage(role="user", content="A number, please"),
    ]
    assert asks(loop, "1") == allowed("1", turn=2)
    assert returns(loop, "3") == CallModel(turn=3)


def test_missing_text_is_given_as_it_came() -> None:
    """S-ENG-33, S-ENG-34: the rule for blank answers is the caller's."""
    assert answers(machine(), None) == Finish(text=None)


def test_conversation_has_the_request_before_its_results() -> None:
    """S-ENG-32: one result per request, with its id and name, in request order."""
    loop = machine()
    asks(loop, "1", "2", text="Both")
    returns(loop, "first", "second")
    assert loop.messages[2:] == [
        ChatMessage(role="assistant", content="Both", tool_calls=requests("1", "2")),
        ChatMessage(role="tool", content="first", tool_call_id="1", name="search"),
        ChatMessage(role="tool", content="second", tool_call_id="2", name="search"),
    ]


def test_requests_are_counted_and_not_model_calls() -> None:
    """S-ENG-40: two in one turn are two."""
    loop = machine(max_iterations=3)
    asks(loop, "1", "2")
    assert loop.tool_call_count == 2
    returns(loop, "", "")
    step = asks(loop, "3", "4")
    assert step == CallTools(turn=1, allowed=requests("3"), stopped=requests("4"), stop_count=1)


def test_first_requests_are_run_when_a_turn_goes_over_the_limit() -> None:
    """S-ENG-40, S-ENG-41: in request order; the others get the stop text as their results."""
    loop = machine()
    assert asks(loop, "1", "2", "3", "4") == CallTools(
        turn=0, allowed=requests("1", "2"), stopped=requests("3", "4"), stop_count=1
    )
    assert returns(loop, "a", "b") == CallModel(turn=1)
    assert results(loop) == [("1", "a"), ("2", "b"), ("3", STOP), ("4", STOP)]


def test_stop_text_names_the_limit() -> None:
    """S-ENG-41."""
    assert stop_text(2) == STOP


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_task_fails_at_the_third_stop(limit: int) -> None:
    """S-ENG-43, S-ENG-46: limit + 3 model calls in all; the third stop text is never sent."""
    loop = machine(max_iterations=limit)
    model_calls = 1
    for number in range(limit + MAX_STOPS):
        step = asks(loop, str(number))
        assert isinstance(step, CallTools)
        after = returns(loop, *("found" for _ in step.allowed))
        if after == CallModel(turn=model_calls):
            model_calls += 1
    assert after == Fail(tool_calls_made=limit + 3)
    assert model_calls == limit + 3
    assert [text for _, text in results(loop)].count(stop_text(limit)) == 2


def test_stop_messages_are_counted_one_by_one() -> None:
    """S-ENG-42: the count that the log line of each names."""
    loop = machine(max_iterations=1)
    asks(loop, "1")
    returns(loop, "")
    counts = []
    for number in ("2", "3", "4"):
        step = asks(loop, number)
        assert isinstance(step, CallTools)
        counts.append(step.stop_count)
        returns(loop)
    assert counts == [1, 2, 3]


@pytest.mark.parametrize("count", [2, 5, 40])
def test_model_reads_the_stops_when_one_answer_has_many(count: int) -> None:
    """S-ENG-44, S-ENG-46: each request has a result; they are one stop, and the model may still answer."""
    loop = machine(max_iterations=1)
    ids = [str(number) for number in range(count)]
    assert asks(loop, *ids) == CallTools(turn=0, allowed=requests("0"), stopped=requests(*ids[1:]), stop_count=1)
    assert returns(loop, "found") == CallModel(turn=1)
    assert results(loop) == [("0", "found"), *((each, stop_text(1)) for each in ids[1:])]
    assert loop.tool_call_count == count
    assert answers(loop, "Done") == Finish(text="Done")


def test_task_fails_when_the_model_insists_in_three_answers() -> None:
    """S-ENG-43, S-ENG-44, S-ENG-46: answers are counted, and all of their requests are tool calls made."""
    loop = machine(max_iterations=1)
    for ids in (("1", "2", "3", "4"), ("5", "6", "7")):
        asks(loop, *ids)
        assert isinstance(returns(loop, *(["found"] if "1" in ids else [])), CallModel)
    assert asks(loop, "8", "9") == CallTools(turn=2, allowed=(), stopped=requests("8", "9"), stop_count=3)
    assert returns(loop) == Fail(tool_calls_made=9)
    assert [each for each, _ in results(loop)] == ["1", "2", "3", "4", "5", "6", "7"]


@pytest.mark.parametrize("stops", [1, 2])
def test_text_after_a_stop_is_accepted(stops: int) -> None:
    """S-ENG-45."""
    loop = machine(max_iterations=1)
    asks(loop, "1")
    returns(loop, "found")
    for number in range(stops):
        asks(loop, f"over-{number}")
        returns(loop)
    assert answers(loop, "Done") == Finish(text="Done")
    assert loop.tool_call_count == 1 + stops


def _steps(loop: ReactMachine, turns: Sequence[int]) -> list[StepInstruction]:
    """What comes of turns with so many requests each."""
    steps: list[StepInstruction] = []
    for number, size in enumerate(turns):
        steps.append(asks(loop, *(f"{number}-{position}" for position in range(size))))
        assert isinstance(steps[-1], CallTools)
        steps.append(returns(loop, *("text" for _ in steps[-1].allowed)))
        if isinstance(steps[-1], Fail):
            break
    return steps


@pytest.mark.parametrize("turns", [(1, 1, 1, 1, 1), (2, 2, 2, 2), (3, 1, 1), (4, 9, 1), (1, 2, 3, 4)])
def test_no_tool_runs_beyond_the_limit_whatever_the_turns_are(turns: tuple[int, ...]) -> None:
    """S-ENG-40, S-ENG-46: the same steps from the same answers."""
    steps = _steps(machine(), turns)
    assert steps == _steps(machine(), turns)
    assert sum(len(step.allowed) for step in steps if isinstance(step, CallTools)) == 2
    assert steps[-1] == Fail(tool_calls_made=sum(turns))
