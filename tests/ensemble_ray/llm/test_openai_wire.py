"""The protocol as bytes: what goes out, what comes back, what is refused."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import ChatMessage, ChatResponse, ProviderFields, TokenUsage, ToolCall, ToolSpec
from ensemble_ray.llm.protocol.wire import (
    AnswerFailedError,
    AnswerLimits,
    EncodedPieces,
    SseParser,
    StreamAssembler,
    TooMuchError,
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

    def encode(message: ChatMessage) -> str | None:
        encoded.append(message)
        return message.content

    pieces = EncodedPieces(limit_bytes=1000)
    first, second = ChatMessage("user", "a"), ChatMessage("user", "a")
    for conversation in ([first], [first, second], [first, second]):
        assert [pieces.get(message, encode) for message in conversation] == [b'"a"'] * len(conversation)
    assert [id(message) for message in encoded] == [id(first), id(second)]


def test_the_oldest_pieces_are_forgotten_when_the_bound_is_reached() -> None:
    """Memory for encoded messages is bounded in bytes."""
    pieces = EncodedPieces(limit_bytes=10)
    for text in ("aaaa", "bbbb", "cccc", "x" * 50):
        assert pieces.get(ChatMessage("user", text), lambda message: message.content) == f'"{text}"'.encode()
    assert len(pieces) == 0


@given(st.text(), st.text())
def test_any_text_survives_when_sent(content: str, arguments: str) -> None:
    """S-CONV-21: content is carried as it is; beside tool calls a blank one is null (S-LLM-9)."""
    message = ChatMessage("assistant", content, (ToolCall("1", "t", json.dumps({"a": arguments})),))
    body = json.loads(encode_request(PREFIX, [message, USER, USER], ()))
    assert body["messages"][0]["content"] == (content if content.strip() else None)
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
        (answer({"content": "", "refusal": "I will not"}), ChatResponse("I will not")),
        (answer({"content": [], "refusal": "I will not"}), ChatResponse("I will not")),
        (answer({"content": "yes", "refusal": "no"}), ChatResponse("yes")),
        (answer({"content": "", "refusal": None}), ChatResponse("")),
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


EVENTS = (
    b'\xef\xbb\xbfdata: {"a": 1}\n\n: comment\n\nevent: x\nid: 7\nretry: 5\ndata: {"b":\ndata: 2}\r\n\r\n'
    b"data: \n\ndata\n\nevent: ping\ndata: anything\n\nid: 8\n\r\n"
    b'data: {"c": 3}\r\r\nevent: heartbeat\rdata: {}\r\rdata:[DONE]\n\n'
)
DATA = [b'{"a": 1}', b'{"b":\n2}', b'{"c": 3}', b"[DONE]"]


@given(st.lists(st.integers(0, len(EVENTS)), max_size=8))
def test_events_are_found_when_the_bytes_come_cut_anywhere(cuts: list[int]) -> None:
    """S-STR-8, S-LLM-13: pieces are read as they come, wherever the network cuts them; pings and empty events are none."""
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
    assert (assembler.reasoning_fragment or None, fragment) == (reasoning, text)
    assembler.feed(chunk({}))
    assert assembler.reasoning_fragment == ""
    whole = assembler.finish()
    assert (whole.reasoning, whole.text) == (reasoning, text)


@pytest.mark.parametrize(
    ("counts", "cached", "written"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 64}}, 64, -1),  # OpenAI
        ({"prompt_tokens_details": {"cached_tokens": 0}}, 0, -1),
        ({"prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 40}}, 60, 40),  # OpenRouter
        ({"prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 36}, 64, -1),  # DeepSeek
        ({"cached_tokens": 64}, 64, -1),  # Moonshot
        ({"cache_read_input_tokens": 10, "cache_creation_input_tokens": 90}, 10, 90),  # Anthropic's, by a gateway
        ({"prompt_tokens_details": None, "prompt_cache_hit_tokens": 64}, 64, -1),
        ({"prompt_tokens_details": {"cached_tokens": None}}, -1, -1),
        ({"prompt_tokens_details": {"cached_tokens": 101}}, -1, -1),  # more than the whole prompt
        ({"prompt_tokens_details": {"cached_tokens": "64"}}, -1, -1),
        ({"prompt_tokens_details": [64]}, -1, -1),
        ({}, -1, -1),
    ],
)
def test_cached_tokens_are_read_in_all_the_forms_of_endpoints(
    counts: dict[str, object], cached: int, written: int
) -> None:
    """S-PRC-1: of whole answers and of streams."""
    usage = {"prompt_tokens": 100, "completion_tokens": 5, **counts}
    expected = TokenUsage(100, 5, -1, cached, written)
    assert decode_completion(answer({"content": "42"}, usage=usage)).usage == expected
    assembler = StreamAssembler()
    assembler.feed(chunk({"content": "42"}))
    assembler.feed({"choices": [], "usage": usage})
    assembler.feed_data(b"[DONE]")
    assert assembler.finish().usage == expected


def chunk(delta: object, **more: object) -> dict[str, object]:
    """A chunk with that delta."""
    return {"choices": [{"index": 0, "delta": delta}], **more}


def test_fragments_make_the_text_when_streamed() -> None:
    """S-STR-3: the final text is the concatenation of the fragments; usage comes in its own chunk."""
    assembler = StreamAssembler()
    deltas = [{"role": "assistant", "content": None}, {"content": "Hel"}, {"content": "lo"}, {}]
    assert [assembler.feed(chunk(delta)) for delta in deltas] == ["", "Hel", "lo", ""]
    assert assembler.feed({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}) == ""
    assert assembler.feed_data(b" [DONE] ") == ""
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
    assembler.feed_data(b"[DONE]")
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
    assembler.feed_data(b"[DONE]")
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


@pytest.mark.parametrize("said", ["message", "delta"])
def test_an_error_in_a_choice_that_failed_is_worth_another_attempt(said: str) -> None:
    """S-LLM-7, S-LLM-20: also where it has no code; the text is the provider's."""
    choice = {said: {"content": ""}, "finish_reason": "error", "error": {"message": "upstream broke"}}
    raw = json.dumps({"choices": [choice]}).encode()
    with pytest.raises(AnswerFailedError, match=r"^upstream broke$"):
        _ = decode_completion(raw) if said == "message" else StreamAssembler().feed_data(raw)
    refused = json.dumps({"choices": [{**choice, "finish_reason": "stop"}]}).encode()
    with pytest.raises(WireError, match=r"^upstream broke$") as caught:
        decode_completion(refused)
    assert not isinstance(caught.value, AnswerFailedError)


