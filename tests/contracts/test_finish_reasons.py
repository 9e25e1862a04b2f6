"""Why a model stopped, as both ways to an endpoint tell it."""

from __future__ import annotations

import json

import openai
import pytest

from ensemble_ray import ChatMessage, ChatResponse, OpenAIChatModel, OpenAIResponsesModel
from ensemble_ray.llm.failures import fault_of
from ensemble_ray.testing import ModelServer, RawAnswer, Reply
from ensemble_ray.testing.model_server.script import Answer
from ensemble_ray.values.messages import incomplete_reason

HELLO = [ChatMessage("user", "hello")]
Api = type[OpenAIChatModel]
#: The first event of a stream, without a piece of an answer.
BEGUN = {
    OpenAIChatModel: {"choices": [{"delta": {"role": "assistant"}}]},
    OpenAIResponsesModel: {"type": "response.created", "response": {"status": "in_progress"}},
}


WAYS = pytest.mark.parametrize("way", [None, {"max_retries": 0}], ids=["lean", "client"])


@WAYS
@pytest.mark.parametrize("reason", ["length", "content_filter", "stop"])
async def test_the_finish_reason_is_told_however_the_answer_comes(
    api: Api, way: dict[str, object] | None, reason: str
) -> None:
    """S-CONV-21, S-ENG-36: the provider's word, in one piece and at the end of a stream."""
    with ModelServer(Reply(text="half", finish_reason=reason)) as server:
        model = api("m", base_url=server.base_url, api_key="sk-of-a-test", client_options=way)
        assert (await model.chat(HELLO)).finish_reason == reason
        *_, whole = [part async for part in model.stream(HELLO)]
        assert isinstance(whole, ChatResponse)
        assert whole.finish_reason == reason


@pytest.mark.parametrize(
    "reason", [None, "stop", "STOP", "tool-calls", "end_turn", "eos_token", "COMPLETE", "function_call"]
)
def test_an_answer_is_whole_when_it_comes_to_a_good_end(reason: str | None) -> None:
    """S-ENG-36: whatever the case, and whichever provider's word."""
    assert incomplete_reason(ChatResponse("fine", finish_reason=reason)) is None


@pytest.mark.parametrize(
    "reason", ["length", "MAX_TOKENS", "SAFETY", "model_length", "refusal", "stream_cut", "of a new kind"]
)
def test_an_answer_is_incomplete_when_its_end_is_no_good_one(reason: str) -> None:
    """S-ENG-36: also where no list has the reason."""
    assert incomplete_reason(ChatResponse("half", finish_reason=reason)) == reason.lower()


@WAYS
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(
    "reason",
    ["error", "network_error", "insufficient_system_resource", "function_call_filter: MALFORMED_FUNCTION_CALL"],
)
async def test_the_call_fails_when_the_end_is_the_providers_failure(
    api: Api, way: dict[str, object] | None, reason: str, *, stream: bool
) -> None:
    """S-LLM-7: half a text is no answer; the failure is one that is worth another attempt."""
    with ModelServer(Reply(text="half", finish_reason=reason)) as server:
        model = api("m", base_url=server.base_url, api_key="sk-of-a-test", client_options=way)
        with pytest.raises(openai.APIError, match=f"failed while it answered: .*'{reason}'") as caught:
            _ = [part async for part in model.stream(HELLO)] if stream else await model.chat(HELLO)
    assert fault_of(caught.value) is not None


async def test_the_call_is_repeated_when_the_model_repeats_by_itself(api: Api) -> None:
    """S-LLM-7, S-SET-10: `max_retries` counts such failures too, streamed or not."""
    script: list[Answer] = [
        Reply(finish_reason="error"),
        "whole",
        RawAnswer(body=b"", content_type="text/event-stream"),
        "whole",
    ]
    with ModelServer(script) as server:
        model = api("m", base_url=server.base_url, api_key="sk-of-a-test", max_retries=1)
        assert (await model.chat(HELLO)).text == "whole"
        *_, whole = [part async for part in model.stream(HELLO)]
        assert isinstance(whole, ChatResponse)
        assert whole.text == "whole"


@WAYS
async def test_a_streamed_answer_is_cut_when_neither_a_reason_nor_the_end_mark_comes(
    api: Api,
    way: dict[str, object] | None,
) -> None:
    """S-LLM-8: what came is kept, and is incomplete."""
    with ModelServer(Reply(text="Never mix bleach with", is_ended=False)) as server:
        model = api("m", base_url=server.base_url, api_key="sk-of-a-test", client_options=way)
        *_, whole = [part async for part in model.stream(HELLO)]
    assert whole == ChatResponse("Never mix bleach with", finish_reason="stream_cut")


@WAYS
@pytest.mark.parametrize("body", [b"", b": waiting\n\n", b"data: %b\n\n"])
async def test_the_call_fails_when_a_stream_is_cut_before_the_answer(
    api: Api, way: dict[str, object] | None, body: bytes
) -> None:
    """S-LLM-8: there is nothing to keep, and another attempt may succeed."""
    if b"%b" in body:
        body %= json.dumps(BEGUN[api]).encode()
    with ModelServer(RawAnswer(body=body, content_type="text/event-stream")) as server:
        model = api("m", base_url=server.base_url, api_key="sk-of-a-test", client_options=way)
        with pytest.raises(openai.APIConnectionError, match="without a single piece") as caught:
            _ = [part async for part in model.stream(HELLO)]
    assert fault_of(caught.value) is not None
