"""Runs that end and go on, as OpenTelemetry sees them: every call is sent once, and the record gives the same spans."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ensemble_ray import (
    Ensemble,
    EnsembleOutput,
    ExitReason,
    OpenTelemetryListener,
    Review,
    ReviewDecision,
    RunOptions,
    RunState,
    decide,
    resume,
    tool,
)
from ensemble_ray.facts.effects import ToolReturned
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.runs import read_facts
from ensemble_ray.record.view.exporters import recorded_spans
from ensemble_ray.recovery.resuming import start_resumed
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.delegating import ask
from tests.scenarios.detached import gates_of
from tests.scenarios.teams import PATIENCE_S, Forever, wait_for

RUN_ID = "again"


class Sent:
    """What a listener sent."""

    def __init__(self) -> None:
        self._kept, self._read = InMemorySpanExporter(), InMemoryMetricReader()
        self.listener = OpenTelemetryListener(
            span_processor=SimpleSpanProcessor(self._kept), meter_provider=MeterProvider([self._read])
        )

    @property
    def spans(self) -> set[tuple[str, str, str]]:
        """Ids, parents' ids and names; none was sent twice."""
        found = [_named(each) for each in self._kept.get_finished_spans()]
        ids = [each[0] for each in found]
        assert len(ids) == len(set(ids)), f"a span was sent twice: {sorted(each[2] for each in found)}"
        return set(found)

    @property
    def tree(self) -> list[tuple[str, str]]:
        """Names and parents' names."""
        names = {span_id: name for span_id, _, name in self.spans}
        return sorted((name, names.get(parent, "")) for _, parent, name in self.spans)

    @property
    def tokens(self) -> float:
        """The tokens of all model calls."""
        data = self._read.get_metrics_data()
        assert data is not None
        metrics = [each for one in data.resource_metrics for scope in one.scope_metrics for each in scope.metrics]
        (usage,) = [each for each in metrics if each.name == "gen_ai.client.token.usage"]
        return sum(cast("HistogramDataPoint", each).sum for each in usage.data.data_points)


def _named(span: ReadableSpan) -> tuple[str, str, str]:
    parent = "" if span.parent is None else f"{span.parent.span_id:016x}"
    assert span.context is not None
    return f"{span.context.span_id:016x}", parent, span.name


def recorded(home: str) -> set[tuple[str, str, str]]:
    """Return what the record tells, as `Sent.spans` has it; it has no span twice."""
    found = [(each.span_id, each.parent_id or "", each.name) for each in recorded_spans(read_facts(RUN_ID, Path(home)))]
    assert len({each[0] for each in found}) == len(found)
    return set(found)


def cancel_when(happened: threading.Event, ensemble: Ensemble) -> EnsembleOutput:
    """Begin a run, and cancel it when that has happened."""
    run = ensemble.start(runtime="inline", run_id=RUN_ID)
    wait_for(happened)
    run.cancel()
    return run.result(timeout_s=PATIENCE_S)


@pytest.fixture
def sent() -> Iterator[Sent]:
    """What is sent in a test."""
    found = Sent()
    yield found
    assert found.listener.close()


def test_calls_of_a_task_that_waits_for_people_are_sent_when_it_goes_on(sent: Sent, home: str) -> None:
    """S-INT-31, S-INT-35, S-INT-36: the beginning that waited has told of no task that waits."""
    writer = agent(ScriptedModel(answer("draft", 3, 4)))
    ensemble = Ensemble(
        tasks=[task("write", writer, review=Review.required("Right?"))],
        listeners=[sent.listener],
        review_wait="detach",
    )
    waiting = ensemble.run(runtime="inline", run_id=RUN_ID)
    assert waiting.state is RunState.WAITING
    assert sent.tree == [("invoke_workflow", "")]
    decide(RUN_ID, gates_of(waiting)["write"], ReviewDecision.continue_execution(), runtime="inline")
    assert resume(RUN_ID, ensemble, runtime="inline").raw == "draft"
    assert sent.tree == [
        ("chat", "invoke_agent Writer"),
        ("invoke_agent Writer", "invoke_workflow"),
        ("invoke_workflow", ""),
        ("invoke_workflow", ""),
    ]
    assert sent.tokens == 7
    assert recorded(home) == sent.spans