def test_an_error_beside_a_piece_counts_when_it_says_something() -> None:
    """S-LLM-20: a piece is no whole answer; an error without status and message is none."""
    assembler = StreamAssembler()
    for empty in (None, {}, "", {"code": None, "message": ""}):
        assert assembler.feed(chunk({"content": "x"}, error=empty)) == "x"
    with pytest.raises(WireError, match=r"^upstream broke$"):
        assembler.feed(chunk({"content": "x"}, error={"message": "upstream broke"}))
    with pytest.raises(WireError):
        assembler.feed(chunk({"content": "x"}, error={"code": 502}))


def test_an_empty_stream_is_an_error_when_nothing_of_an_answer_came() -> None:
    """S-STR-10 speaks of answers; a stream without any piece of one is none, and is worth another attempt (S-LLM-8)."""
    with pytest.raises(AnswerFailedError, match="without a single piece"):
        StreamAssembler().finish()
    empty = StreamAssembler()
    empty.feed(chunk({"role": "assistant", "content": ""}))
    with pytest.raises(AnswerFailedError, match="without a single piece"):
        empty.finish()


@pytest.mark.parametrize("ping", [{}, {"type": "ping"}, {"event": "keepalive"}, {"heartbeat": 3}, None])
def test_a_ping_is_no_piece_of_an_answer_when_it_is_an_object(ping: object) -> None:
    """S-LLM-13: it is left out; a stream of pings alone is no answer."""
    assembler = StreamAssembler()
    assert [assembler.feed(each) for each in (ping, chunk({"content": "x"}, usage=None), ping)] == ["", "x", ""]
    assembler.feed_data(b"[DONE]")
    assert assembler.finish() == ChatResponse("x")
    alone = StreamAssembler()
    alone.feed(ping)
    with pytest.raises(AnswerFailedError, match="without a single piece"):
        alone.finish()


