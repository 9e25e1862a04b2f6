"""Traces and metrics of runs: what is counted, what is kept in which capture mode, where it is exported to."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from ensemble_ray import (
    CaptureMode,
    CostConfiguration,
    Ensemble,
    EnsembleOutput,
    ExecutionTrace,
    ExitEarlyError,
    Runtime,
    TaskExecutionError,
    TaskTrace,
    tool,
)
from ensemble_ray.record.runs import read_facts
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.teams import PATIENCE_S, prompt_of, wait_for

#: Sums of rounded parts and rounded sums differ by a microsecond per part.
ROUNDING = timedelta(microseconds=20)


@tool
def look(what: str = "") -> str:
    """Look."""
    return f"saw {what}"


@tool
def crash() -> str:
    """Raise."""
    raise ValueError("broke")


@tool
def refuse() -> str:
    """Give an error text."""
    return "Error: not today"


def traced(runtime: Runtime, model: ScriptedModel, **fields: object) -> tuple[EnsembleOutput, TaskTrace]:
    """A run of one agent with tools, and the trace of its task."""
    worker = agent(model, tools=[look, crash, refuse], max_iterations=4)
    output = Ensemble(tasks=[task("go", worker)], **fields).run({"x": "bees"}, runtime=runtime)
    assert output.trace is not None
    return output, output.trace.task_traces[0]


def two_turns() -> ScriptedModel:
    """Two tool turns and an answer."""
    return ScriptedModel(
        answer("", 100, 20, calls=[call("look", '{"what": "bees"}', number=1), call("crash", number=2)]),
        answer("", 150, 30, calls=[call("refuse", number=3)]),
        answer("done", 10, 5),
    )


def test_trace_is_a_tree_of_all_that_happened(runtime: Runtime) -> None:
    """S-TRC-1, S-TRC-2, S-TRC-3, S-TRC-10, S-TRC-20, S-TRC-21, S-TRC-22, S-TRC-30, S-TRC-31, S-TRC-32, S-MET-1."""
    model = two_turns()
    output, traced_task = traced(runtime, model)
    trace = output.trace
    assert trace is not None
    assert (trace.schema_version, trace.workflow, dict(trace.inputs)) == ("1.1", "sequential", {"x": "bees"})
    assert trace.ensemble_id == output.run_id
    assert trace.total_duration == trace.completed_at - trace.started_at == output.total_duration
    (summary,) = trace.agents
    assert (summary.role, summary.goal, summary.background) == ("Writer", "be a good Writer", None)
    assert (summary.tool_names, summary.allow_delegation) == (("look", "crash", "refuse"), False)
    assert traced_task == output.task_outputs[0].trace
    assert (traced_task.task_description, traced_task.agent_role, traced_task.final_output) == ("go", "Writer", "done")
    assert traced_task.duration == traced_task.completed_at - traced_task.started_at
    turns = traced_task.llm_interactions
    assert [turn.iteration_index for turn in turns] == [0, 1, 2]
    assert [turn.response_type for turn in turns] == ["tool_calls", "tool_calls", "final_answer"]
    assert [turn.response_text for turn in turns] == [None, None, "done"]
    assert [(turn.input_tokens, turn.output_tokens) for turn in turns] == [(100, 20), (150, 30), (10, 5)]
    assert all(turn.latency == turn.completed_at - turn.started_at >= timedelta() for turn in turns)
    tools = [each for turn in turns for each in turn.tool_calls]
    assert [(each.tool_name, each.arguments, each.outcome) for each in tools] == [
        ("look", '{"what": "bees"}', "success"),
        ("crash", "{}", "error"),
        ("refuse", "{}", "failure"),
    ]
    assert [each.result for each in tools] == ["saw bees", "Tool error: ValueError: broke", "Error: not today"]
    assert tools[1].result == [message.content for message in model.calls[1].messages if message.role == "tool"][1]
    assert all(each.duration == each.completed_at - each.started_at for each in tools)


def test_prompts_are_those_of_the_first_call(inline_runtime: Runtime) -> None:
    """S-TRC-11."""
    model = two_turns()
    _, traced_task = traced(inline_runtime, model)
    first = model.calls[0].messages
    assert traced_task.prompts is not None
    assert (traced_task.prompts.system_prompt, traced_task.prompts.user_prompt) == (first[0].content, first[1].content)


def test_metrics_are_the_sums(runtime: Runtime) -> None:
    """S-MET-2, S-MET-11, S-MET-12, S-MET-24: totals equal the sums over tasks."""
    output, traced_task = traced(runtime, two_turns())
    metrics = output.task_outputs[0].metrics
    assert (metrics.input_tokens, metrics.output_tokens, metrics.total_tokens) == (260, 55, 315)
    assert (metrics.llm_call_count, metrics.tool_call_count) == (3, 3)
    assert metrics.tool_call_count == output.task_outputs[0].tool_call_count == output.total_tool_calls
    waited = sum((turn.latency for turn in traced_task.llm_interactions), timedelta())
    assert abs(metrics.llm_latency - waited) < ROUNDING
    assert metrics.prompt_build_time >= timedelta()
    assert metrics == traced_task.metrics
    assert output.metrics.total_tokens == 315
    assert output.metrics.task_metrics == {"Writer": metrics}
    assert (metrics.cost_estimate, output.metrics.total_cost_estimate) == (None, None)


@pytest.mark.parametrize("workflow", ["sequential", "parallel"])
def test_metrics_of_every_task_are_kept_when_one_agent_has_several(
    inline_runtime: Runtime, workflow: str, home: str
) -> None:
    """S-MET-27, S-MET-23: by the task's key, equal to what the outputs say, in the record too."""
    model = ScriptedModel(otherwise=lambda asked: answer("x", 20 if "Do more" in prompt_of(asked) else 10, 5))
    writer = agent(model)
    first = task("Begin", writer, name="first")
    second = task("Do more", writer, context=[first])
    output = Ensemble(tasks=[first, second], workflow=workflow).run(runtime=inline_runtime)
    by_task = output.metrics.metrics_by_task
    assert {key: each.input_tokens for key, each in by_task.items()} == {"first": 10, "task-2": 20}
    assert list(by_task.values()) == [each.metrics for each in output.task_outputs]
    assert output.trace is not None
    assert output.run_id is not None
    assert fold_trace(read_facts(output.run_id, Path(home))).metrics.metrics_by_task == by_task


