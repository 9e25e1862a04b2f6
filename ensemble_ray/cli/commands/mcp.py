"""`ensemble-ray mcp`: teams as tools of an MCP server on standard input and output."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from ensemble_ray.cli.commands.run import RuntimeChoice
from ensemble_ray.cli.view.terminal import FINE


def mcp(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help="YAML files, or module:attribute.")],
    *,
    runtime: RuntimeChoice = None,
    llm: Annotated[
        str | None, typer.Option("--llm", metavar="MODEL", help="A model in place of every other: openai:NAME, local.")
    ] = None,
) -> int:
    """Serve teams as tools of an MCP server, over standard input and output.

    Each team is a tool named after its file, whose arguments are the team's inputs. Ends when its input ends.

    Exit codes: 2 a team is wrong, or a package is missing.
    """
    from ensemble_ray.errors import ValidationError

    if find_spec("mcp") is None:
        raise ValidationError("MCP needs the package mcp, which is not installed: pip install 'ensemble-ray[mcp]'")
    import asyncio

    from ensemble_ray.cli.inputs.arguments import check_team_keys_here
    from ensemble_ray.cli.team_tools import TeamTools
    from ensemble_ray.teamfile import load_ensemble

    teams = [(target, load_ensemble(target, llm=llm)) for target in targets]
    check_team_keys_here(dict(teams), runtime)
    tools = TeamTools(runtime=None if runtime is None else runtime.value)
    for target, team in teams:
        tools.add(target, team)
    asyncio.run(tools.serve())
    return FINE
