"""Teams of an endpoint as tools of MCP: their names and the schema of their arguments. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mcp_types import Tool

from ensemble_ray.tools.tool import make_tool_name

if TYPE_CHECKING:
    from ensemble_ray.serve.run_schemas import EnsembleInfo

#: Argument that takes the items of a map-reduce, where no input of the team has that name.
ITEMS = "items"


def tools_by_name(teams: Iterable[EnsembleInfo]) -> Mapping[str, EnsembleInfo]:
    """Return teams by the names of their tools: letters, digits and underscores; of those that would be one, as they are."""
    known = list(teams)
    shown = {each.name: make_tool_name(each.name) for each in known}
    count = Counter(shown.values())
    return {(shown[each.name] if count[shown[each.name]] == 1 else each.name): each for each in known}


def tool_of(name: str, team: EnsembleInfo) -> Tool:
    """Return a team as a tool: a text for each input that a run has to give, and the items where requests may bring them."""
    properties: dict[str, object] = {each: {"type": "string"} for each in team.inputs}
    if team.takes_items and ITEMS not in properties:
        properties[ITEMS] = {"type": "array", "description": "What is mapped, in place of the team's own items"}
    of_tasks = "" if team.tasks is None else f" of {team.tasks} tasks"
    about = f"Runs the team '{team.name}', a {team.workflow} workflow{of_tasks}, and returns its last output."
    return Tool(
        name=name,
        title=team.name,
        description=f"{team.description}\n{about}" if team.description else about,
        input_schema={
            "type": "object",
            "properties": properties,
            "required": list(team.inputs),
            "additionalProperties": False,
        },
    )
