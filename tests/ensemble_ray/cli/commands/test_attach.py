"""`ensemble-ray attach`: what a record tells of a run that another process drives."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ensemble_ray import ReviewDecision, decide, pending_reviews, resume
from ensemble_ray.cli.app import invoke
from ensemble_ray.teamfile import load_runnable
from tests.command_line import Call

TEAM = """
tasks:
  one: {description: Say a, expected_output: a, handler: "attached_team:first"}
  two: {description: Say b, expected_output: b, handler: "attached_team:second", context: [one]}
"""
MODULE = """
import threading
goes_on, is_held = threading.Event(), threading.Event()

def first(context):
    return "a"

def second(context):
    is_held.set()
    goes_on.wait(60)
    return "the end\\r\\n"
"""


@pytest.fixture
def held_team(folder: Path) -> str:
    """A team whose second task waits to be let go."""
    (folder / "attached_team.py").write_text(MODULE, encoding="utf-8")
    (folder / "team.yaml").write_text(TEAM, encoding="utf-8")
    return "team.yaml"


@pytest.mark.heavy
def test_a_run_of_this_machine_is_followed_to_its_end(held_team: str, capfd: pytest.CaptureFixture[str]) -> None:
    """S-CLU-20, S-CLU-21: what was done before is counted, what comes is shown, the output is printed."""
    import sys

    team = load_runnable(held_team)
    module = sys.modules["attached_team"]
    run = team.begin({}, runtime="inline", run_id="held")
    assert module.is_held.wait(60)
    codes: list[int] = []
    watching = threading.Thread(target=lambda: codes.append(invoke(["attach", "held"])))
    watching.start()
    said = ""
    while "held: 1 of 2 tasks" not in said:
        said += capfd.readouterr().err
        assert watching.is_alive()
    module.goes_on.set()
    watching.join(60)
    run.result()
    printed, rest = capfd.readouterr()
    assert (codes, printed) == ([0], "the end\r\n\n")
    assert "done     2/2  two" in rest
    assert "done     1/2" not in said + rest


def test_a_run_that_ended_is_printed_at_once(team: str, call: Call) -> None:
    """S-CLU-22, S-DUR-155: its output, or why it failed, with the exit code of run."""
    call("run", f"{team}:broken", "--run-id", "lost")
    called = call("attach", "lost")
    assert (called.code, called.printed) == (1, "")
    assert "Error: task 'second'" in called.said
    assert "no disk" in called.said
    done = call("run", f"{team}:team", "--input", "topic=tides", "--input", "audience=us", "--run-id", "done")
    called = call("attach", "done", "--json")
    data = json.loads(called.printed)
    assert (called.code, data["raw"]) == (0, done.printed.removesuffix("\n"))
    assert data["record"]
    assert data["record"] == json.loads(call("resume", "done", "--json").printed)["record"]
    assert call("attach", "none").code == 2


def test_a_run_that_waits_for_reviews_is_left_with_its_exit_code(folder: Path, call: Call) -> None:
    """S-CLU-24: without --wait."""
    (folder / "waiting_team.py").write_text("def write(context):\n    return 'sorry'\n", encoding="utf-8")
    (folder / "team.yaml").write_text(
        'review_wait: detach\ntasks:\n  draft: {description: A, handler: "waiting_team:write", review: {timeout: 0}}\n',
        encoding="utf-8",
    )
    assert call("run", "team.yaml", "--run-id", "r").code == 4
    called = call("attach", "r")
    assert (called.code, called.printed) == (4, "")
    assert "The run is waiting" in called.said


def test_doctor_says_which_cluster_it_lacks(folder: Path, call: Call) -> None:
    """S-CLU-6: and that a team is looked at on a cluster alone."""
    called = call("doctor", "--cluster")
    assert called.code == 2
    assert "There is no cluster to check" in called.said
    assert call("doctor", "team.yaml").code == 2
    inline = call("run", "none:team", "--check-nodes")
    assert inline.code == 2


@pytest.mark.heavy
def test_a_run_that_waits_is_watched_on_when_it_goes_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """S-CLU-24: with --wait, through the decision, to the output."""
    (folder / "waiting_team.py").write_text("def write(context):\n    return 'sorry'\n", encoding="utf-8")
    (folder / "team.yaml").write_text(
        'review_wait: detach\ntasks:\n  draft: {description: A, handler: "waiting_team:write", review: {timeout: 0}}\n',
        encoding="utf-8",
    )
    assert invoke(["run", "team.yaml", "--run-id", "r"]) == 4
    capfd.readouterr()
    codes: list[int] = []
    watching = threading.Thread(target=lambda: codes.append(invoke(["attach", "r", "--wait"])))
    watching.start()
    said = ""
    while " of 1 tasks" not in said:
        said += capfd.readouterr().err
        assert watching.is_alive(), said
    (review,) = pending_reviews()
    decide("r", review.gate_id, ReviewDecision.continue_execution())
    resume("r")
    watching.join(60)
    assert (codes, capfd.readouterr().out) == ([0], "sorry\n")
