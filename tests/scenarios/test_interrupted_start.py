"""Ctrl-C while a local Ray starts: a real program, a real instance that is half-started."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from tests.processes import own_directory, own_environment, program

ROOT = Path(__file__).resolve().parents[2]
_TEAM = """
from ensemble_ray import Ensemble, Task

def handler(context):
    return "done"

team = Ensemble(tasks=[Task(description="d", expected_output="e", handler=handler)])
"""
#: Generous: other things run on the machine.
_PATIENCE_S = 60.0


def test_an_interrupt_while_ray_starts_ends_the_program_and_all_that_it_started() -> None:
    """S-SET-54: exit code 130 before Ray is up, no advice about a record that there is not, and no process that is left."""
    with own_directory() as directory:
        (directory / "team.py").write_text(_TEAM, encoding="utf-8")
        env = own_environment(directory, PYTHONPATH=f"{ROOT}:{directory}")
        command = [sys.executable, "-m", "ensemble_ray", "run", "team:team", "--runtime", "ray"]
        with program(command, log=directory / "log", env=env, cwd=directory, is_forked=False) as running:
            running.until(lambda: "Starting a local Ray" in running.text, "the notice")
            # The first process of the instance stands, and the others are still to come.
            running.until(lambda: len(running.members()) > 1, "the first process of the instance")
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(timeout=_PATIENCE_S) == 130
            deadline = time.monotonic() + _PATIENCE_S
            while running.members() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert running.members() == []
            assert "done" not in running.text
            assert "started  task" not in running.text
            assert "Ending the run" in running.text
            assert "Record: none was kept" in running.text
            assert "Resume it" not in running.text