@pytest.mark.parametrize("workflow", ["sequential", "parallel"])
def test_one_unknown_count_makes_that_total_unknown(inline_runtime: Runtime, workflow: str) -> None:
    """S-MET-10, S-MET-12, S-MET-13, S-MET-22, S-MET-24: the others are known; 0 is known."""
    model = ScriptedModel(otherwise=lambda asked: answer("x", -1 if "bad" in prompt_of(asked) else 0, 20))
    writer = agent(model)
    output = Ensemble(tasks=[task("good", writer), task("bad", writer)], workflow=workflow).run(runtime=inline_runtime)
    totals = output.metrics
    assert (totals.total_input_tokens, totals.total_output_tokens, totals.total_tokens) == (-1, 40, -1)
    by_task = {each.task_description: each.metrics for each in output.task_outputs}
    assert (by_task["good"].input_tokens, by_task["good"].total_tokens) == (0, 20)
    assert totals.total_llm_call_count == 2


def test_cost_is_estimated_when_rates_are_given(inline_runtime: Runtime) -> None:
    """S-MET-25, S-MET-32, S-MET-34."""
    rates = CostConfiguration(input_token_rate=0.0000025, output_token_rate=0.00001)  # type: ignore[arg-type]
    model = ScriptedModel(answer("x", 1000, 500), answer("y", 1000, 500))
    writer = agent(model)
    output = Ensemble(tasks=[task("a", writer), task("b", writer)], cost_configuration=rates).run(
        runtime=inline_runtime
    )
    each = output.task_outputs[0].metrics.cost_estimate
    assert each is not None
    assert (each.input_cost, each.output_cost, each.total_cost) == (
        *(Decimal("0.00250000"), Decimal("0.00500000")),
        Decimal("0.00750000"),
    )
    assert output.metrics.total_cost_estimate is not None
    assert output.metrics.total_cost_estimate.total_cost == Decimal("0.01500000")
    assert output.trace is not None
    assert output.trace.total_cost_estimate == output.metrics.total_cost_estimate


