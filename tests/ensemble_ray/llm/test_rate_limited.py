"""A model behind a limit: what waits, what passes through, and what a copy of it is."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import timedelta

import pytest

from ensemble_ray import (
    ChatMessage,
    ChatModel,
    ChatResponse,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    RateLimitTimeoutError,
    StreamingChatModel,
    TokenUsage,
    ToolCall,
    ToolSpec,
    ValidationError,
)
from ensemble_ray.llm.limits.limiter import LocalLimiter
from ensemble_ray.ports import Services, use_services
from ensemble_ray.testing import ManualClock, ScriptedModel
from tests.ensemble_ray.llm.limits.settling import settle

HELLO = (ChatMessage("user", "hello"),)
SEARCH = (ToolSpec("search", "Search the web"),)
PER_SECOND = RateLimit.per_second(1)


class NoCpu:
    """Nothing here is CPU-heavy."""

    async def run(
        self, function: bytes, arguments: Mapping[str, object], *, timeout_s: float | None, may_repeat: bool = True
    ) -> object:
        raise NotImplementedError


class Parrot:
    """A synchronous model that does not stream."""

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        return ChatResponse(text=messages[-1].content)


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    """Time made by hand, for a limiter that every model of the test finds in its services."""
    clock = ManualClock(0.0)
    with use_services(Services(limiter=LocalLimiter(clock=clock), cpu=NoCpu())):
        yield clock


def test_parts_are_readable_when_wrapped() -> None:
    """S-RATE-10: delegate, limit and timeout, 30 s by default; numbers are seconds; it is a ChatModel."""
    model = ScriptedModel()
    limited = RateLimitedChatModel.of(model, PER_SECOND)
    assert limited.delegate is model
    assert limited.rate_limit == PER_SECOND
    assert limited.wait_timeout == timedelta(seconds=30)
    assert RateLimitedChatModel.of(model, PER_SECOND, 1.5).wait_timeout == timedelta(seconds=1.5)
    assert RateLimitedChatModel.of(model, PER_SECOND, timedelta(minutes=1)).wait_timeout == timedelta(minutes=1)
    assert isinstance(limited, ChatModel)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((None, PER_SECOND), "delegate"),
        ((ScriptedModel(), None), "rate_limit"),
        ((ScriptedModel(), PER_SECOND, None), "wait_timeout"),
    ],
)
def test_argument_is_refused_when_none(arguments: tuple[object, ...], name: str) -> None:
    """S-RATE-10: each of the three."""
    with pytest.raises(ValueError, match=f"RateLimitedChatModel {name} must not be None"):
        RateLimitedChatModel.of(*arguments)  # type: ignore[arg-type]


def test_timeout_is_refused_when_negative() -> None:
    """S-RATE-10: nobody waits less than not at all."""
    with pytest.raises(ValidationError, match="wait_timeout must not be negative"):
        RateLimitedChatModel.of(ScriptedModel(), PER_SECOND, -1)


def test_model_may_be_named_when_wrapped() -> None:
    """S-CONV-19: a string is accepted wherever a model is; an unknown prefix is refused."""
    named = RateLimitedChatModel.of("openai:gpt-4o-mini", PER_SECOND)
    assert isinstance(named.delegate, ChatModel)
    assert isinstance(named, StreamingChatModel)
    with pytest.raises(ValidationError):
        RateLimitedChatModel.of("nobody:nothing", PER_SECOND)


async def test_conversation_passes_unchanged_when_there_is_a_token(clock: ManualClock) -> None:
    """S-RATE-16: messages and tools go in as given, the answer comes out as made."""
    answer = ChatResponse("hi", (ToolCall("1", "search", "{}"),), TokenUsage(3, 4))
    seen: list[object] = []

    class Model:
        async def chat(self, *given: object) -> ChatResponse:
            seen.extend(given)
            return answer

    limited = RateLimitedChatModel.of(Model(), PER_SECOND)
    assert await limited.chat(HELLO, SEARCH) is answer
    assert seen[0] is HELLO
    assert seen[1] is SEARCH
    seen.clear()
    clock.advance(1.0)
    await limited.chat(HELLO)
    assert seen == [HELLO]


async def test_synchronous_model_is_asked_beside_the_loop_when_wrapped(clock: ManualClock) -> None:
    """S-RATE-16, S-CONV-20: a sync `chat` behind the limit is a ChatModel all the same."""
    assert (await RateLimitedChatModel.of(Parrot(), PER_SECOND).chat(HELLO)).text == "hello"


async def test_second_call_waits_when_it_follows_at_once(clock: ManualClock) -> None:
    """S-RATE-11, S-RATE-22: every model call counts, and the second one of a new limit already waits."""
    model = ScriptedModel("one", "two")
    limited = RateLimitedChatModel.of(model, RateLimit.of(2, 1.0))
    assert (await limited.chat(HELLO)).text == "one"
    second = asyncio.create_task(limited.chat(HELLO))
    await settle()
    assert len(model.calls) == 1
    clock.advance(0.5)
    assert (await second).text == "two"


async def test_model_is_not_asked_when_the_wait_times_out(clock: ManualClock) -> None:
    """S-RATE-12, S-ERR-20: the text says how long and which limit; both are fields."""
    model = ScriptedModel("one", "two")
    limited = RateLimitedChatModel.of(model, RateLimit.per_minute(10), wait_timeout=2.5)
    await limited.chat(HELLO)
    late = asyncio.create_task(limited.chat(HELLO))
    await settle()
    clock.advance(2.5)
    with pytest.raises(RateLimitTimeoutError) as timed_out:
        await late
    assert str(timed_out.value) == (
        "Rate limit exceeded: waited 2500ms but no token became available. Limit: 10 requests per 0:01:00. "
        "Increase wait_timeout or reduce concurrency."
    )
    assert len(model.calls) == 1
    copy = pickle.loads(pickle.dumps(timed_out.value))  # noqa: S301  our own bytes
    assert (str(copy), copy.rate_limit) == (str(timed_out.value), RateLimit.per_minute(10))
    assert copy.wait_timeout == timedelta(seconds=2.5)


async def test_token_is_used_when_the_model_fails(clock: ManualClock) -> None:
    """S-RATE-16: a failing call is a call; its error comes out as it is."""
    model = ScriptedModel(OSError("no line"), "two")
    limited = RateLimitedChatModel.of(model, PER_SECOND, wait_timeout=0)
    with pytest.raises(OSError, match="no line"):
        await limited.chat(HELLO)
    with pytest.raises(RateLimitTimeoutError):
        await limited.chat(HELLO)
    clock.advance(1.0)
    assert (await limited.chat(HELLO)).text == "two"


async def test_waiting_call_gets_cancelled_error_when_cancelled(clock: ManualClock) -> None:
    """S-RATE-13, S-RATE-14: as any await; no token is gone."""
    model = ScriptedModel("one", "two")
    limited = RateLimitedChatModel.of(model, PER_SECOND, wait_timeout=5)
    await limited.chat(HELLO)
    waiting = asyncio.create_task(limited.chat(HELLO))
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    clock.advance(1.0)
    assert (await limited.chat(HELLO)).text == "two"


async def test_copy_draws_from_the_same_bucket_when_pickled(clock: ManualClock) -> None:
    """S-RATE-20, S-RATE-34: a copy is a handle; a second wrapper of the same model is another limit."""
    limited = RateLimitedChatModel.of(Parrot(), PER_SECOND, wait_timeout=0)
    copy = pickle.loads(pickle.dumps(limited))  # noqa: S301  our own bytes
    assert copy is not limited
    assert copy == limited
    assert hash(copy) == hash(limited)
    await limited.chat(HELLO)
    with pytest.raises(RateLimitTimeoutError):
        await copy.chat(HELLO)
    another = RateLimitedChatModel.of(limited.delegate, PER_SECOND, wait_timeout=0)
    assert another != limited
    await another.chat(HELLO)


async def test_process_has_a_limiter_when_there_is_no_run() -> None:
    """S-RATE-10: outside any run the limit holds as well."""
    limited = RateLimitedChatModel.of(Parrot(), RateLimit.of(1, 3600), wait_timeout=0)
    await limited.chat(HELLO)
    with pytest.raises(RateLimitTimeoutError):
        await limited.chat(HELLO)


# Streaming.


async def test_stream_passes_through_when_the_model_streams(clock: ManualClock) -> None:
    """S-RATE-22, S-STR-1: fragments and closing answer as they come, one permit per stream."""
    limited = RateLimitedChatModel.of(ScriptedModel("two words", "more"), PER_SECOND, wait_timeout=0)
    assert isinstance(limited, StreamingChatModel)
    pieces = [piece async for piece in limited.stream(HELLO)]
    assert pieces == ["two ", "words", ChatResponse("two words")]
    with pytest.raises(RateLimitTimeoutError):
        await anext(aiter(limited.stream(HELLO)))
    with pytest.raises(RateLimitTimeoutError):
        await limited.chat(HELLO)


async def test_streaming_copy_streams_when_pickled(clock: ManualClock) -> None:
    """S-RATE-20: what it can do travels too."""
    model = ScriptedModel("hello")
    copy = pickle.loads(pickle.dumps(RateLimitedChatModel.of(model, PER_SECOND)))  # noqa: S301  our own bytes
    assert isinstance(copy, RateLimitedChatModel)
    assert copy.delegate is model
    assert isinstance(copy, StreamingChatModel)


def test_wrapper_does_not_stream_when_its_model_cannot() -> None:
    """S-STR-1: it must not look like a model that streams."""
    assert not isinstance(RateLimitedChatModel.of(Parrot(), PER_SECOND), StreamingChatModel)


async def test_stream_of_the_model_ends_when_the_reader_leaves(clock: ManualClock) -> None:
    """S-RATE-22: nothing is left open behind the wrapper."""
    ended: list[bool] = []

    class Endless(Parrot):
        async def stream(
            self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
        ) -> AsyncIterator[str | ChatResponse]:
            try:
                while True:
                    yield "on "
            finally:
                ended.append(True)

    limited = RateLimitedChatModel.of(Endless(), PER_SECOND)
    assert isinstance(limited, StreamingChatModel)
    stream = limited.stream(HELLO)
    assert await anext(stream) == "on "
    await stream.aclose()  # type: ignore[attr-defined]
    assert ended == [True]


def test_the_endpoint_is_that_of_the_model_behind_it_when_it_has_one() -> None:
    """S-DUR-64: a limit changes nothing about who fails together."""
    model = OpenAIChatModel("m", base_url="http://h/v1", api_key="sk-1234")
    assert RateLimitedChatModel.of(model, RateLimit.per_second(1)).endpoint_id == model.endpoint_id
    assert not RateLimitedChatModel.of(ScriptedModel("x"), RateLimit.per_second(1)).endpoint_id
