"""Agents of other systems in team files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import RemoteAgent
from ensemble_ray.tools import A2ATool
from tests.ensemble_ray.teamfile.conftest import Load, Refused

TEAM = """
agents:
  far:
    goal: Know
    {AGENT}
  near: {goal: Help, llm: local, tools: [{a2a: {TOOL}}]}
tasks:
  know: {description: Know, agent: far}
  help: {description: Help, agent: near}
"""
AGENT = "a2a: {url: https://h.example/far, headers: {Key: {env: FAR_KEY}}, hosts: [other.example], timeout: 5}"
TOOL = "{url: https://h.example/stock, description: Knows the stock, effect: none, timeout: 7}"


def test_remote_agents_stand_in_a_team_file(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-86: as an agent without a model, and as a tool; secrets come from the environment."""
    monkeypatch.setenv("FAR_KEY", "k")
    team = load(TEAM.replace("{AGENT}", AGENT).replace("{TOOL}", TOOL))
    far, near = (each.agent for each in team.tasks)
    assert isinstance(far, RemoteAgent)
    assert (far.role, far.url, far.headers, far.hosts) == (
        "far",
        "https://h.example/far",
        {"Key": "k"},
        ("other.example",),
    )
    assert far.timeout == 5
    assert near is not None
    (tool,) = near.tools
    assert isinstance(tool, A2ATool)
    assert (tool.name, tool.description, tool.effect) == ("ask_stock", "Knows the stock", "none")


@pytest.mark.parametrize(
    ("agent", "tool", "said"),
    [
        ("a2a: {}", TOOL, "url"),
        ("a2a: {url: far}", TOOL, "must be 'https://HOST/PATH'"),
        ("a2a: {url: 'https://h', retries: 3}", TOOL, "retries"),
        (f"{AGENT}\n    llm: local", TOOL, "cannot have both a runner and a llm"),
        (f"{AGENT}\n    runner: runners:Echo", TOOL, "already has a runner"),
        (AGENT, "{url: 'https://h', effect: twice}", "effect must be one of"),
        (AGENT, "{url: 'https://u:p@h'}", "without a name or password"),
    ],
)
def test_a_wrong_one_is_refused_with_its_place(
    *, folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, agent: str, tool: str, said: str
) -> None:
    """S-INT-86, S-INT-80: as every wrong agent or tool is."""
    monkeypatch.setenv("FAR_KEY", "k")
    (folder / "runners.py").write_text(
        "class Echo:\n    def run(self, request):\n        return ''\n", encoding="utf-8"
    )
    assert any(said in line for line in refused(TEAM.replace("{AGENT}", agent).replace("{TOOL}", tool)))
