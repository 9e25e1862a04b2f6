"""The protocol as bytes: what goes out, what comes back, what is refused."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import ChatMessage, ChatResponse, TokenUsage, ToolCall, ToolSpec
from ensemble_ray.llm.protocol.stream import SseParser, StreamAssembler
from ensemble_ray.llm.protocol.wire import (
    EncodedPieces,
    WireError,
    decode_completion,
    encode_request,
    json_bytes,
)

PREFIX = b'"model":"m"'
SYSTEM, USER = ChatMessage("system", "Be brief"), ChatMessage("user", "hello")


def answer(message: object, **more: object) -> bytes:
    """A completion with that message."""
    return json.dumps({"choices": [{"message": message}], **more}).encode()


def test_the_request_carries_no_tool_field_when_no_tools_are_offered() -> None:
    """S-CONV-24: with none the body has no `tools`; S-CONV-25: the messages are exactly those given."""
    body = json.loads(encode_request(PREFIX, [SYSTEM, USER], ()))
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hello"}],
    }


def test_tools_travel_beside_the_messages_when_offered() -> None:
    """S-CONV-25, S-SET-7: name, description and JSON schema, in `tools` only."""
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    body = json.loads(encode_request(PREFIX, [USER], [ToolSpec("find", "Finds", schema), ToolSpec("now", "Tells")]))
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["tools"] == [
        {"type": "function", "function": {"name": "find", "description": "Finds", "parameters": schema}},
        {
            "type": "function",
            "function": {"name": "now", "description": "Tells", "parameters": {"type": "object", "properties": {}}},
        },
    ]


def test_a_tool_turn_is_sent_whole_when_the_loop_goes_on() -> None:
    """S-CONV-21, S-ENG-32: the request of a tool with its id, the result with the same id."""
    call = ToolCall("c1", "find", '{"q": "tide"}')
    turn = [SYSTEM, USER, ChatMessage("assistant", None, (call,)), ChatMessage("tool", "moon", (), "c1", "find")]
    assert json.loads(encode_request(PREFIX, turn, ()))["messages"][2:] == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "tide"}'}}
            ],
        },
        {"role": "tool", "content": "moon", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("raw", "sent"),
    [
        ("", {}),
        ("  ", {}),
        ("not json", {"unparsable": "not json"}),
        ("[1]", {"unparsable": "[1]"}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_arguments_go_back_as_an_object_when_the_model_sent_garbage(raw: str, sent: object) -> None:
    """S-CONV-21: the raw text is the caller's; what servers refuse in a history is not sent back to them."""
    body = json.loads(encode_request(PREFIX, [ChatMessage("assistant", "", (ToolCall("1", "t", raw),))], ()))
    assert json.loads(body["messages"][0]["tool_calls"][0]["function"]["arguments"]) == sent


def test_the_body_is_utf8_when_a_text_holds_half_of_a_surrogate_pair() -> None:
    """S-SEC-56: half of a pair goes out as U+FFFD, which every server reads; whole pairs and the rest stay."""
    assert json.loads(json_bytes({"a\udc00": "\ud800é"})) == {"a\ufffd": "\ufffdé"}
    assert json_bytes("é") == '"é"'.encode()
    assert json.loads(json_bytes("\ud83d\ude00")) == "\U0001f600"


def test_an_old_message_is_not_encoded_again_when_the_conversation_grows() -> None:
    """A tool loop sends its history each turn; the cost of a turn must not grow with the turns before it."""
    encoded: list[ChatMessage] = []

    def encode(message: ChatMessage) -> bytes:
        encoded.append(message)
        return (message.content or "").encode()

    pieces = EncodedPieces(limit_bytes=1000)
    first, second = ChatMessage("user", "a"), ChatMessage("user", "a")
    for conversation in ([first], [first, second], [first, second]):
        assert [pieces.get(message, encode) for message in conversation] == [b"a"] * len(conversation)
    assert [id(message) for message in encoded] == [id(first), id(second)]


def test_the_oldest_pieces_are_forgotten_when_the_bound_is_reached() -> None:
    """Memory for encoded messages is bounded in bytes."""
    pieces = EncodedPieces(limit_bytes=10)
    for text in ("aaaa", "bbbb", "cccc", "x" * 50):
        assert pieces.get(ChatMessage("user", text), lambda message: (message.content or "").encode()) == text.encode()
    assert len(pieces) == 0


