"""Why a model stopped, as both ways to an endpoint tell it."""

from __future__ import annotations

import pytest

from ensemble_ray import ChatMessage, ChatResponse, OpenAIChatModel
from ensemble_ray.testing import ModelServer, Reply

HELLO = [ChatMessage("user", "hello")]


@pytest.mark.parametrize("way", [None, {"max_retries": 0}], ids=["lean", "client"])
@pytest.mark.parametrize("reason", ["length", "content_filter", "stop"])
async def test_the_finish_reason_is_told_however_the_answer_comes(way: dict[str, object] | None, reason: str) -> None:
    """S-CONV-21, S-ENG-36: the provider's word, in one piece and at the end of a stream."""
    with ModelServer(Reply(text="half", finish_reason=reason)) as server:
        model = OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test", client_options=way)
        assert (await model.chat(HELLO)).finish_reason == reason
        *_, whole = [part async for part in model.stream(HELLO)]
        assert isinstance(whole, ChatResponse)
        assert whole.finish_reason == reason
