"""Model calls of a task whose model is a chain: the next model is asked, and the record says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

import pytest
from msgspec.structs import replace

from ensemble_ray import (
    AgentExecutionError,
    AllModelsFailedError,
    ChatMessage,
    ChatResponse,
    CircuitOpenError,
    ExitReason,
    Fallback,
    JsonSchema,
    RateLimit,
    RateLimitTimeoutError,
    RetryPolicy,
    TokenUsage,
    ToolCall,
    ToolSpec,
    When,
    tool,
)
from ensemble_ray.execute.orders import RunModels, TaskResult
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import FailureRecorded
from ensemble_ray.llm.limits.endpoints import EndpointService
from ensemble_ray.llm.names import ModelNames
from ensemble_ray.process.context import current_effect_key
from ensemble_ray.testing import RecordingSink
from ensemble_ray.values.metrics import RunBudget
from ensemble_ray.values.reviews import ModelSwitch
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, InPieces, writer
from tests.ensemble_ray.llm.limits.settling import settle

WITHOUT_DELAYS = RetryPolicy(first_delay=0, max_delay=0, max_attempts=2)


class StatusError(Exception):
    """A provider's error, as any package may have it."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"status {status}")
        self.status_code = status
        self.body = {"error": {"code": code, "message": f"status {status}"}}


FILTERED = "the model's answer was cut off by the provider's content filter (finish_reason 'content_filter')"
NO_CREDIT = StatusError(429, "insufficient_quota")
Entry = str | ChatResponse | BaseException


CALL = ChatResponse(text="", tool_calls=(ToolCall("1", "look", "{}"),))


@tool(effect="none")
def look() -> str:
    """Look."""
    return "seen"


class Provider:
    """A model with a name; it answers as it is told, one entry per request."""

    provider_name = "here"

    def __init__(self, model: str, *entries: Entry, endpoint_id: str = "", max_output_tokens: int = 0) -> None:
        self.model = model
        self._entries = list(entries)
        self.endpoint_id = endpoint_id
        self.max_output_tokens = max_output_tokens
        self.requests: list[Sequence[ChatMessage]] = []
        self.keys: list[str] = []

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        self.requests.append(messages)
        self.keys.append(current_effect_key())
        entry = self._entries.pop(0)
        if isinstance(entry, BaseException):
            raise entry
        return entry if isinstance(entry, ChatResponse) else ChatResponse(text=entry)


class Streamer(InPieces, Provider):
    """The same, in pieces."""


class Structured(Provider):
    """A model with schemas."""

    schemas = 0

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        self.schemas += 1
        return await self.chat(messages)


def bench_of(
    *models: object,
    policy: RetryPolicy | None = WITHOUT_DELAYS,
    known: Sequence[Fact] = (),
    sink: RecordingSink | None = None,
    budget: RunBudget | None = None,
    tools: Sequence[object] = (),
    **options: object,
) -> Bench:
    """A task of one agent with a chain, with a service on the bench's clock."""
    chain = Fallback(list(models), **options)  # type: ignore[arg-type]  models and options of the test
    context = replace(RUN_CONTEXT, retry=policy, budget=budget, began_at=1000.0)
    agents = {"draft": writer(chain, tools=list(tools))}
    bench = Bench(agents=agents, context=context, known=known, sink=sink)
    bench.runner.ports = replace(bench.runner.ports, endpoints=EndpointService(clock=bench.clock))
    return bench


def answers(bench: Bench) -> list[ModelAnswered]:
    """The recorded answers."""
    return [fact.data for fact in bench.journal.facts() if isinstance(fact.data, ModelAnswered)]


def raw_of(result: TaskResult) -> str:
    """The text of its output."""
    assert result.output is not None, result.error
    return str(result.output.raw)


def cause_of(result: TaskResult) -> BaseException | None:
    """What ended its model call."""
    assert isinstance(result.error, AgentExecutionError)
    return result.error.__cause__


async def test_the_next_model_is_asked_after_the_retries(caplog: pytest.LogCaptureFixture) -> None:
    """S-FBK-10, S-FBK-13, S-FBK-30, S-FBK-31: record, trace, metrics and log name the models."""
    first, second = Provider("big", StatusError(503), StatusError(500)), Provider("small", "Done")
    bench = bench_of(first, second)
    with caplog.at_level(logging.WARNING):
        result = await bench.run()
    assert raw_of(result) == "Done"
    assert caplog.messages == [
        "Task 'draft': attempt 1 of 2 at Provider failed, again in 0 s: big: HTTP 503: status 503",
        "Task 'draft': the next model of the chain is asked. big: HTTP 500: status 500",
    ]
    (answer,) = answers(bench)
    assert (answer.model, answer.provider) == ("small", "here")
    failed = ("big: HTTP 503: status 503", "big: HTTP 500: status 500")
    assert answer.attempts_failed == failed
    assert [(wait.cause, wait.reason) for wait in answer.waits] == list(zip(("retry", "fallback"), failed, strict=True))
    assert result.output is not None
    metrics = result.output.metrics
    assert (metrics.retry_count, metrics.llm_call_count, metrics.answers_by_model) == (2, 1, {"small": 1})
    assert result.output.trace is not None
    (interaction,) = result.output.trace.llm_interactions
    assert (interaction.model, interaction.provider) == ("small", "here")
    assert interaction.waits == (failed[0], f"{failed[1]}; then the next model")


