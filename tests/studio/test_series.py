"""Runs that lie one behind the other, over real HTTP: of a team in a home, of a program at its dashboard."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ensemble_ray import Agent, Ensemble, InlineRuntime, MapReduceEnsemble, Task, TaskExecutionError, WebDashboard
from ensemble_ray.definition.fields import Origin
from ensemble_ray.teamfile import load_source
from ensemble_ray.testing import ScriptedModel

from .conftest import Serve

API = "api/studio"


def team_of(*names: str, fails: bool = False) -> Ensemble:
    """A team with a task of each name."""

    def work(_: object) -> str:
        return str(1 // (not fails))

    return Ensemble(tasks=[Task(name=name, description=name, expected_output="x", handler=work) for name in names])


def spoken_team(role: str) -> Ensemble:
    """A team of one agent, which is called as that."""
    agent = Agent(role=role, goal="Speak", llm=ScriptedModel(otherwise="ok"))
    return Ensemble(name=role, tasks=[Task(name="say", description="Say it", expected_output="x", agent=agent)])


def placed_team() -> Ensemble:
    """A team that is told by where it is."""
    return spoken_team("Speaker")


def summed(series: dict[str, object]) -> list[tuple[int, str, str, int]]:
    """Return number, id, state and count of tasks of each run of a series."""
    first, runs = series["first"], series["runs"]
    assert isinstance(first, int)
    assert isinstance(runs, list)
    return [(first + at, run["run_id"], run["status"], run["tasks"]) for at, run in enumerate(runs)]


def test_runs_of_a_team_are_numbered_from_the_first_on(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-STU-9, S-VIZ-76, S-VIZ-79: in the order in which they began, with workflow, tasks and duration; of many, those around the run."""
    monkeypatch.setattr("ensemble_ray.studio.reading._SERIES", 4)
    inline = InlineRuntime(home=tmp_path)
    for number in range(7):
        team_of("a", "b").run(runtime=inline, run_id=f"run-{number}")
    with pytest.raises(TaskExecutionError):
        team_of("a", fails=True).run(runtime=inline, run_id="bad")
    client = serve()
    latest = client.get(f"{API}/runs/bad/series").json()
    assert summed(latest) == [*((5 + at, f"run-{4 + at}", "completed", 2) for at in range(3)), (8, "bad", "failed", 1)]
    assert {run["workflow"] for run in latest["runs"]} == {"sequential"}
    assert all(run["duration_ms"] >= 0 for run in latest["runs"])
    middle = summed(client.get(f"{API}/runs/run-3/series").json())
    assert middle == [(2 + at, f"run-{1 + at}", "completed", 2) for at in range(4)]
    assert client.get(f"{API}/runs/none/series").status_code == 404


def test_runs_of_another_team_are_not_counted(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-9, S-VIZ-79: those between them have no numbers and take no places, whether a program began them or a file says the team."""
    monkeypatch.setattr("ensemble_ray.studio.reading._SERIES", 4)
    inline = InlineRuntime(home=tmp_path)
    for number in range(6):
        spoken_team("Speaker").run(runtime=inline, run_id=f"spoken-{number}")
        spoken_team("Listener").run(runtime=inline, run_id=f"heard-{number}")
        load_source(Origin(place=f"{__name__}:placed_team")).run(runtime=inline, run_id=f"placed-{number}")
    client = serve()
    for name in ("spoken", "heard", "placed"):
        assert [run[:2] for run in summed(client.get(f"{API}/runs/{name}-5/series").json())] == [
            (3 + at, f"{name}-{2 + at}") for at in range(4)
        ]
        assert [run[:2] for run in summed(client.get(f"{API}/runs/{name}-0/series").json())] == [
            (1 + at, f"{name}-{at}") for at in range(2)
        ]


def test_series_of_a_long_history_has_no_numbers(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-9: of teams that only records name, records far from the run are not read; who did not count the first gives no number."""
    monkeypatch.setattr("ensemble_ray.studio.reading._ASKED_FOR_NAMES", 4)
    inline = InlineRuntime(home=tmp_path)
    for number in range(3):
        spoken_team("Speaker").run(runtime=inline, run_id=f"spoken-{number}")
        spoken_team("Listener").run(runtime=inline, run_id=f"heard-{number}")
    client = serve()
    late = client.get(f"{API}/runs/spoken-2/series").json()
    assert (late["first"], [run["run_id"] for run in late["runs"]]) == (None, ["spoken-1", "spoken-2"])
    early = client.get(f"{API}/runs/spoken-0/series").json()
    assert (early["first"], [run["run_id"] for run in early["runs"]]) == (1, ["spoken-0"])


def test_runs_of_a_program_are_one_series_whatever_their_teams(tmp_path: Path) -> None:
    """S-VIZ-76, S-VIZ-79: a dashboard's are all that it has seen; a map-reduce has as many tasks as it made."""
    inline = InlineRuntime(home=tmp_path)
    with WebDashboard.on_port(0) as dashboard:
        first = team_of("a", "b", "c")
        first.model_copy(update={"dashboard": dashboard}).run(runtime=inline, run_id="first")
        team_of("x").run(runtime=inline, run_id="stranger")
        url = f"http://localhost:{dashboard.actual_port}/{API}"
        counted = MapReduceEnsemble(
            items=[1, 2],
            map_task=lambda item: Task(description=f"{item}", expected_output="x", handler=lambda _: "one"),
            reduce_task=lambda group: Task(
                description="sum", expected_output="x", handler=lambda _: "two", context=group
            ),
            dashboard=dashboard,
        )
        counted.run(runtime=inline, run_id="second")
        series = httpx.get(f"{url}/runs/second/series", trust_env=False).json()
    assert [run[:3] for run in summed(series)] == [(1, "first", "completed"), (2, "second", "completed")]
    assert [run["tasks"] for run in series["runs"]] == [3, 3]