@given(st.text(), st.text())
def test_any_text_survives_when_sent(content: str, arguments: str) -> None:
    """S-CONV-21: content is carried as it is."""
    message = ChatMessage("assistant", content, (ToolCall("1", "t", json.dumps({"a": arguments})),))
    body = json.loads(encode_request(PREFIX, [message, USER, USER], ()))
    assert body["messages"][0]["content"] == content
    assert json.loads(body["messages"][0]["tool_calls"][0]["function"]["arguments"]) == {"a": arguments}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            answer({"content": "hi"}, usage={"prompt_tokens": 3, "completion_tokens": 0}),
            ChatResponse("hi", (), TokenUsage(3, 0)),
        ),
        (answer({"content": None}), ChatResponse(None)),
        (answer({}), ChatResponse(None)),
        (answer({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}), ChatResponse("ab")),
        (answer({"content": None, "refusal": "I will not"}), ChatResponse("I will not")),
        (answer({"content": "x"}, usage={"prompt_tokens": None}), ChatResponse("x", (), TokenUsage(-1, -1))),
        (
            answer({"content": "", "tool_calls": [{"id": "1", "function": {"name": "t", "arguments": "{oops"}}]}),
            ChatResponse("", (ToolCall("1", "t", "{oops"),)),
        ),
        (
            answer({"tool_calls": [{"function": {"name": "t", "arguments": {"a": 1}}}, {"function": {"name": "u"}}]}),
            ChatResponse(None, (ToolCall("call_0", "t", '{"a":1}'), ToolCall("call_1", "u", ""))),
        ),
    ],
)
def test_an_answer_is_read_when_it_has_the_protocols_form(raw: bytes, expected: ChatResponse) -> None:
    """S-CONV-21, S-SET-11: text, raw arguments, usage with -1 for what is unknown; small differences are borne."""
    assert decode_completion(raw) == expected


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"<html>Bad gateway</html>", "it is not JSON: <html>Bad gateway</html>"),
        (b"[1, 2]", "it is not a JSON object: [1,2]"),
        (b'{"choices": []}', 'it has no choices with a message: {"choices":[]}'),
        (b'{"object": "list"}', 'it has no choices with a message: {"object":"list"}'),
        (b'{"error": {"message": "no credit"}}', "no credit"),
        (b'{"error": "no credit"}', "no credit"),
        (b"x" * 5000, f"it is not JSON: {'x' * 200}... [5000 characters in all]"),
        (b"\x1b[2J\nx", "it is not JSON: \\x1b[2J x"),
        (b"[" * 200_000, "it is JSON that is nested too deeply"),
    ],
)
def test_the_error_says_what_came_when_it_is_no_completion(raw: bytes, text: str) -> None:
    """A wrong answer is shown, cut to a line, and never an empty success."""
    with pytest.raises(WireError) as caught:
        decode_completion(raw)
    assert str(caught.value) == text


EVENTS = b'data: {"a": 1}\n\n: comment\n\nevent: x\ndata: {"b":\ndata: 2}\r\n\r\ndata:[DONE]\n\n'
DATA = [b'{"a": 1}', b'{"b":\n2}', b"[DONE]"]


@given(st.lists(st.integers(0, len(EVENTS)), max_size=8))
def test_events_are_found_when_the_bytes_come_cut_anywhere(cuts: list[int]) -> None:
    """S-STR-8: pieces are read as they come, wherever the network cuts them."""
    parser = SseParser()
    edges = [0, *sorted(cuts), len(EVENTS)]
    found = [data for start, stop in itertools.pairwise(edges) for data in parser.feed(EVENTS[start:stop])]
    assert found + list(parser.finish()) == DATA


def test_the_last_event_counts_when_the_stream_does_not_close_it() -> None:
    """Some servers end without the empty line."""
    parser = SseParser()
    assert list(parser.feed(b"data: x")) == []
    assert list(parser.finish()) == [b"x"]


