"""The values of a trace and their JSON form."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ensemble_ray import (
    AgentSummary,
    CapturedMessage,
    CaptureMode,
    CostEstimate,
    ErrorTrace,
    ExecutionMetrics,
    ExecutionTrace,
    LlmInteraction,
    TaskMetrics,
    TaskPrompts,
    TaskTrace,
    ToolCallTrace,
    ValidationError,
)
from ensemble_ray.values.trace import jsonable
from ensemble_ray.values.value import utc_of

COST = CostEstimate(input_cost=Decimal("0.00250000"), output_cost=0, total_cost=Decimal("0.00250000"))
TOOL_CALL = ToolCallTrace(
    tool_name="search",
    arguments='{"q": "Ray"}',
    result="3 hits",
    structured_output={"hits": 3},
    started_at=utc_of(2),
    completed_at=utc_of(3.5),
    duration=timedelta(seconds=1.5),
    outcome="success",
    parsed_input={"q": "Ray"},
    metadata={"cached": True},
)
ASKED = LlmInteraction(
    iteration_index=0,
    started_at=utc_of(1),
    completed_at=utc_of(2),
    latency=timedelta(seconds=1),
    input_tokens=100,
    output_tokens=20,
    response_type="tool_calls",
    tool_calls=[TOOL_CALL],
    messages=[
        CapturedMessage(role="user", content="Find"),
        CapturedMessage(role="assistant", tool_calls=[{"id": "1", "name": "search", "arguments": "{}"}]),
    ],
)
ANSWERED = LlmInteraction(
    iteration_index=1,
    started_at=utc_of(4),
    completed_at=utc_of(5),
    latency=timedelta(seconds=1),
    response_type="final_answer",
    response_text="Found",
)
TASK = TaskTrace(
    task_description="Find Ray",
    expected_output="Hits",
    agent_role="Searcher",
    started_at=utc_of(1),
    completed_at=utc_of(5),
    duration=timedelta(seconds=4),
    prompts=TaskPrompts(system_prompt="You are", user_prompt="Find"),
    llm_interactions=[ASKED, ANSWERED],
    final_output="Found",
    parsed_output={"title": "Ray", "tags": [1, 2.5, None, True]},
    metrics=TaskMetrics(input_tokens=100, llm_latency=timedelta(seconds=2), cost_estimate=COST),
    node_type="task",
    metadata={"attempt": 1},
)
TRACE = ExecutionTrace(
    capture_mode="full",
    ensemble_id="run-1",
    workflow="sequential",
    started_at=utc_of(0),
    completed_at=utc_of(12.345),
    total_duration=timedelta(seconds=12.345),
    inputs={"topic": "Ray"},
    agents=[AgentSummary(role="Searcher", goal="Find", tool_names=["search"])],
    task_traces=[TASK],
    metrics=ExecutionMetrics(task_metrics={"Searcher": TASK.metrics}, total_cost_estimate=COST),
    total_cost_estimate=COST,
    errors=[
        ErrorTrace(
            agent_role="Searcher",
            task_description="Find Ray",
            error_type="AgentExecutionError",
            message="LLM failed",
            stack_trace="Traceback",
            occurred_at=utc_of(5),
        )
    ],
    trace_id="outside-7",
    metadata={"note": "x"},
)


class Custom:
    """No JSON form."""

    def __str__(self) -> str:
        return "a custom thing"


class Silent:
    """No JSON form and no text."""

    def __str__(self) -> str:
        msg = "no text"
        raise RuntimeError(msg)


class Report(BaseModel):
    """Has a JSON form."""

    title: str
    at: datetime


@dataclass
class Point:
    """Has one too."""

    x: int


def _read(text: str) -> ExecutionTrace:
    return ExecutionTrace.model_validate_json(text)


def test_trace_is_equal_when_read_from_its_json() -> None:
    """S-TRC-52, S-TRC-1, S-TRC-2, S-TRC-10, S-TRC-20, S-TRC-30: every field of every level."""
    assert _read(TRACE.to_json()) == TRACE


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.heavy
@given(value=JSON_VALUES, text=st.text(), seconds=st.integers(0, 10**9))
def test_any_json_data_is_equal_when_read_back(value: object, text: str, seconds: int) -> None:
    """S-TRC-52: texts of all kinds, nested data, far instants."""
    call = TOOL_CALL.replace(structured_output=value, result=text)
    task = TASK.replace(
        parsed_output=value,
        final_output=text,
        llm_interactions=[ASKED.replace(tool_calls=[call])],
        metadata={"v": value},
    )
    trace = TRACE.replace(task_traces=[task], completed_at=utc_of(seconds), inputs={text: text})
    assert _read(trace.to_json()) == trace


@pytest.mark.parametrize("value", [(1, 2), {3: 4}, Point(1), Custom(), {"at": utc_of(1)}, b"\xff"])
def test_trace_is_equal_when_a_tool_gave_objects(value: object) -> None:
    """S-TRC-52: structured outputs and metadata are data from the start."""
    call = TOOL_CALL.replace(structured_output=value, metadata={"v": value})
    trace = TRACE.replace(task_traces=[TASK.replace(llm_interactions=[ASKED.replace(tool_calls=[call])])])
    assert _read(trace.to_json()) == trace


def test_json_names_and_forms() -> None:
    """S-TRC-51: snake_case, enums by value, UTC instants and durations in ISO 8601, decimals as text."""
    data = json.loads(TRACE.to_json())
    assert data["capture_mode"] == "full"
    assert data["started_at"] == "1970-01-01T00:00:00Z"
    assert data["total_duration"] == "PT12.345S"
    assert data["total_cost_estimate"]["input_cost"] == "0.00250000"
    assert data["task_traces"][0]["metrics"]["cost_estimate"]["total_cost"] == "0.00250000"
    assert all(name == name.lower() for name in data)


def test_instants_are_written_in_utc_when_given_elsewhere() -> None:
    """S-TRC-51, S-CONV-8: whatever zone they came in."""
    tokyo = datetime(2026, 1, 1, 9, tzinfo=timezone(timedelta(hours=9)))
    trace = TRACE.replace(started_at=tokyo)
    assert trace.started_at.tzinfo is UTC
    assert json.loads(trace.to_json())["started_at"] == "2026-01-01T00:00:00Z"
    with pytest.raises(ValidationError, match="timezone"):
        TRACE.replace(started_at=datetime(2026, 1, 1))  # noqa: DTZ001  that is the point


def test_schema_version() -> None:
    """The version of the trace's form, S-TRC-52."""
    assert json.loads(TRACE.to_json())["schema_version"] == "1.1"


