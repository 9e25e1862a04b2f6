"""Real runs in this process, and what their records tell afterwards."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    CaptureMode,
    ChatResponse,
    CostConfiguration,
    Ensemble,
    EnsembleOutput,
    ExecutionTrace,
    InlineRuntime,
    RunState,
    Task,
    TaskExecutionError,
    TokenUsage,
    ToolCall,
    tool,
)
from ensemble_ray.record.runs import list_runs, read_facts
from ensemble_ray.record.trace import fold_output, fold_trace
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.testing import ScriptedModel

ADD = '{"a": 1, "b": 2}'


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def _calls(*arguments: str) -> ChatResponse:
    calls = tuple(ToolCall(id=str(number), name="add", arguments=text) for number, text in enumerate(arguments))
    return ChatResponse(tool_calls=calls, usage=TokenUsage(100, 20))


def _answer(text: str) -> ChatResponse:
    return ChatResponse(text=text, usage=TokenUsage(150, 30))


def _team(*script: object, **changes: object) -> Ensemble:
    """An adder with a tool, an editor without, and a task without a model."""
    model = ScriptedModel(*script)
    adder = Agent(role="Adder", goal="Add", llm=model, tools=[add])
    editor = Agent(role="Editor", goal="Edit", llm=model)
    added = Task(name="add", description="Add {what}", expected_output="A number", agent=adder)
    edited = Task(name="edit", description="Edit", expected_output="Text", agent=editor, context=[added])
    counted = Task(name="count", description="Count", expected_output="A number", handler=lambda _: "42")
    return Ensemble(**{"tasks": [added, edited, counted], "inputs": {"what": "1 and 2"}, **changes})


SCRIPT = (_calls(ADD, ADD), _calls(ADD), _answer("three " * 400), _answer("edited"))


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Ensemble], EnsembleOutput]:
    """Runs a team in this process, recording below the test's folder."""
    return lambda team: team.run(runtime=InlineRuntime(home=tmp_path))


Run = Callable[[Ensemble], EnsembleOutput]


def _trace(output: EnsembleOutput) -> ExecutionTrace:
    assert output.trace is not None
    return output.trace


def test_folded_trace_equals_the_live_one(run: Run, tmp_path: Path) -> None:
    """S-MET-1, S-MET-2, S-TRC-2, S-TRC-52: nothing of a finished run is lost on the disk."""
    output = run(_team(*SCRIPT))
    assert output.run_id is not None
    assert fold_trace(read_facts(output.run_id, tmp_path)) == _trace(output)
    assert [(found.run_id, found.state) for found in list_runs(tmp_path)] == [(output.run_id, RunState.COMPLETED)]


def test_folded_output_equals_the_live_one(run: Run, tmp_path: Path) -> None:
    """S-SET-39: the recorded output stands for the run."""
    team = _team(*SCRIPT)
    output = run(team)
    assert output.run_id is not None
    ids = {str(task.name): task.object_id for task in team.tasks}
    given = fold_output(read_facts(output.run_id, tmp_path), object_ids=ids)
    assert given == output
    assert [given.get_output(task) for task in team.tasks] == list(output.task_outputs)


def test_runs_have_ids_of_their_own(run: Run) -> None:
    """S-TRC-4, S-CONV-37: the trace's is the run's."""
    first, second = run(_team(*SCRIPT)), run(_team(*SCRIPT))
    assert _trace(first).ensemble_id == first.run_id
    assert _trace(first).ensemble_id != _trace(second).ensemble_id


def test_trace_tells_each_turn(run: Run) -> None:
    """S-TRC-11, S-TRC-13, S-TRC-20, S-TRC-21, S-TRC-22, S-MET-12, S-MET-14: prompts, turns, tools; a handler has none."""
    added, _, counted = _trace(run(_team(*SCRIPT))).task_traces
    assert added.prompts is not None
    assert "Add 1 and 2" in added.prompts.user_prompt
    assert "Adder" in added.prompts.system_prompt
    assert [turn.response_type for turn in added.llm_interactions] == ["tool_calls", "tool_calls", "final_answer"]
    assert [turn.iteration_index for turn in added.llm_interactions] == [0, 1, 2]
    assert [[call.result for call in turn.tool_calls] for turn in added.llm_interactions] == [["3", "3"], ["3"], []]
    assert (added.metrics.input_tokens, added.metrics.output_tokens, added.metrics.total_tokens) == (350, 70, 420)
    assert added.final_output == "three " * 400
    assert (counted.prompts, counted.llm_interactions, counted.metrics.total_tokens) == (None, (), 0)


def test_totals_are_the_sums_of_the_tasks(run: Run) -> None:
    """S-MET-24, S-MET-25, S-MET-34: tokens, calls and money."""
    rates = CostConfiguration(input_token_rate=0.01, output_token_rate=0.02)
    output = run(_team(*SCRIPT, cost_configuration=rates))
    assert (output.metrics.total_tokens, output.metrics.total_llm_call_count, output.metrics.total_tool_calls) == (
        600,
        4,
        3,
    )
    assert output.metrics.total_cost_estimate == rates.estimate(500, 100)
    assert _trace(output).total_cost_estimate == output.metrics.total_cost_estimate
    assert run(_team(*SCRIPT)).metrics.total_cost_estimate is None


