"""Streaming runs: fragments as they come, and the same results as without."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    ChatResponse,
    Ensemble,
    OpenAIChatModel,
    RateLimit,
    RateLimitedChatModel,
    Runtime,
    TaskExecutionError,
    TokenEvent,
    TokenUsage,
    tool,
)
from ensemble_ray.testing import ModelServer, Reply, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, told_by_us


@tool
def look() -> str:
    """Look."""
    return "seen"


def tokens(watcher: Watcher) -> list[tuple[int, str]]:
    """What was streamed: turn and fragment."""
    return [(event.iteration, event.token) for event in watcher.of(TokenEvent)]


def test_fragments_are_sent_in_order(runtime: Runtime) -> None:
    """S-STR-1, S-STR-3, S-EVT-39, S-PAR-41: the text is what they add up to."""
    model, watcher = ScriptedModel("one two three"), Watcher()
    output = Ensemble(tasks=[task("go", agent(model, stream=True))], listeners=[watcher]).run(runtime=runtime)
    assert tokens(watcher) == [(0, "one "), (0, "two "), (0, "three")]
    assert output.raw == "one two three"
    (first, *_) = watcher.of(TokenEvent)
    assert (first.agent_role, first.task_description) == ("Writer", "go")
    order = [method for method in watcher.methods if method != "on_token"]
    assert order == [
        *("on_ensemble_started", "on_task_start", "on_task_input", "on_llm_iteration_started"),
        *("on_llm_iteration_completed", "on_task_complete", "on_ensemble_completed"),
    ]
    assert watcher.methods.index("on_llm_iteration_started") < watcher.methods.index("on_token")


def test_results_are_as_without_streaming(inline_runtime: Runtime) -> None:
    """S-STR-3, S-STR-4: raw, metrics and trace; no token without streaming."""

    def run(*, stream: bool) -> tuple[object, ...]:
        reply = Reply(text="one two", usage=TokenUsage(3, 2))
        model, watcher = ScriptedModel(call("look"), reply), Watcher()
        worker = agent(model, tools=[look], stream=stream)
        output = Ensemble(tasks=[task("go", worker)], listeners=[watcher]).run(runtime=inline_runtime)
        assert output.trace is not None
        turns = output.trace.task_traces[0].llm_interactions
        assert bool(tokens(watcher)) is stream
        return (
            output.raw,
            [(turn.response_type, turn.response_text, turn.input_tokens, len(turn.tool_calls)) for turn in turns],
            (output.metrics.total_llm_call_count, output.metrics.total_tool_calls, output.metrics.total_tokens),
        )

    assert run(stream=True) == run(stream=False)


@pytest.mark.parametrize(
    ("by_agent", "by_task", "by_ensemble", "streams"),
    [
        (None, None, True, True),
        (None, None, False, False),
        (None, False, True, False),
        (None, True, False, True),
        (False, True, True, False),
        (True, False, False, True),
    ],
)
def test_first_that_says_anything_decides(
    inline_runtime: Runtime, *, by_agent: bool | None, by_task: bool | None, by_ensemble: bool, streams: bool
) -> None:
    """S-STR-1: agent, then task, then ensemble."""
    watcher = Watcher()
    worker = agent(ScriptedModel("x"), stream=by_agent)
    Ensemble(tasks=[task("go", worker, stream=by_task)], stream=by_ensemble, listeners=[watcher]).run(
        runtime=inline_runtime
    )
    assert bool(tokens(watcher)) is streams


class Plain:
    """A model that cannot stream."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return ChatResponse(text="whole")


def test_model_that_cannot_stream_runs_without(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-STR-1: one WARN."""
    watcher = Watcher()
    worker = agent(Plain(), tools=[look], stream=True)
    output = Ensemble(tasks=[task("go", worker)], listeners=[watcher]).run(runtime=inline_runtime)
    assert (output.raw, tokens(watcher)) == ("whole", [])
    warnings = [record.getMessage() for record in told_by_us(caplog.records, logging.WARNING)]
    assert warnings == ["Model Plain cannot stream; running without streaming"]


def test_turns_of_a_tool_loop_are_told_apart(inline_runtime: Runtime) -> None:
    """S-STR-2: texts of every turn are sent; tool calls are assembled."""
    first = Reply(text="let me look", tool_calls=(call("look"),))
    model, watcher = ScriptedModel(first, "it is red"), Watcher()
    worker = agent(model, tools=[look], stream=True)
    output = Ensemble(tasks=[task("go", worker)], listeners=[watcher]).run(runtime=inline_runtime)
    assert output.raw == "it is red"
    assert tokens(watcher) == [(0, "let "), (0, "me "), (0, "look"), (1, "it "), (1, "is "), (1, "red")]
    assert output.total_tool_calls == 1


class Stumbling:
    """A model whose stream breaks, or ends without a response."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        raise AssertionError("not streamed")

    async def stream(self, messages: object, tools: object = ()) -> AsyncIterator[str | ChatResponse]:
        yield "one "
        yield "two"
        if self._error is not None:
            raise self._error


def test_broken_stream_fails_the_task(runtime: Runtime) -> None:
    """S-STR-5: what was sent before stays delivered."""
    watcher = Watcher()
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(Stumbling(OSError("cut")), stream=True))], listeners=[watcher]).run(
            runtime=runtime
        )
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert str(cause) == "Streaming failed for agent 'Writer': cut (OSError)"
    assert isinstance(cause.__cause__, OSError)
    assert tokens(watcher) == [(0, "one "), (0, "two")]


