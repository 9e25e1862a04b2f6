"""What a run's pickles name, and who has to load it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import cloudpickle
import pytest

from ensemble_ray import Agent
from ensemble_ray.actors.driver import node_check as loading
from ensemble_ray.actors.driver.node_check import check_loading, modules_in
from ensemble_ray.actors.scheduler.scheduler import load_all
from tests.actors import feeding


def shout(text: str) -> str:
    """Louder."""
    return text.upper()


def test_modules_of_users_are_found_in_a_pickle() -> None:
    """S-SET-56: by reference, in a partial, or used by a function that travels by value; Python's and ours do not count."""
    assert modules_in(cloudpickle.dumps(functools.partial(shout, "a"))) == {__name__}
    assert modules_in(cloudpickle.dumps(lambda: feeding.__doc__)) >= {"tests.actors.feeding"}
    agent = Agent(role="A", goal="B", llm="openai:gpt-4o")
    assert modules_in(cloudpickle.dumps(agent)) == set()


async def test_nothing_is_asked_when_no_module_is_needed() -> None:
    """S-SET-56: a scheduler that has no such method is not called."""
    await check_loading(object(), {"Agent 'A'": cloudpickle.dumps(Agent(role="A", goal="B", llm="openai:m"))})


def test_modules_are_vouched_for_when_workers_look_where_they_lie(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S-SET-56: the environment's path, the current directory; not what the program put on its own path."""
    monkeypatch.setattr(loading, "_STARTED_IN", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program.py")])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert loading._are_on_path([__name__, "tests", "pytest"])
    monkeypatch.setenv("PYTHONPATH", "")
    assert not loading._are_on_path([__name__])
    assert not loading._are_on_path(["tests"])


def test_what_cannot_be_loaded_is_named_with_its_reason() -> None:
    """S-SET-56: all of it, whatever is raised."""
    lost = cloudpickle.dumps(shout).replace(b"test_loading", b"lost_loading")
    failed = load_all({"good": cloudpickle.dumps(shout), "Agent 'A'": lost})
    assert failed == [("Agent 'A'", "No module named 'tests.actors.lost_loading'")]
