"""Spans as plain data: names, parents and attributes of what traces tell."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes

from ensemble_ray import ExitReason, LlmInteraction, TaskTrace, ToolCallTrace, ValidationError
from ensemble_ray.events import RunTracedEvent, TaskTracedEvent
from ensemble_ray.events.telemetry import conventions
from ensemble_ray.events.telemetry.spans import (
    CONTENT_VARIABLE,
    Content,
    UnitTimes,
    content_mode,
    run_spans,
    task_spans,
)
from ensemble_ray.llm.failures import provider_of
from ensemble_ray.values.trace import RunTracing, TraceParent

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
TRACING = RunTracing(run_id="r")


def _at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


def _interaction(index: int, *tools: ToolCallTrace, at: float = 0.0) -> LlmInteraction:
    return LlmInteraction(
        iteration_index=index,
        started_at=_at(at),
        completed_at=_at(at + 1),
        latency=timedelta(seconds=1),
        response_type="tool_calls" if tools else "final_answer",
        tool_calls=tools,
    )


def _tool(name: str, outcome: str) -> ToolCallTrace:
    return ToolCallTrace(
        tool_name=name,
        arguments="{}",
        result="secret",
        started_at=_at(1),
        completed_at=_at(2),
        duration=timedelta(seconds=1),
        outcome=outcome,  # type: ignore[arg-type]
    )


def _event(instance: str, *interactions: LlmInteraction, began: float = 0.0, **fields: object) -> TaskTracedEvent:
    trace = TaskTrace(
        task_description="d",
        expected_output="e",
        agent_role="Writer",
        started_at=_at(began),
        completed_at=_at(began + 3),
        duration=timedelta(seconds=3),
        llm_interactions=interactions,
    )
    event = TaskTracedEvent(run_id="r", instance=instance, tracing=TRACING, trace=trace, status="completed")
    return replace(event, **fields)  # type: ignore[arg-type]


def _ended(
    tracing: RunTracing = TRACING, reason: ExitReason = ExitReason.COMPLETED, **fields: object
) -> RunTracedEvent:
    event = RunTracedEvent(
        run_id="r",
        tracing=tracing,
        workflow="sequential",
        name="shop",
        started_at=_at(0).timestamp(),
        ended_at=_at(9).timestamp(),
        exit_reason=reason,
    )
    return replace(event, **fields)  # type: ignore[arg-type]


def test_names_are_those_of_the_conventions() -> None:
    """S-INT-32, S-INT-35: as the package of OpenTelemetry has them."""
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    own = {
        getattr(conventions, name)
        for name in vars(conventions)
        if name.isupper()
        and str(getattr(conventions, name)).startswith("gen_ai.")
        and "client" not in getattr(conventions, name)
    }
    assert own <= known
    operations = {each.value for each in gen_ai_attributes.GenAiOperationNameValues}
    assert {
        conventions.CHAT,
        conventions.EXECUTE_TOOL,
        conventions.INVOKE_AGENT,
        conventions.INVOKE_WORKFLOW,
    } <= operations
    assert error_attributes.ERROR_TYPE == conventions.ERROR_TYPE
    assert conventions.TOKEN_BUCKETS[:3] == (1, 4, 16)
    assert conventions.TOKEN_BUCKETS[-1] == 67_108_864
    assert (conventions.DURATION_BUCKETS[0], conventions.DURATION_BUCKETS[-1]) == (0.01, 81.92)


def test_tool_calls_of_one_turn_are_told_apart_by_their_place() -> None:
    """S-INT-31, S-INT-32, S-INT-36: ids are those that the process computed that made the call; failures are errors."""
    interaction = _interaction(0, _tool("a", "success"), _tool("a", "error"))
    _, chat, good, bad = task_spans(_event("w#0", interaction, call_ids=(("c1", "c2"),)))
    ids = [TRACING.effect_span(name) for name in ("w#0/0/model", "w#0/0/call-0", "w#0/0/call-1")]
    assert [each.span_id for each in (chat, good, bad)] == ids
    assert [each.attributes["gen_ai.tool.call.id"] for each in (good, bad)] == ["c1", "c2"]
    assert (chat.kind, good.is_error, bad.is_error) == ("client", False, True)
    assert (bad.attributes["error.type"], bad.attributes["ensemble_ray.tool.outcome"]) == ("error", "error")
    assert chat.attributes["gen_ai.provider.name"] == "_OTHER"
    assert "gen_ai.usage.input_tokens" not in chat.attributes, "unknown is not zero"


def test_failed_execution_says_its_error_and_its_text_only_with_content() -> None:
    """S-INT-32, S-INT-33."""
    event = _event("w#0", status="failed", error_type="AgentExecutionError", error_message="a secret")
    (span,) = task_spans(event)
    assert (span.is_error, span.attributes["error.type"], span.status_text) == (True, "AgentExecutionError", "")
    (told,) = task_spans(event, Content.SPAN_ONLY)
    assert told.status_text == "a secret"
    (handled,) = task_spans(_event("loop:x#0/count#0", is_handler=True))
    assert (handled.name, "gen_ai.operation.name" in handled.attributes) == ("task count", False)


@pytest.mark.parametrize(
    ("instance", "parent"),
    [
        ("w#0", TRACING.run_span()),
        ("a/b#0", TRACING.run_span()),
        ("loop:refine#2/w#0", TRACING.execution_span("loop:refine#2")),
        ("graph:g#3/loop:l#1/w#0", TRACING.execution_span("graph:g#3/loop:l#1")),
        ("w#0/1/call-2/delegate#0", TRACING.effect_span("w#0/1/call-2")),
        ("w#0/1/call-2/delegate#0/0/call-0/delegate#0", TRACING.effect_span("w#0/1/call-2/delegate#0/0/call-0")),
        ("loop:l#1/w#0/0/call-0/delegate#0", TRACING.effect_span("loop:l#1/w#0/0/call-0")),
    ],
)
def test_parent_follows_from_the_path(instance: str, parent: str) -> None:
    """S-INT-31: the round, the call that handed work on, else the run; names of tasks may have slashes."""
    assert task_spans(_event(instance))[0].parent_id == parent


def test_run_has_the_name_of_its_team() -> None:
    """S-INT-114: in its span's name and as the workflow's."""
    run, *_ = run_spans(_ended(), UnitTimes(()))
    assert (run.name, run.attributes["gen_ai.workflow.name"]) == ("invoke_workflow shop", "shop")


def test_units_last_from_the_first_to_the_last_of_what_is_in_them() -> None:
    """S-INT-31: each round is a child of its unit, and a unit of the round that it is in."""
    paths = ("graph:g#0/loop:l#0/w#0", "graph:g#0/loop:l#1/w#0", "phase:p#1/w#0")
    units = UnitTimes(_event(path, began=float(place)) for place, path in enumerate(paths))
    run, *spans = run_spans(_ended(), units)
    by_id = {each.span_id: each.name for each in (run, *spans)}
    shown = [(each.name, by_id[each.parent_id or ""], each.started_at, each.ended_at) for each in spans]
    start = BEGAN.timestamp()
    assert shown == [
        ("graph g", "invoke_workflow shop", start, start + 4),
        ("step 1", "graph g", start, start + 4),
        ("loop l", "step 1", start, start + 4),
        ("iteration 1", "loop l", start, start + 3),
        ("iteration 2", "loop l", start + 1, start + 4),
        ("phase p", "invoke_workflow shop", start + 2, start + 5),
        ("attempt 2", "phase p", start + 2, start + 5),
    ]


def test_run_that_goes_on_links_to_its_first_span_and_tells_calls_once() -> None:
    """S-INT-36: a beginning that ended has told of its calls."""
    again = RunTracing(run_id="r", beginning=2, reported_until=_at(5).timestamp())
    (run,) = run_spans(_ended(again, ExitReason.CANCELLED), UnitTimes())
    assert (run.links, run.parent_id, run.is_error) == ((TRACING.run_span(),), None, False)
    _, *calls = task_spans(_event("w#0", _interaction(0), _interaction(1, at=6.0), tracing=again))
    assert [each.span_id for each in calls] == [TRACING.effect_span("w#0/1/model")]


def test_run_that_failed_or_was_asked_for_says_so() -> None:
    """S-INT-31, S-INT-38: what it says is content."""
    asked = RunTracing(run_id="r", caller=TraceParent("a" * 32, "b" * 16))
    (run,) = run_spans(_ended(asked, ExitReason.ERROR, error_type="TaskExecutionError", error_message="m"), UnitTimes())
    assert (run.trace_id, run.parent_id, run.has_remote_parent) == ("a" * 32, "b" * 16, True)
    assert (run.is_error, run.attributes["error.type"], run.status_text) == (True, "TaskExecutionError", "")
    # The clock of another machine may be behind.
    early = UnitTimes([_event("w#0", began=-4.0)])
    assert run_spans(_ended(), early)[0].started_at == _at(-4.0).timestamp()


@pytest.mark.parametrize(
    ("wanted", "said", "found"),
    [
        (None, "", Content.NO_CONTENT),
        (None, "True", Content.SPAN_AND_EVENT),
        (None, "EVENT_ONLY", Content.EVENT_ONLY),
        (False, "true", Content.NO_CONTENT),
        (True, "false", Content.SPAN_AND_EVENT),
        ("span_only", "", Content.SPAN_ONLY),
    ],
)
def test_content_is_where_it_is_asked_for(*, wanted: bool | str | None, said: str, found: Content) -> None:
    """S-INT-33: an argument counts before the environment; nothing is sent unasked."""
    assert content_mode(wanted, {CONTENT_VARIABLE: said}) is found


def test_wrong_place_of_content_is_refused() -> None:
    """S-INT-33: with those that there are."""
    with pytest.raises(ValidationError, match=r"must be one of \[true, false, no_content.*got: 'all'"):
        content_mode(None, {CONTENT_VARIABLE: "all"})


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://bedrock-runtime.eu-west-1.amazonaws.com/openai/v1", "aws.bedrock"),
        ("https://notapi.openai.com.example.org/v1", "notapi.openai.com.example.org"),
        ("http://[::1]:8000/v1", "::1"),
        ("http://[", ""),
    ],
)
def test_provider_follows_from_the_host(url: str, name: str) -> None:
    """S-INT-32."""
    assert provider_of(url) == name
