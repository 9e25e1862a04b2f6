"""Schemas sent to an endpoint that honours, ignores or refuses them: what it is sent, and what is remembered."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any, cast

import openai
import pytest

from ensemble_ray import (
    ChatMessage,
    JsonSchema,
    LocalChatModel,
    OpenAIChatModel,
    OpenAIResponsesModel,
    RateLimit,
    RateLimitedChatModel,
    StructuredChatModel,
)
from ensemble_ray.llm import local as local_server
from ensemble_ray.llm.local import LocalSpec
from ensemble_ray.testing import Fault, ModelServer, ScriptedModel, ServedRequest

HELLO = [ChatMessage("user", "hello")]
CITY = JsonSchema(
    "City",
    {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"], "additionalProperties": False},
    strict=True,
)
TRIP = JsonSchema("Trip", {"type": "object", "additionalProperties": {"type": "integer"}})
SENT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY.schema, "strict": True}}
#: Both ways to the endpoint: the lean client, and the package's own.
WAYS = [None, {"max_retries": 0}]
REFUSALS = [
    Fault(status=400, message="Invalid parameter: 'response_format' of type 'json_schema' is not supported"),
    Fault(status=400, message="bad request"),
    Fault(status=404, message="No endpoints found that support the requested parameters"),
    Fault(status=422, message="Extra inputs are not permitted"),
    Fault(status=501, message="not implemented"),
    Fault(status=500, message='response_format type must be one of "text" or "json_object"'),
]

Make = Callable[..., OpenAIChatModel]


@pytest.fixture(params=WAYS, ids=["lean", "client"])
def make(request: pytest.FixtureRequest, api: type[OpenAIChatModel]) -> Make:
    """Makes models of a name of this test's own: what is remembered is remembered for the process."""
    way = cast("dict[str, object] | None", request.param)
    name = request.node.name

    def made(server: ModelServer, **options: object) -> OpenAIChatModel:
        return api(
            name,
            base_url=server.base_url,
            api_key="sk-of-a-test",
            **{"client_options": way, **options},  # type: ignore[arg-type]  options of a model
        )

    return made


def forms(server: ModelServer) -> list[bool]:
    """Whether each request came with a schema."""
    return [request.response_format is not None for request in server.requests]


async def test_the_schema_is_sent_beside_an_unchanged_conversation(make: Make) -> None:
    """S-OUT-40, S-OUT-47: to an endpoint that takes schemas, and nothing else changes."""
    with ModelServer("{}") as server:
        model = make(server, temperature=0)
        assert isinstance(model, StructuredChatModel)
        assert (await model.chat_structured(HELLO, CITY)).text == "{}"
        await model.chat_structured(HELLO, CITY)
        await model.chat(HELLO)
        first, second, plain = server.requests
    assert first.response_format == SENT
    member = (
        {"text": {"format": {"type": "json_schema", **SENT["json_schema"]}}}
        if first.is_response
        else {"response_format": SENT}
    )
    assert first.body == second.body == {**plain.body, **member}