@pytest.mark.parametrize("empty", [{"choices": []}, {"choices": None}, {"choices": [{"index": 0, "delta": None}]}])
def test_a_piece_without_content_is_borne_when_it_comes_anywhere(empty: object) -> None:
    """S-LLM-13: results of content filters, roles and usage come in such pieces."""
    assembler = StreamAssembler()
    pieces = [empty, chunk({"content": "x"}), empty, {"choices": [{"delta": {"tool_calls": [None]}}]}]
    assert [assembler.feed(each) for each in pieces] == ["", "x", "", ""]


def test_a_whole_message_is_read_when_it_is_the_only_piece() -> None:
    """S-LLM-12: some servers send their completion as one event."""
    assembler = StreamAssembler()
    assert assembler.feed({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}) == "hi"
    assembler.feed({"choices": [{"delta": {}, "message": {"content": "hi"}}]})
    assert assembler.finish() == ChatResponse("hi", finish_reason="stop")


def test_a_message_at_the_end_adds_only_what_no_piece_had() -> None:
    """S-LLM-12: reasoning, members, text and calls that pieces had are not added again."""
    whole = {"content": "hi", "reasoning_content": "think", "audience": "me", "tool_calls": [LOOK]}
    for name, streamed in whole.items():
        assembler = StreamAssembler(origin=HERE)
        assembler.feed(chunk({name: streamed}))
        assembler.feed({"choices": [{"message": whole, "finish_reason": "stop"}]})
        found = assembler.finish()
        assert (found.text, found.reasoning, len(found.tool_calls)) == ("hi", "think", 1), name
        sent = cast("dict[str, object]", sent_back(found, HERE))
        assert (sent["audience"], sent["reasoning_content"]) == ("me", "think"), name
    assembler = StreamAssembler()
    assembler.feed(chunk({"reasoning": "think"}))
    assembler.feed({"choices": [{"message": {"content": "hi", "reasoning_content": "think"}}]})
    assert (assembler.finish().reasoning, assembler.reasoning_fragment) == ("think", "")


@pytest.mark.parametrize("data", [b'{"type": "ping"}', b"{}", b"null", b"[DONE]", b'{"choices": []}'])
def test_a_thought_is_sent_once_when_an_event_without_one_follows(data: bytes) -> None:
    """S-LLM-3, S-LLM-13: whatever the next event is."""
    assembler = StreamAssembler()
    assembler.feed(chunk({"reasoning_content": "think"}))
    assembler.feed_data(data)
    assert assembler.reasoning_fragment == ""


def test_one_answer_is_read_when_the_request_asked_for_several() -> None:
    """S-LLM-13: pieces of two answers are not mixed."""
    assembler = StreamAssembler()
    for index, text in ((0, "a"), (1, "x"), (0, "b"), (1, "y")):
        assembler.feed({"choices": [{"index": index, "delta": {"content": text}}]})
    assert assembler.finish().text == "ab"


def piece(index: int | None, call_id: str | None, name: str | None, arguments: str) -> dict[str, object]:
    """A piece of a tool call; what is None is left out."""
    function = {"arguments": arguments, **({} if name is None else {"name": name})}
    entry: dict[str, object] = {"function": function}
    return {**entry, **({} if index is None else {"index": index}), **({} if call_id is None else {"id": call_id})}


