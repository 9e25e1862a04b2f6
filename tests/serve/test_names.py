"""Teams by their names: where they are served, as tools of MCP, as agents of A2A, and among the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import RunState, ValidationError
from ensemble_ray.serve.a2a import agent_card
from ensemble_ray.serve.app import EndpointOptions, app
from ensemble_ray.serve.catalog import load_teams, served_team, team_names
from ensemble_ray.serve.mcp_api import tool_of, tools_by_name
from ensemble_ray.serve.schemas import NewRun, RunFilter
from ensemble_ray.testing import ScriptedModel

from .driving import driven
from .teams import INPUTS, pair

TEAM = """
name: {name}
description: Writes the news.
tags: {{desk: news, urgent: ""}}
llm: "openai:any"
tasks:
  - {{name: draft, description: "Write about {{topic}}", expected_output: A text}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    return tmp_path


def write(path: Path, name: str) -> None:
    """Write the file of a team."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(TEAM.format(name=name), encoding="utf-8")


def test_a_team_is_served_under_its_name(folder: Path) -> None:
    """S-SRV-226: else under that of its file; two of one name are refused, whatever their files are called."""
    write(folder / "a" / "team.yaml", "News desk")
    write(folder / "b" / "team.yaml", "Sports desk")
    (folder / "plain.yaml").write_text(TEAM.format(name="null"), encoding="utf-8")
    teams = load_teams(team_names(["a/team.yaml", "b/team.yaml", "plain.yaml"]))
    assert list(teams) == ["News desk", "Sports desk", "plain"]
    info = teams["News desk"].info
    assert (info.name, info.description, info.tags) == (
        "News desk",
        "Writes the news.",
        {"desk": "news", "urgent": ""},
    )
    write(folder / "b" / "team.yaml", "News desk")
    with pytest.raises(ValidationError, match=r"Two teams are called 'News desk': a/team\.yaml and b/team\.yaml"):
        app(EndpointOptions(teams=("a/team.yaml", "b/team.yaml")))


def test_a_team_tells_what_it_is_for() -> None:
    """S-INT-111, S-INT-112: its tool and its card have its name and its description, and the card its tags."""
    team = pair(ScriptedModel()).replace(description="Writes the news.", tags={"desk": "news", "urgent": ""})
    info = served_team("News desk", team).info
    ((name, found),) = tools_by_name([info]).items()
    tool = tool_of(name, found)
    assert (tool.name, tool.title) == ("News_desk", "News desk")
    assert tool.description == (
        "Writes the news.\nRuns the team 'News desk', a sequential workflow of 2 tasks, and returns its last output."
    )
    card = agent_card(info, "http://localhost/a2a/News%20desk", asks_for_keys=False)
    assert (card.name, card.description) == ("News desk", "Writes the news.")
    assert list(card.skills[0].tags) == ["sequential", "desk:news", "urgent"]


async def test_a_run_has_the_tags_of_its_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-227: and is found by them; of one name the request's value counts. Requests are the same by their own ones."""
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(tmp_path))
    team = pair(ScriptedModel(otherwise="fine")).replace(tags={"desk": "news", "for": "all"})
    async with driven(team) as runs:
        asked = NewRun(ensemble="team", run_id="one", inputs=INPUTS, tags={"for": "docs"})
        await runs.start(asked)
        await runs.start(asked)
        assert (await runs.wait("one", 60)).status == RunState.COMPLETED.value
        found = (await runs.list(RunFilter(tags={"desk": "news", "for": "docs"}))).runs
        assert [(each.run_id, each.tags) for each in found] == [("one", {"desk": "news", "for": "docs"})]
