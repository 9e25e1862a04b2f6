"""The event hub dies in the middle of a run: events may be lost, tasks and their results are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray import Ensemble
from tests.builders import agent, task
from tests.scenarios.dying import kill_actor
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ensemble_ray import RayRuntime
    from ensemble_ray.testing import ScriptedModel


def test_results_arrive_when_the_event_hub_dies(
    ray_runtime: RayRuntime, scripted: Callable[..., ScriptedModel], tmp_path: Path
) -> None:
    """S-PAR-34: never a hang; what is listened to matters less than what is done. The next run is heard as ever."""
    # Few tasks are sent one by one and answered by replies; many share messages, there and back.
    counts = (2, 6)
    marks = Marks(tmp_path / "marks")

    def handle(context: object) -> str:
        marks.add("at work")
        marks.wait("hub is dead")
        return f"done: {getattr(context, 'description', '')}"

    begun = [
        Ensemble(
            tasks=[task(f"part {number}", handler=handle) for number in range(count)],
            workflow="parallel",
            listeners=[Watcher()],
        ).start(runtime=ray_runtime)
        for count in counts
    ]
    until(lambda: len(marks.lines) == sum(counts), "all tasks at work")
    kill_actor("event_hub")
    marks.add("hub is dead")
    for run, count in zip(begun, counts, strict=True):
        output = run.result(PATIENCE_S)
        assert sorted(each.raw for each in output.task_outputs) == [f"done: part {number}" for number in range(count)]
    watcher = Watcher()
    again = Ensemble(tasks=[task("again", agent(scripted("fine")))], listeners=[watcher])
    assert again.start(runtime=ray_runtime).result(PATIENCE_S).raw == "fine"
    assert watcher.lines == ["start again", "complete again"]


def test_run_begins_when_the_event_hub_has_just_died(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    """S-PAR-34: the scheduler cannot reach it; never a hang."""
    marks = Marks(tmp_path / "marks")

    def handle(_: object) -> str:
        marks.add("done")
        return "done"

    team = Ensemble(tasks=[task("part", handler=handle)], listeners=[Watcher()])
    assert team.start(runtime=ray_runtime).result(PATIENCE_S).raw == "done"
    kill_actor("event_hub")
    assert team.start(runtime=ray_runtime).result(PATIENCE_S).raw == "done"
    assert marks.lines == ["done", "done"]
