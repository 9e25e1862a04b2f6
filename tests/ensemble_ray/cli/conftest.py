"""Calls commands in this process: what they printed, what they said, their exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ensemble_ray.cli.app import invoke


@dataclass(frozen=True)
class Called:
    """What a command did."""

    code: int
    #: on standard output
    printed: str
    #: on standard error
    said: str


Call = Callable[..., Called]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command with these arguments."""

    def call(*arguments: str) -> Called:
        capsys.readouterr()
        code = invoke(arguments)
        printed, said = capsys.readouterr()
        return Called(code, printed, said)

    return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory; what is imported from it is forgotten with the test. Runs are inline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


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
