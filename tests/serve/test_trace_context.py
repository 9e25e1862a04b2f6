"""The trace of a client: its request's `traceparent` is the parent of the run that it asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ensemble_ray import MCP, Ensemble, OpenAIChatModel, OpenTelemetryListener, Task
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.process.config import home_directory
from ensemble_ray.record.runs import list_runs, read_facts
from ensemble_ray.record.view.exporters import recorded_spans
from ensemble_ray.serve.api import build_api
from ensemble_ray.testing import ModelServer, ScriptedModel
from ensemble_ray.values.trace import TraceParent, parse_traceparent
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S
from tests.serve.conftest import Connect
from tests.serve.driving import driven
from tests.serve.http_server import served_app

TRACE, SPAN, OTHER = "a" * 32, "b" * 16, "c" * 16


def _team(*listeners: object) -> Ensemble:
    writing = Task(description="Write about {topic}", expected_output="A line")
    return Ensemble(tasks=[writing], llm=ScriptedModel(otherwise="fine"), listeners=listeners)


@pytest.mark.parametrize("way", ["header", "body", "wrong body", "openai", "a2a"])
async def test_run_is_a_child_of_the_client_that_asks(connect: Connect, way: str) -> None:
    """S-INT-38: the body counts before the header, a wrong one is no reason to refuse; the record knows it."""
    kept = InMemorySpanExporter()
    listener = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider())
    team = _team(listener)
    header = {"traceparent": f"00-{TRACE}-{OTHER if way == 'body' else SPAN}-01"}
    async with connect(team) as client:
        if way == "openai":
            messages = [{"role": "user", "content": "Ray"}]
            asked = {"model": "team", "messages": messages}
            response = await client.post("/v1/chat/completions", json=asked, headers=header)
        elif way == "a2a":
            message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "Ray"}]}
            asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
            response = await client.post("/a2a/team", json=asked, headers={**header, "a2a-version": "1.0"})
        else:
            said = {"body": f"00-{TRACE}-{SPAN}-01", "wrong body": "x\r\nX-Evil: 1"}.get(way)
            body = {"inputs": {"topic": "Ray"}, "traceparent": said}
            response = await client.post("/runs?wait=60", json=body, headers=header)
            wrong = await client.post(
                "/runs?wait=60", json={"inputs": {"topic": "Ray"}}, headers={"traceparent": "00-x"}
            )
            assert wrong.status_code == 200
    assert response.status_code == 200, response.text
    runs = [each for each in kept.get_finished_spans() if each.name.startswith("invoke_workflow")]
    first = runs[0]
    assert first.parent is not None
    assert (f"{first.parent.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, SPAN)
    assert first.parent.is_remote
    assert [each.parent for each in runs[1:]] == ([] if way in {"openai", "a2a"} else [None])
    run_id = str((first.attributes or {})["ensemble_ray.run.id"])
    told = [
        each for each in recorded_spans(read_facts(run_id, home_directory())) if each.name.startswith("invoke_workflow")
    ]
    assert [(each.trace_id, each.parent_id) for each in told] == [(TRACE, SPAN)]
    listener.close()


def _recorded_caller(*, beside: str = "") -> TraceParent | None:
    """Who asked for the only run of an endpoint, as its record says; there may be one beside it."""
    home = home_directory()
    (run,) = [each for each in list_runs(home) if each.run_id != beside]
    header = next(each.data for each in read_facts(run.run_id, home) if isinstance(each.data, PlanRecorded))
    return parse_traceparent(header.traceparent or "")


@pytest.mark.parametrize("way", ["meta", "header", "wrong meta"])
async def test_call_of_a_team_as_a_tool_is_part_of_the_clients_trace(way: str) -> None:
    """S-INT-38: as our own client of MCP names it, or by a header of the request."""
    mcp = pytest.importorskip("mcp")
    httpx2 = pytest.importorskip("httpx2")
    from mcp.client.streamable_http import streamable_http_client

    said = {"meta": f"00-{TRACE}-{SPAN}-01", "wrong meta": "x"}.get(way)
    header = f"00-{TRACE}-{OTHER if way == 'meta' else SPAN}-01"
    with served_app(build_api(driven(_team()))) as url:
        async with httpx2.AsyncClient(headers={"traceparent": header}, timeout=PATIENCE_S) as http:
            transport = streamable_http_client(f"{url}/mcp", http_client=http)
            async with mcp.Client(transport) as client:
                meta = None if said is None else {"traceparent": said}
                called = await client.call_tool("team", {"topic": "Ray"}, meta=meta)
                assert not called.is_error, called
    assert _recorded_caller() == TraceParent(TRACE, SPAN)


async def test_tool_call_and_the_run_that_it_asks_for_are_of_one_trace() -> None:
    """S-INT-37, S-INT-38: a call of a tool of an MCP server carries its span."""
    pytest.importorskip("mcp")
    kept = InMemorySpanExporter()
    listener = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider())
    with served_app(build_api(driven(_team()))) as url:
        model = ScriptedModel(call("team", '{"topic": "Ray"}'), "asked")
        asking = task("ask", agent(model, tools=[MCP(f"{url}/mcp")]))
        await Ensemble(tasks=[asking], listeners=[listener]).arun(runtime="inline", run_id="asking")
    (asked,) = [each.context for each in kept.get_finished_spans() if each.name == "execute_tool team"]
    assert asked is not None
    assert _recorded_caller(beside="asking") == TraceParent(f"{asked.trace_id:032x}", f"{asked.span_id:016x}")
    assert listener.close()


async def test_message_to_a_team_as_an_agent_is_part_of_the_clients_trace(connect: Connect) -> None:
    """S-INT-38."""
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [{"text": "Ray"}]}
    asked = {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "a2a-version": "1.0"}
    async with connect(_team()) as client:
        response = await client.post("/a2a/team", json=asked, headers=headers)
    assert "error" not in response.json(), response.text
    assert _recorded_caller() == TraceParent(TRACE, SPAN)


@pytest.mark.parametrize("said", [f"00-{TRACE}-{SPAN}-01", "x\r\nX-Evil: 1"])
async def test_run_that_nobody_traces_sends_models_nothing_of_the_client(
    connect: Connect, model_server: Callable[..., ModelServer], said: str
) -> None:
    """S-INT-37: whatever the client names; the record keeps what is a span."""
    server = model_server(["fine"])
    team = _team().replace(llm=OpenAIChatModel("m", base_url=server.base_url, api_key="none"))
    async with connect(team) as client:
        response = await client.post("/runs?wait=60", json={"inputs": {"topic": "Ray"}, "traceparent": said})
    assert response.status_code == 200, response.text
    (request,) = server.requests
    assert not {"traceparent", "x-evil"} & request.headers.keys()
    assert _recorded_caller() == parse_traceparent(said)
