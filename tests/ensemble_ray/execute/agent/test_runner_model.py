"""Agents whose tasks a runner of the user's does: what it is asked, what its answers become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    CaptureMode,
    ChatMessage,
    GuardrailOutput,
    GuardrailResult,
    GuardrailViolationError,
    LlmIterationCompletedEvent,
    OutputParsingError,
    RetryPolicy,
    Task,
    TaskAnswer,
    TaskRequest,
    TokenEvent,
    TryAgain,
)
from ensemble_ray.testing import RecordingSink
from ensemble_ray.values.messages import Reasoning
from ensemble_ray.values.metrics import RunBudget
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench
from tests.ensemble_ray.values.test_joined import output


class Answers:
    """A runner that gives what it is told to, one after the other, and keeps what it was asked."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.requests: list[TaskRequest] = []

    async def run(self, request: TaskRequest) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class City(BaseModel):
    name: str


def bench_of(runner: object, **fields: object) -> Bench:
    """A task `draft` of an agent with that runner; `fields` of the task."""
    agent = Agent(role="Writer", goal="Write", background="Long", runner=runner)  # type: ignore[arg-type]
    bench = Bench(agents={"draft": agent}, sink=RecordingSink())
    bench.tasks["draft"] = Task(description="Draft it", expected_output="Prose", **fields)  # type: ignore[arg-type]
    return bench


async def test_runner_is_asked_what_a_model_would_be() -> None:
    """S-INT-51: with the same prompts, and the context's outputs beside them."""
    runner = Answers("done")
    said = (ChatMessage(role="user", content="Hello"), ChatMessage(role="assistant", content="Yes?"))
    bench = bench_of(runner, history=said)
    given = output("The facts", 1.0)
    result = await bench.run(context=(given,))
    assert result.output is not None
    assert (result.output.raw, result.output.agent_role) == ("done", "Writer")
    [request] = runner.requests
    assert request.system_prompt.startswith("You are Writer.")
    assert "Long" in request.system_prompt
    assert "The facts" in request.prompt
    assert request.prompt.endswith("Prose")
    assert request.history == said
    assert request.text == f"{request.system_prompt}\n\nUser: Hello\n\nAssistant: Yes?\n\n{request.prompt}"
    assert (request.description, request.expected_output) == ("Draft it", "Prose")
    assert (request.agent_role, request.context_outputs) == ("Writer", (given,))
    assert (request.run_id, request.task, request.instance, request.attempt) == ("run", "draft", "draft#0", 0)
    assert (request.output_type, request.output_schema, request.is_streaming) == (None, None, False)


async def _later() -> AsyncIterator[str | TaskAnswer]:
    yield "in "
    yield "pieces"
    yield TaskAnswer(input_tokens=7, output_tokens=2)


class Generator:
    async def run(self, request: TaskRequest) -> AsyncIterator[str]:
        yield f"{request.task} "
        yield "streamed"


async def _thinking() -> AsyncIterator[str]:
    yield Reasoning("secret thought ")
    yield "42"


class Plain:
    def run(self, request: TaskRequest) -> str:
        return request.description.upper()


@pytest.mark.parametrize(
    ("runner", "text", "tokens"),
    [
        (Answers("a text"), "a text", -1),
        (Answers(TaskAnswer(text="a value", input_tokens=3, output_tokens=4)), "a value", 7),
        (Answers(_later()), "in pieces", 9),
        (Answers(TaskAnswer(structured_output={"a": [1]})), '{"a":[1]}', -1),
        (Answers(TaskAnswer(text="told", structured_output={"a": 1})), "told", -1),
        (Generator(), "draft streamed", -1),
        (Answers(_thinking()), "42", -1),
        (Plain(), "DRAFT IT", -1),
    ],
    ids=["text", "answer", "iterator", "structured", "both", "generator", "reasoning", "synchronous"],
)
async def test_answer_of_a_runner_has_one_of_these_forms(runner: object, text: str, tokens: int) -> None:
    """S-INT-52, S-INT-55: and its tokens are those of the task."""
    result = await bench_of(runner).run()
    assert result.output is not None
    assert (result.output.raw, result.output.metrics.total_tokens) == (text, tokens)
    assert (result.output.metrics.llm_call_count, result.output.tool_call_count) == (1, 0)


