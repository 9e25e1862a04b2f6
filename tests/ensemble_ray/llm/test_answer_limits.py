"""How much of an endpoint's answer is taken, and where a request may go."""

from __future__ import annotations

import json

import pytest

from ensemble_ray import OpenAIChatModel, ValidationError
from ensemble_ray.llm.protocol.transport import RedirectRefusedError, follow_redirect, is_redirect
from ensemble_ray.llm.protocol.wire import (
    AnswerLimits,
    SseParser,
    StreamAssembler,
    TooMuchError,
    WireError,
    decode_completion,
)

URL = "https://host/v1/chat/completions"


def test_events_are_counted_when_they_come() -> None:
    """S-SEC-51: the number of events is bounded."""
    parser = SseParser(AnswerLimits(events=3))
    assert len(list(parser.feed(b"data: 1\n\ndata: 2\n\ndata: 3\n\n"))) == 3
    with pytest.raises(TooMuchError, match="more than 3 events"):
        list(parser.feed(b"data: 4\n\n"))


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: y\n", b"data:\n"])
def test_an_event_is_refused_when_it_has_no_end(piece: bytes) -> None:
    """S-SEC-51: lines and events are bounded, empty lines of data too."""
    parser = SseParser(AnswerLimits(body_bytes=10_000))

    def feed() -> None:
        for _ in range(10_000):
            list(parser.feed(piece))

    with pytest.raises(TooMuchError, match="10000 bytes, the limit of one event"):
        feed()


def test_tool_calls_are_counted_when_an_answer_asks_for_many() -> None:
    """S-SEC-53: 1,000 in one answer, whole or streamed."""
    calls = [{"index": n, "function": {"name": "t"}} for n in range(1001)]
    for count, is_fine in ((1000, True), (1001, False)):
        body = json.dumps({"choices": [{"message": {"tool_calls": calls[:count]}}]}).encode()
        chunk = {"choices": [{"delta": {"tool_calls": calls[:count]}}]}
        if is_fine:
            assert len(decode_completion(body).tool_calls) == count
            assert StreamAssembler().feed(chunk) == ""
            continue
        with pytest.raises(WireError, match="more than 1000 tool calls"):
            decode_completion(body)
        with pytest.raises(TooMuchError, match="more than 1000 tool calls"):
            StreamAssembler().feed(chunk)


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/elsewhere", "https://host/elsewhere"),
        ("https://host:443/x", "https://host:443/x"),
        ("https://HOST/x", "https://HOST/x"),
        ("completions/", "https://host/v1/chat/completions/"),
    ],
)
def test_a_request_moves_when_the_place_is_of_the_same_origin(location: str, target: str) -> None:
    """S-SEC-54: scheme, host and port are the endpoint's own."""
    assert follow_redirect(URL, 307, location, followed=0) == target
    assert follow_redirect(URL, 308, location, followed=2) == target


@pytest.mark.parametrize(
    ("status", "location", "said"),
    [
        (307, "http://host/v1", "to another origin, http://host,"),
        (307, "https://host:8443/v1", "to another origin, https://host:8443,"),
        (308, "//evil.example/v1?key=1#x", "to another origin, https://evil.example,"),
        (307, "https://host@evil.example/", "to another origin, https://evil.example,"),
        (307, "https://[::1]:1/", "to another origin, https://[::1]:1,"),
        (307, "https://ho\x1bst/", r"to another origin, https://ho\x1bst,"),
        (307, "https://[::1", "to an invalid URL"),
        (307, "https://host:99999/", "to an invalid URL"),
        (307, "", "cannot follow"),
        (307, None, "cannot follow"),
        (302, "/v1", "cannot follow"),
        (304, None, "cannot follow"),
    ],
)
def test_a_redirect_is_refused_when_it_leads_elsewhere(status: int, location: str | None, said: str) -> None:
    """S-SEC-54: the text names the origin, cleaned, and what to do."""
    assert is_redirect(status)
    with pytest.raises(RedirectRefusedError) as caught:
        follow_redirect(URL, status, location, followed=0)
    assert said in str(caught.value)
    assert "`base_url`" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_redirect_is_refused_when_there_were_three() -> None:
    """S-SEC-54: nobody runs in circles."""
    with pytest.raises(RedirectRefusedError, match="more than 3 times"):
        follow_redirect(URL, 307, "/x", followed=3)


def test_limits_are_part_of_the_model_when_given() -> None:
    """S-SEC-50, S-SEC-52: they travel with it, and make another model of it."""
    model = OpenAIChatModel("m", base_url=URL, api_key="k", max_answer_bytes=100, max_answer_time=5, timeout=9)
    made, arguments = model.__reduce__()
    assert made(*arguments) == model
    assert model != OpenAIChatModel("m", base_url=URL, api_key="k", timeout=9)
    assert (model._endpoint().limits, model._endpoint().timeout_s) == (AnswerLimits(body_bytes=100, time_s=5), 5)
    usual = OpenAIChatModel("m", base_url=URL, api_key="k", timeout=7200)._endpoint()
    assert usual.limits == AnswerLimits(body_bytes=16 * 2**20, time_s=7200)


@pytest.mark.parametrize(
    "wrong", [{"max_answer_bytes": 0}, {"max_answer_bytes": True}, {"max_answer_bytes": 1.5}, {"max_answer_time": 0}]
)
def test_a_limit_is_refused_when_it_is_none(wrong: dict[str, object]) -> None:
    """S-SEC-50: the text names it."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        OpenAIChatModel("m", **wrong)  # type: ignore[arg-type]
