"""Errors that endpoints tell in the body of a success, and errors whose body says more than their status."""

from __future__ import annotations

import json
from typing import NamedTuple

import openai
import pytest

from ensemble_ray import ChatMessage, ChatResponse, JsonSchema, OpenAIChatModel
from ensemble_ray.errors.travel import is_refusal
from ensemble_ray.llm.failures import fault_of
from ensemble_ray.testing import Fault, ModelServer, RawAnswer

HELLO = [ChatMessage("user", "hello")]
FORM = JsonSchema("Form", {"type": "object", "properties": {"n": {"type": "string"}}})
BROKE = Fault(status=429, message="You exceeded your current quota", code="insufficient_quota", retry_after_s=0)
BAD_CALL = RawAnswer(
    body=json.dumps(
        {
            "error": {
                "message": "Failed to call a function.",
                "type": "invalid_request_error",
                "code": "tool_use_failed",
                "failed_generation": "<function=look{}</function>",
            }
        }
    ).encode(),
    status=400,
)


class Way(NamedTuple):
    """One of the ways: an API, and whether the package's own client asks it."""

    api: type[OpenAIChatModel]
    by_client: bool


@pytest.fixture(params=[False, True], ids=["lean", "client"])
def way(request: pytest.FixtureRequest, api: type[OpenAIChatModel]) -> Way:
    """One of the ways."""
    return Way(api, request.param)


CHAT_ALONE = pytest.mark.parametrize("api", [OpenAIChatModel], indirect=True)


def model_at(server: ModelServer, way: Way, retries: int = 0) -> OpenAIChatModel:
    """A model that repeats by itself so often."""
    if not way.by_client:
        return way.api("m", base_url=server.base_url, api_key="k", max_retries=retries)
    return way.api("m", base_url=server.base_url, api_key="k", client_options={"max_retries": retries})


async def ask(model: OpenAIChatModel, *, stream: bool) -> str | None:
    """The text of an answer."""
    if not stream:
        return (await model.chat(HELLO)).text
    parts = [part async for part in model.stream(HELLO)]
    last = parts[-1]
    assert isinstance(last, ChatResponse)
    return last.text


def in_choice(*, stream: bool) -> RawAnswer:
    """An error in place of the first choice, as OpenRouter sends it."""
    said = {"message": {"role": "assistant", "content": ""}} if not stream else {"delta": {"content": ""}}
    choice = {**said, "finish_reason": "error", "error": {"code": 502, "message": "upstream broke"}}
    body = json.dumps({"choices": [choice], "usage": None}).encode()
    if not stream:
        return RawAnswer(body=body)
    return RawAnswer(body=b"data: " + body + b"\n\n", content_type="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        ("429", openai.RateLimitError, 429),
        ("rate_limit_exceeded", openai.RateLimitError, 429),
        ("502", openai.InternalServerError, 502),
        ("overloaded_error", openai.InternalServerError, 503),
    ],
)
async def test_an_error_in_a_success_is_that_of_its_code(
    way: Way, code: str, kind: type[openai.APIStatusError], status: int, *, stream: bool
) -> None:
    """S-LLM-20: it has the class, the status and the retries of an answer with that status."""
    fault = Fault(status=200, message="upstream is busy", code=code)
    with ModelServer(fault) as server:
        with pytest.raises(kind, match=f"HTTP 200 with error {status}.: upstream is busy") as caught:
            await ask(model_at(server, way), stream=stream)
        assert caught.value.status_code == status
        found = fault_of(caught.value)
        assert found is not None
        assert found.status == status
    with ModelServer([fault, "hi"]) as server:
        assert await ask(model_at(server, way, retries=1), stream=stream) == "hi"


@CHAT_ALONE
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_in_the_first_choice_is_repeated(way: Way, *, stream: bool) -> None:
    """S-LLM-20: OpenRouter tells so of the provider behind it."""
    with ModelServer([in_choice(stream=stream), "hi"]) as server:
        assert await ask(model_at(server, way, retries=1), stream=stream) == "hi"


