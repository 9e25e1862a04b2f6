"""Sequential runs: order, context, wrapping of failures, the first and last events, the lines in the log."""

from __future__ import annotations

import asyncio
import logging
import uuid
from datetime import timedelta

import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    EnsembleError,
    ExitReason,
    PromptTemplateError,
    RunOptions,
    Runtime,
    Task,
    TaskExecutionError,
    ValidationError,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, task
from tests.scenarios.teams import Watcher, prompt_of, task_of


def test_tasks_run_one_at_a_time_in_list_order(inline_runtime: Runtime) -> None:
    """S-ENG-10, S-DOM-51, S-EVT-19."""
    under_way: list[str] = []
    seen: list[tuple[str, int]] = []

    async def reply(asked: ScriptedCall) -> str:
        under_way.append(task_of(asked))
        await asyncio.sleep(0)
        seen.append((task_of(asked), len(under_way)))
        under_way.remove(task_of(asked))
        return f"did {task_of(asked)}"

    model, watcher = ScriptedModel(otherwise=reply), Watcher()
    tasks = [task(f"step {n}", agent(model, f"Worker {n}")) for n in range(3)]
    output = Ensemble(tasks=tasks, listeners=[watcher]).run(runtime=inline_runtime)
    assert seen == [(f"step {n}", 1) for n in range(3)]
    assert [each.raw for each in output.task_outputs] == [f"did step {n}" for n in range(3)]
    assert watcher.lines == [line for n in range(3) for line in (f"start step {n}", f"complete step {n}")]


def test_output_describes_the_run_when_it_completed(runtime: Runtime) -> None:
    """S-DOM-50, S-DOM-51, S-DOM-52, S-DOM-53, S-DOM-67."""
    writer = agent(ScriptedModel("draft", "final"))
    output = Ensemble(tasks=[task("draft it", writer), task("finish it", writer)]).run(runtime=runtime)
    assert output.raw == "final"
    assert (output.exit_reason, output.is_complete) == (ExitReason.COMPLETED, True)
    assert output.completed_tasks == output.task_outputs
    assert isinstance(output.task_outputs, tuple)
    assert output.last_completed_output == output.task_outputs[1]
    assert output.total_tool_calls == 0
    assert output.total_duration >= sum((each.duration for each in output.task_outputs), timedelta())


def test_outputs_are_found_by_task_identity_when_tasks_look_alike(runtime: Runtime) -> None:
    """S-DOM-54, S-DOM-41, S-DOM-38, S-CONV-30: equal-looking templates are resolved copies, found by their originals."""
    writer = agent(ScriptedModel("first", "second"))
    one, two, stranger = (task("write of {topic}", writer) for _ in range(3))
    output = Ensemble(tasks=[one, two]).run({"topic": "bees"}, runtime=runtime)
    found = [output.get_output(each) for each in (one, two)]
    assert [each.raw for each in found if each is not None] == ["first", "second"]
    assert found[0] is not None
    assert found[0].task_description == "write of bees"
    assert one.description == "write of {topic}"
    assert output.get_output(stranger) is None
    assert output.get_output(None) is None


def test_only_declared_context_is_passed_on(inline_runtime: Runtime) -> None:
    """S-ENG-12, S-ENG-11: in the order of the task's context list."""
    model = ScriptedModel("alpha text", "beta text", "gamma text", "end")
    writer = agent(model)
    alpha, beta, gamma = (task(name, writer) for name in ("alpha", "beta", "gamma"))
    last = task("last", writer, context=[gamma, alpha])
    Ensemble(tasks=[alpha, beta, gamma, last]).run(runtime=inline_runtime)
    assert all("Context" not in prompt_of(asked) for asked in model.calls[:3])
    prompt = prompt_of(model.calls[3])
    assert "beta text" not in prompt
    assert 0 < prompt.index("gamma text") < prompt.index("alpha text")


