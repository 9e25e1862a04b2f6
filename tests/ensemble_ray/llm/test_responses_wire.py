"""The Responses API as bytes: what is sent, by the types of the `openai` package, and what is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import FunctionToolParam, Response, ResponseInputParam
from pydantic import TypeAdapter

from ensemble_ray import ChatMessage, ChatResponse, Reasoning, TokenUsage, ToolCall, ToolSpec
from ensemble_ray.llm.protocol.responses import RESPONSES, ResponseAssembler, decode_response
from ensemble_ray.llm.protocol.wire import AnswerFailedError, AnswerLimits, TooMuchError, WireError, encode_request

HERE = "https://host/v1/responses m"
INPUT = TypeAdapter[object](ResponseInputParam)
TOOL = TypeAdapter[object](FunctionToolParam)
RULES, HELLO = ChatMessage("system", "Be brief"), ChatMessage("user", "hello", name="ann")
FIND = ToolSpec("find", "Finds", {"type": "object", "properties": {"q": {"type": "string"}}})

THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [{"type": "summary_text", "text": "I look"}, {"type": "summary_text", "text": "it up"}],
    "encrypted_content": "gAAA",
}
TEXT = {"type": "output_text", "text": "One moment", "annotations": []}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "find",
    "arguments": '{"q": "tide"}',
    "status": "completed",
}
OTHER_CALL = {**CALL, "id": "fc_2", "call_id": "c2"}


def response(*output: object, **more: object) -> dict[str, Any]:
    """A whole response."""
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "error": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": list(output),
        **more,
    }


def read(body: object, origin: str = HERE) -> ChatResponse:
    """What is read from it."""
    return decode_response(json.dumps(body).encode(), origin=origin)


def sent(messages: Sequence[ChatMessage], origin: str = HERE) -> list[dict[str, Any]]:
    """The items of a request, which have the types of the package."""
    body = json.loads(encode_request(b'"model":"m"', messages, (), origin=origin, api=RESPONSES))
    INPUT.validate_python(body["input"])
    return cast("list[dict[str, Any]]", body["input"])


def in_conversation(answer: ChatResponse, **changes: object) -> list[ChatMessage]:
    """The conversation after an answer whose calls have results."""
    members = {"content": answer.text, "tool_calls": answer.tool_calls, "provider_fields": answer.provider_fields}
    own = ChatMessage("assistant", **{**members, **changes})  # type: ignore[arg-type]  members of a message
    results = [ChatMessage("tool", f"for {each.id}", tool_call_id=each.id, name="find") for each in own.tool_calls]
    return [RULES, HELLO, own, *results]


def test_messages_are_items_when_they_come_from_elsewhere() -> None:
    """S-RSP-2, S-RSP-4: an answer of another model is a message and its calls, without ids of items."""
    calls = (ToolCall("c1", "find", '{"q": "tide"}'), ToolCall("c1", "find", "no json"))
    items = sent(in_conversation(ChatResponse("One moment", calls)))
    assert items == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "One moment"},
        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"q": "tide"}'},
        {"type": "function_call", "call_id": "call00001", "name": "find", "arguments": '{"unparsable":"no json"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "for c1"},
        {"type": "function_call_output", "call_id": "call00001", "output": "for c1"},
    ]
    assert [item.get("type") for item in sent(in_conversation(ChatResponse(" ", calls[:1])))][2:] == [
        "function_call",
        "function_call_output",
    ]
    assert sent([ChatMessage("assistant", None)]) == [{"role": "assistant", "content": ""}]


def test_tools_have_the_flat_form() -> None:
    """S-RSP-2: not strict, which is the API's default."""
    body = json.loads(encode_request(b'"model":"m"', [HELLO], [FIND, ToolSpec("now", "Tells")], api=RESPONSES))
    for tool in body["tools"]:
        TOOL.validate_python(tool)
    assert body["tools"] == [
        {"type": "function", "name": "find", "description": "Finds", "parameters": FIND.parameters, "strict": False},
        {
            "type": "function",
            "name": "now",
            "description": "Tells",
            "parameters": {"type": "object", "properties": {}},
            "strict": False,
        },
    ]


