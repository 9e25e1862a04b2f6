"""Runs over several schedulers of one cluster: each is with the one that its id says, and found again whatever the next program wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleError,
    RayRuntime,
    RunExistsError,
    RunOptions,
    RunState,
    Task,
    ValidationError,
    resume,
)
from ensemble_ray.actors import spawn
from ensemble_ray.plan.placement import shard_of
from ensemble_ray.recovery import resuming
from tests.scenarios.dying import kill_actor
from tests.scenarios.teams import PATIENCE_S, Marks, until

#: Ids that lead two schedulers to the second one.
SECOND = [run_id for number in range(20) if shard_of(run_id := f"sharded-{number}", 2) == 1]


@pytest.fixture
def two(ray_cluster: str) -> RayRuntime:
    """A runtime whose runs are spread over two schedulers."""
    return RayRuntime(shards=2)


def waiting(marks: Marks) -> Ensemble:
    """A run that says that it began, and waits."""

    def work(_: object) -> str:
        marks.add("begun")
        marks.wait("go")
        return "done"

    return Ensemble(tasks=[Task(description="wait", expected_output="a text", handler=work, effect="idempotent")])


async def states(name: str) -> dict[str, str]:
    """The runs of a scheduler."""
    found: dict[str, str] = await spawn.existing(name).states.remote()
    return found


@pytest.mark.parametrize("shards", [0, -1, True, "2"])
def test_number_of_schedulers_is_checked(shards: Any) -> None:
    """S-CLU-60: when the runtime is made."""
    with pytest.raises(ValidationError, match=f"RayRuntime shards must be > 0, got: {shards}"):
        RayRuntime(shards=shards)


@pytest.mark.parametrize("durability", ["off", "effects"])
async def test_run_is_with_its_scheduler_and_refused_to_another_program(
    two: RayRuntime, tmp_path: Path, durability: str
) -> None:
    """S-CLU-60 to S-CLU-62: by its id; one with another number of schedulers hears of it, recorded or not."""
    marks, run_id = Marks(tmp_path / "marks"), f"{SECOND[0]}"
    options = RunOptions(durability=durability)
    begun = waiting(marks).start(runtime=two, run_id=run_id, options=options)
    until(lambda: "begun" in marks.lines, "the run")
    assert run_id in await states("scheduler-1")
    assert run_id not in await states("scheduler")
    with pytest.raises(RunExistsError):
        await waiting(marks).arun(runtime=RayRuntime(), run_id=run_id, options=options)
    with pytest.raises(RunExistsError):
        await waiting(marks).arun(runtime=RayRuntime(shards=3), run_id=run_id, options=options)
    marks.add("go")
    assert (await begun.aresult()).raw == "done"


def test_run_goes_on_when_its_scheduler_died_and_others_have_nothing_of_it(two: RayRuntime, tmp_path: Path) -> None:
    """S-CLU-63, S-DUR-32: each scheduler finds its own runs, and no other's."""
    marks, run_id = Marks(tmp_path / "marks"), SECOND[1]
    begun = waiting(marks).start(runtime=two, run_id=run_id)
    until(lambda: "begun" in marks.lines, "the run")
    kill_actor("scheduler")
    kill_actor("scheduler-1")
    marks.add("go")
    assert begun.result(timeout_s=PATIENCE_S).raw == "done"


def test_run_is_cancelled_and_resumed_by_programs_with_other_numbers_of_schedulers(
    two: RayRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-CLU-62, S-DUR-34: the record says whose it is, and who goes on with it; a cluster that is there is not waited for."""
    monkeypatch.setattr(resuming, "_ENDING_S", 10_000.0)
    marks, run_id = Marks(tmp_path / "marks"), SECOND[2]
    begun = waiting(marks).start(runtime=two, run_id=run_id)
    until(lambda: "begun" in marks.lines, "the run")
    with pytest.raises(EnsembleError, match="running"):
        resume(run_id, waiting(marks), runtime=RayRuntime())
    begun.cancel()
    assert begun.result(timeout_s=PATIENCE_S).state is RunState.CANCELLED
    marks.add("go")
    assert resume(run_id, waiting(marks), runtime=RayRuntime()).raw == "done"