def test_trace_survives_its_json(inline_runtime: Runtime) -> None:
    """S-TRC-50, S-TRC-51, S-TRC-52."""
    output, _ = traced(inline_runtime, two_turns(), capture_mode="full", trace_exporter=lambda _: None)
    assert output.trace is not None
    assert ExecutionTrace.model_validate_json(output.trace.to_json()) == output.trace


# Capture modes.


def test_off_keeps_no_messages(inline_runtime: Runtime) -> None:
    """S-CAP-10, S-CAP-16: the default."""
    output, traced_task = traced(inline_runtime, two_turns())
    assert output.trace is not None
    assert output.trace.capture_mode is CaptureMode.OFF
    assert all(turn.messages == () for turn in traced_task.llm_interactions)
    assert all(each.parsed_input is None for turn in traced_task.llm_interactions for each in turn.tool_calls)


def test_standard_keeps_messages_as_they_were(runtime: Runtime) -> None:
    """S-CAP-11, S-CAP-12, S-CAP-13, S-SET-13: after the call and before the turn is closed."""
    output, traced_task = traced(runtime, two_turns(), capture_mode="standard")
    assert output.trace is not None
    assert output.trace.capture_mode is CaptureMode.STANDARD
    first, second, last = traced_task.llm_interactions
    assert [message.role for message in first.messages] == ["system", "user", "assistant"]
    assert [message.role for message in second.messages] == [
        *("system", "user", "assistant"),
        *("tool", "tool", "assistant"),
    ]
    assert [dict(each) for each in first.messages[2].tool_calls] == [
        {"id": "call-look-1", "name": "look", "arguments": '{"what": "bees"}'},
        {"id": "call-crash-2", "name": "crash", "arguments": "{}"},
    ]
    assert [(message.content, message.tool_name) for message in second.messages if message.role == "tool"] == [
        ("saw bees", "look"),
        ("Tool error: ValueError: broke", "crash"),
    ]
    assert last.messages[-1].content == "done"
    assert all(each.parsed_input is None for turn in traced_task.llm_interactions for each in turn.tool_calls)


def test_tasks_without_tools_get_messages_too(inline_runtime: Runtime) -> None:
    """S-CAP-20."""
    output = Ensemble(tasks=[task("go", agent(ScriptedModel("x")))], capture_mode="standard").run(
        runtime=inline_runtime
    )
    assert output.trace is not None
    (turn,) = output.trace.task_traces[0].llm_interactions
    assert [message.role for message in turn.messages] == ["system", "user", "assistant"]


