"""One suite for the `ChatModel` and `StreamingChatModel` ports over all their adapters.

Adapters of the protocol meet a server on loopback that answers by script; the doubles answer by the same script.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from ensemble_ray import (
    ChatMessage,
    ChatModel,
    ChatResponse,
    LocalChatModel,
    OpenAIChatModel,
    OpenAIResponsesModel,
    RateLimit,
    RateLimitedChatModel,
    StreamingChatModel,
    TokenUsage,
    ToolCall,
    ToolSpec,
)
from ensemble_ray.llm import local as local_server
from ensemble_ray.llm.local import LocalSpec
from ensemble_ray.ports import Services, use_services
from ensemble_ray.testing import Fault, ModelServer, Reply, ScriptedModel
from ensemble_ray.testing.model_server import Answer
from ensemble_ray.testing.scripted import ScriptedModelHandle, answer_scripted

HELLO = [ChatMessage("system", "Be brief"), ChatMessage("user", "hello")]
TOOL = ToolSpec("find", "Finds", {"type": "object", "properties": {"q": {"type": "string"}}})
CALL = ToolCall("c1", "find", '{"q": "tide"}')
GARBAGE = ToolCall("c2", "find", '{"q": ')

Script = list[Answer]


@dataclass
class Adapter:
    """A model that answers by a script, and what it was sent."""

    model: ChatModel
    #: how often it was asked
    asked: Callable[[], int]
    #: names of the tools of the last call, None when there was no field for them at all
    offered: Callable[[], Sequence[str] | None]


class Driver:
    """Services of the driver, answered here through JSON."""

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        return json.loads(json.dumps(await answer_scripted(json.loads(json.dumps(payload)))))

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        raise AssertionError(name)


SERVICES = Services(limiter=None, cpu=None, driver=Driver())  # type: ignore[arg-type]  # these two are not asked


@dataclass(frozen=True)
class Abroad:
    """A handle as it is used in an actor: the process's services are set when work arrives."""

    double_id: str

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        with use_services(SERVICES):
            return await ScriptedModelHandle(self.double_id).chat(messages, tools)

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        with use_services(SERVICES):
            async for part in ScriptedModelHandle(self.double_id).stream(messages, tools):
                yield part


def served(model: ChatModel, server: ModelServer) -> Adapter:
    """An adapter that asks the server."""
    return Adapter(
        model,
        asked=lambda: len(server.requests),
        offered=lambda: server.requests[-1].tools if "tools" in server.requests[-1].body else None,
    )


def scripted(script: Script) -> ScriptedModel:
    """The double with the same script; a fault is an error."""
    return ScriptedModel(*(RuntimeError(entry.message) if isinstance(entry, Fault) else entry for entry in script))


