"""Options in the requests that can have them, the URL's query, and roles that an endpoint accepts: what it is sent."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import cast

import openai
import pytest

from ensemble_ray import ChatMessage, JsonSchema, LocalChatModel, OpenAIChatModel, ToolCall, ToolSpec, ValidationError
from ensemble_ray.llm import local as local_server
from ensemble_ray.llm.failures import provider_of
from ensemble_ray.llm.local import LocalSpec
from ensemble_ray.testing import Fault, ModelServer, ServedRequest

KEY = "sk-of-a-test"
RULES = ChatMessage("system", "Be brief")
HELLO = ChatMessage("user", "hello")
CALLED = ChatMessage("assistant", None, (ToolCall("c1", "look", "{}"),))
RESULT = ChatMessage("tool", "seen", tool_call_id="c1", name="look")
LOOK = [ToolSpec("look", "Looks")]
CITY = JsonSchema("City", {"type": "object"})
#: Both ways to the endpoint: the lean client, and the package's own.
WAYS = [None, {"max_retries": 0}]
NAMED = {"type": "function", "function": {"name": "look"}}
LOOK_CHOICE = {"type": "function", "name": "look"}

Make = Callable[..., OpenAIChatModel]
Api = type[OpenAIChatModel]


def sent_form(api: Api, choice: object) -> object:
    """A choice of tools as that API gets it: the Responses API has no object around a tool (S-RSP-6)."""
    if api is OpenAIChatModel or not isinstance(choice, dict):
        return choice
    outer = cast("dict[str, object]", choice)
    inner = cast("dict[str, object]", outer.get(str(outer["type"]), {}))
    members = {name: [LOOK_CHOICE] if name == "tools" else value for name, value in inner.items()}
    return {"type": outer["type"], **members}


@pytest.fixture(params=WAYS, ids=["lean", "client"])
def make(request: pytest.FixtureRequest, api: Api) -> Make:
    """Makes models of a name of this test's own: what is remembered is remembered for the process."""
    way = cast("dict[str, object] | None", request.param)
    name = request.node.name

    def made(server: ModelServer | str, **options: object) -> OpenAIChatModel:
        url = server if isinstance(server, str) else server.base_url
        return api(
            name,
            base_url=url,
            **{"api_key": KEY, "client_options": way, **options},  # type: ignore[arg-type]  # options of a model
        )

    return made


async def said(model: OpenAIChatModel, *messages: ChatMessage) -> str:
    """The streamed answer's text."""
    return "".join([part async for part in model.stream(messages) if isinstance(part, str)])


@pytest.mark.parametrize(
    "options",
    [
        {"parallel_tool_calls": False},
        {"tool_choice": "auto"},
        {"tool_choice": NAMED, "max_tool_calls": 3},
        {"extra_body": {"parallel_tool_calls": True, "parse_tool_calls": True}},
    ],
    ids=json.dumps,
)
async def test_options_about_tools_are_sent_with_tools_alone(make: Make, api: Api, options: dict[str, object]) -> None:
    """S-LLM-25: not with answers, corrections, schemas and streams without tools; other options are in all requests."""
    with ModelServer("ok") as server:
        model = make(server, temperature=0, **options)
        await model.chat([HELLO])
        await model.chat_structured([HELLO], CITY)
        await said(model, HELLO)
        await model.chat([HELLO], LOOK)
        *without, with_tools = (request.body for request in server.requests)
    about_tools = cast("dict[str, object]", options.get("extra_body", options))
    assert [name for body in without for name in about_tools if name in body] == []
    assert {name: with_tools[name] for name in about_tools} == {
        name: sent_form(api, value) for name, value in about_tools.items()
    }
    assert {body["temperature"] for body in (*without, with_tools)} == {0}


_LOOK_ALONE = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("choice", "later"),
    [
        ("required", None),
        ("any", None),
        (NAMED, None),
        ({"type": "any"}, None),
        ("auto", "auto"),
        ("none", "none"),
        ({"type": "auto"}, {"type": "auto"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": _LOOK_ALONE}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": _LOOK_ALONE}},
        ),
    ],
    ids=json.dumps,
)
async def test_a_forced_choice_ends_with_the_first_tool_result(
    make: Make, api: Api, choice: object, later: object
) -> None:
    """S-LLM-26: then the model may answer; a choice that does not force a call stays."""
    with ModelServer("ok") as server:
        model = make(server, tool_choice=choice, parallel_tool_calls=False)
        await model.chat([RULES, HELLO], LOOK)
        await model.chat([RULES, HELLO, CALLED, RESULT], LOOK)
        [part async for part in model.stream([RULES, HELLO, CALLED, RESULT, HELLO], LOOK)]
        first, *others = (request.body for request in server.requests)
    assert first["tool_choice"] == sent_form(api, choice)
    assert [body.get("tool_choice") for body in others] == [sent_form(api, later)] * 2
    assert {body["parallel_tool_calls"] for body in (first, *others)} == {False}


