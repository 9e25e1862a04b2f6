"""Deps of the runs of a team file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ensemble_ray import MapEnsemble
from ensemble_ray.process.run_context import Provided
from ensemble_ray.teamfile import load_runnable
from tests.command_line import calling
from tests.ensemble_ray.teamfile.conftest import Load, Refused

MODULE = """
class Shop:
    def __init__(self, run): self.what = run.inputs["what"]

def say(context):
    return f"{context.deps.what} for {context.user}"

def both(first, second): ...
"""
TEAM = """
deps: shop:Shop
deps_type: shop:Shop
deps_place: driver
inputs: {what: tea}
tasks:
  say: {description: "Say {what}", handler: "shop:say"}
"""


def test_a_file_names_the_function_that_opens_the_deps(
    load: Load, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-CTX-62, S-CTX-61: a run of the command has them, and its user."""
    (folder / "shop.py").write_text(MODULE, encoding="utf-8")
    team, call = load(TEAM), calling(capsys)
    assert isinstance(team.deps, Provided)
    assert (team.deps_type.__name__, team.deps_place) == ("Shop", "driver")  # type: ignore[union-attr]
    called = call("run", "team.yaml", "--runtime", "inline", "--user", "ada", "--run-id", "r")
    assert called.printed.strip() == "tea for ada", called
    assert "[user=ada]" in call("runs").printed
    assert call("runs", "--tag", "user=ada").printed.startswith("r ")
    assert call("runs", "--tag", "user=eve").printed == ""
    assert "[user=ada]" in call("trace", "r").printed
    forked = call("fork", "r", "--from", "say", "--user", "eve", "--runtime", "inline")
    assert forked.printed.strip() == "tea for eve", forked


def test_an_evaluation_has_the_deps_of_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S-CTX-62, S-CTX-61, S-REQ-1: and its user; another text is another team."""
    (folder / "shop.py").write_text(MODULE, encoding="utf-8")
    evaluation = "evaluation: {cases: cases.jsonl, scorers: [exact]}\n"
    (folder / "team.yaml").write_text(TEAM.replace("deps_place: driver\n", "") + evaluation, encoding="utf-8")
    case = {"id": "rice", "inputs": {"what": "rice"}, "expected": "rice for ada"}
    (folder / "cases.jsonl").write_text(json.dumps(case), encoding="utf-8")
    call = calling(capsys)
    command = ("eval", "team.yaml", "--id", "e", "--user", "ada", "--runtime", "inline", "--min", "exact=1")
    called = call(*command)
    assert called.code == 0, called
    assert "case=rice repeat=1 user=ada]" in call("runs", "--tag", "user=ada").printed
    assert "from the record" in call(*command, "--max-iterations", "3").said
    refused = call(*command, "--context", "Be brief")
    assert (refused.code, "began with another team" in refused.said) == (2, True), refused


def test_a_map_has_the_same_keys(folder: Path) -> None:
    """S-CTX-62."""
    (folder / "shop.py").write_text(MODULE, encoding="utf-8")
    text = 'llm: local\ndeps: "shop:Shop"\nmap_reduce: {items: [a], map: {description: "read {item}"}}\n'
    (folder / "mapped.yaml").write_text(text, encoding="utf-8")
    mapped = load_runnable("mapped.yaml")
    assert isinstance(mapped, MapEnsemble)
    assert isinstance(mapped.deps, Provided)


def test_wrong_names_are_refused_at_their_place(refused: Refused, folder: Path) -> None:
    """S-CTX-62, S-CTX-40."""
    (folder / "shop.py").write_text(MODULE, encoding="utf-8")
    lines = "\n".join(refused(TEAM.replace("deps: shop:Shop", "deps: shop:both").replace("driver", "here")))
    assert "provide(both): it must need no argument, or only the run, and needs: first, second" in lines
    assert "deps place" in lines
    (first, *_) = refused(TEAM.replace("deps_type: shop:Shop", "deps_type: shop:say"))
    assert "a class" in first
