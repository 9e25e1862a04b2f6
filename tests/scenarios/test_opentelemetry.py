"""Runs as an OpenTelemetry receiver sees them: one tree over all processes, context out to tools and models and in from callers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

import ensemble_ray
from ensemble_ray import (
    Ensemble,
    Loop,
    OpenAIChatModel,
    OpenTelemetryListener,
    Review,
    ReviewDecision,
    Runtime,
    tool,
)
from ensemble_ray.process.context import use_traceparent
from ensemble_ray.testing import ModelServer, ScriptedModel
from ensemble_ray.values.trace import RunTracing
from tests.builders import agent, answer, call, task
from tests.command_line import calling
from tests.otlp_receiver import Receiver, receiving_by_environment, values
from tests.scenarios.delegating import ask
from tests.scenarios.dying_run import DIED, MARKS, MODEL, RUN_ID, answers, team
from tests.scenarios.teams import PATIENCE_S
from tests.template import run_forked

GATE = Review.required("Right?")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that the environment names."""
    with receiving_by_environment(monkeypatch) as found:
        yield found


@pytest.fixture
def opened(receiver: Receiver) -> Iterator[list[OpenTelemetryListener]]:
    """Listeners that are closed while the receiver is still there."""
    found: list[OpenTelemetryListener] = []
    yield found
    for listener in found:
        listener.close()


@tool
def where(step: str = "") -> str:
    """Say which span is active here."""
    active = otel_trace.get_current_span().get_span_context()
    return f"{step} {active.trace_id:032x} {active.span_id:016x}"


@tool(cpu=True)
def far(step: str = "") -> str:
    """Say which span is active in a process of the pool."""
    active = otel_trace.get_current_span().get_span_context()
    return f"{step} {active.trace_id:032x} {active.span_id:016x}"


def several(model_url: str) -> Ensemble:
    """A task with tools of one turn, one that hands work on, and a loop."""
    finder = agent(OpenAIChatModel("gpt-x", base_url=model_url, api_key="none"), "Finder", tools=[where, far])
    helper = agent(ScriptedModel(answer("helped", 3, 4)), "Helper")
    lead = agent(ScriptedModel(ask("Helper"), "led"), "Lead", allow_delegation=True)
    finding, leading = task("find", finder, name="find"), task("lead", lead, name="lead")
    rounds = agent(ScriptedModel(otherwise=lambda asked: f"draft {asked.number}"), "Writer")
    loop = Loop(name="refine", body=[task("write", rounds, name="write")], max_iterations=2)
    return Ensemble(tasks=[finding, leading], agents=[finder, lead, helper, rounds], loops=[loop])