@pytest.mark.parametrize("fault", REFUSALS, ids=lambda fault: f"{fault.status}-{fault.message[:12]}")
async def test_an_endpoint_that_refuses_schemas_is_asked_without_from_then_on(
    make: Make, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """S-OUT-48, S-OUT-49: the same call is answered at once, and no other schema is sent there; other models may."""
    with caplog.at_level(logging.INFO), ModelServer("ok", rejects_response_format=fault) as server:
        model = make(server)
        assert (await model.chat_structured(HELLO, CITY)).text == "ok"
        assert (await model.chat_structured(HELLO, TRIP)).text == "ok"
        assert forms(server) == [True, False, False]
        other = type(model)(f"other {model.model}", base_url=server.base_url, api_key="k")
        await other.chat_structured(HELLO, CITY)
        assert forms(server)[3:] == [True, False]
    lines = [message for message in caplog.messages if "does not take JSON schemas" in message]
    assert len(lines) == 2
    assert f"(HTTP {fault.status})" in lines[0]
    assert "sk-of-a-test" not in caplog.text


async def test_a_refusal_is_not_repeated_when_the_model_repeats_failures(request: pytest.FixtureRequest) -> None:
    """S-OUT-48: also not one whose status is otherwise worth another attempt."""
    with ModelServer("ok", rejects_response_format=Fault(status=501)) as server:
        model = OpenAIChatModel(request.node.name, base_url=server.base_url, api_key="k", max_retries=3)
        assert (await model.chat_structured(HELLO, CITY)).text == "ok"
        assert forms(server) == [True, False]


async def test_an_error_in_an_answer_of_success_is_a_refusal_when_it_names_the_mode(make: Make) -> None:
    """S-OUT-48, S-OUT-50: routers answer so; one that names something else is the call's own failure."""
    with ModelServer("ok", rejects_response_format=Fault(status=200, message="no response_format here")) as server:
        assert (await make(server).chat_structured(HELLO, CITY)).text == "ok"
        assert forms(server) == [True, False]
    with ModelServer("ok", rejects_response_format=Fault(status=200, message="no credit")) as server:
        with pytest.raises(openai.APIError, match="no credit"):
            await make(server).chat_structured(HELLO, CITY)
        assert forms(server) == [True]


async def test_only_the_schema_is_refused_when_the_endpoint_took_another(make: Make) -> None:
    """S-OUT-49: or where its text says so, or the user says that schemas are taken."""

    def script(request: ServedRequest) -> Fault | str:
        form = cast("Mapping[str, Mapping[str, object]]", request.response_format or {})
        return Fault(status=400) if form and form["json_schema"]["name"] == "Trip" else "ok"

    with ModelServer(script) as server:
        model = make(server)
        for schema in (CITY, TRIP, TRIP, CITY):
            assert (await model.chat_structured(HELLO, schema)).text == "ok"
        assert forms(server) == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"structured_outputs": True}, Fault(status=400, message="response_format")),
        ({}, Fault(status=400, message="Invalid schema for response_format 'City'")),
    ],
)
async def test_another_schema_is_sent_when_one_alone_was_refused(
    make: Make, options: dict[str, object], fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """S-OUT-49, S-OUT-47."""
    with caplog.at_level(logging.INFO), ModelServer("ok", rejects_response_format=fault) as server:
        model = make(server, **options)
        for schema in (CITY, CITY, TRIP):
            assert (await model.chat_structured(HELLO, schema)).text == "ok"
        assert forms(server) == [True, False, False, True, False]
    assert "does not take the JSON schema of 'City' (HTTP 400)" in caplog.text


async def test_nothing_is_remembered_when_the_call_fails_without_the_schema_too(make: Make) -> None:
    """S-OUT-48, S-OUT-49: the failure is that of the call as it would have been."""
    answers = [Fault(status=400, message="too long"), Fault(status=400, message="still too long"), "{}"]
    with ModelServer(answers) as server:
        model = make(server)
        with pytest.raises(openai.BadRequestError, match="still too long"):
            await model.chat_structured(HELLO, CITY)
        assert (await model.chat_structured(HELLO, CITY)).text == "{}"
        assert forms(server) == [True, False, True]


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_other_failures_are_the_calls_own_when_a_schema_was_sent(make: Make, status: int) -> None:
    """S-OUT-50: they say nothing of schemas."""
    with ModelServer([Fault(status=status), "{}"]) as server:
        model = make(server)
        with pytest.raises(openai.APIStatusError):
            await model.chat_structured(HELLO, CITY)
        await model.chat_structured(HELLO, CITY)
        assert forms(server) == [True, True]


@pytest.mark.parametrize(
    "options",
    [
        {"structured_outputs": False},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"response_format": {"type": "json_object"}}},
    ],
    ids=["switched off", "own form", "own form in the body"],
)
async def test_no_schema_is_sent_when_the_user_wants_none(
    make: Make, api: type[OpenAIChatModel], options: dict[str, object]
) -> None:
    """S-OUT-47, S-OUT-51, S-RSP-7."""
    if api is OpenAIResponsesModel and "extra_body" in options:
        options = {"extra_body": {"text": {"format": {"type": "json_object"}}}}
    with ModelServer("ok") as server:
        model = make(server, **options)
        assert (await model.chat_structured(HELLO, CITY)).text == "ok"
        await model.chat(HELLO)
        asked, plain = server.requests
    assert asked.body == plain.body


async def test_the_copy_sends_schemas_as_the_model_does(make: Make) -> None:
    """S-OUT-47, S-CONV-22: what the user said of the endpoint travels."""
    with ModelServer("ok") as server:
        copy = pickle.loads(pickle.dumps(make(server, structured_outputs=False)))  # noqa: S301  our own bytes
        await copy.chat_structured(HELLO, CITY)
        assert forms(server) == [False]


async def test_a_local_model_is_held_to_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-OUT-52, S-OUT-51: its engine enforces them; what it cannot take is asked for without."""

    def script(request: ServedRequest) -> Fault | str:
        form = cast("Mapping[str, Mapping[str, object]]", request.response_format or {})
        return Fault(status=400) if form.get("json_schema", {}).get("name") == "Trip" else "{}"

    with ModelServer(script) as server:

        def held(_: LocalSpec) -> local_server.Address:
            return local_server.Address(server.base_url.removesuffix("/v1"), "key")

        monkeypatch.setattr(local_server, "find_held", held)
        model = LocalChatModel("tiny.gguf")
        assert isinstance(model, StructuredChatModel)
        for schema in (TRIP, TRIP, CITY):
            await model.chat_structured(HELLO, schema)
        assert forms(server) == [True, False, False, True]
        assert server.requests[-1].response_format == SENT
        await LocalChatModel("tiny.gguf", response_format={"type": "text"}).chat_structured(HELLO, CITY)
        assert server.requests[-1].response_format == {"type": "text"}


async def test_a_limited_model_passes_schemas_on(make: Make) -> None:
    """S-OUT-52: to a model that takes them; another is asked as before. A call is one permit, a refusal included."""
    limit = RateLimit.of(1, period=3600.0)
    with ModelServer("ok", rejects_response_format=True) as server:
        limited = RateLimitedChatModel.of(make(server), limit, wait_timeout=0)
        assert isinstance(limited, StructuredChatModel)
        assert (await limited.chat_structured(HELLO, CITY)).text == "ok"
        assert forms(server) == [True, False]
    double = ScriptedModel("plain")
    assert (await RateLimitedChatModel.of(double, limit).chat_structured(HELLO, CITY)).text == "plain"
    assert double.calls[0].tools == ()
