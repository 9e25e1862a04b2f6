"""MCP servers in team files."""

from __future__ import annotations

import pytest

from ensemble_ray import MCP
from tests.ensemble_ray.teamfile.conftest import Load, Refused

TEAM = """
llm: local
agents:
  clerk:
    role: Clerk
    goal: Help
    tools:
      - mcp: {MCP}
tasks:
  help: {description: Help, agent: clerk}
"""


def test_a_server_is_a_tool_of_a_team_file(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-1, S-INT-4, S-INT-15, S-INT-90: secrets come from the environment."""
    monkeypatch.setenv("SHOP_KEY", "k")
    keys = (
        "{server: 'stdio:shop --x', env: {KEY: {env: SHOP_KEY}}, effect: {buy: idempotent}, tools: [buy], timeout: 5, "
        "sampling: true, max_samples: 3}"
    )
    team = load(TEAM.replace("{MCP}", keys))
    assert team.tasks[0].agent is not None
    (server,) = team.tasks[0].agent.tools
    assert isinstance(server, MCP)
    assert repr(server) == "MCP('stdio:shop')"
    assert server._address.env == (("KEY", "k"),)
    assert server._address.max_samples == 3
    assert server._effect == {"buy": "idempotent"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("{}", "server"),
        ("{server: shop}", "must be 'stdio:COMMAND ARGUMENTS' or 'https://HOST/PATH'"),
        ("{server: 'https://h/m', effect: twice}", "effect must be one of [none, idempotent, once]"),
    ],
)
def test_a_wrong_server_is_refused_with_its_place(refused: Refused, keys: str, said: str) -> None:
    """S-INT-1: as every wrong tool is."""
    assert any(said in line for line in refused(TEAM.replace("{MCP}", keys)))
