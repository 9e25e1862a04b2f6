"""Model calls whose provider fails are made again, as the run's policy allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    AgentExecutionError,
    ChatMessage,
    ChatResponse,
    CircuitOpenError,
    RateLimit,
    RateLimitedChatModel,
    RetryPolicy,
    ToolSpec,
)
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.runs import FailureRecorded
from ensemble_ray.llm.limits.endpoints import EndpointService
from ensemble_ray.llm.limits.limiter import LocalLimiter
from ensemble_ray.process.context import current_effect_key
from ensemble_ray.values.ids import uuid_of
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, InPieces, writer
from tests.ensemble_ray.llm.limits.settling import settle

WITHOUT_DELAYS = RetryPolicy(first_delay=0, max_delay=0)


class StatusError(Exception):
    """A provider's error, as any package may have it."""

    def __init__(self, status: int, retry_after: str | None = None) -> None:
        super().__init__(f"status {status}")
        self.status_code = status
        self.headers = {} if retry_after is None else {"retry-after": retry_after}


class Provider:
    """A model of the user's own; it answers as it is told, one entry per request."""

    def __init__(self, *entries: str | BaseException, endpoint_id: str = "") -> None:
        self._entries = list(entries)
        self.endpoint_id = endpoint_id
        self.requests = 0
        self.keys: list[str] = []

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        self.requests += 1
        self.keys.append(current_effect_key())
        entry = self._entries.pop(0)
        if isinstance(entry, BaseException):
            raise entry
        return ChatResponse(text=entry)


class Streamer(InPieces, Provider):
    """The same, in pieces."""


def bench_of(model: object, policy: RetryPolicy | None = WITHOUT_DELAYS) -> Bench:
    """A task of one agent, with a service on the bench's clock."""
    bench = Bench(agents={"draft": writer(model)}, context=replace(RUN_CONTEXT, retry=policy))
    bench.runner.ports = replace(bench.runner.ports, endpoints=EndpointService(clock=bench.clock))
    return bench


async def ended(model: object, policy: RetryPolicy | None = WITHOUT_DELAYS, **changes: object) -> TaskResult:
    """Run its task to the end."""
    return await bench_of(model, policy).run(**changes)


def cause_of(result: TaskResult) -> BaseException | None:
    """What the model raised."""
    assert isinstance(result.error, AgentExecutionError)
    return result.error.__cause__


async def test_a_call_is_made_again_when_its_provider_failed(caplog: pytest.LogCaptureFixture) -> None:
    """S-DUR-61, S-DUR-66, S-MET-17: one WARN line each, counted in the metrics, told in the record."""
    provider = Provider(StatusError(503), ConnectionResetError("reset"), "Done")
    bench = bench_of(provider)
    with caplog.at_level(logging.WARNING):
        result = await bench.run()
    assert result.output is not None
    assert (result.output.raw, provider.requests) == ("Done", 3)
    assert (result.output.metrics.retry_count, result.output.metrics.llm_call_count) == (2, 1)
    assert caplog.messages == [
        "Task 'draft': attempt 1 of 5 at Provider failed, again in 0 s: HTTP 503: status 503",
        "Task 'draft': attempt 2 of 5 at Provider failed, again in 0 s: no connection: reset",
    ]
    fact = bench.journal.facts()[0].data.to_data()
    assert (fact["retries"], fact["attempts_failed"]) == (2, ["HTTP 503: status 503", "no connection: reset"])


async def test_attempts_and_their_waits_are_recorded_with_the_answer() -> None:
    """S-DUR-66: reason, time and wait of each, and in the trace as texts; nothing of a call that needed one attempt."""
    bench = bench_of(Provider("One", StatusError(429, "0.5"), StatusError(503, "2"), "Two"))
    first = await bench.run()
    task = asyncio.create_task(bench.run(instance="draft#1"))
    await settle()
    bench.clock.advance(0.5)
    await settle()
    bench.clock.advance(2)
    second = await task
    short, long = [fact.data.to_data() for fact in bench.journal.facts() if isinstance(fact.data, ModelAnswered)]
    assert not {"waits", "max_attempts", "retries"} & short.keys()
    assert long["waits"] == [
        ["retry", "HTTP 429: status 429", 1000.0, 0.5],
        ["retry", "HTTP 503: status 503", 1000.5, 2.0],
    ]
    assert long["max_attempts"] == 5
    traces = [
        each.output.trace for each in (first, second) if each.output is not None and each.output.trace is not None
    ]
    assert [each.llm_interactions[0].waits for each in traces] == [
        (),
        ("HTTP 429: status 429, waited 0.5 s", "HTTP 503: status 503, waited 2 s"),
    ]
    assert ["waits" in each.llm_interactions[0].model_dump() for each in traces] == [False, True]