def test_stream_without_a_final_response_is_complete(inline_runtime: Runtime) -> None:
    """S-STR-10: with unknown usage."""
    output = Ensemble(tasks=[task("go", agent(Stumbling(None), stream=True))]).run(runtime=inline_runtime)
    assert (output.raw, output.metrics.total_tokens) == ("one two", -1)


def test_failing_token_listener_does_not_stop_the_stream(inline_runtime: Runtime) -> None:
    """S-STR-6."""
    seen: list[str] = []

    def note(event: TokenEvent) -> None:
        seen.append(event.token)
        raise ValueError("listener broke")

    output = Ensemble(tasks=[task("go", agent(ScriptedModel("a b c"), stream=True))], on_token=note).run(
        runtime=inline_runtime
    )
    assert (output.raw, seen) == ("a b c", ["a ", "b ", "c"])


class City(BaseModel):
    """A typed answer."""

    name: str


def test_corrections_are_not_streamed(inline_runtime: Runtime) -> None:
    """S-STR-7."""
    watcher = Watcher()
    model = ScriptedModel("no idea", '{"name": "Bern"}')
    typed = task("where", agent(model, stream=True), output_type=City)
    output = Ensemble(tasks=[typed], listeners=[watcher]).run(runtime=inline_runtime)
    assert output.task_outputs[0].parsed_output == City(name="Bern")
    assert [token for _, token in tokens(watcher)] == ["no ", "idea"]


class Patient:
    """A streaming model that goes on only when its first fragment was heard."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        raise AssertionError("not streamed")

    async def stream(self, messages: object, tools: object = ()) -> AsyncIterator[str | ChatResponse]:
        yield "first "
        await asyncio.to_thread(self._marks.wait, "heard")
        yield "second"
        yield ChatResponse(text="first second")


def test_fragments_come_while_the_model_still_talks(runtime: Runtime, tmp_path: Path) -> None:
    """S-STR-8, S-EVT-6: also from an agent's process."""
    marks = Marks(tmp_path / "marks")

    def note(_event: TokenEvent) -> None:
        if not marks.lines:
            marks.add("heard")

    output = Ensemble(tasks=[task("go", agent(Patient(marks), stream=True))], on_token=note).run(runtime=runtime)
    assert output.raw == "first second"


def test_endpoint_streams_through_an_agent(runtime: Runtime, model_server: type[ModelServer]) -> None:
    """S-STR-2, S-STR-8, S-CONV-23, S-CONV-22: a real client, in the agent's process, against a server."""

    def script(request: object) -> object:
        done = any(message.get("role") == "tool" for message in request.messages)  # type: ignore[attr-defined]
        return "it is red" if done else call("look")

    server, watcher = model_server(script), Watcher()
    model = OpenAIChatModel("scripted", base_url=server.base_url, api_key="none")
    worker = agent(model, tools=[look], stream=True)
    output = Ensemble(tasks=[task("go", worker)], listeners=[watcher]).run(runtime=runtime)
    assert output.raw == "it is red"
    assert "".join(token for _, token in tokens(watcher)) == "it is red"
    assert [request.stream for request in server.requests] == [True, True]
    assert (output.metrics.total_input_tokens, output.metrics.total_output_tokens) == (20, 10)


def test_limited_model_streams_and_counts(runtime: Runtime) -> None:
    """S-RATE-22: a streaming call through a wrapped model draws a permit."""
    watcher = Watcher()
    limited = RateLimitedChatModel.of(ScriptedModel("a b", "never"), RateLimit.of(1, 3600), wait_timeout=0.01)
    worker = agent(limited, stream=True)
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("one", worker), task("two", worker)], listeners=[watcher]).run(runtime=runtime)
    assert "Rate limit exceeded" in str(caught.value.__cause__)
    assert [token for _, token in tokens(watcher)] == ["a ", "b"]


def test_streams_of_parallel_tasks_keep_their_own_order(runtime: Runtime) -> None:
    """S-STR-3, S-EVT-7: two talk at the same time."""
    meeting = threading.Barrier(2)

    def reply(asked: object) -> str:
        meeting.wait(PATIENCE_S)
        return " ".join(str(n) for n in range(50))

    watcher = Watcher()
    model = ScriptedModel(otherwise=reply)
    tasks = [task(name, agent(model, name, stream=True)) for name in ("Ann", "Bob")]
    Ensemble(tasks=tasks, workflow="parallel", listeners=[watcher]).run(runtime=runtime)
    for name in ("Ann", "Bob"):
        said = [event.token for event in watcher.of(TokenEvent) if event.agent_role == name]
        assert [int(token) for token in said] == list(range(50))