def test_run_is_one_tree_with_the_same_spans_from_its_record(
    runtime: Runtime,
    receiver: Receiver,
    model_server: Callable[..., ModelServer],
    opened: list[OpenTelemetryListener],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S-INT-31, S-INT-32, S-INT-35, S-INT-37, S-INT-39: parents are right across processes, parallel tools, delegation and rounds."""
    calls = [call("where", '{"step": "a"}'), call("far", '{"step": "b"}')]
    server = model_server([answer("", 1, 2, calls=calls), answer("found", 5, 6)])
    listener = OpenTelemetryListener()
    opened.append(listener)
    ensemble = several(server.base_url).with_additional_listener(listener)
    output = ensemble.run(runtime=runtime, run_id="traced")
    assert listener.flush()
    assert receiver.tree() == {
        ("invoke_workflow", ""),
        ("invoke_agent Finder", "invoke_workflow"),
        ("chat gpt-x", "invoke_agent Finder"),
        ("execute_tool where", "invoke_agent Finder"),
        ("execute_tool far", "invoke_agent Finder"),
        ("invoke_agent Lead", "invoke_workflow"),
        ("chat", "invoke_agent Lead"),
        ("execute_tool delegate", "invoke_agent Lead"),
        ("invoke_agent Helper", "execute_tool delegate"),
        ("chat", "invoke_agent Helper"),
        ("loop refine", "invoke_workflow"),
        ("iteration 1", "loop refine"),
        ("iteration 2", "loop refine"),
        ("invoke_agent Writer", "iteration 1"),
        ("invoke_agent Writer", "iteration 2"),
        ("chat", "invoke_agent Writer"),
    }
    assert {each.trace_id for each in receiver.spans} == {receiver.one("invoke_workflow").trace_id}
    assert {each.service for each in receiver.spans} == {"ensemble-ray"}
    run = receiver.one("invoke_workflow")
    beyond = [each for each in receiver.spans if not run.start_ns <= each.start_ns <= each.end_ns <= run.end_ns]
    assert beyond == [], f"outside {run}"
    # What is active where tools run, and what the model's endpoint was sent.
    (found,) = (each for each in output.trace.task_traces if each.agent_role == "Finder")
    told = [each.result for each in found.llm_interactions[0].tool_calls]
    tools = [receiver.one("execute_tool where"), receiver.one("execute_tool far")]
    assert told == [f"{step} {each.trace_id} {each.span_id}" for step, each in zip("ab", tools, strict=True)]
    chats = [each for each in receiver.spans if each.name == "chat gpt-x"]
    sent = [each.headers["traceparent"] for each in server.requests]
    assert sorted(sent) == sorted(f"00-{each.trace_id}-{each.span_id}-01" for each in chats)
    last = max(chats, key=lambda each: each.start_ns)
    assert last.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "127.0.0.1",
        "gen_ai.request.model": "gpt-x",
        "gen_ai.agent.name": "Finder",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    points = {
        values(each.attributes)["gen_ai.token.type"]: each.sum
        for each in receiver.metrics["gen_ai.client.token.usage"]
        if values(each.attributes)["gen_ai.provider.name"] == "127.0.0.1"
    }
    assert points == {"input": 6, "output": 8}
    assert sum(each.count for each in receiver.metrics["gen_ai.client.operation.duration"]) == 7
    # From the record.
    live = {(each.span_id, each.parent_id, each.name, each.trace_id) for each in receiver.spans}
    receiver.spans.clear()
    done = calling(capsys)("trace", "traced", "--otlp", receiver.url)
    assert done.code == 0, done.said
    assert f"{len(live)} spans of run traced were sent to {receiver.url}" in done.said
    assert {(each.span_id, each.parent_id, each.name, each.trace_id) for each in receiver.spans} == live
    assert not any("messages" in name for each in receiver.spans for name in each.attributes)


def test_resumed_run_goes_on_in_the_same_trace_with_a_link(
    receiver: Receiver,
    opened: list[OpenTelemetryListener],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S-INT-30, S-INT-36, S-INT-39: a process that traces by the environment's wish dies in a tool; another one goes on."""
    left = answers()
    with ModelServer(lambda _: left.pop(0)) as server:
        monkeypatch.setenv(MODEL, server.base_url)
        monkeypatch.setenv(MARKS, str(tmp_path / "marks"))
        with monkeypatch.context() as patch:
            patch.setenv("ENSEMBLE_RAY_OTEL", "1")
            patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
            died = run_forked(
                [sys.executable, "-c", "from tests.scenarios.dying_run import main; main()"],
                cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
            )  # fmt: skip
        assert died.returncode == DIED, died.stderr
        before = {each.span_id for each in receiver.spans}
        listener = OpenTelemetryListener()
        opened.append(listener)
        ensemble_ray.resume(RUN_ID, team().with_additional_listener(listener), runtime="inline")
        sent = [each.headers["traceparent"] for each in server.requests]
    assert listener.flush()
    first = RunTracing(run_id=RUN_ID)
    run = receiver.one("invoke_workflow")
    assert (run.trace_id, run.links, run.parent_id) == (first.trace_id, (first.run_span(),), "")
    assert run.span_id != first.run_span()
    assert len({each.span_id for each in receiver.spans}) == len(receiver.spans), "nothing is told twice"
    measurer = receiver.one("invoke_agent Measurer")
    assert measurer.parent_id == run.span_id
    # The call that the process died in was asked for then, and is told of with the task that goes on.
    chats = [each for each in receiver.spans if each.parent_id == measurer.span_id and each.name == "chat m"]
    assert sorted(sent[1:]) == sorted(f"00-{each.trace_id}-{each.span_id}-01" for each in chats)
    # The record knows both beginnings.
    live = {each.span_id for each in receiver.spans}
    receiver.spans.clear()
    done = calling(capsys)("trace", RUN_ID, "--otlp", receiver.url)
    assert done.code == 0, done.said
    assert live | before < {each.span_id for each in receiver.spans}
    interrupted, resumed = sorted(
        (each for each in receiver.spans if each.name == "invoke_workflow"), key=lambda each: each.start_ns
    )
    assert (interrupted.span_id, interrupted.attributes["error.type"]) == (first.run_span(), "Interrupted")
    assert (resumed.span_id, resumed.links) == (run.span_id, run.links)
    assert receiver.one("invoke_agent Namer").parent_id == interrupted.span_id
    parents = {each.parent_id for each in receiver.spans} - {""}
    assert parents <= {each.span_id for each in receiver.spans}


def test_run_is_part_of_the_trace_of_who_asks_for_it(receiver: Receiver, opened: list[OpenTelemetryListener]) -> None:
    """S-INT-38: a program's active span is the parent, also of a run that a tool begins and of one that goes on."""
    listener = OpenTelemetryListener()
    opened.append(listener)

    @tool
    async def begin() -> str:
        """Run another team."""
        inner = Ensemble(tasks=[task("in", agent(ScriptedModel("inner"), "Inner"))], listeners=[listener])
        return (await inner.arun(runtime="inline", run_id="inner")).raw

    outer = agent(ScriptedModel(call("begin"), "outer"), "Outer", tools=[begin])
    span = otel_trace.NonRecordingSpan(
        otel_trace.SpanContext(
            int("a" * 32, 16), int("b" * 16, 16), is_remote=False, trace_flags=otel_trace.TraceFlags(1)
        )
    )
    token = otel_context.attach(otel_trace.set_span_in_context(span))
    try:
        with use_traceparent(f"00-{'c' * 32}-{'d' * 16}-01"):  # the active span counts before what a request named
            team = Ensemble(tasks=[task("out", outer, review=GATE)], listeners=[listener], review_wait="detach")
            waiting = team.run(runtime="inline", run_id="outer")
    finally:
        otel_context.detach(token)
    ensemble_ray.decide("outer", waiting.open_reviews[0].gate_id, ReviewDecision.continue_execution(), runtime="inline")
    assert ensemble_ray.resume("outer", team, runtime="inline").raw == "outer"
    assert listener.flush()
    begun = [each for each in receiver.spans if each.name == "invoke_workflow"]
    runs = {each.attributes["ensemble_ray.run.id"]: each for each in begun}
    parents = [each.parent_id for each in begun if each.attributes["ensemble_ray.run.id"] == "outer"]
    assert parents == ["b" * 16, "b" * 16]
    assert runs["inner"].parent_id == receiver.one("execute_tool begin").span_id
    assert {each.trace_id for each in receiver.spans} == {"a" * 32}


def test_nothing_is_sent_of_a_run_that_its_caller_does_not_sample(
    receiver: Receiver, opened: list[OpenTelemetryListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-30, S-INT-38: nor where the environment's sampler or switch says so; other context still goes out."""
    listener = OpenTelemetryListener()
    opened.append(listener)
    with ModelServer(["one", "two"]) as server:
        writer = agent(OpenAIChatModel("m", base_url=server.base_url, api_key="none"))
        ensemble = Ensemble(tasks=[task("write", writer)], listeners=[listener])
        unsampled = otel_trace.SpanContext(
            int("a" * 32, 16), int("b" * 16, 16), is_remote=False, trace_flags=otel_trace.TraceFlags(0)
        )
        token = otel_context.attach(otel_trace.set_span_in_context(otel_trace.NonRecordingSpan(unsampled)))
        try:
            ensemble.run(runtime="inline")
        finally:
            otel_context.detach(token)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        ensemble.run(runtime="inline")
        sent = [each.headers["traceparent"] for each in server.requests]
    assert listener.flush()
    assert receiver.spans == []
    assert sent[0].startswith(f"00-{'a' * 32}-")
    assert [each.endswith("-00") for each in sent] == [True, True]


def test_content_is_sent_where_it_is_asked_for(
    receiver: Receiver, opened: list[OpenTelemetryListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-33: by the conventions' own setting, or by the listener's."""
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    opened.append(listener := OpenTelemetryListener())
    quiet = OpenTelemetryListener(content=False)
    opened.append(quiet)
    writer = agent(ScriptedModel(call("where", '{"step": "s"}'), "told"), tools=[where])
    Ensemble(tasks=[task("write", writer)], listeners=[listener], capture_mode="standard").run(runtime="inline")
    assert listener.flush()
    (first, last) = sorted((each for each in receiver.spans if each.name == "chat"), key=lambda each: each.start_ns)
    (system,) = json.loads(first.attributes["gen_ai.system_instructions"])
    assert system["content"].startswith("You are Writer")
    (user,) = json.loads(first.attributes["gen_ai.input.messages"])
    assert user["role"] == "user"
    (said,) = json.loads(first.attributes["gen_ai.output.messages"])
    assert said["parts"] == [{"type": "tool_call", "id": "call-where-0", "name": "where", "arguments": '{"step": "s"}'}]
    assert [each["role"] for each in json.loads(last.attributes["gen_ai.input.messages"])] == [
        "user",
        "assistant",
        "tool",
    ]
    assert first.events == last.events == ("gen_ai.client.inference.operation.details",)
    assert receiver.one("execute_tool where").attributes["gen_ai.tool.call.arguments"] == '{"step": "s"}'
    receiver.spans.clear()
    again = agent(ScriptedModel("again"))
    Ensemble(tasks=[task("write", again)], listeners=[quiet]).run(runtime="inline")
    assert quiet.flush()
    assert "again" not in str(receiver.spans)


def test_header_of_the_users_own_wins(opened: list[OpenTelemetryListener]) -> None:
    """S-INT-37: a request to a model carries what its model says."""
    opened.append(listener := OpenTelemetryListener())
    with ModelServer(["text"]) as server:
        model = OpenAIChatModel("m", base_url=server.base_url, api_key="none", extra_headers={"Traceparent": "mine"})
        Ensemble(tasks=[task("write", agent(model))], listeners=[listener]).run(runtime="inline")
        assert [each.headers["traceparent"] for each in server.requests] == ["mine"]
