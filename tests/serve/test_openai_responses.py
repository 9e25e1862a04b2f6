"""`/v1/responses`, asked by the real `openai` client over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from ensemble_ray import ChatResponse, TokenUsage
from ensemble_ray.testing import ScriptedModel
from tests.serve.http_server import served_teams
from tests.serve.test_openai_chat import echo

#: In the order in which this API has them.
EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def test_a_team_answers_a_text() -> None:
    """S-SRV-125, S-SRV-126: the id is the run's, under which the response is found again."""
    model = ScriptedModel(ChatResponse(text="42", usage=TokenUsage(7, 3)))
    with served_teams(echo(model)) as url, OpenAI(base_url=url, api_key="any") as asking:
        made = asking.responses.create(model="team", input="What is it?", metadata={"for": "x"}, temperature=0.1)
        again = asking.responses.retrieve(made.id)
        with pytest.raises(NotFoundError) as found:
            asking.responses.retrieve("nobody")
    assert (made.output_text, made.status, made.model, made.metadata) == ("42", "completed", "team", {"for": "x"})
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (7, 3, 10)
    assert (again.id, again.output_text, again.usage) == (made.id, "42", made.usage)
    assert found.value.code == "run_not_found"
    assert "Answer What is it?" in model.calls[0].text


async def test_the_async_client_is_told_of_a_response_in_the_order_of_this_api() -> None:
    """S-SRV-127: numbered events; the last one has the whole response."""
    with served_teams(echo(ScriptedModel(otherwise="one two"), stream=True)) as url:
        async with AsyncOpenAI(base_url=url, api_key="any") as asking:
            events = [each async for each in await asking.responses.create(model="team", input="Hi", stream=True)]
            async with asking.responses.stream(model="team", input="Hi") as helped:
                final = await helped.get_final_response()
    assert list(dict.fromkeys(each.type for each in events)) == EVENTS
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "one two"
    last: Any = events[-1]
    assert (last.response.output_text, last.response.status) == ("one two", "completed")
    assert final.output_text == "one two"


def test_messages_and_instructions_are_the_history() -> None:
    """S-SRV-104: instructions come first; parts of texts are taken, others refused by their place."""
    model = ScriptedModel(otherwise="fine")
    said: Any = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Now?"}]},
    ]
    team = echo(model, "Said: <{history}>. Answer {question}")
    with served_teams(team) as url, OpenAI(base_url=url, api_key="any") as asking:
        asking.responses.create(model="team", input=said, instructions="Be brief")
        image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
        with pytest.raises(BadRequestError, match=r"input\[0\].content\[0\]: 'input_image'"):
            asking.responses.create(model="team", input=image)
        called: Any = [{"type": "function_call_output", "call_id": "1", "output": "22"}]
        with pytest.raises(BadRequestError, match="'function_call_output' cannot be passed"):
            asking.responses.create(model="team", input=called)
    assert "Said: <system: Be brief\n\nuser: Hi\n\nassistant: Hello>. Answer Now?" in model.calls[0].text


def test_what_a_team_cannot_do_is_refused_by_its_name() -> None:
    """S-SRV-107, S-SRV-128."""
    refused: list[tuple[str, Any]] = [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("tools", [{"type": "web_search"}]),
        ("top_logprobs", 2),
    ]
    model = ScriptedModel(otherwise="fine")
    with served_teams(echo(model)) as url, OpenAI(base_url=url, api_key="any") as asking:
        for name, value in refused:
            with pytest.raises(BadRequestError, match=name) as found:
                asking.responses.create(model="team", input="Hi", **{name: value})
            assert (found.value.param, found.value.code) == (name, "unsupported_parameter")
        with pytest.raises(BadRequestError, match=r"text\.format"):
            asking.responses.create(model="team", input="Hi", text={"format": {"type": "json_object"}})
        assert not model.calls
        asking.responses.create(
            model="team", input="Hi", store=False, text={"format": {"type": "text"}}, truncation="auto"
        )


def test_a_failed_team_is_an_error_and_the_last_event_of_a_stream() -> None:
    """S-SRV-110, S-SRV-127: never an empty answer."""
    team = echo(ScriptedModel(otherwise=ValueError("boom")))
    with served_teams(team) as url, OpenAI(base_url=url, api_key="any") as asking:
        with pytest.raises(APIStatusError, match="boom") as found:
            asking.responses.create(model="team", input="Hi")
        events: list[Any] = list(asking.responses.create(model="team", input="Hi", stream=True))
        kept = asking.responses.retrieve(found.value.response.headers["x-run-id"])
    assert found.value.status_code == 502
    assert [each.type for each in events] == ["response.created", "response.in_progress", "response.failed"]
    assert "boom" in events[-1].response.error.message
    assert (kept.status, kept.error is not None) == ("failed", True)
