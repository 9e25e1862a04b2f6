"""Ages of answers to reuse in a team file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import MapEnsemble
from ensemble_ray.teamfile import load_runnable
from tests.ensemble_ray.teamfile.conftest import Load, Refused
from tests.ensemble_ray.teamfile.test_json_schema import schema_errors

TEAM = """
llm: local
tasks:
  a: {description: do a, reuse: 7d}
  b: {description: do b, reuse: "90s"}
  c: {description: do c}
"""
MAPPED = """
llm: local
map_reduce:
  items: [a, b]
  map: {description: "read {item}", reuse: 12h}
"""


def test_ages_in_a_file(load: Load, folder: Path) -> None:
    """S-USE-2: also of the tasks of a map-reduce."""
    team = load(TEAM)
    assert [each.reuse for each in team.tasks] == [timedelta(days=7), timedelta(seconds=90), None]
    (folder / "mapped.yaml").write_text(MAPPED, encoding="utf-8")
    mapped = load_runnable("mapped.yaml")
    assert isinstance(mapped, MapEnsemble)
    assert mapped.map_task("a").reuse == timedelta(hours=12)


@pytest.mark.parametrize(
    ("age", "text"),
    [
        ("7 days", "'7 days' is no age: write 30d for days"),
        ("7", "must be text"),
        ("0d", "Task reuse must be > 0 when set"),
    ],
)
def test_what_is_no_age_is_refused_at_its_place(refused: Refused, age: str, text: str) -> None:
    """S-USE-2."""
    (line,) = refused(TEAM.replace("7d", age))
    assert line.startswith(f"team.yaml:4:33: tasks.a.reuse: {text}")


@pytest.mark.parametrize("text", [TEAM, MAPPED])
def test_the_schema_knows_ages(text: str) -> None:
    """S-USE-2."""
    assert schema_errors(text) == []
    assert schema_errors(text.replace("7d", "soon").replace("12h", "soon")) != []
