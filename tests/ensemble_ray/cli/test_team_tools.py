"""Teams as tools of the command line's MCP server."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble_ray import Ensemble, Image, Task, ValidationError
from ensemble_ray.plan.planner import check_foreign_values

pytest.importorskip("mcp")

from ensemble_ray.cli.team_tools import TeamTools


def team(**fields: Any) -> Ensemble:
    """A team of one task."""
    return Ensemble(tasks=[Task.of("Say {what}")], **fields)


@pytest.mark.parametrize("value", ["../secret", "/etc/passwd", "a/b", ".hidden", "a:b", "c\\d", "%2e"])
async def test_client_cannot_choose_the_directory_of_an_attachment(value: str) -> None:
    """S-ATT-16: what it says becomes a part of a path."""
    tools = TeamTools()
    tools.add("team.yaml", Ensemble(tasks=[Task("Look", attachments=Image("photos/{name}.png"))]))
    (listed,) = (await tools.list_tools(None, None)).tools
    assert list(listed.input_schema["properties"]) == ["name"]
    with pytest.raises(ValidationError, match="Input 'name' is a part of the path or URL of an attachment"):
        check_foreign_values([Task("Look", attachments=Image("photos/{name}.png"))], {"name": value})
    with pytest.raises(ValidationError, match="must be one plain name and no host, got: 'localhost'"):
        check_foreign_values([Task("Look", attachments=Image("https://{name}/a.png"))], {"name": "localhost"})
    check_foreign_values([Task("Look", attachments=Image("https://x.y/{name}.png"))], {"name": "a b-1.2", "other": "/"})


async def test_a_team_is_a_tool_under_its_name() -> None:
    """S-INT-113: else under that of its file or attribute; what it is for comes first in its description."""
    tools = TeamTools()
    tools.add("a/team.yaml", team(name="News desk", description="Writes the news."))
    tools.add("b/team.yaml", team())
    named, plain = (await tools.list_tools(None, None)).tools
    about = "Runs a team of agents and returns what its last task gave. Its tasks: Say {what}"
    assert (named.name, named.title, named.description) == ("News_desk", "News desk", f"Writes the news.\n{about}")
    assert (plain.name, plain.title, plain.description) == ("team", None, about)
    tools.add("c/desk.yaml", team(name="News_desk"))
    tools.add("d/support.yaml", team(name="\u5ba2\u670d"))
    with pytest.raises(ValidationError, match="Two teams would be the tool 'team': rename one of the teams"):
        tools.add("e/team.yaml", team(name="News desk"))
    listed = (await tools.list_tools(None, None)).tools
    assert [each.name for each in listed] == ["News_desk", "team", "desk", "support"]