@pytest.mark.parametrize("answer", [None, 3, ["a"], b"bytes"])
async def test_anything_else_fails_the_task(answer: object) -> None:
    """S-INT-52: with the type that came."""
    error = (await bench_of(Answers(answer)).run()).error
    assert isinstance(error, AgentExecutionError)
    assert f"runner returned {type(answer).__name__} instead of a text, a TaskAnswer" in str(error)


async def test_pieces_are_tokens_when_the_task_streams() -> None:
    """S-INT-52: also a text that comes as a whole; the runner is told that somebody reads along."""
    runner = Answers(_later(), "whole")
    bench = bench_of(runner)
    first, second = await bench.run(is_streaming=True), await bench.run(is_streaming=True, instance="draft#1")
    assert first.output is not None
    assert second.output is not None
    assert [each.token for each in bench.sink.of(TokenEvent)] == ["in ", "pieces", "whole"]
    assert (first.output.raw, first.output.metrics.total_tokens, second.output.raw) == ("in pieces", 9, "whole")
    assert all(request.is_streaming for request in runner.requests)


async def test_reasoning_of_a_runner_is_no_part_of_its_answer_when_it_streams() -> None:
    """S-LLM-3: it is recorded apart, and its tokens are marked."""
    bench = bench_of(Answers(_thinking()))
    result = await bench.run(is_streaming=True)
    assert result.output is not None
    assert (result.output.raw, result.output.trace.llm_interactions[0].reasoning) == ("42", "secret thought ")
    assert [(each.token, each.is_reasoning) for each in bench.sink.of(TokenEvent)] == [
        ("secret thought ", True),
        ("42", False),
    ]


async def test_what_a_runner_raises_fails_the_task() -> None:
    """S-INT-52: with the role, the text and the cause."""
    cause = ValueError("no such page")
    error = (await bench_of(Answers(cause)).run()).error
    assert isinstance(error, AgentExecutionError)
    assert str(error) == "Agent 'Writer': no such page (ValueError)"
    assert error.__cause__ is cause


async def test_answer_is_parsed_and_the_runner_is_asked_again_with_the_mistake() -> None:
    """S-INT-53: structured output as of a model; each asking has another key."""
    runner = Answers("no JSON", '{"name": "Bern"}')
    result = await bench_of(runner, output_type=City).run()
    assert result.output is not None
    assert result.output.parsed_output == City(name="Bern")
    first, second = runner.requests
    assert (first.output_type, (first.output_schema or {})["required"]) == (City, ["name"])
    assert "no JSON" in second.prompt
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.idempotency_key != second.idempotency_key
    assert result.output.metrics.llm_call_count == 2


@pytest.mark.parametrize("structured", [City(name="Bern"), {"name": "Bern"}])
async def test_structured_output_of_a_runner_is_the_answer(structured: object) -> None:
    """S-INT-52: where the task has a type it outranks the text."""
    runner = Answers(TaskAnswer(text="It is Bern.", structured_output=structured))
    result = await bench_of(runner, output_type=City).run(is_streaming=True)
    assert result.output is not None
    assert (result.output.parsed_output, result.output.raw) == (City(name="Bern"), '{"name":"Bern"}')


async def test_answers_that_never_parse_fail_the_task() -> None:
    """S-INT-53: as those of a model."""
    result = await bench_of(Answers("a", "b"), output_type=City, max_output_retries=1).run()
    assert isinstance(result.error, OutputParsingError)


def _wants_more(given: GuardrailOutput) -> GuardrailResult:
    if given.raw_response != "long":
        raise TryAgain("too short")
    return GuardrailResult.success()


