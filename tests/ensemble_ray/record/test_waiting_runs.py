"""What is read from the record of a run that waited for reviews: the same as from a run that had none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    InlineRuntime,
    Loop,
    Review,
    ReviewDecision,
    RunState,
    Task,
    adecide,
    aresume,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.following import EventProjection
from ensemble_ray.record.head import RunHead
from ensemble_ray.record.resume.fork import plan_unit_fork
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.studio.views.steps import StepsView


def _team(review: Review | None) -> Ensemble:
    draft = Task(name="draft", description="Draft", expected_output="x", handler=lambda _: "a page", review=review)
    loop = Loop(name="refine", body=[draft], max_iterations=2, until=lambda _: False)
    last = Task(
        name="last", description="Send", expected_output="x", handler=lambda _: "sent", context=[loop.output_of(draft)]
    )
    return Ensemble(loops=[loop], tasks=[last], review_wait="detach")


async def _facts(tmp_path: Path, review: Review | None) -> Sequence[Fact]:
    """The record of a run whose reviews are all approved."""
    runtime, team = InlineRuntime(home=tmp_path), _team(review)
    output = await team.arun(runtime=runtime, run_id="run")
    while output.state is RunState.WAITING:
        for gate in output.open_reviews:
            await adecide("run", gate.gate_id, ReviewDecision.continue_execution(), runtime=runtime)
        output = await aresume("run", team, runtime=runtime)
    return await SqliteStore(tmp_path).facts("run")


@pytest.fixture
async def waited(tmp_path: Path) -> Sequence[Fact]:
    return await _facts(tmp_path / "waited", Review.required())


@pytest.fixture
async def direct(tmp_path: Path) -> Sequence[Fact]:
    return await _facts(tmp_path / "direct", None)


def _messages(facts: Sequence[Fact]) -> list[tuple[str, object]]:
    projection = EventProjection("run")
    messages = [each for fact in facts for each in projection.apply(fact)]
    return [(each.type, each.data.get("instance")) for each in messages if not each.type.startswith("review_")]


def _steps(facts: Sequence[Fact]) -> dict[str, str]:
    view = StepsView()
    for fact in facts:
        view.apply(fact)
    return {name: state.status for name, state in view.history.executions.items()}


async def test_rounds_are_followed_when_their_tasks_waited(waited: Sequence[Fact], direct: Sequence[Fact]) -> None:
    """S-LOOP-107, S-REV-116: the same messages, the ends of iterations among them, and the same steps."""
    assert ("loop_iteration_completed", "loop:refine#1") in _messages(waited)
    assert _messages(waited) == _messages(direct)
    assert _steps(waited) == _steps(direct)


async def test_loop_is_in_the_trace_when_its_tasks_waited(waited: Sequence[Fact], direct: Sequence[Fact]) -> None:
    """S-LOOP-146, S-REV-116: with its iterations and the reason of its end."""
    (loop,) = fold_trace(waited).loop_traces
    assert (loop.iterations_run, loop.termination_reason) == (2, "max_iterations")
    assert (loop,) == fold_trace(direct).loop_traces


async def test_fork_uses_iterations_whose_tasks_waited(waited: Sequence[Fact], direct: Sequence[Fact]) -> None:
    """S-DUR-131, S-REV-116: a fork from the task behind a loop uses both iterations."""
    plan = recorded_plan(RunHead(waited).header.plan or {})
    reused = [plan_unit_fork(plan, plan, facts, run_id="run", name="last").reused for facts in (waited, direct)]
    assert reused == [("loop:refine#0", "loop:refine#1")] * 2