async def test_attempts_are_recorded_with_the_failure_when_no_attempt_was_answered() -> None:
    """S-DUR-66: those before the last one, whose error is the failure; a later call has its own."""
    bench = bench_of(Provider(StatusError(503), StatusError(429, "0"), StatusError(400)))
    await bench.run()
    failure = bench.journal.facts()[-1].data
    assert isinstance(failure, FailureRecorded)
    assert [(each.cause, each.reason, each.wait_s) for each in failure.waits] == [
        ("retry", "HTTP 503: status 503", 0.0),
        ("retry", "HTTP 429: status 429", 0.0),
    ]
    assert (failure.attempts, failure.max_attempts) == (3, 5)
    bench = bench_of(Provider(StatusError(400)))
    await bench.run()
    assert not {"waits", "max_attempts"} & bench.journal.facts()[-1].data.to_data().keys()


class BodyError(StatusError):
    """The same, with what the provider said."""

    def __init__(self, status: int, **said: object) -> None:
        super().__init__(status)
        self.body = {"error": said}


@pytest.mark.parametrize(
    "error",
    [
        BodyError(429, code="insufficient_quota"),
        BodyError(402, message="Insufficient Balance"),
        BodyError(400, message="Your credit balance is too low"),
    ],
)
async def test_a_call_is_made_once_when_the_account_has_no_credit(error: BodyError) -> None:
    """S-LLM-21: for a model of the user's own, too; the endpoint is well, so that nobody waits for it (S-DUR-64)."""
    provider = Provider(*[error] * 6, "Done", endpoint_id="e")
    bench = bench_of(provider)
    for _ in range(6):
        assert (await bench.run()).status == "failed"
    assert provider.requests == 6
    assert (await bench.run()).status == "completed"


async def test_a_call_is_made_again_when_the_model_wrote_a_bad_tool_call() -> None:
    """S-LLM-22: up to the policy's attempts; no breaker opens for it (S-DUR-64)."""
    bad = BodyError(400, code="tool_use_failed", failed_generation="<function=look{}")
    provider = Provider(bad, "Done", *[bad] * 10, "Done", endpoint_id="e")
    bench = bench_of(provider)
    assert [(await bench.run()).status for _ in range(4)] == ["completed", "failed", "failed", "completed"]
    assert provider.requests == 13


async def test_retries_count_when_no_attempt_was_answered() -> None:
    """S-DUR-60, S-DUR-66: five attempts, then the provider's own error."""
    errors = [StatusError(500) for _ in range(6)]
    provider = Provider(*errors)
    result = await ended(provider)
    assert (result.status, provider.requests) == ("failed", 5)
    assert cause_of(result) is errors[4]
    assert result.trace is not None
    assert result.trace.metrics.retry_count == 4


@pytest.mark.parametrize("policy", [None, RetryPolicy(max_attempts=1)])
async def test_a_call_fails_at_once_when_no_retries_are_wanted(policy: RetryPolicy | None) -> None:
    """S-DUR-60: None, or one attempt."""
    provider = Provider(StatusError(500), "never")
    assert (await ended(provider, policy)).status == "failed"
    assert provider.requests == 1


@pytest.mark.parametrize("error", [StatusError(400), StatusError(404), ValueError("a mistake"), SystemExit(3)])
async def test_a_call_fails_at_once_when_another_attempt_is_of_no_use(error: BaseException) -> None:
    """S-DUR-61: never a refusal, never an error of user code."""
    provider = Provider(error, "never")
    assert cause_of(await ended(provider)) is error
    assert provider.requests == 1