TWO = [("weather", '{"city":"Oslo"}'), ("weather", '{"city":"Rome"}')]
STREAMED_CALLS = {
    "new ids": ([piece(0, "a", *TWO[0]), piece(0, "b", *TWO[1])], TWO),
    "new ids, in pieces": (
        [
            piece(0, "a", "weather", '{"city":'),
            piece(0, None, None, '"Oslo"}'),
            piece(0, "b", "weather", ""),
            piece(0, "b", None, TWO[1][1]),
        ],
        TWO,
    ),
    "new names": ([piece(0, None, "t", "{}"), piece(0, None, "u", "{}")], [("t", "{}"), ("u", "{}")]),
    "one id, new names": ([piece(0, "a", "t", "{}"), piece(0, "a", "u", "{}")], [("t", "{}"), ("u", "{}")]),
    "no ids": ([piece(0, "", *TWO[0]), piece(0, "", *TWO[1])], TWO),
    "id and name repeated": (
        [piece(0, "a", "t", '{"x"'), piece(0, "a", "t", ":1"), piece(0, "a", "t", "}")],
        [("t", '{"x":1}')],
    ),
    "name repeated": (
        [piece(0, None, "t", '{"x"'), piece(0, None, "t", ':{"y":1}'), piece(0, None, "t", "}")],
        [("t", '{"x":{"y":1}}')],
    ),
    "an id for each piece": (
        [piece(0, "a", "t", '{"x"'), piece(0, "b", None, ":1}"), piece(0, "c", None, "")],
        [("t", '{"x":1}')],
    ),
    "no index, id repeated": (
        [piece(None, "a", "t", '{"x"'), piece(None, "a", "t", ":1}"), piece(None, "b", "t", "{}")],
        [("t", '{"x":1}'), ("t", "{}")],
    ),
    "no index, ids in turn": (
        [
            piece(None, "a", "t", "{"),
            piece(None, "b", "u", "{"),
            piece(None, "a", None, "}"),
            piece(None, "b", None, "}"),
        ],
        [("t", "{}"), ("u", "{}")],
    ),
    "no index": ([piece(None, None, *TWO[0]), piece(None, None, *TWO[1])], TWO),
}


@pytest.mark.parametrize("name", STREAMED_CALLS)
def test_calls_are_told_apart_when_servers_number_them_in_their_own_way(name: str) -> None:
    """S-LLM-11: a new id or name under an index in use begins a call; what is repeated in each piece continues it."""
    pieces, expected = STREAMED_CALLS[name]
    assembler = StreamAssembler()
    for each in pieces:
        assembler.feed(chunk({"tool_calls": [each]}))
    calls = assembler.finish().tool_calls
    assert [(call.name, call.arguments) for call in calls] == expected
    together = StreamAssembler()
    together.feed(chunk({"tool_calls": pieces}))
    assert [(call.name, call.arguments) for call in together.finish().tool_calls] == expected


HERE, ELSEWHERE = "http://here/v1 m", "http://elsewhere/v1 m"
THOUGHT = {"reasoning_content": "I look", "extra_content": {"google": {"thought_signature": "sig"}}}
LOOK = {
    "id": "a",
    "type": "function",
    "function": {"name": "t", "arguments": "{}", "signature": "s"},
    "extra_content": {"x": [1]},
}


def sent_back(response: ChatResponse, origin: str, *, calls: bool = True) -> Mapping[str, object]:
    """The message of an answer, as the next request has it."""
    message = ChatMessage(
        "assistant",
        response.text,
        response.tool_calls if calls else (),
        provider_fields=response.provider_fields,
    )
    body = json.loads(encode_request(PREFIX, [SYSTEM, USER, message], (), origin=origin))
    return cast("Mapping[str, object]", body["messages"][2])


def test_members_go_back_when_the_history_goes_to_the_endpoint_that_sent_them() -> None:
    """S-LLM-9: members that only the provider knows, those of calls and of their functions too; nowhere else."""
    raw = answer({"content": "", "refusal": None, "annotations": [], **THOUGHT, "tool_calls": [LOOK]})
    response = decode_completion(raw, origin=HERE)
    assert sent_back(response, HERE) == {"role": "assistant", "content": None, **THOUGHT, "tool_calls": [LOOK]}
    plain = {"id": "a", "type": "function", "function": {"name": "t", "arguments": "{}"}}
    for other in (ELSEWHERE, ""):
        assert sent_back(response, other) == {"role": "assistant", "content": None, "tool_calls": [plain]}
    assert pickle.loads(pickle.dumps(response)) == response  # noqa: S301  our own bytes
    assert hash(response.provider_fields)


