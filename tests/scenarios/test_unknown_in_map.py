"""A map-reduce whose process dies in a call that must not be made twice: what its trace shows before and after a resume."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray import ToolCall
from ensemble_ray.testing import ModelServer, ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.command_line import call_command, environment_of, run_command
from tests.processes import own_directory

TEAM = """
import os, signal
from pathlib import Path
from ensemble_ray import Agent, MapReduceEnsemble, Task, tool

@tool(effect="once")
def pay(item: str) -> str:
    \"\"\"Pay it.\"\"\"
    died = Path("died")
    if item == "1" and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid"

worker = Agent(role="Worker", goal="work", tools=[pay], llm="openai:m")
team = MapReduceEnsemble(
    items=["0", "1", "2"],
    map_agent=lambda _: worker,
    map_task=lambda item, _: Task.of("Pay " + item),
    reduce_agent=lambda: Agent(role="Editor", goal="join", llm="openai:m"),
    reduce_task=lambda chunk, _: Task(description="Join", expected_output="a text", context=chunk),
    max_parallel_tasks=1,
    **OPTIONS,
)
"""
ADAPTIVE = "dict(target_token_budget=1000)"
PIPELINED = 'dict(chunk_size=3, mode="pipelined")'


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for one test."""
    with own_directory() as directory:
        yield directory


def _script(request: ServedRequest) -> Answer:
    """A map pays its item once; then, and in a reduce, it answers."""
    if not request.tools or any(message.get("role") == "tool" for message in request.messages):
        return "done"
    item = request.text.partition("Pay ")[2][:1]
    return ToolCall("call-0", "pay", json.dumps({"item": item}))


@pytest.mark.parametrize("options", [ADAPTIVE, PIPELINED])
def test_an_unknown_outcome_shows_in_the_trace_of_a_map_reduce(place: Path, options: str) -> None:
    """S-DUR-26: while the run is interrupted, and for good after it went on; in the level, by its task, and as data."""
    (place / "paying.py").write_text(TEAM.replace("**OPTIONS", f"**{options}"), encoding="utf-8")
    with ModelServer(_script) as server:
        environment = environment_of(place, server)
        killed = run_command(place, environment, "run", "paying:team", "--run-id", "one")
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        interrupted = call_command(place, environment, "trace", "one")
        resumed = run_command(place, environment, "resume", "one", "--quiet")
        assert resumed.returncode == 0, resumed.stderr
        completed = call_command(place, environment, "trace", "one")
        data = json.loads(call_command(place, environment, "trace", "one", "--json").stdout)
    call = 'map-1: pay({"item": "1"}) -> '
    assert f"{call}No result was recorded: the run ended during this call  [unknown]" in interrupted.stdout
    assert f"{call}Outcome unknown: this call of 'pay' was begun" in completed.stdout
    for shown in (interrupted, completed):
        (level,) = [line for line in shown.stdout.splitlines() if "level 0: map" in line]
        assert "[1 unknown outcome]" in level
        assert shown.stdout.count("[unknown]") == 1
    assert [level["unknown_outcomes"] for level in data["levels"]] == [1, 0]
    assert data["unknown_outcomes"] == 1
    (told,) = data["first_unknown_outcomes"].values()
    assert told.startswith('pay({"item": "1"}) -> Outcome unknown')
