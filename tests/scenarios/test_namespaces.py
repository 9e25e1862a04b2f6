"""Programs of two namespaces on one cluster: schedulers, processes and unrecorded runs of their own."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, RayRuntime, RunExistsError, RunOptions, Task, ValidationError
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.runtime import check_namespace
from tests.scenarios.dying import kill_actor
from tests.scenarios.teams import PATIENCE_S, Marks, until


def waiting(marks: Marks, answer: str) -> Ensemble:
    """A run that says that it began, and waits."""

    def work(_: object) -> str:
        marks.add(f"begun {answer}")
        marks.wait(f"go {answer}")
        return answer

    return Ensemble(tasks=[Task(description="wait", expected_output="a text", handler=work, effect="idempotent")])


async def states(namespace: str) -> dict[str, str]:
    """The runs of the schedulers of a namespace."""
    found: dict[str, str] = {}
    for each in spawn.existing_schedulers(namespace).values():
        found |= await each.states.remote()
    return found


@pytest.mark.parametrize("name", ["a b", "-a", "a/b", "a" * 65, "ä"])
def test_the_name_of_a_namespace_is_checked(name: str) -> None:
    """S-CLU-80: when the runtime is made."""
    with pytest.raises(ValidationError, match="A namespace has up to 64 letters"):
        RayRuntime(namespace=name)


def test_the_environment_says_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-80: where the program does not."""
    monkeypatch.setenv("ENSEMBLE_RAY_NAMESPACE", "a/b")
    with pytest.raises(ValidationError, match="got: 'a/b'"):
        RayRuntime()
    RayRuntime(namespace="")
    assert check_namespace("blue-1.x_Y") == "blue-1.x_Y"


async def test_programs_of_two_namespaces_do_not_see_each_other(ray_cluster: str, tmp_path: Path) -> None:
    """S-CLU-80, S-CLU-81: a run of the same id runs in both where nothing is recorded; a second one of a namespace is refused."""
    marks, options = Marks(tmp_path / "marks"), RunOptions(durability="off")
    own = uuid.uuid4().hex[:8]  # the schedulers that this test starts stay on the cluster
    blue, green = f"blue-{own}", f"green-{own}"
    first = waiting(marks, "blue").start(runtime=RayRuntime(namespace=blue), run_id="same", options=options)
    second = waiting(marks, "green").start(
        runtime=RayRuntime(namespace=green, shards=2), run_id="same", options=options
    )
    until(lambda: {"begun blue", "begun green"} <= set(marks.lines), "both runs")
    assert set(spawn.existing_schedulers(blue)) == {f"{blue}/scheduler"}
    assert set(spawn.existing_schedulers(green)) == {f"{green}/scheduler", f"{green}/scheduler-1"}
    assert all(spawn.namespace_of(name) == "" for name in spawn.existing_schedulers())
    assert [set(await states(blue)), set(await states(green))] == [{"same"}, {"same"}]
    assert "same" not in await states("")
    with pytest.raises(RunExistsError):
        await waiting(marks, "blue").arun(runtime=RayRuntime(namespace=blue, shards=2), run_id="same", options=options)
    marks.add("go blue")
    marks.add("go green")
    assert [(await each.aresult()).raw for each in (first, second)] == ["blue", "green"]


async def test_a_recorded_run_is_one_run_in_all_namespaces_of_a_home(ray_cluster: str, tmp_path: Path) -> None:
    """S-CLU-82: the record says that it is running; a namespace keeps processes apart, a home keeps records apart."""
    marks = Marks(tmp_path / "marks")
    first = waiting(marks, "blue").start(runtime=RayRuntime(namespace="blue"), run_id="recorded")
    until(lambda: "begun blue" in marks.lines, "the run")
    with pytest.raises(RunExistsError):
        await waiting(marks, "green").arun(runtime=RayRuntime(namespace="green"), run_id="recorded")
    marks.add("go blue")
    assert (await first.aresult()).raw == "blue"


def test_a_scheduler_that_died_goes_on_with_the_runs_of_its_namespace(ray_cluster: str, tmp_path: Path) -> None:
    """S-CLU-81, S-DUR-32: that of the other one has nothing of them."""
    marks = Marks(tmp_path / "marks")
    begun = waiting(marks, "blue").start(runtime=RayRuntime(namespace="blue"), run_id="killed")
    until(lambda: "begun blue" in marks.lines, "the run")
    kill_actor("blue/scheduler")
    marks.add("go blue")
    assert begun.result(timeout_s=PATIENCE_S).raw == "blue"