def test_full_parses_inputs_and_exports(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-CAP-14, S-CAP-15, S-CAP-18, S-TRC-63: to ./traces/ where no exporter is chosen."""
    monkeypatch.chdir(tmp_path)
    model = ScriptedModel([call("look", '{"what": "x"}', number=1), call("look", "no JSON", number=2)], "done")
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        output, traced_task = traced(runtime, model, capture_mode="full")
    parsed = [each.parsed_input for turn in traced_task.llm_interactions for each in turn.tool_calls]
    assert parsed == [{"what": "x"}, None]
    written = json.loads((tmp_path / "traces" / f"{output.run_id}.json").read_text(encoding="utf-8"))
    assert written["capture_mode"] == "full"
    assert "Capture mode: full" in [record.getMessage() for record in caplog.records]


def test_environment_chooses_where_the_ensemble_does_not(
    inline_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-CAP-2, S-CAP-3, S-CAP-4, S-CAP-5: the caller's environment, read at each run; an explicit off wins."""
    monkeypatch.setenv("ENSEMBLE_RAY_CAPTURE_MODE", " Standard ")
    output, traced_task = traced(inline_runtime, two_turns())
    assert output.trace is not None
    assert output.trace.capture_mode is CaptureMode.STANDARD
    assert len(traced_task.llm_interactions[0].messages) == 3
    output, _ = traced(inline_runtime, two_turns(), capture_mode="off")
    assert output.trace is not None
    assert output.trace.capture_mode is CaptureMode.OFF


# Exporters.


class Keep:
    """An exporter that keeps what it gets."""

    def __init__(self) -> None:
        self.traces: list[ExecutionTrace] = []

    def export(self, trace: ExecutionTrace) -> None:
        self.traces.append(trace)


def test_exporter_gets_the_trace_once_per_run(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-TRC-60, S-TRC-61, S-CAP-15, S-CONV-33: in the driver; the only one, also in mode full."""
    monkeypatch.chdir(tmp_path)
    keep = Keep()
    output, _ = traced(runtime, two_turns(), trace_exporter=keep, capture_mode="full")
    assert keep.traces == [output.trace]
    assert not (tmp_path / "traces").exists()


def leave(_context: object) -> str:
    """Leave the run."""
    raise ExitEarlyError


def test_exporter_gets_runs_that_left_early_but_no_failed_ones(inline_runtime: Runtime) -> None:
    """S-TRC-61."""
    keep = Keep()
    Ensemble(tasks=[task("go", handler=leave)], trace_exporter=keep).run(runtime=inline_runtime)
    assert len(keep.traces) == 1
    with pytest.raises(TaskExecutionError):
        Ensemble(tasks=[task("go", agent(ScriptedModel(ValueError("no"))))], trace_exporter=keep).run(
            runtime=inline_runtime
        )
    assert len(keep.traces) == 1


def test_exporter_gets_no_cancelled_run(inline_runtime: Runtime) -> None:
    """S-TRC-61, S-SET-27: it was no successful one; its trace is on its output."""
    keep, asked = Keep(), threading.Event()

    async def never(_asked: ScriptedCall) -> str:
        asked.set()
        await asyncio.Event().wait()
        return "never"

    run = Ensemble(tasks=[task("go", agent(ScriptedModel(never)))], trace_exporter=keep).start(runtime=inline_runtime)
    wait_for(asked)
    run.cancel()
    assert run.result(timeout_s=PATIENCE_S).trace is not None
    assert keep.traces == []


def test_failing_exporter_changes_nothing(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-TRC-62: WARN."""

    def broken(_trace: ExecutionTrace) -> None:
        raise OSError("disk full")

    output = Ensemble(tasks=[task("go", agent(ScriptedModel("x")))], trace_exporter=broken).run(runtime=inline_runtime)
    assert output.raw == "x"
    assert any("disk full" in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)


def test_concurrent_tool_durations_add_up(inline_runtime: Runtime) -> None:
    """S-MET-15, S-TRC-21: each call has its own duration; the sum is theirs."""
    model = ScriptedModel([call("look", f'{{"what": "{n}"}}', number=n) for n in range(4)], "done")
    output, traced_task = traced(inline_runtime, model)
    calls = traced_task.llm_interactions[0].tool_calls
    assert [each.result for each in calls] == [f"saw {n}" for n in range(4)]
    spent = output.task_outputs[0].metrics.tool_execution_time
    assert abs(spent - sum((each.duration for each in calls), timedelta())) < ROUNDING


def test_last_task_of_a_role_stands_in_the_metrics(inline_runtime: Runtime) -> None:
    """S-MET-23."""

    def reply(asked: ScriptedCall) -> object:
        return answer("x", asked.number + 1, 1)

    writer = agent(ScriptedModel(otherwise=reply))
    output = Ensemble(tasks=[task("a", writer), task("b", writer)]).run(runtime=inline_runtime)
    assert output.metrics.task_metrics["Writer"].input_tokens == 2
    assert output.metrics.total_input_tokens == 3