def test_failure_stops_the_run_and_carries_what_was_done(runtime: Runtime) -> None:
    """S-ENG-13, S-ENG-14, S-ENG-50, S-ERR-12, S-ERR-15, S-ERR-36, S-EVT-13, S-ENG-4."""
    model, watcher = ScriptedModel("good", ValueError("no quota")), Watcher()
    writer = agent(model)
    tasks = [task("first", writer), task("second", writer), task("third", writer)]
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=tasks, listeners=[watcher]).run(runtime=runtime)
    error = caught.value
    assert str(error) == "Task 'second' failed: Agent 'Writer': no quota (ValueError)"
    assert (error.task_description, error.agent_role) == ("second", "Writer")
    assert [each.raw for each in error.completed_task_outputs] == ["good"]
    cause = error.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert str(cause) == "Agent 'Writer': no quota (ValueError)"
    assert (cause.agent_role, cause.task_description) == ("Writer", "second")
    assert (type(cause.__cause__), str(cause.__cause__)) == (ValueError, "no quota")
    assert len(model.calls) == 2
    assert watcher.lines == ["start first", "complete first", "start second", "failed second"]
    failed = watcher.heard[-1][1]
    assert (type(failed.cause), str(failed.cause)) == (AgentExecutionError, str(cause))  # type: ignore[attr-defined]
    assert "on_ensemble_completed" not in watcher.methods


def test_error_carries_trace_and_run_id_when_a_run_fails(runtime: Runtime) -> None:
    """S-SET-26, S-TRC-61: the trace up to the failure, with its errors."""
    writer = agent(ScriptedModel("good", ValueError("no quota")))
    with pytest.raises(EnsembleError) as caught:
        Ensemble(tasks=[task("first", writer), task("second", writer)]).run(runtime=runtime, run_id="failing")
    error = caught.value
    assert error.run_id == "failing"
    assert error.trace is not None
    assert error.trace.ensemble_id == "failing"
    assert [each.task_description for each in error.trace.task_traces] == ["first", "second"]
    (told,) = error.trace.errors
    assert (told.agent_role, told.task_description, told.error_type) == ("Writer", "second", "AgentExecutionError")
    assert told.message == "Agent 'Writer': no quota (ValueError)"
    assert "no quota" in told.stack_trace


def test_ensemble_events_frame_the_run(inline_runtime: Runtime) -> None:
    """S-ENG-2, S-ENG-4, S-EVT-30, S-EVT-31, S-TRC-4: a fresh UUID for each run."""
    writer = agent(ScriptedModel(otherwise="x"))
    ids: list[str] = []
    for _ in range(2):
        watcher = Watcher()
        output = Ensemble(tasks=[task("one", writer)], listeners=[watcher]).run(runtime=inline_runtime)
        assert watcher.methods[0] == "on_ensemble_started"
        assert watcher.methods[-1] == "on_ensemble_completed"
        started, completed = watcher.heard[0][1], watcher.heard[-1][1]
        assert started == (output.run_id, "sequential", 1)
        assert completed == (output.run_id, output.total_duration, ExitReason.COMPLETED)
        assert output.trace is not None
        assert output.trace.ensemble_id == output.run_id
        ids.append(str(output.run_id))
    assert ids[0] != ids[1]
    assert all(str(uuid.UUID(each)) == each for each in ids)


def test_nothing_happens_when_validation_fails(inline_runtime: Runtime) -> None:
    """S-ENG-1, S-ENG-4, S-DOM-60, S-TPL-10, S-ERR-10: before the first event, template or model call."""
    model, watcher = ScriptedModel(), Watcher()
    late = task("late", agent(model))
    early = task("{nobody} gave this", agent(model), context=[late])
    with pytest.raises(ValidationError) as caught:
        Ensemble(tasks=[early, late], listeners=[watcher]).run(runtime=inline_runtime)
    assert str(caught.value) == (
        "Task '{nobody} gave this' references context task 'late' which appears later in the task list"
    )
    assert (watcher.heard, model.calls) == ([], ())


def test_nothing_happens_when_inputs_are_missing(inline_runtime: Runtime) -> None:
    """S-TPL-10, S-TPL-12, S-ERR-11, S-DOM-66: the first failing template in task order."""
    model, watcher = ScriptedModel(), Watcher()
    writer = agent(model)
    tasks = [task("of {known}", writer, expected_output="{b} and {a}"), task("{c}", writer)]
    with pytest.raises(PromptTemplateError) as caught:
        Ensemble(tasks=tasks, inputs={"known": "x"}, listeners=[watcher]).run(runtime=inline_runtime)
    assert caught.value.missing_variables == ("b", "a")
    assert caught.value.template == "{b} and {a}"
    assert (watcher.heard, model.calls) == ([], ())


