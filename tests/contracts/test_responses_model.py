"""`OpenAIResponsesModel` against a server on loopback: what only this API has. Its other contracts are those of both."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any, cast
from urllib.parse import urlsplit

import openai
import pytest
from openai.types.responses import Response, ResponseInputParam, ResponseStreamEvent
from pydantic import TypeAdapter

from ensemble_ray import (
    ChatMessage,
    ChatResponse,
    JsonSchema,
    OpenAIChatModel,
    OpenAIResponsesModel,
    ToolCall,
    ToolSpec,
    ValidationError,
)
from ensemble_ray.testing import Fault, ModelServer, RawAnswer, Reply, ServedRequest

KEY = "sk-of-a-test"
HELLO = [ChatMessage("system", "Be brief"), ChatMessage("user", "hello")]
LOOK = [ToolSpec("look", "Looks")]
CALL = ToolCall("c1", "look", '{"at": "it"}')
THINKING = Reply(reasoning="I look", tool_calls=[CALL])
CITY = JsonSchema("City", {"type": "object"})

Make = Callable[..., OpenAIResponsesModel]


@pytest.fixture(params=[None, {"max_retries": 0}], ids=["lean", "client"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes models of a name of this test's own: what is remembered is remembered for the process."""

    def made(server: ModelServer, **options: object) -> OpenAIResponsesModel:
        return OpenAIResponsesModel(
            request.node.name,
            base_url=server.base_url,
            api_key=KEY,
            client_options=request.param,
            **options,  # type: ignore[arg-type]  # options of a model
        )

    return made


async def next_turn(model: OpenAIResponsesModel) -> ChatResponse:
    """The second turn of a tool loop."""
    first = await model.chat(HELLO, LOOK)
    own = ChatMessage("assistant", first.text, first.tool_calls, provider_fields=first.provider_fields)
    return await model.chat([*HELLO, own, ChatMessage("tool", "seen", tool_call_id="c1", name="look")], LOOK)


def kinds(request: ServedRequest) -> list[object]:
    """The types of a request's items, or their roles."""
    return [each.get("type", each.get("role")) for each in cast("list[dict[str, object]]", request.body["input"])]


async def test_the_request_is_one_of_the_responses_api(make: Make) -> None:
    """S-RSP-1 to S-RSP-3, S-RSP-6: its path, its options under the names of that API, and nothing stored."""
    with ModelServer("hi", api_key=KEY) as server:
        model = make(
            server, max_tokens=9, reasoning_effort="low", reasoning={"summary": "auto"}, verbosity="low", top_p=0.5
        )
        assert (await model.chat(HELLO)).text == "hi"
        *_, whole = [part async for part in model.stream(HELLO)]
        assert cast("ChatResponse", whole).text == "hi"
        plain, streamed = server.requests
    body = {
        "model": model.model,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 9,
        "reasoning": {"summary": "auto", "effort": "low"},
        "text": {"verbosity": "low"},
        "top_p": 0.5,
        "input": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hello"}],
    }
    assert (plain.path, plain.body, streamed.body) == ("/v1/responses", body, {**body, "stream": True})


async def test_a_schema_stands_beside_the_users_own_text_options(make: Make) -> None:
    """S-RSP-7: and where it is refused, these remain."""
    with ModelServer("{}", rejects_response_format=True) as server:
        model = make(server, text={"verbosity": "low"})
        await model.chat_structured(HELLO, CITY)
        refused, answered = (request.body["text"] for request in server.requests)
    schema = {"type": "json_schema", "name": "City", "schema": {"type": "object"}, "strict": False}
    assert (refused, answered) == ({"verbosity": "low", "format": schema}, {"verbosity": "low"})


async def test_reasoning_goes_back_to_its_model_alone(make: Make) -> None:
    """S-RSP-4: encrypted, in its place before the call; not to another model, nor to chat completions."""
    with ModelServer([THINKING, "done", "other", "chat"]) as server:
        model = make(server)
        answer = await model.chat(HELLO, LOOK)
        assert (answer.reasoning, answer.finish_reason) == ("I look", "tool_calls")
        own = ChatMessage("assistant", answer.text, answer.tool_calls, provider_fields=answer.provider_fields)
        turn = [*HELLO, pickle.loads(pickle.dumps(own)), ChatMessage("tool", "seen", tool_call_id="c1", name="look")]  # noqa: S301  our own bytes
        await model.chat(turn, LOOK)
        await OpenAIResponsesModel("other", base_url=server.base_url, api_key=KEY).chat(turn, LOOK)
        await OpenAIChatModel(model.model, base_url=server.base_url, api_key=KEY).chat(turn, LOOK)
        _, back, other, chat = server.requests
    items = cast("list[dict[str, object]]", back.body["input"])
    TypeAdapter[object](ResponseInputParam).validate_python(items)
    assert kinds(back) == ["system", "user", "reasoning", "function_call", "function_call_output"]
    assert (items[2]["encrypted_content"], items[3]["id"]) == ("encrypted-0", "fc_0_0")
    assert kinds(other) == ["system", "user", "function_call", "function_call_output"]
    assert "encrypted" not in json.dumps(other.body["input"]) + chat.raw.decode()


