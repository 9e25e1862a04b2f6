"""Runs on a cluster that wait for reviews, and go on there by themselves when somebody decided, whoever and wherever that is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleOutput,
    RayRuntime,
    Review,
    ReviewDecision,
    RunState,
    Task,
    TaskHandlerContext,
    aresume,
    decide,
    pending_reviews,
)
from ensemble_ray.testing import ModelServer
from tests.command_line import call_command, run_command
from tests.scenarios.dying import kill_actor
from tests.scenarios.teams import Marks, recorded_state, until

APPROVE = ReviewDecision.continue_execution()
TEAM = """
llm: {model: gpt-4o-mini, base_url: URL}
review_wait: detach
agents: {writer: {role: Writer, goal: Write}}
tasks:
  draft: {description: Write the apology, agent: writer, review: {prompt: "Is it polite?"}}
  send: {description: Send it, agent: writer, context: [draft]}
"""


@pytest.fixture(autouse=True)
def _no_held_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a process holds memories for tools, as earlier tests may, its runs need it and do not go on by themselves."""
    monkeypatch.setattr("ensemble_ray.memory.tools._held", WeakValueDictionary())


class Given:
    """The handler of a team's tasks: gives what its context gave, and notes that it was asked."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def __call__(self, context: TaskHandlerContext) -> str:
        self.marks.add(context.description)
        return " + ".join(output.raw for output in context.context_outputs) or f"text of {context.description}"


def team(marks: Marks, review: Review | None = None) -> Ensemble:
    """Two drafts with a gate behind each, and a letter that is made of both."""
    gate, given = review or Review.required(), Given(marks)
    drafts = [
        Task(name=name, description=name, expected_output="A draft", handler=given, review=gate) for name in ("a", "b")
    ]
    letter = Task(name="letter", description="letter", expected_output="It", handler=given, context=drafts)
    return Ensemble(tasks=[*drafts, letter], workflow="parallel", review_wait="detach")


def until_state(home: str, run_id: str, state: RunState) -> None:
    """Return when the record says that the run stands so."""
    until(lambda: recorded_state(home, run_id) is state, f"run {run_id} to be {state.value}")


async def test_run_goes_on_by_itself_when_it_was_decided(ray_runtime: RayRuntime, home: str, tmp_path: Path) -> None:
    """S-REV-134: after each decision; nothing is done twice, and `resume` gives the recorded output."""
    marks = Marks(tmp_path / "marks")
    ensemble = team(marks)
    output = await ensemble.arun(runtime=ray_runtime, run_id="both")
    assert output.state is RunState.WAITING
    gates = {review.task_description: review.gate_id for review in output.open_reviews}
    decide("both", gates["b"], ReviewDecision.edit("better b"), by="Ann", runtime=ray_runtime)
    until(
        lambda: [each.task_description for each in pending_reviews(runtime=ray_runtime)] == ["a"], "the first decision"
    )
    decide("both", gates["a"], ReviewDecision.edit("better a"), by="Ann", runtime=ray_runtime)
    until_state(home, "both", RunState.COMPLETED)
    assert sorted(marks.lines) == ["a", "b", "letter"]
    assert (await aresume("both", ensemble, runtime=ray_runtime)).raw == "better a + better b"


async def test_timeout_is_applied_by_itself(ray_runtime: RayRuntime, home: str, tmp_path: Path) -> None:
    """S-REV-134, S-REV-120: when its instant has passed."""
    marks = Marks(tmp_path / "marks")
    output = await team(marks, Review(timeout=0.5, on_timeout="continue")).arun(runtime=ray_runtime, run_id="late")
    assert output.state is RunState.WAITING
    until_state(home, "late", RunState.COMPLETED)
    assert sorted(marks.lines) == ["a", "b", "letter"]


async def test_run_goes_on_when_its_scheduler_died_while_it_waited(
    ray_runtime: RayRuntime, home: str, tmp_path: Path
) -> None:
    """S-REV-134, S-DUR-32: the next one finds it."""
    marks = Marks(tmp_path / "marks")
    output = await team(marks).arun(runtime=ray_runtime, run_id="left")
    kill_actor("scheduler")
    for review in output.open_reviews:
        decide("left", review.gate_id, APPROVE, runtime=ray_runtime)
    until_state(home, "left", RunState.COMPLETED)
    assert sorted(marks.lines) == ["a", "b", "letter"]


async def test_whoever_resumes_first_has_the_run(ray_runtime: RayRuntime, home: str, tmp_path: Path) -> None:
    """S-REV-134, S-DUR-15: the decisions are taken once, by the cluster or by the caller, who gets the output anyhow."""
    marks = Marks(tmp_path / "marks")
    ensemble = team(marks)
    output = await ensemble.arun(runtime=ray_runtime, run_id="race")
    for review in output.open_reviews:
        decide("race", review.gate_id, APPROVE, runtime=ray_runtime)
    resumed: EnsembleOutput = await aresume("race", ensemble, runtime=ray_runtime)
    assert (resumed.state, resumed.raw) == (RunState.COMPLETED, "text of a + text of b")
    assert sorted(marks.lines) == ["a", "b", "letter"]


def test_run_goes_on_when_its_program_has_ended(
    ray_cluster: str, model_server: Callable[..., ModelServer], tmp_path: Path, home: str
) -> None:
    """S-REV-132, S-REV-134: at another terminal, where no cluster is known; the command sees it go on."""
    server = model_server(["We are sorry.", "Sent: We are very sorry."])
    (tmp_path / "team.yaml").write_text(TEAM.replace("URL", server.base_url), encoding="utf-8")
    (tmp_path / "better.txt").write_text("We are very sorry.\n", encoding="utf-8")
    here = {**os.environ, "ENSEMBLE_RAY_HOME": home, "RAY_USAGE_STATS_ENABLED": "0"}
    joined = {**here, "RAY_ADDRESS": ray_cluster}
    ran = run_command(tmp_path, joined, "run", "team.yaml", "--runtime", "ray", "--run-id", "apology")
    listed = call_command(tmp_path, here, "reviews")
    assert "Is it polite?" in listed.stdout, ran.stderr
    gate = listed.stdout.split()[1]
    decided = run_command(tmp_path, here, "review", "apology", gate, "edit", "better.txt", "--comment", "warmer")
    assert decided.returncode == 0, decided.stderr
    assert decided.stderr == "The run continues on its cluster\n"
    until(lambda: "completed" in call_command(tmp_path, here, "runs").stdout, "the run's end")
    shown = run_command(tmp_path, joined, "resume", "apology", "--quiet")
    assert shown.stdout == "Sent: We are very sorry.\n"