def test_descriptions_and_expected_outputs_are_resolved_but_agents_are_not(inline_runtime: Runtime) -> None:
    """S-TPL-9, S-DOM-66, S-DOM-70, S-DOM-38: inputs of the run win; they become text."""
    model = ScriptedModel("done")
    writer = agent(model, goal="write {form}")
    ensemble = Ensemble(
        tasks=[task("{n} lines of {topic}", writer, expected_output="{form}")],
        inputs={"topic": "bees", "form": "verse"},
    )
    output = ensemble.run({"topic": "ants", "n": 3}, runtime=inline_runtime)
    system, user = (message.content or "" for message in model.calls[0].messages)
    assert "## Task\n3 lines of ants" in user
    assert "## Expected Output\nverse" in user
    assert "write {form}" in system
    assert output.trace is not None
    assert dict(output.trace.inputs) == {"topic": "ants", "form": "verse", "n": "3"}


def test_context_is_found_when_the_context_task_was_a_template(inline_runtime: Runtime) -> None:
    """S-TPL-11."""
    model = ScriptedModel("facts on bees", "text")
    writer = agent(model)
    facts = task("find facts on {topic}", writer)
    Ensemble(tasks=[facts, task("write", writer, context=[facts])]).run({"topic": "bees"}, runtime=inline_runtime)
    assert "### Writer: find facts on bees\nfacts on bees" in prompt_of(model.calls[1])


def test_options_hold_for_one_run_only(inline_runtime: Runtime) -> None:
    """S-DOM-68: None keeps the ensemble's value."""
    from ensemble_ray import tool
    from tests.builders import call

    @tool
    def long_text() -> str:
        """Give a long text."""
        return "0123456789"

    def sent(options: RunOptions | None) -> str | None:
        model = ScriptedModel(call("long_text"), "done")
        worker = agent(model, tools=[long_text])
        ensemble = Ensemble(tasks=[task("go", worker)], max_tool_output_length=4)
        ensemble.run(runtime=inline_runtime, options=options)
        return model.calls[1].messages[-1].content

    assert sent(None) == "0123... [truncated, full length: 10 chars]"
    assert sent(RunOptions(max_tool_output_length=2)) == "01... [truncated, full length: 10 chars]"
    assert sent(RunOptions(tool_log_truncate_length=1)) == "0123... [truncated, full length: 10 chars]"
    assert sent(RunOptions(max_tool_output_length=-1)) == "0123456789"