@CHAT_ALONE
async def test_an_error_after_the_first_words_of_a_stream_is_that_of_its_code(way: Way) -> None:
    """S-LLM-20, S-DUR-61: its class is known; a stream that has begun is not repeated."""
    words = b'data: {"choices": [{"delta": {"content": "he"}}]}\n\n'
    failed = b'data: {"error": {"code": 503, "message": "no capacity"}, "choices": []}\n\n'
    with ModelServer(RawAnswer(body=words + failed, content_type="text/event-stream")) as server:
        with pytest.raises(openai.InternalServerError, match="no capacity"):
            await ask(model_at(server, way, retries=3), stream=True)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        [{"error": {"code": 503, "message": "model is overloaded", "status": "UNAVAILABLE"}}],
        {"code": 503, "message": "model is overloaded"},
        {"type": "error", "error": {"type": "overloaded_error", "message": "model is overloaded"}},
        {"error": {"code": 503, "message": "model is overloaded"}, "choices": [{"message": {"content": ""}}]},
    ],
)
async def test_an_error_in_a_success_is_found_in_every_form(way: Way, body: object) -> None:
    """S-LLM-20: in a list, without an object around it, with the type of Anthropic, beside an empty choice."""
    with ModelServer([RawAnswer(body=json.dumps(body).encode()), "hi"]) as server:
        assert await ask(model_at(server, way, retries=1), stream=False) == "hi"
        assert len(server.requests) == 2


@CHAT_ALONE
async def test_an_answer_stays_one_when_it_has_an_empty_error(way: Way) -> None:
    """S-LLM-20: members that say nothing are no error."""
    choice = {"message": {"content": "hi"}, "error": None}
    for empty in (None, {}, "", {"code": None, "message": ""}):
        with ModelServer(RawAnswer(body=json.dumps({"error": empty, "choices": [choice]}).encode())) as server:
            assert await ask(model_at(server, way), stream=False) == "hi"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_account_without_credit_is_asked_once(way: Way, *, stream: bool) -> None:
    """S-LLM-21: neither the model nor a run's policy repeats it, and it refuses every other call too."""
    with ModelServer(BROKE) as server:
        with pytest.raises(openai.RateLimitError, match="has no credit or quota left") as caught:
            await ask(model_at(server, way, retries=3), stream=stream)
        assert len(server.requests) == 1
    assert fault_of(caught.value) is None
    assert is_refusal(caught.value)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_tool_call_of_the_model_is_asked_again(way: Way, *, stream: bool) -> None:
    """S-LLM-22: and where it stays bad, the error shows what the model wrote."""
    with ModelServer([BAD_CALL, "hi"]) as server:
        assert await ask(model_at(server, way, retries=1), stream=stream) == "hi"
    with ModelServer(BAD_CALL) as server:
        with pytest.raises(openai.BadRequestError, match=r"The model wrote: <function=look\{\}</function>") as caught:
            await ask(model_at(server, way, retries=1), stream=stream)
        assert len(server.requests) == 2
    found = fault_of(caught.value)
    assert found is not None
    assert found.is_bad_generation


async def test_a_bad_answer_in_a_schema_does_not_switch_schemas_off(way: Way) -> None:
    """S-LLM-22, S-OUT-48: the endpoint takes schemas; its model did not keep to this one."""
    bad = Fault(status=400, message="Failed to generate JSON", code="json_validate_failed")
    with ModelServer([bad, "{}", "{}"]) as server:
        model = model_at(server, way, retries=1)
        await model.chat_structured(HELLO, FORM)
        await model.chat_structured(HELLO, FORM)
        assert [request.response_format is not None for request in server.requests] == [True, True, True]


async def test_the_message_of_the_provider_behind_a_gateway_is_told(way: Way) -> None:
    """S-LLM-23: the words of the gateway alone say nothing."""
    raw = json.dumps({"error": {"message": "max_tokens is too large: 9"}})
    body = {"error": {"message": "Provider returned error", "code": 400, "metadata": {"raw": raw}}}
    with ModelServer(RawAnswer(body=json.dumps(body).encode(), status=400)) as server:
        with pytest.raises(openai.BadRequestError, match="Provider returned error: max_tokens is too large: 9"):
            await ask(model_at(server, way), stream=False)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "headers", "asked"),
    [
        ({"error": {"message": "Please try again in 1.5s", "code": "rate_limit_exceeded"}}, {}, "1.5"),
        ([{"error": {"code": 429, "message": "m", "details": [{"retryDelay": "17s"}]}}], {}, "17"),
        ({"error": {"message": "m"}}, {"retry-after-ms": "250"}, "0.25"),
        ({"error": {"message": "try again in 9s"}}, {"retry-after": "2"}, "2"),
    ],
)
async def test_the_delay_is_that_of_the_answer(way: Way, body: object, headers: dict[str, str], asked: str) -> None:
    """S-LLM-20, S-DUR-62: of a header, else of the body; the error carries it as `Retry-After`."""
    answer = RawAnswer(body=json.dumps(body).encode(), status=429, headers=headers)
    with ModelServer(answer) as server, pytest.raises(openai.RateLimitError) as caught:
        await ask(model_at(server, way), stream=False)
    found = fault_of(caught.value)
    assert found is not None
    assert found.retry_after == asked
