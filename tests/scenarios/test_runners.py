"""Agents with runners in runs: on both runtimes, in teams with managers, and when their processes die in mid-call."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ensemble_ray import (
    Agent,
    Ensemble,
    Loop,
    RunState,
    Runtime,
    TaskAnswer,
    TaskExecutionError,
    TaskRequest,
    TokenEvent,
    UnknownOutcomeError,
    ValidationError,
    fork,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import task
from tests.scenarios.delegating import hand, run_of
from tests.scenarios.dying import kill_first
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, until
from tests.scenarios.test_death import links


class Says:
    """A runner that tells where it works, in pieces."""

    def __init__(self, word: str) -> None:
        self.word = word

    async def run(self, request: TaskRequest) -> AsyncIterator[str | TaskAnswer]:
        yield f"{self.word} "
        yield str(os.getpid())
        yield TaskAnswer(input_tokens=2, output_tokens=3)


class Stays:
    """A runner that notes its process and its key, and stays until all is over."""

    def __init__(self, marks: Marks, effect: str) -> None:
        self.marks = marks
        self.effect = effect

    def run(self, request: TaskRequest) -> str:
        self.marks.add(os.getpid())
        self.marks.add(request.idempotency_key)
        self.marks.wait("over")
        return "survived"


def own(runner: object, role: str = "Writer", **fields: object) -> Agent:
    """An agent with that runner."""
    return Agent(role=role, goal="Work", runner=runner, **fields)  # type: ignore[arg-type]


def test_runners_do_tasks_where_their_agents_live(ray_runtime: Runtime, inline_runtime: Runtime) -> None:
    """S-INT-57, S-INT-52, S-INT-55: on Ray in processes of their own; pieces, tokens and context come all the same."""
    first = task("first", own(Says("a"), "First", isolation="process"), name="first")
    second = task("second", own(Says("b"), "Second", isolation="process"), name="second", context=[first])
    watcher = Watcher()
    team = Ensemble(tasks=[first, second], stream=True, listeners=[watcher])
    output = team.run(runtime=ray_runtime)
    homes = {each.raw.split()[1] for each in output.task_outputs}
    assert len(homes) == 2
    assert str(os.getpid()) not in homes
    assert [each.raw.split()[0] for each in output.task_outputs] == ["a", "b"]
    assert [each.token for each in watcher.of(TokenEvent)][::2] == ["a ", "b "]
    assert (output.metrics.total_tokens, output.metrics.total_llm_call_count) == (10, 2)
    inline = team.run(runtime=inline_runtime)
    assert {each.raw.split()[1] for each in inline.task_outputs} == {str(os.getpid())}


def test_runner_that_died_in_mid_call_is_not_asked_again(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-INT-54: nobody knows what it did; the error names the key under which that can be found out."""
    marks = Marks(tmp_path / "marks")
    team = Ensemble(tasks=[task("go", own(Stays(marks, "once"), isolation="process"))])
    run = team.start(runtime=ray_runtime)
    until(lambda: len(marks.lines) == 2, "the runner")
    kill_first(marks)
    with pytest.raises(TaskExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    [unknown] = [each for each in links(caught.value) if isinstance(each, UnknownOutcomeError)]
    assert "its runner was called at" in str(unknown)
    assert marks.lines[1] in str(unknown)
    assert len(marks.lines) == 2


def test_runner_whose_effect_allows_it_is_asked_again_under_its_key(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-INT-54, S-DUR-31: in another process, and the run completes."""
    marks = Marks(tmp_path / "marks")
    team = Ensemble(tasks=[task("go", own(Stays(marks, "idempotent"), isolation="process"))])
    run = team.start(runtime=ray_runtime)
    until(lambda: len(marks.lines) == 2, "the runner")
    kill_first(marks)
    until(lambda: len(marks.lines) == 4, "the other process")
    marks.add("over")
    assert run.result(timeout_s=PATIENCE_S).raw == "survived"
    (pid, key), (other_pid, same_key) = marks.lines[:2], marks.lines[2:4]
    assert pid != other_pid
    assert key == same_key


def test_runner_that_cannot_travel_is_refused_before_the_run(ray_runtime: Runtime) -> None:
    """S-INT-57, S-CONV-34: with the way to the culprit."""
    runner = Says("a")
    runner.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="Agent 'Writer' -> runner -> lock"):
        Ensemble(tasks=[task("go", own(runner))]).run(runtime=ray_runtime)


class Turns:
    """A runner that gives another answer each time, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[TaskRequest] = []

    async def run(self, request: TaskRequest) -> str:
        self.asked.append(request)
        return self.answers.pop(0)


def test_manager_hands_work_to_a_runner(inline_runtime: Runtime) -> None:
    """S-INT-53: as to any worker."""
    digger = Turns("gold")
    manager = ScriptedModel(hand("Digger", "dig here"), "all done")
    goals = [task("find gold", own(digger, "Digger"))]
    output = run_of(Ensemble(tasks=goals, workflow="hierarchical", manager_llm=manager), inline_runtime).given
    assert [(each.agent_role, each.raw) for each in output.task_outputs] == [
        ("Digger", "gold"),
        ("Manager", "all done"),
    ]
    assert digger.asked[0].description == "dig here"


def test_loop_asks_a_runner_again_with_what_it_gave(inline_runtime: Runtime) -> None:
    """S-INT-53: the earlier attempt is in its prompt."""
    writer = Turns("draft", "better")
    loop = Loop(name="refine", body=[task("write", own(writer))], max_iterations=2)
    assert Ensemble(loops=[loop]).run(runtime=inline_runtime).raw == "better"
    assert "draft" in writer.asked[1].prompt


def test_fork_takes_answers_of_runners_from_the_record(inline_runtime: Runtime) -> None:
    """S-INT-54: the second task failed; the first one's runner is not asked again."""
    first, second = Turns("one"), Turns()
    before = task("before", own(first, "First"))
    team = Ensemble(tasks=[before, task("after", own(second, "Second"), name="after", context=[before])])
    run = team.start(runtime=inline_runtime)
    with pytest.raises(TaskExecutionError):
        run.result(timeout_s=PATIENCE_S)
    assert run.state is RunState.FAILED
    second.answers.append("two")
    output = fork(run.id, "after", team, runtime=inline_runtime)
    assert (output.raw, len(first.asked), len(second.asked)) == ("two", 1, 2)