@pytest.mark.parametrize(
    ("message", "reasoning", "text"),
    [
        ({"content": "42", "reasoning_content": "41?"}, "41?", "42"),
        ({"content": "42", "reasoning": "41?"}, "41?", "42"),
        (
            {"content": "42", "reasoning": "41?", "reasoning_details": [{"type": "reasoning.text", "text": "41?"}]},
            "41?",
            "42",
        ),
        ({"content": "42", "reasoning_content": None, "reasoning": {"effort": "low"}}, None, "42"),
        (
            {
                "content": "42",
                "reasoning_details": [
                    {"type": "reasoning.summary", "summary": "4"},
                    {"type": "reasoning.text", "text": "1?"},
                    {"type": "reasoning.encrypted", "data": "eA=="},
                ],
            },
            "41?",
            "42",
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": "4", "signature": "s"},
                    {"type": "redacted_thinking", "data": "eA=="},
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "1"}]},
                    {"type": "thinking", "thinking": [{"type": "text", "text": "?"}]},
                    {"type": "text", "text": "4"},
                    {"type": "output_text", "text": "2"},
                    {"type": "image", "text": None},
                ]
            },
            "41?",
            "42",
        ),
        ({"content": "<think>41?</think>42"}, None, "<think>41?</think>42"),
    ],
)
def test_reasoning_is_read_in_all_the_forms_of_endpoints(
    message: dict[str, object], reasoning: str | None, text: str
) -> None:
    """S-LLM-3: members and parts, in one piece and in a stream; tags are left to the task's runner."""
    usage = {"prompt_tokens": 1, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}}
    found = decode_completion(answer(message, usage=usage))
    assert (found.reasoning, found.text, found.usage) == (reasoning, text, TokenUsage(1, 5, 3))
    assembler = StreamAssembler()
    fragment = assembler.feed(chunk(message))
    assert (assembler.thought or None, fragment) == (reasoning, text)
    assembler.feed(chunk({}))
    assert assembler.thought == ""
    whole = assembler.finish()
    assert (whole.reasoning, whole.text) == (reasoning, text)


def chunk(delta: object, **more: object) -> dict[str, object]:
    """A chunk with that delta."""
    return {"choices": [{"index": 0, "delta": delta}], **more}


def test_fragments_make_the_text_when_streamed() -> None:
    """S-STR-3: the final text is the concatenation of the fragments; usage comes in its own chunk."""
    assembler = StreamAssembler()
    deltas = [{"role": "assistant", "content": None}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert [assembler.feed(chunk(delta)) for delta in deltas] == ["", "Hel", "lo", ""]
    assert assembler.feed({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}) == ""
    assert assembler.finish() == ChatResponse("Hello", (), TokenUsage(7, 2))


def test_tool_calls_are_assembled_when_they_come_in_pieces() -> None:
    """S-STR-2, S-SET-7: the closing response carries the calls, in order of their index."""
    assembler = StreamAssembler()
    pieces = [
        {"index": 1, "id": "b", "function": {"name": "u", "arguments": ""}},
        {"index": 0, "id": "a", "function": {"name": "t", "arguments": '{"x"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]
    for piece in pieces:
        assert assembler.feed(chunk({"tool_calls": [piece]})) == ""
    assert assembler.finish() == ChatResponse(None, (ToolCall("a", "t", '{"x": 1}'), ToolCall("b", "u", "{}")))


def test_tool_calls_are_assembled_when_the_server_sends_no_index() -> None:
    """S-STR-2: whole calls, one per piece, and pieces of the last one."""
    assembler = StreamAssembler()
    assembler.feed(chunk({"tool_calls": [{"function": {"name": "t", "arguments": {"x": 1}}}]}))
    assembler.feed(chunk({"tool_calls": [{"id": "z", "function": {"name": "u", "arguments": "{"}}]}))
    assembler.feed(chunk({"tool_calls": [{"function": {"arguments": "}"}}]}))
    assert assembler.finish().tool_calls == (ToolCall("call_0", "t", '{"x":1}'), ToolCall("z", "u", "{}"))


def test_usage_is_unknown_when_the_stream_names_none() -> None:
    """S-STR-10: complete, with unknown usage."""
    assembler = StreamAssembler()
    assembler.feed(chunk({"content": "x"}))
    assert assembler.finish() == ChatResponse("x", (), None)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"nonsense", "a piece of the stream is not JSON: nonsense"),
        (b"3", "a piece of the stream is not a JSON object: 3"),
        (b'{"error": {"message": "overloaded"}}', "overloaded"),
        (b'{"x": 1}', 'it has no choices with a message: {"x":1}'),
        (b'{"choices": [3]}', 'it has no choices with a message: {"choices":[3]}'),
    ],
)
def test_the_error_says_what_came_when_a_piece_is_no_chunk(data: bytes, text: str) -> None:
    """S-STR-5: a broken stream is an error with a text, not a short answer."""
    with pytest.raises(WireError) as caught:
        StreamAssembler().feed_data(data)
    assert str(caught.value) == text


def test_an_empty_stream_is_an_error_when_nothing_of_an_answer_came() -> None:
    """S-STR-10 speaks of answers; a stream without any piece of one is none."""
    with pytest.raises(WireError, match="without a single piece"):
        StreamAssembler().finish()