def test_nothing_more_is_captured_when_the_mode_is_off(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """S-CAP-10, S-CAP-16, S-CAP-18: no messages, no parsed inputs, no line."""
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        trace = _trace(run(_team(*SCRIPT)))
    assert trace.capture_mode is CaptureMode.OFF
    turns = [turn for task in trace.task_traces for turn in task.llm_interactions]
    assert {turn.messages for turn in turns} == {()}
    assert {call.parsed_input for turn in turns for call in turn.tool_calls} == {None}
    assert "Capture mode" not in caplog.text


def test_messages_are_captured_in_standard_mode(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """S-CAP-11, S-CAP-13, S-CAP-16, S-CAP-18, S-CAP-20: taken after the call and before the turn is closed."""
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        trace = _trace(run(_team(*SCRIPT, capture_mode="standard")))
    assert trace.capture_mode is CaptureMode.STANDARD
    added, edited, _ = trace.task_traces
    roles = [[message.role for message in turn.messages] for turn in added.llm_interactions]
    assert roles[0] == ["system", "user", "assistant"]
    assert roles[1] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [message.role for message in edited.llm_interactions[0].messages] == ["system", "user", "assistant"]
    assert {call.parsed_input is None for turn in added.llm_interactions for call in turn.tool_calls} == {True}
    assert "Capture mode: standard" in caplog.text


def test_inputs_are_parsed_and_traces_exported_in_full_mode(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-CAP-14, S-CAP-15, S-CAP-2: from the environment; to `./traces/`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENSEMBLE_RAY_CAPTURE_MODE", "full")
    trace = _trace(run(_team(*SCRIPT)))
    assert trace.task_traces[0].llm_interactions[0].tool_calls[0].parsed_input == {"a": 1, "b": 2}
    written = (tmp_path / "traces" / f"{trace.ensemble_id}.json").read_text(encoding="utf-8")
    assert ExecutionTrace.model_validate_json(written) == trace


def test_explicit_off_wins_over_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CAP-3, S-CAP-17: and `verbose` has nothing to do with it."""
    monkeypatch.setenv("ENSEMBLE_RAY_CAPTURE_MODE", "full")
    assert _trace(run(_team(*SCRIPT, capture_mode="off", verbose=True))).capture_mode is CaptureMode.OFF


def test_exporter_is_called_once_after_a_successful_run(run: Run) -> None:
    """S-TRC-60, S-TRC-61, S-CAP-17: in any mode, with the trace of the output."""
    seen: list[ExecutionTrace] = []
    output = run(_team(*SCRIPT, trace_exporter=seen.append))
    assert seen == [output.trace]


def test_result_stands_when_the_exporter_raises(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """S-TRC-62: a WARN line."""

    def broken(trace: ExecutionTrace) -> None:
        raise OSError("no network")

    assert run(_team(*SCRIPT, trace_exporter=broken)).raw == "42"
    assert [record.levelname for record in caplog.records if "no network" in record.getMessage()] == ["WARNING"]


def test_failed_run_carries_its_trace_and_is_not_exported(run: Run, tmp_path: Path) -> None:
    """S-TRC-61, S-SET-26, S-ERR-36: on the error, with errors filled; the record shows the same."""
    seen: list[ExecutionTrace] = []
    with pytest.raises(TaskExecutionError) as caught:
        run(_team(_calls(ADD), _answer("three"), ConnectionError("refused"), trace_exporter=seen.append, retry=None))
    error = caught.value
    assert seen == []
    assert error.run_id is not None
    assert error.trace is not None
    assert [found.error_type for found in error.trace.errors] == ["AgentExecutionError"]
    folded = fold_trace(read_facts(error.run_id, tmp_path))
    assert folded.task_traces == error.trace.task_traces
    assert [(e.error_type, e.message, e.agent_role) for e in folded.errors] == [
        (e.error_type, e.message, e.agent_role) for e in error.trace.errors
    ]
    assert [found.state for found in list_runs(tmp_path)] == [RunState.FAILED]
    assert "AgentExecutionError" in render_tree(folded)


def test_record_shows_the_unfinished_task_when_the_facts_end_early(run: Run, tmp_path: Path) -> None:
    """S-TRC-20, S-TRC-30: the effects alone give the same turns as the runner's own trace, but for prompts and names."""
    output = run(_team(*SCRIPT, capture_mode="full", trace_exporter=lambda _: None))
    assert output.run_id is not None
    facts = [fact for fact in read_facts(output.run_id, tmp_path) if fact.kind not in {"output", "end"}]
    folded = fold_trace(facts).task_traces[0]
    live = _trace(output).task_traces[0]
    without_messages = [turn.replace(messages=()) for turn in live.llm_interactions]
    assert list(folded.llm_interactions) == without_messages
    assert (folded.task_description, folded.agent_role) == (live.task_description, live.agent_role)
    assert folded.metadata == {"state": "interrupted"}