def test_json_is_pretty() -> None:
    """S-TRC-50: one field per line, indented."""
    assert TRACE.to_json().splitlines()[1] == '  "schema_version": "1.1",'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Report(title="Ray", at=utc_of(0)), {"title": "Ray", "at": "1970-01-01T00:00:00Z"}),
        (Point(1), {"x": 1}),
        (Custom(), "a custom thing"),
        ({"inner": [Custom()]}, {"inner": ["a custom thing"]}),
        (Silent(), "<Silent>"),
        ({"inner": [Silent(), 1]}, {"inner": ["<Silent>", 1]}),
        (b"\xff", "b'\\xff'"),
        ({"a": b"\xff", "b": 1}, {"a": "b'\\xff'", "b": 1}),
    ],
)
def test_parsed_output_is_written_in_its_json_form_else_as_text(value: object, expected: object) -> None:
    """S-TRC-52: writing never fails for that reason, and one bad part spoils no other."""
    trace = TRACE.replace(task_traces=[TASK.replace(parsed_output=value)])
    assert json.loads(trace.to_json())["task_traces"][0]["parsed_output"] == expected


def test_writing_goes_on_when_an_object_contains_itself() -> None:
    """S-TRC-52: the inner one is a text."""
    loop: dict[str, object] = {"x": 1}
    loop["self"] = loop
    assert jsonable(loop) == {"x": 1, "self": "{'x': 1, 'self': {...}}"}


