"""Options of a run on the command line: a text for all prompts, and fewer tool requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Call

TEAM = """
from ensemble_ray import Agent, Ensemble, Task
from ensemble_ray.testing import ScriptedModel

writer = Agent(role="Writer", goal="Write", llm=ScriptedModel(otherwise=lambda call: call.text))
team = Ensemble(tasks=[Task("Write one", "A text", name="one", agent=writer), Task("Write two", "A text", name="two", agent=writer)])
"""
SHOWN = "## Additional Context\nThe request for this run contains this text. Consider it in your work.\n\nFor {children}\n\n## Task"


@pytest.fixture
def echoing(folder: Path) -> str:
    """The module of a team that answers with its prompts."""
    (folder / "echoing_of_test.py").write_text(TEAM, encoding="utf-8")
    return "echoing_of_test:team"


def test_the_options_stay_with_a_run_when_it_is_forked(call: Call, echoing: str) -> None:
    """S-REQ-1, S-REQ-2."""
    options = ("--context", "For {children}", "--max-iterations", "3")
    called = call("run", echoing, *options, "--run-id", "first", "--quiet")
    assert (called.code, SHOWN in called.printed) == (0, True)
    kept = call("fork", "first", "--from", "two", "--quiet")
    assert (kept.code, SHOWN in kept.printed) == (0, True)
    other = call("fork", "first", "--from", "two", "--context", "Other", "--quiet")
    assert (other.code, "Other\n\n## Task\nWrite two" in other.printed) == (0, True)
    again = call("resume", "first", "--quiet")
    assert (again.code, SHOWN in again.printed) == (0, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--context", " "), "additional_context must not be blank"),
        (("--max-iterations", "0"), "max_iterations must be > 0"),
    ],
)
def test_options_are_refused_when_they_are_wrong(call: Call, echoing: str, options: tuple[str, str], said: str) -> None:
    """S-REQ-3, S-REQ-4: exit code 2, before any model call."""
    called = call("run", echoing, *options)
    assert (called.code, said in called.said) == (2, True)
    assert json.loads(call("runs", "--json").printed) == []