REFUSALS = [
    Fault(status=400, message="Encrypted content is not supported with this model."),
    Fault(status=400, message="Unknown parameter: 'include'."),
    RawAnswer(body=b'{"detail": [{"loc": ["body", "include", 0], "msg": "Extra inputs"}]}', status=422),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["model", "member", "form"])
async def test_encrypted_reasoning_is_not_requested_again_after_a_refusal(
    make: Make, refusal: Fault | RawAnswer, caplog: pytest.LogCaptureFixture
) -> None:
    """S-RSP-3, S-RSP-4: the same call is answered; a schema in it was not refused; bare reasoning stays away."""

    def answer(request: ServedRequest) -> Fault | RawAnswer | Reply:
        return refusal if "include" in request.body else THINKING

    with caplog.at_level(logging.INFO), ModelServer(answer) as server:
        model = make(server)
        await model.chat_structured(HELLO, CITY)
        await next_turn(model)
        _ = [part async for part in make(server).stream(HELLO)]
        assert ["include" in request.body for request in server.requests] == [True, *[False] * 4]
        assert server.requests[1].response_format is not None
        assert kinds(server.requests[3])[2:] == ["function_call", "function_call_output"]
    assert len([line for line in caplog.messages if "refused 'include'" in line]) == 1


async def test_a_stream_finds_out_by_itself(make: Make) -> None:
    """S-RSP-3: no piece was passed on before the refusal."""
    with ModelServer(lambda asked: REFUSALS[0] if "include" in asked.body else "hi") as server:
        first, whole = [part async for part in make(server).stream(HELLO)]
        assert (first, cast("ChatResponse", whole).text) == ("hi", "hi")
        assert len(server.requests) == 2


async def test_items_have_no_ids_where_these_are_refused(make: Make) -> None:
    """S-RSP-5: some endpoints look for an item with an id among those that they have stored."""

    def answer(request: ServedRequest) -> Fault | Reply:
        if any("id" in each for each in cast("list[dict[str, object]]", request.body["input"])):
            return Fault(
                status=404, message="Item with id 'rs_0' not found. Items are not persisted when `store` is false."
            )
        return THINKING

    with ModelServer(answer) as server:
        for _ in range(2):
            await next_turn(make(server))
        refused, again, later = (server.requests[place] for place in (1, 2, 4))
        assert len(server.requests) == 5
    assert [kinds(each)[2:4] for each in (refused, again, later)] == [["reasoning", "function_call"]] * 3
    assert cast("list[dict[str, object]]", later.body["input"])[2]["encrypted_content"] == "encrypted-3"


async def test_the_call_fails_when_its_second_form_is_refused_too(make: Make) -> None:
    """S-RSP-3: with that refusal, and without a third request."""
    with ModelServer(REFUSALS[0]) as server:
        with pytest.raises(openai.BadRequestError, match="Encrypted content"):
            await make(server).chat(HELLO)
        assert len(server.requests) == 2


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_a_failed_response_is_an_error_of_its_code(make: Make, *, stream: bool) -> None:
    """S-RSP-11: without a code it is a broken answer, which is worth another attempt."""
    kind = "text/event-stream" if stream else "application/json"
    for error, expected in (
        ({"code": "rate_limit_exceeded", "message": "slow down"}, openai.RateLimitError),
        ({"code": "server_error", "message": "broke"}, openai.InternalServerError),
        ({"code": "invalid_prompt", "message": "not this"}, openai.BadRequestError),
        ({"code": "bio_policy", "message": "not this"}, openai.APIError),
        (None, openai.APIConnectionError),
    ):
        failed = {"status": "failed", "output": [], "error": error}
        event = json.dumps({"type": "response.failed", "response": failed}).encode()
        body = b"event: response.failed\ndata: %b\n\n" % event if stream else json.dumps(failed).encode()
        with ModelServer(RawAnswer(body=body, content_type=kind)) as server, pytest.raises(openai.APIError) as caught:
            _ = [part async for part in make(server).stream(HELLO)] if stream else await make(server).chat(HELLO)
        assert type(caught.value) is expected


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_an_answer_is_refused_when_it_is_too_long(make: Make, *, stream: bool) -> None:
    """S-RSP-1, S-SEC-50: the limits are those of chat completions."""
    with ModelServer("long " * 1000) as server:
        model = make(server, max_answer_bytes=2000)
        with pytest.raises(openai.APIError, match="Raise `max_answer_bytes`"):
            _ = [part async for part in model.stream(HELLO)] if stream else await model.chat(HELLO)