def adapter_of(kind: str, script: Script, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """The adapter of that kind, answering by that script."""
    if kind.startswith("scripted") or kind == "rate_limited":
        double = scripted(script)
        stack.callback(lambda: double)  # its owner holds it for as long as the test lasts
        model: ChatModel = double
        if kind == "scripted_handle":
            model = Abroad(str(double.__reduce__()[1][0]))
        elif kind == "rate_limited":
            model = RateLimitedChatModel.of(double, RateLimit.per_second(100_000))
        return Adapter(
            model,
            asked=lambda: len(double.calls),
            offered=lambda: tuple(tool.name for tool in double.calls[-1].tools) or None,
        )
    server = stack.enter_context(ModelServer(script, api_key="secret-key"))
    if kind == "local":

        def held(_: LocalSpec) -> local_server.Address:
            return local_server.Address(server.base_url.removesuffix("/v1"), "secret-key")

        monkeypatch.setattr(local_server, "find_held", held)
        return served(LocalChatModel("tiny.gguf"), server)
    options = {"max_retries": 0} if kind.endswith("_client") else None
    model = (OpenAIResponsesModel if kind.startswith("responses") else OpenAIChatModel)(
        "m", base_url=server.base_url, api_key="secret-key", client_options=options
    )
    return served(model, server)


KINDS = (
    "openai",
    "openai_client",
    "responses",
    "responses_client",
    "local",
    "scripted",
    "scripted_handle",
    "rate_limited",
)
Given = Callable[[Script], Adapter]


@pytest.fixture(params=KINDS)
def given(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    """Gives the adapter under test for a script."""
    with ExitStack() as stack:
        yield lambda script: adapter_of(str(request.param), script, stack, monkeypatch)


async def parts_of(model: ChatModel, messages: Sequence[ChatMessage] = HELLO) -> list[str | ChatResponse]:
    """Everything a stream gives."""
    assert isinstance(model, StreamingChatModel)
    return [part async for part in model.stream(messages, [TOOL])]


async def chat(model: ChatModel, tools: Sequence[ToolSpec] = ()) -> ChatResponse:
    """One answer."""
    answer = model.chat(HELLO, tools)
    assert not isinstance(answer, ChatResponse)
    return await answer


async def test_text_and_usage_arrive_when_the_model_answers(given: Given) -> None:
    """S-CONV-20, S-CONV-21: one call, one response with text, the tokens it cost, and why it ended."""
    adapter = given([Reply(text="hi", usage=TokenUsage(7, 2), finish_reason="length")])
    assert isinstance(adapter.model, ChatModel)
    assert await chat(adapter.model) == ChatResponse("hi", (), TokenUsage(7, 2), "length")
    assert adapter.asked() == 1


async def test_usage_is_unknown_when_the_model_does_not_tell(given: Given) -> None:
    """S-SET-11: no usage is None, not zero."""
    assert (await chat(given([Reply(text="hi", usage=None)]).model)).usage is None


async def test_tool_calls_arrive_raw_when_the_model_asks_for_tools(given: Given) -> None:
    """S-CONV-21: the arguments are the model's text, also where it is no JSON."""
    answer = await chat(given([Reply(text="let me see", tool_calls=[CALL, GARBAGE])]).model, [TOOL])
    assert answer.text == "let me see"
    assert answer.tool_calls == (CALL, GARBAGE)


async def test_tools_are_named_only_when_offered(given: Given) -> None:
    """S-CONV-24, S-CONV-25: with none there is no tool field; offered ones travel beside the messages."""
    adapter = given(["a", "b"])
    await chat(adapter.model)
    assert adapter.offered() is None
    await chat(adapter.model, [TOOL])
    assert list(adapter.offered() or ()) == ["find"]


async def test_fragments_come_in_order_when_streamed(given: Given) -> None:
    """S-CONV-23, S-STR-3: `str` fragments whose concatenation is the text, then one response with everything."""
    reply = Reply(text="one two", fragments=["one", " t", "wo"], usage=TokenUsage(7, 2), finish_reason="length")
    whole = ChatResponse("one two", (), TokenUsage(7, 2), "length")
    assert await parts_of(given([reply]).model) == ["one", " t", "wo", whole]


async def test_tool_calls_are_assembled_when_streamed(given: Given) -> None:
    """S-SET-7, S-STR-2: the closing response carries them, whole and in order."""
    parts = await parts_of(given([Reply(tool_calls=[CALL, GARBAGE], usage=None, finish_reason="tool_calls")]).model)
    assert parts == [ChatResponse(None, (CALL, GARBAGE), None, "tool_calls")]


async def test_the_failure_is_raised_when_the_model_fails(given: Given) -> None:
    """S-ERR-31: an error with the model's words, never an empty answer; the next call is a new one."""
    adapter = given([Fault(status=500, message="overheated"), Fault(status=500, message="overheated"), "fine"])
    with pytest.raises(Exception, match="overheated"):
        await chat(adapter.model)
    with pytest.raises(Exception, match="overheated"):
        await parts_of(adapter.model)
    assert (await chat(adapter.model)).text == "fine"


async def test_calls_do_not_wait_for_each_other_when_made_at_once(given: Given) -> None:
    """S-CONV-16, S-CONV-37: one model serves many tasks."""
    adapter = given(["x"] * 20)
    answers = await asyncio.gather(*(chat(adapter.model) for _ in range(20)))
    assert [answer.text for answer in answers] == ["x"] * 20
    assert adapter.asked() == 20


async def test_the_copy_answers_when_the_model_was_pickled(given: Given) -> None:
    """S-CONV-22, S-SET-38, S-RATE-20: every model travels; one script, one bucket, one endpoint."""
    adapter = given(["first", "second"])
    await chat(adapter.model)
    copy = pickle.loads(pickle.dumps(adapter.model))  # noqa: S301  our own bytes
    assert (await chat(copy)).text == "second"
    assert adapter.asked() == 2


async def test_a_stream_can_be_left_when_enough_was_heard(given: Given) -> None:
    """S-SET-27: who stops listening leaves nothing behind."""
    adapter = given([Reply(text="one two three"), "next"])
    assert isinstance(adapter.model, StreamingChatModel)
    stream: AsyncIterator[str | ChatResponse] = adapter.model.stream(HELLO)
    assert await anext(stream) == "one "
    close = getattr(stream, "aclose", None)
    assert close is not None
    await close()
    assert (await chat(adapter.model)).text == "next"