async def test_a_call_fails_at_once_when_what_it_gave_is_no_answer() -> None:
    """S-DUR-61: never an answer that cannot be read."""

    class Mute(Provider):
        async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
            self.requests += 1
            return None  # type: ignore[return-value]  the point of this test

    mute = Mute()
    assert (await ended(mute)).status == "failed"
    assert mute.requests == 1


async def test_the_delay_doubles_when_attempts_go_on() -> None:
    """S-DUR-62: from `first_delay`, between half of it and all of it, by the ports' clock; no permit, no request."""
    provider = Provider(StatusError(500), StatusError(500), "Done")
    bench = bench_of(provider, RetryPolicy(first_delay=10, max_delay=100))
    task = asyncio.create_task(bench.run())
    await settle()
    bench.clock.advance(4.9)
    await settle()
    assert provider.requests == 1
    bench.clock.advance(5.1)
    await settle()
    assert provider.requests == 2
    bench.clock.advance(9.9)
    await settle()
    assert provider.requests == 2
    bench.clock.advance(10.1)
    result = await task
    assert result.output is not None
    # The latency is the model's: waiting between attempts is not counted.
    assert result.output.metrics.llm_latency.total_seconds() == 0
    assert result.output.duration.total_seconds() == 30


@pytest.mark.parametrize("wish", ["40", "Thu, 01 Jan 1970 00:17:20 GMT"])
async def test_the_providers_wish_replaces_the_delay_when_it_has_one(wish: str) -> None:
    """S-DUR-62: seconds or a date, above `max_delay` too; the bench's clock stands at 1000 s."""
    provider = Provider(StatusError(429, wish), "Done")
    bench = bench_of(provider, RetryPolicy(first_delay=0.1))
    task = asyncio.create_task(bench.run())
    await settle()
    bench.clock.advance(39.9)
    await settle()
    assert provider.requests == 1
    bench.clock.advance(0.1)
    assert (await task).status == "completed"


async def test_a_call_fails_at_once_when_its_waits_would_be_too_long_in_sum() -> None:
    """S-DUR-62: more than `max_wait` is not waited; the provider's error tells."""
    last = StatusError(503, "61")
    provider = Provider(StatusError(503, "60"), last)
    bench = bench_of(provider)
    task = asyncio.create_task(bench.run())
    await settle()
    bench.clock.advance(60)
    assert cause_of(await task) is last
    assert bench.clock.sleepers == 0


async def test_a_task_ends_at_once_when_it_is_cancelled_while_it_waits() -> None:
    """S-DUR-62: a retry that nobody wants any more is not waited for."""
    provider = Provider(StatusError(500), "never")
    bench = bench_of(provider, RetryPolicy(first_delay=10))
    task = asyncio.create_task(bench.run(is_stopped=True))
    await settle()
    task.cancel()
    assert (await task).status == "cancelled"
    assert provider.requests == 1


async def test_a_stream_is_repeated_when_it_had_not_begun() -> None:
    """S-DUR-61: nothing of it was shown to anybody."""
    streamer = Streamer(StatusError(503), "It works")
    result = await ended(streamer, is_streaming=True)
    assert result.output is not None
    assert (result.output.raw, streamer.requests) == ("Itworks", 2)


async def test_a_stream_is_not_repeated_when_it_had_begun() -> None:
    """S-DUR-61: its first words are on somebody's screen."""
    lost = ConnectionResetError("cut")
    streamer = Streamer("It...", lost, "never")
    assert cause_of(await ended(streamer, is_streaming=True)) is lost
    assert streamer.requests == 1


async def test_every_attempt_has_the_effects_own_key_when_a_call_is_repeated() -> None:
    """S-DUR-27: one effect, one key; none outside it."""
    provider = Provider(StatusError(503), "Done")
    await ended(provider)
    assert provider.keys == [uuid_of("run/draft#0/0/model")] * 2
    assert not current_effect_key()


async def test_each_attempt_takes_a_permit_when_the_model_has_a_limit() -> None:
    """S-DUR-63: two attempts, one permit: the second gets none within its time."""
    provider = Provider(StatusError(503), "never")
    limited = RateLimitedChatModel.of(provider, RateLimit.of(1, 3600), wait_timeout=0)
    result = await ended(limited)
    assert "Rate limit exceeded" in str(cause_of(result))
    assert provider.requests == 1