async def test_guardrail_has_the_runner_asked_again() -> None:
    """S-INT-53: with its own answer and the reason in the conversation."""
    runner = Answers("short", "long")
    bench = bench_of(runner, output_guardrails=[_wants_more])
    result = await bench.run(output_guardrails=1)
    assert result.output is not None
    assert result.output.raw == "long"
    _, again = runner.requests
    assert [message.role for message in again.messages] == ["system", "user", "assistant", "user"]
    assert again.history[-1].content == "short"
    assert "too short" in again.prompt


async def test_input_guardrail_keeps_a_runner_from_being_asked() -> None:
    """S-INT-53."""
    runner = Answers()
    bench = bench_of(runner, input_guardrails=[lambda _: GuardrailResult.failure("not today")])
    result = await bench.run(input_guardrails=1)
    assert isinstance(result.error, GuardrailViolationError)
    assert runner.requests == []


async def test_trace_has_an_interaction_for_each_asking() -> None:
    """S-INT-55: with what was asked and answered, and the events of a model call."""
    bench = bench_of(
        Answers("no", TaskAnswer(text='{"name": "Bern"}', input_tokens=5, output_tokens=6)), output_type=City
    )
    bench.runner.context = replace(RUN_CONTEXT, capture_mode=CaptureMode.STANDARD)
    result = await bench.run()
    assert result.output is not None
    assert result.output.trace is not None
    first, second = result.output.trace.llm_interactions
    assert (first.response_text, first.input_tokens) == ("no", -1)
    assert (second.input_tokens, second.output_tokens, second.response_type) == (5, 6, "final_answer")
    assert first.messages[-1].content == "no"
    assert [each.response_text for each in bench.sink.of(LlmIterationCompletedEvent)] == ["no", '{"name": "Bern"}']


class Waits:
    """A runner that never comes back by itself."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.was_cancelled = False

    async def run(self, request: TaskRequest) -> str:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return "never"


async def test_cancelled_run_cancels_its_runner() -> None:
    """S-INT-56: and nobody knows then what it did."""
    runner = Waits()
    working = asyncio.create_task(bench_of(runner).run(is_stopped=True))
    await runner.has_begun.wait()
    working.cancel()
    result = await working
    assert (result.status, runner.was_cancelled) == ("cancelled", True)
    assert result.failure is not None
    assert result.failure.trace is not None
    assert result.failure.trace.metadata["outcome"] == "unknown"


class Fails:
    """A runner whose provider is not there at first."""

    def __init__(self, effect: str) -> None:
        self.effect = effect
        self.keys: list[str] = []

    async def run(self, request: TaskRequest) -> str:
        self.keys.append(request.idempotency_key)
        if len(self.keys) == 1:
            raise ConnectionError("refused")
        return "there"


@pytest.mark.parametrize(("effect", "asked"), [("none", 2), ("idempotent", 2), ("once", 1)])
async def test_provider_that_fails_is_asked_again_when_the_effect_allows_it(effect: str, asked: int) -> None:
    """S-INT-55: under the same key, as the policy of retries says."""
    runner = Fails(effect)
    bench = bench_of(runner)
    bench.runner.context = replace(RUN_CONTEXT, retry=RetryPolicy())
    running = asyncio.create_task(bench.run())
    while not running.done():
        await asyncio.sleep(0)
        bench.clock.advance(60.0)
    assert len(runner.keys) == asked
    assert len(set(runner.keys)) == 1
    assert (running.result().status == "completed") is (asked == 2)


async def test_budget_that_is_spent_keeps_a_runner_from_being_asked() -> None:
    """S-INT-55: nothing is recorded of a call that was not made, so a larger budget goes on with it."""
    runner = Answers("never")
    agent = Agent(role="Writer", goal="Write", runner=runner)
    bench = Bench(agents={"draft": agent}, context=replace(RUN_CONTEXT, budget=RunBudget(max_tokens=1)))
    result = await bench.run()
    assert (result.status, runner.requests) == ("exited", [])
    assert [kind for kind, _ in bench.named if kind == "tool_intent"] == []
