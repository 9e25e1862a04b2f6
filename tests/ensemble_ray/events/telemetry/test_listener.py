"""The listener without a receiver: who gets spans, what goes wrong without packages, and a switch of the environment."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ensemble_ray import Ensemble, EnsembleListener, OpenTelemetryListener, ValidationError
from ensemble_ray.events import telemetry
from ensemble_ray.events.telemetry import listener as switch
from ensemble_ray.events.telemetry.otlp import own_resource, readable
from ensemble_ray.events.telemetry.spans import SpanData
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task


@pytest.fixture(autouse=True)
def nothing_made() -> Iterator[None]:
    """What the switch made in a test ends with it."""
    yield
    switch._make_exporter.cache_clear()


def _listener() -> tuple[OpenTelemetryListener, InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    return OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider()), kept


def _take_away_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the exporters be missing, also where an earlier test has loaded them."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "ensemble_ray.events.telemetry.otlp", raising=False)
    monkeypatch.delattr(telemetry, "otlp", raising=False)


def _team(*listeners: object) -> Ensemble:
    return Ensemble(tasks=[task("write", agent(ScriptedModel(otherwise="text")))], listeners=listeners)


def test_spans_go_to_the_processor_of_the_user() -> None:
    """S-INT-30: in place of what the environment says; a stream of events does not have what they are made of."""
    listener, kept = _listener()
    run = _team(listener).start(runtime="inline")
    assert {event.method for event in run.events()} >= {"on_task_start", "on_task_complete"}
    run.result()
    assert "on_task_traced" not in {event.method for event in run.events()}
    assert [each.name for each in kept.get_finished_spans()] == ["invoke_agent Writer", "chat", "invoke_workflow"]
    assert listener.close()


def test_run_that_the_record_answers_is_not_sent_again() -> None:
    """S-INT-36: nothing was done."""
    listener, kept = _listener()
    for _ in range(2):
        _team(listener).run(runtime="inline", run_id="once")
    assert len(kept.get_finished_spans()) == 3
    assert listener.close()


def test_sdk_that_is_switched_off_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-30."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    listener, kept = _listener()
    _team(listener).run(runtime="inline")
    assert kept.get_finished_spans() == ()
    assert listener.close()


def test_switch_adds_a_listener_to_runs_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-30: a run that is traced already is sent once; other listeners do not count."""
    listener, kept = _listener()
    monkeypatch.setattr(switch, "_make_exporter", lambda: listener)
    _team(EnsembleListener()).run(runtime="inline")
    assert kept.get_finished_spans() == (), "it is off"
    monkeypatch.setenv("ENSEMBLE_RAY_OTEL", "1")
    _team(EnsembleListener()).run(runtime="inline")
    _team(listener).run(runtime="inline")
    assert [each.name for each in kept.get_finished_spans()].count("invoke_workflow") == 2
    monkeypatch.undo()
    assert listener.close()


def test_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-ERR-63: before the run begins."""
    monkeypatch.setenv("ENSEMBLE_RAY_OTEL", "maybe")
    with pytest.raises(ValidationError, match=r"^ENSEMBLE_RAY_OTEL must be 1 or 0, got: 'maybe'$"):
        _team().run(runtime="inline")


def test_switch_that_cannot_work_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-INT-30: once, and the run goes on."""
    monkeypatch.setenv("ENSEMBLE_RAY_OTEL", "1")
    _take_away_packages(monkeypatch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert _team().run(runtime="inline").raw == "text"
    assert ["pip install 'ensemble-ray[otel]'" in each.getMessage() for each in caplog.records] == [True]


def test_listener_without_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-30: with what to do."""
    _take_away_packages(monkeypatch)
    with pytest.raises(ValidationError, match=r"pip install 'ensemble-ray\[otel\]'"):
        OpenTelemetryListener()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5000", "max_export_batch_size must be less than or equal to"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "interval value 0"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be"),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "maybe", "maybe"),
    ],
)
def test_variable_that_is_wrong_is_refused_and_fails_no_run_by_the_switch(
    variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-INT-30: the listener says what to do; runs of the switch go on, with one warning."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError, match=text):
        OpenTelemetryListener()
    monkeypatch.setenv("ENSEMBLE_RAY_OTEL", "1")
    for _ in range(2):
        assert _team().run(runtime="inline").raw == "text"
    assert [text in each.getMessage() for each in caplog.records if each.name.startswith("ensemble_ray")] == [True]


def test_nothing_is_made_for_what_the_environment_sends_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-30: `none`; the rest is sent all the same."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", " None")
    listener = OpenTelemetryListener()
    assert (listener._processor, listener._meters) == (None, None)
    _team(listener).run(runtime="inline")
    assert listener.flush()
    assert listener.close()
    kept = InMemorySpanExporter()
    other = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept))
    assert other._meters is None
    _team(other).run(runtime="inline")
    assert len(kept.get_finished_spans()) == 3
    assert other.close()


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({}, "ensemble-ray"),
        ({"OTEL_SERVICE_NAME": "shop"}, "shop"),
        ({"OTEL_SERVICE_NAME": " "}, "ensemble-ray"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=shop,team=a"}, "shop"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.namespace=shop"}, "ensemble-ray"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name="}, "ensemble-ray"),
    ],
)
def test_service_is_this_library_where_nobody_names_it(
    said: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-30: another attribute of a service names none."""
    for variable, value in said.items():
        monkeypatch.setenv(variable, value)
    assert own_resource().attributes["service.name"] == name


def test_a_span_ends_with_its_parent_when_both_have_one_time() -> None:
    """S-INT-32: traces keep microseconds, and the clock's readings have more digits."""
    ended_at = 1_700_000_000.1234567
    in_trace = datetime.fromtimestamp(ended_at, UTC).timestamp()
    assert in_trace > ended_at
    run, task_of_run = (
        readable(
            SpanData(name="n", trace_id="a" * 32, span_id="b" * 16, parent_id=None, started_at=1.7e9, ended_at=at),
            own_resource(),
        )
        for at in (ended_at, in_trace)
    )
    assert run.end_time == task_of_run.end_time