def test_reasoning_goes_back_only_when_its_message_asks_for_tools() -> None:
    """S-LLM-9: endpoints that want it back there refuse it elsewhere; other members go back with any message."""
    raw = answer({"content": "hi", **THOUGHT})
    expected = {"role": "assistant", "content": "hi", "extra_content": THOUGHT["extra_content"]}
    assert sent_back(decode_completion(raw, origin=HERE), HERE) == expected
    with_calls = decode_completion(answer({"content": "hi", **THOUGHT, "tool_calls": [LOOK]}), origin=HERE)
    assert sent_back(with_calls, HERE, calls=False) == expected
    assert (
        decode_completion(answer({"content": "hi", "reasoning": "hm", "audio": None}), origin=HERE).provider_fields
        is None
    )


@pytest.mark.parametrize("fields", ["[1]", "no JSON", "[" * 100_000, '{"content": "x", "role": "user"}'])
def test_a_message_goes_out_when_a_record_has_other_members_than_an_object(fields: str) -> None:
    """S-LLM-9: what is no object is left out, and members of the protocol stay as they are."""
    message = ChatMessage("assistant", "hi", provider_fields=ProviderFields(origin=HERE, message=fields))
    body = json.loads(encode_request(PREFIX, [message], (), origin=HERE))
    assert body["messages"] == [{"role": "assistant", "content": "hi"}]


def test_members_are_merged_when_they_are_streamed() -> None:
    """S-LLM-9: texts are joined, objects merged, items continued by their index, and other values replaced."""
    detail = {"type": "reasoning.text", "format": "f", "index": 0}
    deltas: list[dict[str, object]] = [
        {"reasoning_content": "I ", "reasoning_details": [{**detail, "text": "a"}], "n": 1, "none": None},
        {
            "reasoning_content": "look",
            "reasoning_details": [{**detail, "text": "b"}, {"type": "x", "index": 0}],
            "n": 2,
        },
        {
            "reasoning_details": [{"index": 0, "type": "reasoning.text", "signature": "s"}, "odd"],
            "extra": {"a": {"b": "c"}},
        },
        {"extra": {"a": {"b": "d", "e": True}}, "tool_calls": [{"index": 0, **LOOK}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "", "signature": "t"}}]},
    ]
    assembler = StreamAssembler(origin=HERE)
    for each in deltas:
        assembler.feed(chunk(each))
    expected = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look",
        "reasoning_details": [{**detail, "text": "ab", "signature": "s"}, {"type": "x", "index": 0}, "odd"],
        "n": 2,
        "extra": {"a": {"b": "cd", "e": True}},
        "tool_calls": [{**LOOK, "function": {"name": "t", "arguments": "{}", "signature": "st"}}],
    }
    assert sent_back(assembler.finish(), HERE) == expected


def test_a_member_is_kept_once_when_each_piece_repeats_it() -> None:
    """S-LLM-9: a constant is no text in pieces; pieces of reasoning may be equal."""
    assembler = StreamAssembler(origin=HERE)
    for _ in range(3):
        call = {"index": 0, **LOOK, "group": {"lane": "a"}}
        assembler.feed(chunk({"channel": "analysis", "reasoning_content": "ha", "tool_calls": [call]}))
    sent = cast("dict[str, Any]", sent_back(assembler.finish(), HERE))
    assert (sent["channel"], sent["reasoning_content"]) == ("analysis", "hahaha")
    assert sent["tool_calls"][0]["group"] == {"lane": "a"}


def test_members_are_refused_when_they_are_longer_than_an_answer() -> None:
    """S-LLM-9, S-SEC-51: the limit counts the members of all pieces."""
    assembler = StreamAssembler(AnswerLimits(body_bytes=1000))
    for _ in range(20):
        assembler.feed(chunk({"reasoning_content": "x" * 20}))
    with pytest.raises(TooMuchError, match="1000 bytes"):
        assembler.feed(chunk({"extra": {"a": "x" * 20, "b": ["x" * 20] * 20}}))