def test_writing_goes_on_when_data_is_nested_without_end() -> None:
    """S-TRC-52: no recursion error."""
    deep: list[object] = []
    for _ in range(50_000):
        deep = [deep]
    assert isinstance(jsonable(deep), str)


def test_writing_goes_on_when_a_model_cut_an_emoji_in_two(tmp_path: Path) -> None:
    """S-TRC-52: half of a surrogate pair has no UTF-8 form; U+FFFD stands for it, whole pairs become one character."""
    trace = TRACE.replace(
        task_traces=[TASK.replace(final_output="ok \ud83d", parsed_output={"\ud83d": "\ud83d\ude00"})]
    )
    task = _read(trace.to_json(tmp_path / "trace.json")).task_traces[0]
    assert (task.final_output, task.parsed_output) == ("ok �", {"�": "😀"})


def test_trace_is_written_when_a_path_is_given(tmp_path: Path) -> None:
    """S-TRC-50: parent folders are made; the text is given back too."""
    path = tmp_path / "a" / "b" / "trace.json"
    text = TRACE.to_json(path)
    assert path.read_text(encoding="utf-8") == text
    assert TRACE.to_json(str(path)) == text


def test_os_error_is_raised_when_the_file_cannot_be_written(tmp_path: Path) -> None:
    """S-TRC-53."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        TRACE.to_json(tmp_path / "file" / "trace.json")


def test_trace_goes_to_a_callable_or_an_object() -> None:
    """S-TRC-60: both kinds of exporter."""
    seen: list[ExecutionTrace] = []

    class Exporter:
        def export(self, trace: ExecutionTrace) -> None:
            seen.append(trace)

    TRACE.export(seen.append)
    TRACE.export(Exporter())
    assert seen == [TRACE, TRACE]


@pytest.mark.parametrize("value", [TRACE, TASK, ASKED, TOOL_CALL, TRACE.agents[0], TRACE.errors[0]])
def test_value_refuses_assignment(value: object) -> None:
    """S-MET-3: all levels are frozen, sequences are tuples."""
    with pytest.raises(ValueError, match="frozen"):
        value.metadata = {}  # type: ignore[attr-defined]
    assert isinstance(TRACE.task_traces, tuple)
    assert isinstance(TASK.llm_interactions, tuple)


def test_inputs_stay_when_the_callers_mapping_changes() -> None:
    """S-CONV-5: copied."""
    inputs, metadata = {"topic": "Ray"}, {"a": 1}
    trace = TRACE.replace(inputs=inputs, metadata=metadata)
    inputs["topic"], metadata["a"] = "other", 2
    assert (trace.inputs, trace.metadata) == ({"topic": "Ray"}, {"a": 1})


def test_outcome_of_a_tool_call_is_one_of_four() -> None:
    """S-TRC-31: nothing else."""
    for outcome in ("success", "failure", "error", "skipped_max_iterations"):
        assert TOOL_CALL.replace(outcome=outcome).outcome == outcome
    with pytest.raises(ValidationError):
        TOOL_CALL.replace(outcome="fine")


def test_agent_summary_has_what_the_trace_tells_of_agents() -> None:
    """S-TRC-1: background may be missing."""
    assert TRACE.agents[0].model_dump() == {
        "role": "Searcher",
        "goal": "Find",
        "background": None,
        "tool_names": ("search",),
        "allow_delegation": False,
    }


def test_capture_modes_are_ordered() -> None:
    """S-CAP-1, S-CONV-6: off < standard < full; plain values are accepted."""
    modes = list(CaptureMode)
    assert modes == ["off", "standard", "full"]
    for position, mode in enumerate(modes):
        assert [mode.is_at_least(other) for other in modes] == [position >= other for other in range(3)]
    assert CaptureMode.FULL.is_at_least("standard")


def test_capture_mode_is_shown() -> None:
    """S-CAP-16: the effective one, in its JSON form too."""
    assert TRACE.capture_mode is CaptureMode.FULL
    with pytest.raises(ValidationError):
        TRACE.replace(capture_mode="loud")
