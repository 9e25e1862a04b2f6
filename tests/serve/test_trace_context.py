"""The trace of a client: its request's `traceparent` is the parent of the run that it asks for."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ensemble_ray import Ensemble, OpenTelemetryListener, Task
from ensemble_ray.process.config import home_directory
from ensemble_ray.record.runs import read_facts
from ensemble_ray.record.view.spans import recorded_spans
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect

TRACE, SPAN, OTHER = "a" * 32, "b" * 16, "c" * 16


@pytest.mark.parametrize("way", ["header", "body", "openai", "a2a"])
async def test_run_is_a_child_of_the_client_that_asks(connect: Connect, way: str) -> None:
    """S-INT-38: the body counts before the header, a wrong header is no reason to refuse; the record knows it."""
    kept = InMemorySpanExporter()
    listener = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider())
    writing = Task(description="Write about {topic}", expected_output="A line")
    team = Ensemble(tasks=[writing], llm=ScriptedModel(otherwise="fine"), listeners=[listener])
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
            body = {"inputs": {"topic": "Ray"}, **({"traceparent": f"00-{TRACE}-{SPAN}-01"} if way == "body" else {})}
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