def test_the_encoded_form_fits_when_one_history_goes_to_two_endpoints() -> None:
    """S-LLM-9: what is kept of a message for one endpoint is not sent to the other."""
    response = decode_completion(answer({"content": "hi", "signature": "s"}), origin=HERE)
    message = ChatMessage("assistant", "hi", provider_fields=response.provider_fields)
    for origin in (HERE, ELSEWHERE, HERE):
        body = json.loads(encode_request(PREFIX, [SYSTEM, USER, message], (), origin=origin))
        assert ("signature" in body["messages"][2]) == (origin == HERE)


def ids_sent(messages: Sequence[ChatMessage]) -> list[object]:
    """Ids of calls and of results, in the order of the request."""
    sent = json.loads(encode_request(PREFIX, messages, ()))["messages"]
    return [[call["id"] for call in each.get("tool_calls", ())] or each.get("tool_call_id") for each in sent]


def turn(*ids: str) -> list[ChatMessage]:
    """A turn of a tool loop: calls with these ids, and their results."""
    calls = tuple(ToolCall(each, "t", "{}") for each in ids)
    return [ChatMessage("assistant", None, calls), *(ChatMessage("tool", "r", (), each, "t") for each in ids)]


@pytest.mark.parametrize(
    ("turns", "sent"),
    [
        ([turn("a", "b"), turn("c")], [["a", "b"], "a", "b", ["c"], "c"]),
        ([turn("call_0"), turn("call_0")], [["call_0"], "call_0", ["call00001"], "call00001"]),
        ([turn("a", "a")], [["a", "call00001"], "a", "call00001"]),
        ([turn("", " ")], [["call00001", "call00002"], "call00001", "call00002"]),
        ([turn("call00001"), turn("")], [["call00001"], "call00001", ["call00002"], "call00002"]),
    ],
)
def test_each_call_has_an_id_of_its_own_when_a_request_is_sent(
    turns: list[list[ChatMessage]], sent: list[object]
) -> None:
    """S-LLM-10: ids that are missing or repeated are replaced, and results have those of their calls."""
    messages = [message for each in turns for message in each]
    assert ids_sent(messages) == sent
    assert ids_sent([*messages, *turn("z")])[: len(sent)] == sent


def test_a_result_keeps_its_id_when_no_call_has_it() -> None:
    """S-LLM-10: such a history is the endpoint's to refuse."""
    assert ids_sent([ChatMessage("tool", "r", (), "x"), *turn("a"), ChatMessage("tool", "again", (), "a")]) == [
        "x", ["a"], "a", "a",
    ]  # fmt: skip


BODY = (
    b"".join(
        b"data: %s\n\n" % json.dumps(chunk(each)).encode()
        for each in (
            {"role": "assistant", "content": "Caf\u00e9 ", **THOUGHT},
            {"content": "au lait", "reasoning_content": " again"},
            {"tool_calls": [piece(0, "a", *TWO[0])]},
            {"tool_calls": [piece(0, "b", "weather", TWO[1][1][:5])]},
            {"tool_calls": [piece(0, None, None, TWO[1][1][5:])]},
        )
    )
    + b"event: ping\r\ndata: \r\n\r\ndata: [DONE] \r\n\r\n"
)


@given(st.lists(st.integers(0, len(BODY)), max_size=12))
def test_the_answer_is_the_same_when_the_bytes_come_cut_anywhere(cuts: list[int]) -> None:
    """S-STR-8, S-LLM-9, S-LLM-11: text, calls, members and end."""
    parser, assembler = SseParser(), StreamAssembler(origin=HERE)
    for start, stop in itertools.pairwise([0, *sorted(cuts), len(BODY)]):
        for data in parser.feed(BODY[start:stop]):
            assembler.feed_data(data)
    response = assembler.finish()
    assert (response.text, response.finish_reason) == ("Caf\u00e9 au lait", None)
    assert [(call.id, call.name, call.arguments) for call in response.tool_calls] == [("a", *TWO[0]), ("b", *TWO[1])]
    assert sent_back(response, HERE)["reasoning_content"] == "I look again"
