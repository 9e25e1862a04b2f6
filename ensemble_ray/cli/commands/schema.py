"""`ensemble-ray schema` and `import`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ensemble_ray.cli.view.terminal import FINE, show, write_note
from ensemble_ray.errors import ValidationError


def schema() -> None:
    """Print the JSON Schema of team files.

    With it, editors complete and check them.
    """
    show(schema_text())


def schema_text() -> str:
    from ensemble_ray.teamfile.team import team_schema

    return json.dumps(team_schema(), indent=2)


imports = typer.Typer(help="Create team files from projects of other frameworks.", no_args_is_help=True)


@imports.callback()
def _root() -> None:
    """Create team files from projects of other frameworks."""


@imports.command()
def crewai(
    folder: Annotated[
        Path, Argument(metavar="DIR", help="A project with agents.yaml and tasks.yaml.", show_default=False)
    ],
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write it there instead of printing it.")
    ] = None,
    llm: Annotated[str, Option("--llm", help="Model of agents that name none.")] = "openai:gpt-4o-mini",
) -> int:
    """Create a team file from a crew's agents.yaml and tasks.yaml.

    No code of the project is executed. Remaining manual work is printed, and listed at the head of the file.
    """
    from ensemble_ray.cli.crewai import find_project, import_crew

    team = import_crew(find_project(folder), llm=llm)
    if output is None:
        show(team.text.rstrip())
    else:
        _write(output, team.text)
    for note in team.notes:
        write_note(note)
    if output is not None:
        write_note(f"Wrote {output}. Look at it: ensemble-ray plan {output}")
    return FINE


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValidationError(f"'{path}' is there already, and is not written over. Name another file") from None
    except OSError as error:
        raise ValidationError(f"'{path}' cannot be written: {error.strerror}. Name another file") from error
