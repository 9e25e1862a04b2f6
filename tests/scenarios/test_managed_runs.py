"""Runs that other processes manage: cancelled from elsewhere, killed and resumed, with the real command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import COMMAND, PATIENCE_S, Call, calling, environment_of, run_command
from tests.processes import own_directory, own_environment
from tests.template import ForkedProgram

TEAM = """
import asyncio
from pathlib import Path
from ensemble_ray import Ensemble, Task

def quick(context):
    with Path("done.txt").open("a") as file:
        file.write("quick ")
    return "quick"

async def slow(context):
    if not Path("hurry").exists():
        print("slow has begun", flush=True)
        await asyncio.sleep(3600)
    return "slow"

first = Task(name="first", description="Quick", expected_output="x", handler=quick)
second = Task(name="second", description="Slow", expected_output="x", handler=slow, effect="none")
team = Ensemble(tasks=[first, second])
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for one test: records and the team."""
    with own_directory() as directory:
        monkeypatch.setenv("ENSEMBLE_RAY_HOME", own_environment(directory)["ENSEMBLE_RAY_HOME"])
        (directory / "my_team.py").write_text(TEAM, encoding="utf-8")
        yield directory


def _call(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(place, environment_of(place), *arguments)


@pytest.fixture
def running(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in another process, in the middle of its second task."""
    with ForkedProgram[str](
        (*COMMAND, "run", "my_team:team", "--run-id", "far"),
        cwd=place, env=environment_of(place), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "slow has begun\n"
        yield process
        process.kill()


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command in this process, which is not the run's."""
    return calling(capsys)


def _state(here: Call) -> tuple[str, int]:
    (found,) = json.loads(here("runs", "--json")[1])
    return found["state"], found["tasks_done"]


def test_run_ends_when_another_process_cancels_it(place: Path, running: subprocess.Popen[str], here: Call) -> None:
    """S-DUR-52, S-DUR-53, S-DUR-15: within seconds; nobody else may run or remove it while it runs."""
    assert _state(here) == ("running", 1)
    assert here("delete", "far")[0] == 2
    taken = _call(place, "resume", "far")
    assert taken.returncode == 2
    assert f"{running.pid}" in taken.stderr
    cancelled = _call(place, "cancel", "far")
    assert (cancelled.returncode, cancelled.stdout) == (0, "Run far: cancelled\n")
    assert running.wait(PATIENCE_S) == 130
    assert _state(here) == ("cancelled", 1)


def test_run_goes_on_when_its_process_was_killed(place: Path, running: subprocess.Popen[str], here: Call) -> None:
    """S-DUR-34, S-DUR-50, S-DUR-51: it is interrupted then; what was done is not done again."""
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(PATIENCE_S)
    assert _state(here) == ("interrupted", 1)
    (place / "hurry").touch()
    resumed = _call(place, "resume", "latest")
    assert (resumed.returncode, resumed.stdout) == (0, "slow\n")
    assert (place / "done.txt").read_text(encoding="utf-8") == "quick "
    assert _state(here) == ("completed", 2)
    assert here("delete", "far")[:2] == (0, "Removed far\n")
