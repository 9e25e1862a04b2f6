"""`ensemble-ray schema`: the JSON Schema of team files."""

from __future__ import annotations

from ensemble_ray.cli.view.terminal import show


def schema() -> None:
    """Print the JSON Schema of team files.

    With it, editors complete and check them.
    """
    show(schema_text())


def schema_text() -> str:
    import json  # the help does not need them

    from ensemble_ray.teamfile.team import team_schema

    return json.dumps(team_schema(), indent=2)