async def test_a_local_model_gets_options_about_tools_with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-LLM-25, S-LLM-28: its server speaks the same protocol."""
    with ModelServer(_no_system) as server:
        held = local_server.Address(server.base_url.removesuffix("/v1"), "k")

        def find(spec: LocalSpec) -> local_server.Address:
            del spec
            return held

        monkeypatch.setattr(local_server, "find_held", find)
        model = LocalChatModel("some.gguf", tool_choice="required")
        await model.chat([RULES, HELLO])
        await model.chat([RULES, HELLO], LOOK)
        sent = [(request.messages[0]["role"], "tool_choice" in request.body) for request in server.requests]
    assert sent == [("system", False), ("user", False), ("user", True)]


# ---- the URL


@pytest.mark.parametrize(
    ("ending", "query", "path"),
    [
        ("?api-version=2024-10-21", {}, "?api-version=2024-10-21"),
        ("/?api-version=2024-10-21", {}, "?api-version=2024-10-21"),
        ("", {"api-version": "2024-10-21"}, "?api-version=2024-10-21"),
        ("?api-version=1&tag=a%20b", {"api-version": "preview"}, "?tag=a%20b&api-version=preview"),
        ("", {"debug": True, "n": 3}, "?debug=true&n=3"),
        ("#part", {}, ""),
    ],
)
async def test_the_query_stays_behind_the_path(
    make: Make, api: Api, ending: str, query: Mapping[str, object], path: str
) -> None:
    """S-LLM-27: of `base_url` and of `extra_query`, for answers and streams; nothing of it is in the body."""
    with ModelServer("ok") as server:
        model = make(f"{server.base_url}{ending}", extra_query=query)
        await model.chat([HELLO])
        await said(model, HELLO)
        paths = [request.path.replace("a+b", "a%20b") for request in server.requests]
        resource = "chat/completions" if api is OpenAIChatModel else "responses"
        assert paths == [f"/v1/{resource}{path}"] * 2
        assert all("extra_query" not in request.body for request in server.requests)
        assert model.endpoint_id.startswith(f"{server.base_url} ")
        assert pickle.loads(pickle.dumps(model)) == model  # noqa: S301  our own bytes


async def test_the_query_of_the_client_options_stays_behind_the_path() -> None:
    """S-LLM-27: also where the package's client was given the URL."""
    with ModelServer("ok") as server:
        options = {"base_url": f"{server.base_url}?api-version=1", "default_query": {"more": "2"}}
        await OpenAIChatModel("m", api_key=KEY, client_options=options).chat([HELLO])
        assert sorted(server.requests[0].path.partition("?")[2].split("&")) == ["api-version=1", "more=2"]


async def test_a_query_is_in_no_error_but_for_the_version(make: Make) -> None:
    """S-LLM-27, S-SEC-67: a key in the query is hidden, also where the endpoint repeats it; a version is no secret."""
    with ModelServer(Fault(status=400, message="no version 2024-10-21 for s3cret%2Fquery or s3cret/query")) as server:
        model = make(f"{server.base_url}?api-version=2024-10-21", extra_query={"code": "s3cret/query"})
        with pytest.raises(openai.BadRequestError) as caught:
            await model.chat([HELLO])
    assert "s3cret" not in str(caught.value) + repr(model) + str(caught.value.request.url)
    assert "no version 2024-10-21 for *** or ***" in str(caught.value)


async def test_a_repeated_request_has_the_same_query(request: pytest.FixtureRequest) -> None:
    """S-LLM-27: of a model that repeats failed calls by itself."""
    with ModelServer([Fault(status=503, retry_after_s=0), "ok"]) as server:
        model = OpenAIChatModel(request.node.name, base_url=f"{server.base_url}?api-version=1", max_retries=1)
        await model.chat([HELLO])
        assert {sent.path for sent in server.requests} == {"/v1/chat/completions?api-version=1"}


