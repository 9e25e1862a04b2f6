"""`ensemble-ray run` and `resume` of a run that waits for reviews."""

from __future__ import annotations

import json
from pathlib import Path

from ensemble_ray.cli.view.terminal import own_command
from tests.command_line import Call

TEAM = """
review_wait: detach
tasks:
  draft: {description: Apologise, handler: "waiting_team:write", review: {prompt: "Is it polite?", timeout: 0}}
"""


def test_a_waiting_run_says_what_it_waits_for_and_how_it_goes_on(folder: Path, call: Call) -> None:
    """S-REV-122, S-REV-123: exit code 4, no answer on standard output, each gate with its command; also when it is resumed."""
    (folder / "waiting_team.py").write_text("def write(context):\n    return 'sorry'\n", encoding="utf-8")
    (folder / "team.yaml").write_text(TEAM, encoding="utf-8")
    for called in (call("run", "team.yaml", "--run-id", "r"), call("resume", "r")):
        assert (called.code, called.printed) == (4, "")
        assert "The run waits for 1 review:\n  Apologise: Is it polite?\n" in called.said
        assert f"When it is decided: {own_command()} resume r" in called.said
    (gate,) = json.loads(call("resume", "r", "--json").printed)["open_reviews"]
    assert f"{own_command()} review r {gate['gate_id']} approve | edit FILE | exit" in called.said
    assert "waiting" in call("runs").printed
    assert call("review", "r", gate["gate_id"], "approve").code == 0
    done = call("resume", "r")
    assert (done.code, done.printed) == (0, "sorry\n")


def test_a_waiting_run_is_cancelled_and_removed_like_any_other(folder: Path, call: Call) -> None:
    """S-REV-114: nobody owns it."""
    (folder / "waiting_team.py").write_text("def write(context):\n    return 'sorry'\n", encoding="utf-8")
    (folder / "team.yaml").write_text(TEAM, encoding="utf-8")
    for run_id in ("a", "b"):
        call("run", "team.yaml", "--run-id", run_id)
    assert call("cancel", "a").printed == "Run a: cancelled\n"
    assert call("delete", "b").code == 0
