"""Tasks that the process of an agent starts by itself: what users and deaths change between them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from ensemble_ray import AgentExecutionError, Ensemble, ExitReason, Runtime, TaskExecutionError, tool
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.testing.scripted import ScriptedCall
from tests.builders import agent, call, task
from tests.scenarios import dying
from tests.scenarios.dying import kill_first, marks_of, stay
from tests.scenarios.teams import PATIENCE_S, Marks, task_of, until, until_recorded

TOLD = "## Active Directives\n- Write in French\n\n## Task"


@tool(effect="idempotent")
def die(path: str) -> str:
    """Leave a mark and end this process."""
    Marks(Path(path)).add(os.getpid())
    os._exit(1)


def team(marks: Marks, tool_name: str) -> tuple[ScriptedModel, Ensemble]:
    """Five tasks of one agent, with a call of the tool in the third. Answers are prompts."""

    def answer(asked: ScriptedCall) -> object:
        if task_of(asked) == "stop" and asked.text != "stayed":
            return call(tool_name, marks_of(marks))
        return asked.text

    model = ScriptedModel(otherwise=answer)
    worker = agent(model, tools=[stay, die], isolation="process")
    tasks = [task(name, worker) for name in ("a", "b", "stop", "c", "d")]
    return model, Ensemble(tasks=tasks, workflow="sequential")


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    return Marks(tmp_path / "marks")


def test_directive_reaches_the_tasks_after_it(ray_runtime: Runtime, marks: Marks) -> None:
    """S-DUR-156, S-CTL-5: as if each task was dispatched when the one before it had ended."""
    _, ensemble = team(marks, "stay")
    run = ensemble.start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    run.inject("Write in French", ttl=3600)
    marks.add("over")
    outputs = run.result(timeout_s=PATIENCE_S).task_outputs
    assert [TOLD in each.raw for each in outputs] == [False, False, False, True, True]


def test_cancelled_run_starts_no_further_task(ray_runtime: Runtime, home: str, marks: Marks) -> None:
    """S-DUR-156, S-SET-27."""
    model, ensemble = team(marks, "stay")
    run = ensemble.start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    run.cancel()
    until_recorded(home, run.id, "CancelRequested")
    marks.add("over")
    output = run.result(timeout_s=PATIENCE_S)
    assert output.exit_reason is ExitReason.CANCELLED
    assert [each.task_description for each in output.task_outputs] == ["a", "b"]
    assert {task_of(asked) for asked in model.calls} == {"a", "b", "stop"}


def test_tasks_go_on_in_another_process_when_theirs_dies(ray_runtime: Runtime, home: str, marks: Marks) -> None:
    """S-DUR-156, S-DUR-31, S-DUR-37: no answer is requested again."""
    model, ensemble = team(marks, "stay")
    run = ensemble.start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    dying.until_recorded(home, run)
    kill_first(marks)
    until(lambda: len(marks.lines) == 2, "the other process")
    marks.add("over")
    outputs = run.result(timeout_s=PATIENCE_S).task_outputs
    assert [each.task_description for each in outputs] == ["a", "b", "stop", "c", "d"]
    assert Counter(map(task_of, model.calls)) == {"a": 1, "b": 1, "stop": 2, "c": 1, "d": 1}


def test_task_fails_at_the_third_death_of_its_process(ray_runtime: Runtime, marks: Marks) -> None:
    """S-DUR-156, S-DUR-31: deaths count for the task in which the process died."""
    _, ensemble = team(marks, "die")
    with pytest.raises(TaskExecutionError) as caught:
        ensemble.run(runtime=ray_runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert "its process died 3 times with this task" in str(cause)
    assert len(marks.lines) == 3
    assert [each.task_description for each in caught.value.completed_task_outputs] == ["a", "b"]
