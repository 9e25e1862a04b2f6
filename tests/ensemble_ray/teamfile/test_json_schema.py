"""The published JSON Schema: what the loader takes it takes, what the loader refuses it mostly refuses too."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from ensemble_ray.teamfile.team import team_schema
from tests.ensemble_ray.teamfile.test_mistakes import MISTAKES
from tests.ensemble_ray.teamfile.test_team import WHOLE

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def _validator() -> Any:
    # Not a dependency of ours, but of Ray's; nothing but this test uses it.
    jsonschema = pytest.importorskip("jsonschema")
    schema = team_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def schema_errors(text: str) -> list[str]:
    """Where the schema refuses a team file."""
    return [error.json_path for error in _validator().iter_errors(yaml.safe_load(text))]


def test_the_published_file_is_what_the_loader_says() -> None:
    """`docs/ensemble.schema.json` is the output of `ensemble-ray schema`."""
    published = json.loads((ROOT / "docs" / "ensemble.schema.json").read_text(encoding="utf-8"))
    assert published == team_schema(), "write it again: ensemble-ray schema > docs/ensemble.schema.json"


def test_a_whole_team_passes() -> None:
    """Everything that the loader takes in its own test."""
    # Editors read YAML 1.2, where this is a number; the parser of this test does not.
    assert schema_errors(WHOLE.replace("1e-6", "0.000001")) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tasks: {t: {description: d}}\nworkfow: parallel\n", "$"),
        ("tasks: {t: {description: d}}\nworkflow: paralel\n", "$.workflow"),
        ("tasks: {t: {descripton: d}}\n", "$.tasks"),
        ("tasks: {t: {description: d, tools: [calculater]}}\n", "$.tasks"),
        ("tasks: {t: {description: d}}\nagents: {a: {role: A}}\n", "$.agents"),
        ("agents: {a: {goal: g}}\n", "$"),
    ],
)
def test_mistakes_are_found_in_the_editor(text: str, path: str) -> None:
    """Unknown keys, words and tools, missing keys."""
    assert path in schema_errors(text)


#: What is wrong with a file and only the loader sees: names and circles, the environment, files, code, values.
SEEN_BY_THE_LOADER = (
    *(
        "it has no llm",
        "duplicate key",
        "Ensemble max_parallel",
        "two tasks are named",
        "in a circle",
        "must be > 0",
        "must be an existing",
        "is not set",
    ),
    *("this machine have no", "behind an endpoint have no", "There is no module", "is a str, and not a type"),
)


@pytest.mark.parametrize(
    ("text", "told"), [each for each in MISTAKES if "not valid YAML" not in each[1] and "the tag" not in each[1]]
)
def test_editor_refuses_what_the_loader_refuses_for_its_form(text: str, told: str) -> None:
    """Of a file's mistakes an editor leaves to the loader those of what the file means."""
    is_left_to_the_loader = any(each in told for each in SEEN_BY_THE_LOADER)
    assert bool(schema_errors(text)) is not is_left_to_the_loader


def test_everything_is_described() -> None:
    """An editor has something to show for every key."""
    schema = team_schema()
    definitions = cast("dict[str, dict[str, Any]]", schema["definitions"])
    places = {"team": schema, **{name: each for name, each in definitions.items() if "properties" in each}}
    silent = [
        f"{place}.{key}"
        for place, each in places.items()
        for key, value in each["properties"].items()
        if not value.get("description")
    ]
    assert silent == []