async def test_the_first_models_answer_is_recorded_without_its_name() -> None:
    """S-FBK-41, S-FBK-31: the definition has the name, the provider of a model of the user's is not in it."""
    bench = bench_of(Provider("big", "Done"), Provider("small"))
    result = await bench.run()
    (answer,) = answers(bench)
    assert (answer.model, answer.provider) == (None, "here")
    assert result.output is not None
    assert result.output.metrics.answers_by_model == {"big": 1}
    assert not {"model", "waits", "attempts_failed"} & answer.to_data().keys()


@pytest.mark.parametrize(
    "error",
    [
        NO_CREDIT,
        StatusError(401),
        StatusError(400, "context_length_exceeded"),
        StatusError(500, "exceed_context_size_error"),
        RateLimitTimeoutError(RateLimit.per_second(1), timedelta(seconds=1)),
    ],
)
async def test_the_next_model_is_asked_without_a_retry(error: Exception) -> None:
    """S-FBK-10: no attempt of the same model can help."""
    first, second = Provider("big", error), Provider("small", "Done")
    result = await bench_of(first, second).run()
    assert (raw_of(result), len(first.requests), len(second.requests)) == ("Done", 1, 1)


async def test_other_failures_end_the_call() -> None:
    """S-FBK-10, S-FBK-14: an error that `on` lacks, and one of a model's own code, are raised unchanged."""
    second = Provider("small", "Done")
    result = await bench_of(Provider("big", StatusError(401)), second, on="quota").run()
    assert isinstance(cause_of(result), StatusError)
    result = await bench_of(Provider("big", KeyError("mine")), second).run()
    assert isinstance(cause_of(result), KeyError)
    assert not second.requests


async def test_all_models_failed() -> None:
    """S-FBK-14, S-FBK-30: the error names each in order; the record of the failure has all attempts and waits."""
    bench = bench_of(Provider("big", NO_CREDIT), Provider("small", StatusError(503), StatusError(502)))
    result = await bench.run()
    error = cause_of(result)
    assert isinstance(error, AllModelsFailedError)
    assert error.failures == {"big": "status 429", "small": "HTTP 502: status 502"}
    assert str(error) in str(result.error)
    assert isinstance(error.__cause__, StatusError)
    (failure,) = [fact.data for fact in bench.journal.facts() if isinstance(fact.data, FailureRecorded)]
    assert failure.attempts == 3
    assert [wait.cause for wait in failure.waits] == ["fallback", "retry"]


async def test_an_open_breaker_is_left_immediately() -> None:
    """S-FBK-13: it was not asked, so no attempt failed; the last model waits as a single one does."""
    first, second = Provider("big", "Late", endpoint_id="e1"), Provider("small", "Done", "Again", endpoint_id="e2")
    bench = bench_of(first, second)
    call = bench.runner.ports.endpoints.open_call("e1")
    for _ in range(5):
        call.try_begin()
        call.record_failure("HTTP 503")
    result = await bench.run()
    assert raw_of(result) == "Done"
    (answer,) = answers(bench)
    assert [wait.cause for wait in answer.waits] == ["skipped"]
    assert answer.waits[0].reason.startswith("big: Endpoint e1 fails for everybody")
    assert (answer.retries, first.requests) == (0, [])
    bench.clock.advance(6)  # the breaker lets one call through
    recovered = await bench.run(instance="draft#1")
    assert raw_of(recovered) == "Late"


async def test_without_the_word_an_open_breaker_is_waited_for() -> None:
    """S-FBK-13: as for a single model."""
    bench = bench_of(Provider("big", "Late", endpoint_id="e1"), Provider("small"), on="failure")
    call = bench.runner.ports.endpoints.open_call("e1")
    for _ in range(5):
        call.try_begin()
        call.record_failure("HTTP 503")
    task = asyncio.create_task(bench.run())
    await settle()
    assert not task.done()
    bench.clock.advance(6)
    assert raw_of(await task) == "Late"


