"""A team file with phases, as a user of the command line meets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ensemble_ray.testing import ModelServer
from tests.command_line import call_command, environment_of
from tests.processes import own_directory

TEAM = """
llm: openai:m
phases:
  research:
    tasks:
      - {name: facts, description: "Find facts on {topic}", expected_output: Facts}
  write:
    after: [research]
    tasks:
      - {name: draft, description: Write, expected_output: Prose, context: [facts]}
    review:
      task: {name: check, description: Check, expected_output: Decision, context: [draft]}
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with the team file."""
    with own_directory() as directory:
        (directory / "team.yaml").write_text(TEAM, encoding="utf-8")
        yield directory


def test_phases_of_a_team_file_are_run_and_traced(place: Path, model_server: Callable[..., ModelServer]) -> None:
    """S-PHASE-114, S-PHASE-121, S-PHASE-64: a review sends one back; the trace shows each attempt with its review."""
    left = ["facts", "draft one", "RETRY: bolder", "draft two", "APPROVE"]
    environment = environment_of(place, model_server(lambda _: left.pop(0)))
    ended = call_command(place, environment, "run", "team.yaml", "--input", "topic=bees", "--run-id", "one")
    assert (ended.returncode, ended.stdout) == (0, "draft two\n"), ended.stderr
    trace = call_command(place, environment, "trace", "one").stdout
    assert trace.startswith("Run one: phases, completed")
    shown = [
        "phase:research#0",
        "answer: facts",
        "phase:write#0",
        "answer: RETRY: bolder",
        "phase:write#1",
        "answer: draft two",
    ]
    places = [trace.index(each) for each in shown]
    assert places == sorted(places)
    assert "[2 attempts]" in trace