def test_run_is_told_in_the_log(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-ENG-3: INFO at start and end, DEBUG inputs."""
    with caplog.at_level(logging.DEBUG, logger="ensemble_ray"):
        writer = agent(ScriptedModel("text"))
        Ensemble(tasks=[task("write of {x}", writer)]).run({"x": "bees"}, runtime=inline_runtime)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", "Run started: workflow sequential, 1 tasks, 1 agents") in lines
    assert ("DEBUG", "Inputs: {'x': 'bees'}") in lines
    assert any(
        level == "INFO" and text.startswith("Run completed in ") and text.endswith("1 tasks, 0 tool calls")
        for level, text in lines
    )


def test_failures_are_told_in_the_log_and_raised_unchanged(
    inline_runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    """S-ENG-3, S-ERR-46: the error tells why, so that the log names its class at INFO, and nothing above that."""
    caplog.set_level(logging.INFO, logger="ensemble_ray")
    with pytest.raises(ValidationError):
        Ensemble(tasks=[]).run(runtime=inline_runtime)
    with pytest.raises(TaskExecutionError):
        Ensemble(tasks=[task("write", agent(ScriptedModel(ValueError("no"))))]).run(runtime=inline_runtime)
    told = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.getMessage().startswith(("Run refused", "Run failed"))
    ]
    assert told == [
        ("INFO", "Run refused (ValidationError)"),
        ("INFO", "Run failed (TaskExecutionError)"),
    ]
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


def test_tasks_are_told_in_the_log(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-ENG-16: 1-based numbers, texts cut; the preview of the output is DEBUG unless verbose."""
    description = "d" * 90
    first = agent(ScriptedModel("r" * 250, ValueError("no")))
    with caplog.at_level(logging.DEBUG, logger="ensemble_ray"), pytest.raises(TaskExecutionError):
        Ensemble(tasks=[task(description, first), task("second", first)]).run(runtime=inline_runtime)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert ("INFO", f"Task 1/2 starting: {'d' * 80}... [Writer]") in lines
    assert ("DEBUG", "Task 1/2 has 0 context outputs") in lines
    assert any(
        level == "INFO" and text.startswith("Task 1/2 completed in ") and text.endswith("0 tool calls")
        for level, text in lines
    )
    assert ("DEBUG", f"Output: {'r' * 200}...") in lines
    assert ("INFO", "Task 2/2 failed: Agent 'Writer': no (ValueError)") in lines


@pytest.mark.parametrize("verbose_part", ["ensemble", "agent", "nobody"])
def test_prompts_and_answers_are_shown_at_info_when_verbose(
    inline_runtime: Runtime, caplog: pytest.LogCaptureFixture, verbose_part: str
) -> None:
    """S-ENG-30, S-ENG-16: verbosity is the ensemble's or the agent's; otherwise DEBUG with lengths, and TRACE."""
    writer = agent(ScriptedModel("the answer"), verbose=verbose_part == "agent")
    with caplog.at_level(5, logger="ensemble_ray"):
        Ensemble(tasks=[task("write", writer)], verbose=verbose_part == "ensemble").run(runtime=inline_runtime)
    by_text = {record.getMessage(): record.levelno for record in caplog.records}
    system = next(text for text in by_text if text.startswith("System prompt") and "You are Writer." in text)
    user = next(text for text in by_text if text.startswith("User prompt") and "## Task" in text)
    if verbose_part == "nobody":
        assert (by_text[system], by_text[user]) == (logging.DEBUG, logging.DEBUG)
        body = user.partition("\n")[2]
        assert f"({len(body)} characters)" in user
        assert by_text["Response:\nthe answer"] == 5
    else:
        assert (by_text[system], by_text[user]) == (logging.INFO, logging.INFO)
        assert by_text["Response:\nthe answer"] == logging.INFO
    if verbose_part == "ensemble":
        assert by_text["Output: the answer"] == logging.INFO


def test_library_loggers_have_no_handlers(inline_runtime: Runtime) -> None:
    """S-ENG-22: a logger per module below `ensemble_ray`, none with a handler of ours."""
    Ensemble(tasks=[task("write", agent(ScriptedModel("x")))]).run(runtime=inline_runtime)
    ours = [
        name for name in list(logging.Logger.manager.loggerDict) if name.split(".")[0] in {"ensemble_ray", "actors"}
    ]
    assert len(ours) > 10
    assert not [name for name in ours if logging.getLogger(name).handlers]


def test_same_ensemble_gives_independent_results_when_run_twice(runtime: Runtime) -> None:
    """S-DOM-67, S-DOM-12, S-CONV-37."""
    model = ScriptedModel(otherwise=lambda asked: f"{task_of(asked)} {asked.number}")
    writer = agent(model)
    ensemble = Ensemble(tasks=[task("of {x}", writer)])
    one, two = ensemble.run({"x": "bees"}, runtime=runtime), ensemble.run({"x": "ants"}, runtime=runtime)
    assert (one.raw, two.raw) == ("of bees 0", "of ants 1")
    assert one.run_id != two.run_id
    assert [len(asked.messages) for asked in model.calls] == [2, 2]


async def test_run_works_inside_a_running_loop(runtime: Runtime) -> None:
    """S-CONV-15: both forms have the same contract."""
    ensemble = Ensemble(tasks=[task("write", agent(ScriptedModel(otherwise="text")))])
    assert ensemble.run(runtime=runtime).raw == "text"
    assert (await ensemble.arun(runtime=runtime)).raw == "text"
    with pytest.raises(ValidationError):
        await Ensemble(tasks=[]).arun(runtime=runtime)


def test_short_form_runs(inline_runtime: Runtime) -> None:
    """S-DET-30, S-DET-33: `run(model, *tasks)` with inputs and a runtime; the workflow is inferred."""
    from ensemble_ray import run

    first = Task.of("Research {topic}")
    output = run(
        ScriptedModel("facts", "text"),
        first,
        Task.of("Write").replace(context=[first]),
        inputs={"topic": "bees"},
        runtime=inline_runtime,
    )
    assert output.raw == "text"
    assert [each.agent_role for each in output.task_outputs] == ["Researcher", "Writer"]
    assert output.trace is not None
    assert output.trace.workflow == "parallel"