async def test_the_last_model_waits_for_its_breaker() -> None:
    """S-FBK-13, S-FBK-14: until `max_wait`; then the error names both."""
    bench = bench_of(
        Provider("big", NO_CREDIT), Provider("small", endpoint_id="e2"), policy=WITHOUT_DELAYS.replace(max_wait=1)
    )
    call = bench.runner.ports.endpoints.open_call("e2")
    for _ in range(5):
        call.try_begin()
        call.record_failure("HTTP 503")
    task = asyncio.create_task(bench.run())
    await settle()
    bench.clock.advance(1)
    error = cause_of(await task)
    assert isinstance(error, AllModelsFailedError)
    assert isinstance(error.__cause__, CircuitOpenError)


async def test_a_task_stays_with_its_model() -> None:
    """S-FBK-12, S-FBK-16: until it fails; then the others are asked, the first one too. A new task begins with the first."""
    first = Provider("big", NO_CREDIT, "Recovered", "First")
    second = Provider("small", CALL, CALL, NO_CREDIT)
    bench = bench_of(first, second, tools=[look])
    result = await bench.run()
    assert raw_of(result) == "Recovered"
    assert [each.model for each in answers(bench)] == ["small", "small", None]
    assert (len(first.requests), len(second.requests)) == (2, 3)
    assert len(set(first.keys) | set(second.keys)) == 5
    assert raw_of(await bench.run(instance="draft#1")) == "First"


async def test_a_resumed_task_stays_with_its_model() -> None:
    """S-FBK-42: a recorded answer is not requested again, and the next request goes to the model that gave it."""
    before = bench_of(Provider("big", NO_CREDIT), Provider("small", CALL, KeyError("died")), tools=[look])
    await before.run()
    known = [fact for fact in before.journal.facts() if isinstance(fact.data, ModelAnswered)]
    first, second = Provider("big"), Provider("small", "Done")
    result = await bench_of(first, second, known=known, tools=[look]).run(epoch=1)
    assert raw_of(result) == "Done"
    assert (len(first.requests), len(second.requests)) == (0, 1)
    assert result.output is not None
    assert result.output.metrics.answers_by_model == {"small": 2}
    assert result.output.metrics.retry_count == 1


async def test_a_filtered_answer_is_a_refusal() -> None:
    """S-FBK-11, S-FBK-17: its tokens count with those of the answer."""
    cut = ChatResponse(text="The", finish_reason="content_filter", usage=TokenUsage(5, 2))
    done = ChatResponse(text="Done", usage=TokenUsage(6, 3))
    bench = bench_of(Provider("big", cut), Provider("small", done), budget=RunBudget(max_tokens=1000))
    result = await bench.run()
    assert raw_of(result) == "Done"
    (answer,) = answers(bench)
    assert (answer.input_tokens, answer.output_tokens, answer.model) == (11, 5, "small")
    assert answer.attempts_failed == (f"big: {FILTERED}",)
    spending = bench.runner.ports.spending
    assert spending is not None
    assert await spending.account.share_spent() == pytest.approx(16 / 1000)


async def test_the_last_models_filtered_answer_is_an_incomplete_one() -> None:
    """S-FBK-11: as of a single model."""
    cut = ChatResponse(text="The", finish_reason="content_filter")
    result = await bench_of(Provider("big", NO_CREDIT), Provider("small", cut)).run()
    assert raw_of(result) == "The"
    assert result.output is not None
    assert result.output.metrics.incomplete_answers == 1


async def test_each_model_is_asked_as_it_can_answer(caplog: pytest.LogCaptureFixture) -> None:
    """S-FBK-6: one streams and one answers whole, one has schemas and one none."""
    sink = RecordingSink()
    bench = bench_of(Streamer("big", NO_CREDIT, "Two words"), Provider("small", "Whole"), sink=sink)
    assert raw_of(await bench.run(is_streaming=True)) == "Whole"
    assert "Model Provider cannot stream; running without streaming" in caplog.messages
    assert raw_of(await bench.run(is_streaming=True, instance="draft#1")) == "Twowords"
    structured = Structured("small", '{"n": 1}')
    typed = bench_of(Provider("big", NO_CREDIT), structured)
    typed_task = typed.tasks["draft"].replace(output_type=dict[str, int])
    result = await typed.run(task=typed_task)
    assert result.output is not None
    assert (result.output.parsed_output, structured.schemas) == ({"n": 1}, 1)


async def test_no_other_model_continues_a_shown_answer() -> None:
    """S-FBK-15: a stream that has begun ends the call."""
    second = Provider("small", "Done")
    result = await bench_of(Streamer("big", "One...", StatusError(503)), second).run(is_streaming=True)
    assert isinstance(cause_of(result), StatusError)
    assert not second.requests
    begun = Streamer("big", StatusError(503), StatusError(503))
    assert raw_of(await bench_of(begun, second).run(is_streaming=True)) == "Done"