def test_tool_call_that_a_cancellation_cut_short_is_sent_when_it_is_made_again(sent: Sent, home: str) -> None:
    """S-INT-36: the answer that asked for it was told of; the call itself was not."""
    called, is_free = threading.Event(), threading.Event()

    @tool(effect="none")
    async def look() -> str:
        """Look."""
        called.set()
        if not is_free.is_set():
            await asyncio.Event().wait()
        return "seen"

    writer = agent(ScriptedModel(answer("", 1, 2, calls=[call("look")]), answer("done", 3, 4)), tools=[look])
    ensemble = Ensemble(tasks=[task("write", writer)], listeners=[sent.listener])
    assert cancel_when(called, ensemble).exit_reason is ExitReason.CANCELLED
    is_free.set()
    assert resume(RUN_ID, ensemble, runtime="inline").raw == "done"
    assert sent.tree == [
        ("chat", "invoke_agent Writer"),
        ("chat", "invoke_agent Writer"),
        ("execute_tool look", "invoke_agent Writer"),
        ("invoke_agent Writer", "invoke_workflow"),
        ("invoke_agent Writer", "invoke_workflow"),
        ("invoke_workflow", ""),
        ("invoke_workflow", ""),
    ]
    assert sent.tokens == 10
    assert recorded(home) == sent.spans


def test_record_of_a_run_that_was_cancelled_and_went_on_gives_the_spans_that_were_sent(sent: Sent, home: str) -> None:
    """S-INT-36, S-INT-39: what a task did stands below the beginning that told of it, also work that was handed on."""
    forever = Forever()
    done = agent(ScriptedModel(answer("one", 1, 1)), "Done")
    lead = agent(
        ScriptedModel(
            answer("", 1, 1, calls=[ask("Helper")]), forever, answer("led", 1, 1)
        ),
        "Lead", allow_delegation=True,
    )  # fmt: skip
    helper = agent(ScriptedModel(answer("helped", 1, 1)), "Helper")
    last = agent(ScriptedModel(answer("last", 1, 1)), "Last")
    ensemble = Ensemble(
        tasks=[task("done", done), task("lead", lead), task("last", last)],
        agents=[done, lead, helper, last],
        listeners=[sent.listener],
    )
    assert cancel_when(forever.asked, ensemble).exit_reason is ExitReason.CANCELLED
    cancelled = sent.spans
    assert recorded(home) == cancelled
    assert resume(RUN_ID, ensemble, runtime="inline").raw == "last"
    assert cancelled < sent.spans
    assert [name for name, _ in sent.tree].count("invoke_agent Lead") == 2
    assert recorded(home) == sent.spans


def test_record_of_a_run_that_went_on_with_a_larger_budget_gives_the_spans_that_were_sent(
    sent: Sent, home: str
) -> None:
    """S-INT-36, S-INT-39: as of one that was cancelled."""
    turns = [answer("", 300, 2, calls=[call("look")]), answer("done", 3, 4)]

    @tool(effect="none")
    def look() -> str:
        """Look."""
        return "seen"

    ensemble = Ensemble(
        tasks=[task("write", agent(ScriptedModel(*turns), tools=[look]))], listeners=[sent.listener], max_tokens=400
    )
    assert ensemble.run(runtime="inline", run_id=RUN_ID).exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert recorded(home) == sent.spans
    resumed = resume(RUN_ID, ensemble, runtime="inline", options=RunOptions(max_tokens=5000))
    assert resumed.raw == "done"
    assert sent.tokens == 309
    assert recorded(home) == sent.spans


def test_calls_of_a_turn_that_was_cut_short_are_sent_together(sent: Sent, home: str) -> None:
    """S-INT-36, S-INT-39: also the one that had ended; a second end tells of none of them again."""
    called, is_free, forever = threading.Event(), threading.Event(), Forever()

    @tool(effect="none")
    def glance() -> str:
        """Glance."""
        return "seen"

    @tool(effect="none")
    async def look(step: str = "") -> str:
        """Look, when the other calls are on record."""
        while returned() < len(calls) - 1:  # noqa: ASYNC110  what is looked at is a record
            await asyncio.sleep(0.01)
        called.set()
        if not is_free.is_set():
            await asyncio.Event().wait()
        return f"seen {step}"

    def returned() -> int:
        return sum(isinstance(each.data, ToolReturned) for each in read_facts(RUN_ID, Path(home)))

    calls = [call("glance"), call("look"), ask("Helper")]
    lead = agent(
        ScriptedModel(answer("", 1, 2, calls=calls), forever, answer("done", 3, 4)),
        "Lead",
        tools=[glance, look],
        allow_delegation=True,
    )
    helper = agent(ScriptedModel(answer("helped", 1, 1)), "Helper")
    ensemble = Ensemble(tasks=[task("lead", lead)], agents=[lead, helper], listeners=[sent.listener])
    assert cancel_when(called, ensemble).exit_reason is ExitReason.CANCELLED
    assert not any(name.startswith("execute_tool") for name, _ in sent.tree)
    is_free.set()
    again = run_blocking(start_resumed(RUN_ID, ensemble, runtime="inline"))
    wait_for(forever.asked)
    again.cancel()
    assert again.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    asked = {name for name, parent in sent.tree if parent == "invoke_agent Lead"}
    assert asked == {"chat", *(f"execute_tool {each.name}" for each in calls)}
    assert recorded(home) == sent.spans
    assert resume(RUN_ID, ensemble, runtime="inline").raw == "done"
    assert recorded(home) == sent.spans
