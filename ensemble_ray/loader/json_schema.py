"""The published JSON Schema of team files, so that editors complete and check them. Package: loader. Pure.

In: the sections' models. Out: a schema of draft 7, which editors of YAML know best.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, cast

from ensemble_ray.loader.sections import TeamKeys
from ensemble_ray.values.messages import JsonValue

__all__ = ["team_schema"]

#: What a team does; of these, tasks and loops may stand side by side.
_WORK = ("tasks", "loops", "phases", "graph", "map_reduce")


def team_schema() -> dict[str, JsonValue]:
    """Return the schema of a team file."""
    schema = TeamKeys.model_json_schema(ref_template="#/definitions/{model}")
    definitions = schema.pop("$defs")
    schema = {
        **schema,
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ensemble-ray team",
        "description": "A team of agents and its tasks; run it with `ensemble-ray run FILE`.",
        "anyOf": [{"required": [name]} for name in _WORK],
        "not": {"anyOf": [{"required": list(pair)} for pair in combinations(_WORK, 2) if pair != ("tasks", "loops")]},
        "definitions": definitions,
    }
    return cast("dict[str, JsonValue]", _convert(schema, is_map=False))


def _convert(part: Any, *, is_map: bool) -> Any:
    """Return a part of the schema as draft 7 has it, without what pydantic makes of names.

    Args:
        part: Of pydantic's schema.
        is_map: Whether its keys are names of the user or of ours, and not words of JSON Schema.
    """
    if isinstance(part, list):
        return [_convert(each, is_map=False) for each in part]
    if not isinstance(part, dict):
        return part
    found = {
        name: _convert(value, is_map=not is_map and name in {"properties", "definitions", "patternProperties"})
        for name, value in cast("dict[str, Any]", part).items()
        if is_map or name != "title" or "$schema" in part
    }
    if not is_map and "$ref" in found and len(found) > 1:  # beside a reference, draft 7 reads nothing else
        found = {"allOf": [{"$ref": found.pop("$ref")}], **found}
    return found
