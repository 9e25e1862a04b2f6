"""Ctrl-C while a local Ray starts: a real program, a real instance that is half-started."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.processes import own_directory, own_environment, program
from tests.scenarios.teams import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
#: With this team the start comes as far as the raylet, which is never started.
_TEAM = """
import threading
from pathlib import Path

from ray._private import services

from ensemble_ray import Ensemble, Task

def stay(*arguments, **options):
    Path("half-started").touch()
    threading.Event().wait()

services.start_raylet = stay

def handler(context):
    return "done"

team = Ensemble(tasks=[Task(description="d", expected_output="e", handler=handler)])
"""


def test_an_interrupt_while_ray_starts_ends_the_program_and_all_that_it_started() -> None:
    """S-SET-54: exit code 130 before Ray is up, no advice about a record that there is not, and no process that is left."""
    with own_directory() as directory:
        (directory / "team.py").write_text(_TEAM, encoding="utf-8")
        env = own_environment(directory, PYTHONPATH=f"{ROOT}:{directory}")
        command = [sys.executable, "-m", "ensemble_ray", "run", "team:team", "--runtime", "ray"]
        with program(command, log=directory / "log", env=env, cwd=directory, is_forked=False) as running:
            running.until((directory / "half-started").exists, "the first processes of the instance")
            assert len(running.members()) > 1
            assert "Starting a local Ray" in running.text
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(timeout=PATIENCE_S) == 130
            until(lambda: not running.members(), "the end of what it started")
            assert "done" not in running.text
            assert "started  task" not in running.text
            assert "Ending the run" in running.text
            assert "Record: none" in running.text
            assert "Resume it" not in running.text