async def test_the_wait_for_a_permit_is_recorded_with_the_answer() -> None:
    """S-RATE-35: that of the attempt that was answered, as a part of its latency; in the trace too; nothing where none was waited for."""
    limited = RateLimitedChatModel.of(Provider("One", "Two", "Three"), RateLimit.of(1, 60))
    bench = bench_of(limited)
    limiter = LocalLimiter(clock=bench.clock)
    bench.runner.ports = replace(bench.runner.ports, services=replace(bench.runner.ports.services, limiter=limiter))
    at_once = await bench.run()
    task = asyncio.create_task(bench.run(instance="draft#1"))
    await settle()
    bench.clock.advance(60)
    waited = await task
    first, second = [fact.data for fact in bench.journal.facts() if isinstance(fact.data, ModelAnswered)]
    assert (first.waited_s, second.waited_s, second.latency_s) == (0.0, 60.0, 60.0)
    assert ("waited_s" in first.to_data(), second.to_data()["waited_s"]) == (False, 60.0)
    traces = [each.output.trace for each in (at_once, waited) if each.output is not None]
    assert [each.llm_interactions[0].permit_wait for each in traces if each] == [None, timedelta(seconds=60)]


async def test_calls_of_other_tasks_wait_when_an_endpoint_fails_for_everybody() -> None:
    """S-DUR-64: five attempts of one task open the breaker; another one's call is the probe that closes it."""
    provider = Provider(*[StatusError(500) for _ in range(5)], "Done", endpoint_id="http://h m")
    bench = bench_of(provider)
    assert (await bench.run()).status == "failed"
    task = asyncio.create_task(bench.run(instance="draft#1"))
    await settle()
    assert provider.requests == 5
    bench.clock.advance(5)
    assert (await task).status == "completed"
    assert provider.requests == 6
    (answer,) = [fact.data for fact in bench.journal.facts() if isinstance(fact.data, ModelAnswered)]
    assert answer.waits == (("breaker", "circuit breaker open: HTTP 500: status 500", 1000.0, 5.0),)


async def test_a_task_fails_when_its_patience_ends_before_the_breaker_closes() -> None:
    """S-DUR-64: with the endpoint and its last failure; the call's own last failure is the cause."""
    provider = Provider(*[StatusError(500) for _ in range(9)], endpoint_id="http://h m")
    bench = bench_of(provider, RetryPolicy(max_attempts=9, first_delay=0, max_delay=0, max_wait=3))
    task = asyncio.create_task(bench.run())
    await settle()
    bench.clock.advance(3)
    failure = cause_of(await task)
    assert isinstance(failure, CircuitOpenError)
    assert failure.endpoint == "http://h m"
    assert str(failure).endswith("Last failure: HTTP 500: status 500")
    assert isinstance(failure.__cause__, StatusError)
    assert provider.requests == 5


async def test_the_breaker_stays_closed_when_requests_are_refused() -> None:
    """S-DUR-64: somebody is there who refuses them."""
    provider = Provider(*[StatusError(400) for _ in range(9)], "Done", endpoint_id="http://h m")
    bench = bench_of(provider)
    for number in range(9):
        assert (await bench.run(instance=f"draft#{number}")).status == "failed"
    assert (await bench.run(instance="draft#9")).status == "completed"


async def test_fewer_calls_go_when_the_endpoint_asks_for_it() -> None:
    """S-DUR-65: of two on their way one; the refused one waits for its place when its delay is over."""
    gate = asyncio.Event()

    class Busy(Provider):
        async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
            self.requests += 1
            if self.requests == 2:
                raise StatusError(429, "0")
            await gate.wait()
            return ChatResponse(text="Done")

    busy = Busy(endpoint_id="http://h m")
    bench = bench_of(busy)
    tasks = [asyncio.create_task(bench.run(instance=f"draft#{number}")) for number in range(2)]
    await settle()
    assert busy.requests == 2
    gate.set()
    assert [result.status for result in await asyncio.gather(*tasks)] == ["completed", "completed"]
    assert busy.requests == 3