async def test_another_api_is_named_where_this_one_is_missing(make: Make) -> None:
    """S-RSP-1."""
    said = "Without a Responses API there, use 'openai:"
    with ModelServer(Fault(status=404)) as server, pytest.raises(openai.NotFoundError, match=said):
        await make(server).chat(HELLO)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "the built-in tool 'web_search' cannot be used: the provider would run it"),
        ({"tools": {"type": "mcp"}}, "the built-in tool 'mcp'"),
        ({"extra_body": {"tools": [{"type": "code_interpreter"}]}}, "the built-in tool 'code_interpreter'"),
        ({"tool_choice": {"type": "file_search"}}, "the built-in tool 'file_search'"),
        ({"tools": [{"type": "function", "name": "f"}]}, "'tools' is set by the library"),
        ({"stop": "."}, "'stop' is no option of the Responses API. Leave it out, use 'openai:MODEL', or pass it in"),
        ({"max_tokens": 1, "max_output_tokens": 2}, "max_tokens and max_output_tokens are the same option"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens and max_output_tokens are the same option"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "low"}}, r"reasoning_effort and reasoning\['effort'\] are"),
        ({"reasoning_effort": "low", "reasoning": "low"}, "reasoning must be a mapping, got: str"),
        ({"text": "short"}, "text must be a mapping, got: str"),
        ({"text": {"format": object()}}, "request option 'text' must be JSON"),
        ({"previous_response_id": "resp_1"}, "'previous_response_id' cannot be a request option: each request has the"),
        ({"extra_body": {"background": True}}, "'background' cannot be a request option: a call waits for its answer"),
        ({"structured_outputs": True, "text": {"format": {"type": "json_object"}}}, "a text format of your own exclude"),
        ({"base_url": "nowhere"}, "base_url must begin with http"),
        ({"timeout": 0}, "timeout must be > 0"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else None,
)  # fmt: skip
def test_a_wrong_option_is_refused_before_any_call(options: dict[str, Any], said: str) -> None:
    """S-RSP-6, S-RSP-8."""
    with pytest.raises(ValidationError, match=f"^OpenAIResponsesModel:? .*{said}"):
        OpenAIResponsesModel("m", **options)


async def test_the_body_has_what_the_user_puts_there(make: Make) -> None:
    """S-RSP-6: names of chat completions too, for an endpoint that has them."""
    with ModelServer("hi") as server:
        await make(server, store=True, extra_body={"stop": ["."], "max_tokens": 3}).chat(HELLO)
        body = server.requests[0].body
    assert (body["store"], body["stop"], body["max_tokens"]) == (True, ["."], 3)


def test_a_model_is_data() -> None:
    """S-RSP-1: it travels, shows no key, and differs from the one of chat completions."""
    options: dict[str, Any] = {"base_url": "http://user:pw@host/v1", "api_key": KEY, "extra_headers": {"X-Key": KEY}}
    model = OpenAIResponsesModel("m", **options, reasoning={"effort": "low"})
    copy = pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    assert (copy, type(copy), hash(copy)) == (model, OpenAIResponsesModel, hash(model))
    assert repr(model) == "OpenAIResponsesModel('m', base_url='http://host/v1', reasoning={'effort': 'low'})"
    chat = OpenAIChatModel("m", **options, reasoning={"effort": "low"})
    assert model != chat
    assert chat != model
    assert model.endpoint_id == chat.endpoint_id


def ask(server: ModelServer, **body: object) -> bytes:
    """The body of one answer."""
    connection = HTTPConnection(urlsplit(server.base_url).netloc, timeout=90)
    connection.request("POST", "/v1/responses", body=json.dumps({"model": "m", "input": [], **body}))
    return connection.getresponse().read()


def test_the_server_answers_with_the_types_of_the_package() -> None:
    """S-RSP-12: whole, and event by event; encrypted reasoning for those who request it."""
    reply = Reply(text="One moment", reasoning="I look", tool_calls=[CALL], usage=None, finish_reason="length")
    with ModelServer(reply) as server:
        whole = Response.model_validate_json(ask(server, include=["reasoning.encrypted_content"]))
        assert (whole.output_text, whole.status) == ("One moment", "incomplete")
        assert [each.type for each in whole.output] == ["reasoning", "message", "function_call"]
        assert cast("Any", whole.output[0]).encrypted_content == "encrypted-0"
        lines = [line for line in ask(server, stream=True).split(b"\n") if line.startswith(b"data: ")]
    events = [TypeAdapter[Any](ResponseStreamEvent).validate_json(line.removeprefix(b"data: ")) for line in lines]
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert [each.delta for each in events if each.type.endswith(".delta")] == [
        *("I ", "look", "One ", "moment"),
        *('{"at":', ' "it"}'),
    ]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].encrypted_content is None


async def test_a_script_sees_the_same_request_of_both_apis() -> None:
    """S-RSP-12: conversation, tools and form, so that one script serves both."""
    with ModelServer([THINKING, "done", THINKING, "done", "{}", "{}"]) as server:
        models = [kind("m", base_url=server.base_url, api_key=KEY) for kind in (OpenAIChatModel, OpenAIResponsesModel)]
        for model in models:
            await next_turn(cast("OpenAIResponsesModel", model))
        for model in models:
            await model.chat_structured(HELLO, CITY)
        seen = [
            (
                [{**each, "reasoning_content": None} for each in asked.messages],
                asked.tools,
                asked.text,
                asked.response_format,
            )
            for asked in server.requests
        ]
    assert seen[:2] == seen[2:4]
    assert seen[4] == seen[5]
    assert [asked.is_response for asked in server.requests] == [False, False, True, True, False, True]
