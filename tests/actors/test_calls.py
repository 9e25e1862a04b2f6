"""Calls between actors: handles have no types, so that a method that nobody has would be found at run time only."""

from __future__ import annotations

import ast
from pathlib import Path

import actors
from ensemble_ray.actors.link.events import EventHub
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.actors.shared.journal import JournalActor, RateLimiter
from ensemble_ray.actors.worker.agent import ManagerActor
from ensemble_ray.actors.worker.callable_host import CallableHost

CLASSES = (SchedulerActor, EventHub, JournalActor, RateLimiter, CallableHost, ManagerActor)


def called() -> set[str]:
    """Names of methods that are called as `handle.name.remote`."""
    found: set[str] = set()
    for path in Path(actors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "remote" and isinstance(node.value, ast.Attribute):
                found.add(node.value.attr)
    return found


def test_every_method_that_is_called_on_a_handle_is_one_of_an_actor() -> None:
    """S-PAR-34: in each of the packages' files."""
    names = called() - {"_remote"}  # a remote function is no method
    assert {"submit", "publish", "perform", "notify", "hold"} <= names
    assert {name for name in names if not any(hasattr(cls, name) for cls in CLASSES)} == set()
