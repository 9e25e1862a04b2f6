"""A team file that tests change while it is served: each version says another greeting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ensemble_ray.serve.catalog import ServedTeam, load_teams, team_names
from ensemble_ray.testing import ServedRequest
from tests.serve.teams import KEY_VARIABLE

_TEAM = """# {word}
llm: {{model: "openai:any", base_url: "{url}", api_key_env: {variable}, max_retries: 0}}
{more}
tasks:
  - name: greet
    description: Say {word} to {{who}}
    expected_output: A greeting
    {review}
"""
#: A gate behind the greeting, and a task behind the gate.
_GATE = """review: {{prompt: Right or wrong, timeout: 0}}
  - {{name: repeat, description: Say {word} again, expected_output: A greeting, context: [greet]}}"""
WORDS = ("Hello", "Servus", "Moin", "Ahoy")


def write(directory: Path, url: str, word: str, *, is_reviewed: bool = False, more: str = "") -> Path:
    """Write a version of the team that says this word; gives the file."""
    path = directory / "greeting.yaml"
    more = f"review_wait: detach\n{more}" if is_reviewed else more
    gate = _GATE.format(word=word) if is_reviewed else ""
    path.write_text(_TEAM.format(word=word, url=url, variable=KEY_VARIABLE, review=gate, more=more), encoding="utf-8")
    return path


def loaded(path: Path) -> Mapping[str, ServedTeam]:
    """The team of the file, as an endpoint loads it."""
    return load_teams(team_names([str(path)]))


def greet(request: ServedRequest) -> str:
    """What the model answers: the greeting that it is told."""
    return next((word for word in WORDS if f"Say {word}" in request.text), "?")
