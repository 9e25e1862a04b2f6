"""Calls commands in this process: what they printed, what they said, their exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Call, calling, work_in


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command with these arguments."""
    return calling(capsys)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory; what is imported from it is forgotten with the test. Runs are inline."""
    yield from work_in(tmp_path, monkeypatch)


TEAM = '''
from ensemble_ray import Agent, Ensemble, Task, ToolCall, tool
from ensemble_ray.testing import ScriptedModel

@tool
def shout(text: str) -> str:
    """Shout it."""
    return text.upper()

facts = Task(name="facts", description="Find facts about {topic}", expected_output="A list", llm=ScriptedModel("ebb and flow"))
writer = Agent(role="Writer", goal="Write plainly", tools=[shout], llm=ScriptedModel(ToolCall("1", "shout", '{"text": "a"}'), "An article"))
article = Task(name="article", description="Write for {audience}", expected_output="Prose", agent=writer, context=[facts])
team = Ensemble(tasks=[facts, article], workflow="parallel")

def failing(context):
    raise OSError("no disk")

broken = Ensemble(tasks=[
    Task(name="first", description="Say a", expected_output="a", handler=lambda context: "a"),
    Task(name="second", description="Save it", expected_output="b", handler=failing),
])
'''


@pytest.fixture
def team(folder: Path) -> str:
    """A module with teams; gives its name."""
    (folder / "team_of_test.py").write_text(TEAM, encoding="utf-8")
    return "team_of_test"