@pytest.mark.parametrize(
    "output",
    [
        [THOUGHT, CALL],
        [THOUGHT, MESSAGE, CALL, OTHER_CALL],
        [THOUGHT, CALL, {**THOUGHT, "id": "rs_2"}, OTHER_CALL, {**MESSAGE, "phase": "commentary"}],
        [THOUGHT, MESSAGE],
        [{"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}, CALL],
        [{**MESSAGE, "content": [TEXT, {**TEXT, "text": " please"}]}, {"type": "compaction", "id": "cmp_1", "encrypted_content": "x"}, CALL],
        [{**MESSAGE, "phase": "final_answer"}],
        [THOUGHT, {**MESSAGE, "content": [{"type": "refusal", "refusal": "No"}]}],
    ],
    ids=lambda output: "-".join(item["type"] for item in output),
)  # fmt: skip
def test_the_items_of_an_answer_go_back_as_they_came(output: list[dict[str, object]]) -> None:
    """S-RSP-4: in their order, with their ids, to their origin alone; only the first call of an id keeps it."""
    answer = read(response(*output))
    conversation = in_conversation(answer)
    kept = sent([*conversation, HELLO])
    assert kept[2 : 2 + len(output)] == output
    assert sent([*conversation, HELLO]) == kept  # from the cache
    elsewhere = sent(conversation, origin="https://host/v1/responses other")
    assert {item.get("type") for item in elsewhere} <= {None, "function_call", "function_call_output"}
    assert answer.provider_fields is not None
    known = TEXT["text"] in answer.provider_fields.message or "arguments" in answer.provider_fields.message
    assert known == (len(cast("list[object]", output[0].get("content", ()))) == 2)  # no text is stored twice


def test_a_plain_answer_has_nothing_to_keep() -> None:
    """S-RSP-4: messages and calls are in the conversation already."""
    assert read(response(MESSAGE, CALL)).provider_fields is None


@pytest.mark.parametrize("is_stored", [False, True])
def test_items_stay_away_when_the_provider_would_look_for_them(*, is_stored: bool) -> None:
    """S-RSP-4: reasoning that is neither encrypted nor a text is only an id, which a provider that stores knows."""
    bare = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    kept = sent(in_conversation(read(response(bare, CALL, store=is_stored))))
    assert [item.get("id") for item in kept[2:]] == (["rs_1", "fc_1", None] if is_stored else [None, None])


def test_items_stay_away_when_an_answer_ends_with_its_reasoning() -> None:
    """S-RSP-4: an endpoint refuses reasoning without the item that it is for."""
    cut = response(MESSAGE, THOUGHT, status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    assert sent(in_conversation(read(cut)))[2:] == [{"role": "assistant", "content": "One moment"}]


def test_items_stay_away_when_the_message_has_other_calls() -> None:
    """S-RSP-4: calls that the runner ignored have no results, and their items would be refused."""
    answer = read(response(THOUGHT, MESSAGE, CALL))
    assert sent(in_conversation(answer, tool_calls=()))[2:] == [{"role": "assistant", "content": "One moment"}]


def test_a_changed_text_is_sent_with_its_item() -> None:
    """S-RSP-4: what the conversation says holds."""
    item = sent(in_conversation(read(response(THOUGHT, MESSAGE)), content="Less"))[3]
    assert (item["id"], item["content"][0]["text"]) == ("msg_1", "Less")


USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 14,
}


def test_an_answer_is_read_when_it_has_everything() -> None:
    """S-RSP-9: text, calls, usage, reasoning, and its end."""
    body = response(THOUGHT, MESSAGE, CALL, usage=USAGE)
    Response.model_validate(body)
    answer = read(body)
    assert (answer.text, answer.finish_reason, answer.reasoning) == ("One moment", "tool_calls", "I look\n\nit up")
    assert answer.tool_calls == (ToolCall("c1", "find", '{"q": "tide"}'),)
    assert answer.usage is not None
    used = answer.usage
    assert (used.input_tokens, used.output_tokens, used.reasoning_tokens) == (9, 5, 3)


@pytest.mark.parametrize(
    ("body", "text", "reason"),
    [
        (response(MESSAGE), "One moment", "stop"),
        (response(status=None), "", "stop"),
        (response(MESSAGE, status="incomplete", incomplete_details={"reason": "max_output_tokens"}), "One moment", "length"),
        (response(status="incomplete", incomplete_details={"reason": "content_filter"}), "", "content_filter"),
        (response(MESSAGE, status="incomplete"), "One moment", "incomplete"),
        (response(status="queued"), "", "queued"),
        (response({**MESSAGE, "content": [{"type": "refusal", "refusal": "I must not"}]}), "I must not", "stop"),
        (response({**MESSAGE, "phase": "commentary"}, {**MESSAGE, "phase": "final_answer", "content": [{**TEXT, "text": "42"}]}), "42", "stop"),
        (response({**MESSAGE, "phase": "commentary"}), "One moment", "stop"),
        (response(MESSAGE, error={"code": None, "message": ""}), "One moment", "stop"),
        (response({**MESSAGE, "content": None}), "", "stop"),
    ],
)  # fmt: skip
def test_text_and_end_are_read_in_every_form(body: dict[str, Any], text: str, reason: str) -> None:
    """S-RSP-9: also refusals, answers in phases, and incomplete ones."""
    answer = read(body)
    assert (answer.text, answer.finish_reason, answer.usage) == (text, reason, None)


@pytest.mark.parametrize(
    ("body", "said", "has_failed"),
    [
        (response(status="failed"), "the answer ended with status 'failed'", True),
        (response(status="cancelled"), "the answer ended with status 'cancelled'", True),
        (response(status="incomplete", incomplete_details={"reason": "server_error"}), "finish_reason 'server_error'", True),
        (response(status="failed", error={"code": "server_error", "message": "broke"}), "broke", False),
        (response({"type": "web_search_call", "id": "ws", "status": "completed"}), "it has a web_search_call, a call of a built-in", False),
        (response({"type": "mcp_approval_request", "id": "a"}), "mcp_approval_request", False),
        ({"choices": [{"message": {"content": "hi"}}]}, "it has no list of output items", False),
        (response(3), "it has no list of output items", False),
        ({"output": {"a": 1}}, "it has no list of output items", False),
        ([1], "it is not a JSON object", False),
        (response(*[CALL] * 1001), "more than 1000 tool calls", False),
    ],
)  # fmt: skip
def test_the_error_says_what_is_wrong_with_an_answer(body: object, said: str, *, has_failed: bool) -> None:
    """S-RSP-8, S-RSP-11: a failure of the provider is worth another attempt, another form is not."""
    with pytest.raises(WireError, match=said) as caught:
        read(body)
    assert isinstance(caught.value, AnswerFailedError) == has_failed


# Streams.


def feed(assembler: ResponseAssembler, *events: object) -> list[str]:
    """The fragments of events; those of reasoning are marked."""
    fragments: list[str] = []
    for event in events:
        fragment = assembler.feed_data(json.dumps(event).encode())
        fragments += [Reasoning(assembler.reasoning_fragment)] if assembler.reasoning_fragment else []
        fragments += [fragment] if fragment else []
    return fragments


def delta(kind: str, text: str, place: int, **more: object) -> dict[str, object]:
    """A delta."""
    return {"type": f"response.{kind}.delta", "output_index": place, "delta": text, **more}


def item(kind: str, data: object, place: int) -> dict[str, object]:
    """An item that begins or ends."""
    return {"type": f"response.output_item.{kind}", "output_index": place, "item": data}


PIECES = [
    {"type": "response.created", "response": response(status="in_progress")},
    item("added", {"type": "reasoning", "id": "rs_1", "summary": []}, 0),
    delta("reasoning_summary_text", "I ", 0, summary_index=0),
    {"type": "keepalive", "sequence_number": 3},
    delta("reasoning_summary_text", "look", 0, summary_index=0),
    delta("reasoning_summary_text", "it up", 0, summary_index=1),
    item("done", THOUGHT, 0),
    item("added", {**MESSAGE, "content": []}, 1),
    delta("output_text", "One ", 1, content_index=0),
    delta("output_text", "moment", 1, content_index=0),
    item("added", {**CALL, "arguments": ""}, 2),
    delta("function_call_arguments", '{"q": ', 2),
    delta("function_call_arguments", '"tide"}', 2),
]
FRAGMENTS = ["I ", "look", "\n\nit up", "One ", "moment"]
END = {"type": "response.completed", "response": response(THOUGHT, MESSAGE, CALL, usage=USAGE)}


def test_the_last_event_has_the_answer() -> None:
    """S-RSP-10: with fragments before it, and none of its own."""
    assembler = ResponseAssembler(origin=HERE)
    fragments = feed(assembler, *PIECES)
    assert fragments == FRAGMENTS
    assert [isinstance(each, Reasoning) for each in fragments] == [True, True, True, False, False]
    assert not assembler.is_ended
    assert feed(assembler, END) == []
    assert assembler.is_ended
    assert assembler.finish() == read(END["response"])


def test_the_items_are_the_answer_when_the_last_event_has_none() -> None:
    """S-RSP-10: some servers leave them out there."""
    assembler = ResponseAssembler(origin=HERE)
    feed(assembler, *PIECES, item("done", MESSAGE, 1), item("done", CALL, 2))
    feed(assembler, {"type": "response.completed", "response": response(usage=USAGE)})
    assert assembler.finish() == read(END["response"])


@pytest.mark.parametrize(
    "events",
    [
        [item("done", THOUGHT, 0), item("done", MESSAGE, 1), {"type": "response.completed", "response": response(THOUGHT, MESSAGE)}],
        [item("done", THOUGHT, 0), item("done", MESSAGE, 1)],
    ],
)  # fmt: skip
def test_a_text_without_deltas_is_one_fragment(events: list[object]) -> None:
    """S-RSP-10."""
    assembler = ResponseAssembler()
    assert feed(assembler, *events) == ["I look\n\nit up", "One moment"]
    alone = ResponseAssembler()
    assert feed(alone, {"type": "response.completed", "response": response(MESSAGE)}) == ["One moment"]


def test_the_pieces_are_the_answer_when_the_stream_is_cut() -> None:
    """S-RSP-10, S-LLM-8: nothing of it goes back to the provider, which did not finish it."""
    for count in range(9, len(PIECES) + 1):
        assembler = ResponseAssembler(origin=HERE)
        feed(assembler, *PIECES[:count])
        arguments = "".join(str(each["delta"]) for each in PIECES[11:count])
        calls = () if count < 11 else (ToolCall("c1", "find", arguments),)
        text = "One moment" if count > 9 else "One "
        cut = ChatResponse(text, calls, None, "stream_cut", reasoning="I look\n\nit up")
        assert assembler.finish() == cut
    assembler.feed_data(b" [DONE] ")
    assert assembler.finish().finish_reason == "tool_calls"
    empty = ResponseAssembler()
    feed(empty, *PIECES[:7])
    with pytest.raises(AnswerFailedError, match="without a single piece"):
        empty.finish()


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            b'{"type": "error", "code": "rate_limit_exceeded", "message": "slow down", "sequence_number": 1}',
            "slow down",
        ),
        (b'{"type": "error", "error": {"code": "server_error", "message": "broke"}}', "broke"),
        (b'{"error": {"message": "broke"}}', "broke"),
        (b'{"code": 503, "message": "no capacity"}', "no capacity"),
        (b'{"choices": [{"delta": {"content": "hi"}}]}', "is no event of the Responses API"),
        (b'{"type": "response.completed"}', "is no event of the Responses API"),
        (b'{"type": "response.output_text.delta"}', "is no event of the Responses API"),
        (b'{"type": "response.output_item.done", "item": [1]}', "is no event of the Responses API"),
        (b"3", "a piece of the stream is not a JSON object: 3"),
        (b"nonsense", "a piece of the stream is not JSON: nonsense"),
    ],
)
def test_the_error_says_what_came_when_it_is_no_event(event: bytes, said: str) -> None:
    """S-RSP-11, S-STR-5."""
    with pytest.raises(WireError, match=said):
        ResponseAssembler().feed_data(event)