def test_a_query_that_is_no_mapping_is_refused() -> None:
    """S-LLM-27."""
    with pytest.raises(ValidationError, match="OpenAIChatModel extra_query must be a mapping, got: str"):
        OpenAIChatModel("m", extra_query="a=b")


# ---- keys


async def test_headers_of_the_user_take_the_place_of_the_keys(make: Make) -> None:
    """S-LLM-27: whatever their case; a gateway's headers go beside the key."""
    with ModelServer("ok") as server:
        await make(server, extra_headers={"authorization": "Bearer token", "cf-aig-metadata": "m"}).chat([HELLO])
        await make(server, extra_headers={"x-portkey-provider": "openai"}).chat([HELLO])
        own, beside = (request.headers for request in server.requests)
    assert (own["authorization"], own["cf-aig-metadata"]) == ("Bearer token", "m")
    assert (beside["authorization"], beside["x-portkey-provider"]) == (f"Bearer {KEY}", "openai")


async def test_azure_gets_the_key_both_ways(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-LLM-27: by both clients; a token of the user's stands alone, and a function of the package's client as well."""
    monkeypatch.setattr("ensemble_ray.llm.failures._PROVIDERS", {"127.0.0.1": "azure.ai.openai"})
    provider_of.cache_clear()  # an earlier test may have used the port

    async def token() -> str:
        return "token"

    with ModelServer("ok") as server:
        await make(server).chat([HELLO])
        await make(server, api_key="", extra_headers={"Authorization": "Bearer token"}).chat([HELLO])
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another")
        await make(server, api_key=None, client_options={"api_key": token}).chat([HELLO])
        key, *tokens = (request.headers for request in server.requests)
    assert (key["api-key"], key["authorization"]) == (KEY, f"Bearer {KEY}")
    provider_of.cache_clear()
    assert [("api-key" in each, each["authorization"]) for each in tokens] == [(False, "Bearer token")] * 2


# ---- roles


def _no_system(request: ServedRequest) -> str | Fault:
    if request.messages[0]["role"] != "user":
        return Fault(status=400, message="System role not supported")
    return "ok"


REFUSALS = [
    Fault(status=400, message="System role not supported"),
    Fault(status=400, message="Unsupported value: 'messages[0].role' does not support 'system' with this model."),
    Fault(status=400, message="Developer instruction is not enabled for models/gemma-3-27b-it"),
    Fault(status=400, message="Only user and assistant roles are supported!"),
    Fault(status=400, message="Conversation roles must alternate user/assistant/user/assistant/..."),
    Fault(status=422, message="Template error: invalid operation: System role not supported"),
    Fault(status=500, message="This model doesn't support system messages. Try again without a system message."),
    Fault(status=200, message="Unexpected role 'system'"),
]


@pytest.mark.parametrize("fault", REFUSALS, ids=lambda fault: f"{fault.status}-{fault.message[:16]}")
async def test_system_text_goes_into_the_first_question_when_the_role_is_refused(
    make: Make, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    """S-LLM-28: the same call is answered at once; later ones are sent so from the beginning, those of streams too."""

    def answer(request: ServedRequest) -> str | Fault:
        return fault if request.messages[0]["role"] == "system" else "ok"

    with caplog.at_level(logging.INFO), ModelServer(answer) as server:
        assert (await make(server, max_retries=0).chat([RULES, HELLO])).text == "ok"
        assert await said(make(server), RULES, HELLO, CALLED, RESULT) == "ok"
        assert (await make(server).chat_structured([RULES, HELLO], CITY)).text == "ok"
        first, second, streamed, typed = (request.messages for request in server.requests)
    assert [message["role"] for message in first] == ["system", "user"]
    assert second == typed == [{"role": "user", "content": "Be brief\n\nhello"}]
    assert [message["role"] for message in streamed] == ["user", "assistant", "tool"]
    lines = [message for message in caplog.messages if "refused the roles" in message]
    assert len(lines) == 1
    assert "system messages go into the next user message" in lines[0]


async def test_a_stream_finds_out_by_itself(make: Make) -> None:
    """S-LLM-28: no piece was passed on before the refusal."""
    with ModelServer(_no_system) as server:
        assert await said(make(server), RULES, HELLO) == "ok"
        assert await said(make(server), RULES, HELLO) == "ok"
        assert [request.messages[0]["role"] for request in server.requests] == ["system", "user", "user"]


async def test_other_models_of_an_endpoint_keep_their_system_messages(request: pytest.FixtureRequest) -> None:
    """S-LLM-28: it is remembered for endpoint and model."""

    def answer(asked: ServedRequest) -> str | Fault:
        return "ok" if asked.model == "other" else _no_system(asked)

    with ModelServer(answer) as server:
        for name in (request.node.name, "other"):
            await OpenAIChatModel(name, base_url=server.base_url).chat([RULES, HELLO])
        assert [asked.messages[0]["role"] for asked in server.requests] == ["system", "user", "system"]


@pytest.mark.parametrize(
    ("role", "sent"),
    [
        ("system", [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hello"}]),
        ("developer", [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "hello"}]),
        ("user", [{"role": "user", "content": "Be brief\n\nhello"}]),
    ],
)
async def test_a_declared_role_is_sent_and_not_changed(make: Make, role: str, sent: object) -> None:
    """S-LLM-28: a refusal of it is the call's error."""
    with ModelServer(["ok", Fault(status=400, message="System role not supported")]) as server:
        model = make(server, system_role=role)
        assert pickle.loads(pickle.dumps(model)) == model  # noqa: S301  our own bytes
        assert f"system_role='{role}'" in repr(model)
        await model.chat([RULES, HELLO])
        assert server.requests[0].messages == sent
        with pytest.raises(openai.BadRequestError, match="System role not supported"):
            await model.chat([RULES, HELLO])
        assert len(server.requests) == 2


async def test_neighbours_are_merged_when_roles_must_alternate(make: Make) -> None:
    """S-LLM-29: the system message stays where the template takes one; calls and results stay apart."""

    def answer(request: ServedRequest) -> str | Fault:
        roles = [message["role"] for message in request.messages]
        if any(first == second != "tool" for first, second in pairwise(roles)):
            return Fault(
                status=400,
                message="After the optional system message, conversation roles must alternate user/assistant/...",
            )
        return "ok"

    with ModelServer(answer) as server:
        model = make(server)
        more = ChatMessage("user", "and more")
        assert (await model.chat([RULES, HELLO, more])).text == "ok"
        assert (await model.chat([RULES, HELLO, CALLED, RESULT, RESULT, HELLO, more], LOOK)).text == "ok"
        _, second, third = (request.messages for request in server.requests)
    assert second == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "hello\n\nand more"}]
    assert [message["role"] for message in third] == ["system", "user", "assistant", "tool", "tool", "user"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=400, message="the file system is full and cannot be read"),
        Fault(status=400, message="the system message is interesting"),
        Fault(status=401, message="System role not supported"),
        Fault(status=429, message="system messages must wait"),
    ],
    ids=lambda fault: f"{fault.status}-{fault.message[:15]}",
)
async def test_other_failures_are_no_refusal_of_a_role(make: Make, fault: Fault) -> None:
    """S-LLM-28: they are the call's own, and nothing is asked twice."""
    with ModelServer([fault, "ok"]) as server:
        with pytest.raises(openai.APIStatusError):
            await make(server).chat([RULES, HELLO])
        assert len(server.requests) == 1


async def test_nothing_is_remembered_when_other_roles_do_not_help(make: Make) -> None:
    """S-LLM-28: the request is sent once more, and the second refusal is the error."""
    fault = Fault(status=400, message="System role not supported")
    with ModelServer([fault, fault, "ok"]) as server:
        with pytest.raises(openai.BadRequestError, match="System role not supported"):
            await make(server).chat([RULES, HELLO])
        assert (await make(server).chat([RULES, HELLO])).text == "ok"
        assert [request.messages[0]["role"] for request in server.requests] == ["system", "user", "system"]


async def test_a_refused_role_is_not_repeated_when_the_model_repeats_failures(request: pytest.FixtureRequest) -> None:
    """S-LLM-28: also not where the status is otherwise worth another attempt."""
    with ModelServer([Fault(status=500, message="System role not supported"), "ok"]) as server:
        model = OpenAIChatModel(request.node.name, base_url=server.base_url, api_key="k", max_retries=3)
        assert (await model.chat([RULES, HELLO])).text == "ok"
        assert [sent.messages[0]["role"] for sent in server.requests] == ["system", "user"]
