"""Modules that were merged into others, under their old names."""

import importlib
import pickle

import ray  # noqa: F401  modules of actors are among those that were merged

from ensemble_ray import Agent, CalculatorTool, DateTimeTool, Loop, OpenAIChatModel, RateLimit, Task, Until
from ensemble_ray.actors.driver.packing import list_payloads
from ensemble_ray.actors.link.packing import unpack
from ensemble_ray.actors.link.wire import Submission
from ensemble_ray.process.moved import _PACKAGES, NEW_NAMES
from tests.architecture.project import ROOT


def test_submission_of_before_the_modules_moved_is_read() -> None:
    """S-DUR-32: a scheduler of this version goes on with a run that an older version has submitted."""
    body = (ROOT / "tests/golden/submission-1.pickle").read_bytes()
    submission = unpack(body, Submission)
    agents = [unpack(template.body, Agent) for template in submission.templates]
    assert {agent.role for agent in agents} == {"Worker", "Asked"}
    (worker,) = (agent for agent in agents if agent.role == "Worker")
    assert isinstance(worker, Agent)
    assert [type(tool) for tool in worker.tools][:2] == [CalculatorTool, DateTimeTool]
    (asked,) = (agent for agent in agents if agent.role == "Asked")
    assert isinstance(asked.llm, OpenAIChatModel)
    tasks = [pickle.loads(task) for task in submission.tasks.values()]  # noqa: S301
    assert all(isinstance(task, Task) for task in tasks)
    assert [task.attachments for task in tasks] == [()] * len(tasks), "a field of a later version has its default"
    assert [node.key for node in submission.plan.nodes][:2] == ["draft", "check"]
    for payload in list_payloads(submission).values():
        assert pickle.loads(payload) is not None  # noqa: S301


def test_modules_are_imported_under_their_old_names() -> None:
    """A package that is gone, a module that moved with it, and a module that was merged into another of its package."""
    teamfile, loader = (importlib.import_module(f"ensemble_ray.{name}") for name in ("teamfile", "loader"))
    assert loader.load_ensemble is teamfile.load_ensemble
    targets = importlib.import_module("ensemble_ray.loader.targets")
    assert targets is importlib.import_module("ensemble_ray.teamfile.targets")
    assert importlib.import_module("ensemble_ray.definition.until").Until is Until
    assert importlib.import_module("ensemble_ray.values.rate_limit").RateLimit is RateLimit
    assert importlib.import_module("ensemble_ray.definition.loop").Loop is Loop


def test_every_old_name_is_the_new_module() -> None:
    """All of the table, those of packages that are gone or are modules now too."""
    for old, new in NEW_NAMES.items():
        found = importlib.import_module(old)
        assert found is importlib.import_module(new) or old.removeprefix("ensemble_ray.") in _PACKAGES


def test_module_that_there_never_was_is_not_found() -> None:
    """As any other."""
    assert importlib.util.find_spec("ensemble_ray.definition.nothing") is None