def test_a_failed_response_ends_the_stream_with_its_error() -> None:
    """S-RSP-11: with the status of its code."""
    assembler = ResponseAssembler()
    failed = response(MESSAGE, status="failed", error={"code": "rate_limit_exceeded", "message": "slow down"})
    assert feed(assembler, {"type": "response.failed", "response": failed}) == []
    with pytest.raises(WireError, match="slow down") as caught:
        assembler.finish()
    assert b"rate_limit_exceeded" in caught.value.provider_error


def test_items_of_a_stream_are_limited() -> None:
    """S-SEC-53: as tool calls are."""
    assembler = ResponseAssembler(AnswerLimits(tool_calls=2))
    feed(assembler, item("added", CALL, 0), item("added", CALL, 1))
    with pytest.raises(TooMuchError, match="more than 2 tool calls"):
        feed(assembler, item("added", CALL, 2))


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*MESSAGE, *CALL, *TEXT, *THOUGHT]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
TYPES = st.sampled_from(["message", "function_call", "reasoning", "output_text", "refusal", "compaction"])
ITEMS = st.builds(lambda kind, members: {**members, "type": kind}, TYPES, st.dictionaries(st.sampled_from([*MESSAGE, *CALL, *THOUGHT]), VALUES, max_size=5))  # fmt: skip
BODIES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("status", "error", "incomplete_details", "usage", "store"), VALUES) | {"output": st.lists(ITEMS | VALUES, max_size=4) | VALUES},
)  # fmt: skip
KINDS = st.sampled_from([
    *("response.output_item.added", "response.output_item.done", "response.output_text.delta", "response.failed"),
    *("response.function_call_arguments.delta", "response.reasoning_text.delta", "response.completed", "error", "ping"),
])  # fmt: skip
EVENTS = st.builds(
    lambda kind, members: {**members, "type": kind},
    KINDS,
    st.fixed_dictionaries({}, optional={"delta": VALUES, "output_index": VALUES, "item": ITEMS | VALUES, "response": BODIES | VALUES, "error": VALUES}),
)  # fmt: skip


@given(BODIES | VALUES)
def test_any_answer_is_read_or_refused(body: object) -> None:
    """S-SEC-53: no other error, and no answer that cannot be sent back."""
    try:
        answer = read(body)
    except (WireError, TooMuchError):
        return
    json.loads(encode_request(b'"model":"m"', in_conversation(answer), (), origin=HERE, api=RESPONSES))


@given(st.lists(EVENTS | VALUES, max_size=6))
def test_any_stream_is_read_or_refused(events: list[object]) -> None:
    """S-SEC-53."""
    assembler = ResponseAssembler(origin=HERE)
    try:
        feed(assembler, *events)
        assembler.finish()
    except (WireError, TooMuchError):
        pass


def test_usage_is_known_in_part() -> None:
    """S-RSP-9, S-SET-11: what is missing or no count is unknown."""
    assert read(response(MESSAGE, usage={"input_tokens": 3, "output_tokens": "x"})).usage == TokenUsage(3, -1)