async def test_each_request_is_estimated_for_its_own_model() -> None:
    """S-FBK-17: the limit of the first model does not fit the budget, the one of the second does."""
    first, second = Provider("big", "No", max_output_tokens=5000), Provider("small", "Done", max_output_tokens=10)
    budget = RunBudget(max_tokens=1000)
    result = await bench_of(first, second, budget=budget).run()
    assert (result.status, result.exit_reason) == ("exited", ExitReason.BUDGET_EXHAUSTED)
    assert not second.requests
    result = await bench_of(second, first, budget=budget).run()
    assert raw_of(result) == "Done"


async def test_a_rule_leaves_out_the_first_models() -> None:
    """S-FBK-20, S-FBK-21, S-FBK-30: above a share of the budget the small one is used, and the record says why."""
    usage = TokenUsage(450, 50)
    first = Provider("big", ChatResponse(text="One", usage=usage))
    second = Provider("small", "Two", NO_CREDIT)
    bench = bench_of(first, second, when=When(budget_above=0.4), budget=RunBudget(max_tokens=1000))
    assert raw_of(await bench.run()) == "One"
    assert raw_of(await bench.run(instance="draft#1")) == "Two"
    answer = answers(bench)[-1]
    assert (answer.model, answer.retries) == ("small", 0)
    assert [(wait.cause, wait.reason) for wait in answer.waits] == [("rule", "When(budget_above=0.4): small is asked")]
    failed = await bench.run(instance="draft#2")
    assert isinstance(cause_of(failed), StatusError)
    assert len(first.requests) == 1


async def test_rules_change_the_model_within_a_task() -> None:
    """S-FBK-20: a long request goes to the model that `use` names, the last rule that holds counts."""
    call = ChatResponse(text="x" * 4000, tool_calls=CALL.tool_calls)
    models = Provider("a", call), Provider("b", call), Provider("c", "Done")
    rules = (When(tokens_above=1000, use="b"), When(tokens_above=2000, use="c"), When(tokens_above=1, run_time_above=1))
    bench = bench_of(*models, when=rules, tools=[look])
    assert raw_of(await bench.run()) == "Done"
    assert [each.model for each in answers(bench)] == [None, "b", "c"]


async def test_a_rule_holds_after_some_time_of_the_run() -> None:
    """S-FBK-21: since the run was started or resumed; without a budget its share is never reached."""
    models = Provider("big", "One"), Provider("small", "Two")
    bench = bench_of(*models, when=[When(run_time_above=60), When(budget_above=0, run_time_above=0)])
    assert raw_of(await bench.run()) == "One"
    bench.clock.advance(61)
    assert raw_of(await bench.run(instance="draft#1")) == "Two"


async def test_a_chain_moves_on_without_a_retry_policy() -> None:
    """S-FBK-13: each model has one attempt."""
    result = await bench_of(Provider("big", StatusError(503)), Provider("small", "Done"), policy=None).run()
    assert raw_of(result) == "Done"


async def test_the_record_names_a_model_that_it_does_not_declare() -> None:
    """S-FBK-41: one that a directive chose; in a run that creates its tasks, one that is not the run's."""
    big, other = Provider("big", "One", "Two", "Three"), Provider("other", "Switched", "Own")
    context = replace(RUN_CONTEXT, models=RunModels({"other": other}), declared_model=ModelNames("big", "here"))
    bench = Bench(agents={"draft": writer(big)}, context=context)
    await bench.run()
    await bench.run(instance="draft#1", switches=(ModelSwitch(model="other"),))
    await bench.run(instance="draft#2", agent=writer(big))
    await bench.run(instance="draft#3", agent=writer(other))
    assert [(each.model, each.provider) for each in answers(bench)] == [
        (None, "here"),
        ("other", "here"),
        (None, None),
        ("other", None),
    ]


async def test_a_repeated_answer_is_one_of_the_chain() -> None:
    """S-FBK-12: an incomplete answer is requested again from the model that gave it."""
    cut = ChatResponse(text="The", finish_reason="length", usage=TokenUsage(1, 1))
    done = ChatResponse(text="Done", usage=TokenUsage(1, 1))
    first, second = Provider("big", NO_CREDIT), Provider("small", cut, done)
    bench = bench_of(first, second)
    bench.runner.context = replace(bench.runner.context, on_incomplete="retry")
    assert raw_of(await bench.run()) == "Done"
    (answer,) = answers(bench)
    assert (answer.model, answer.output_tokens, answer.retries) == ("small", 2, 2)
    assert [wait.cause for wait in answer.waits] == ["fallback", "repeat"]
    assert len(set(second.keys)) == 2
