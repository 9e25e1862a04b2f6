"""The published JSON Schema of team files, so that editors complete and check them. Room: loader. Pure.

In: the tables of keys and the words of the classes. Out: a schema of draft 7, which editors of YAML know best.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import docstring_parser
from pydantic_core import PydanticUndefined

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.hierarchy import HierarchicalConstraints
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.definition.retry_policy import RetryPolicy
from ensemble_ray.definition.task import Task
from ensemble_ray.loader.hierarchy import CONSTRAINT
from ensemble_ray.loader.kinds import Field
from ensemble_ray.loader.map_reduce import ITEM_TASK, MAP_REDUCE
from ensemble_ray.loader.models import MODEL_FIELDS
from ensemble_ray.loader.tables import AGENT, COST, LIMIT, RETRY, TASK, TEAM
from ensemble_ray.loader.tools import tool_schema
from ensemble_ray.values.messages import JsonValue
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.rate_limit import RateLimit
from ensemble_ray.values.value import Value

__all__ = ["team_schema"]

_NAME: JsonValue = {"type": "string", "description": "What the others call it by."}


def team_schema() -> dict[str, JsonValue]:
    """The schema of a team file."""
    team = _object(TEAM, EnsembleDefinition)
    properties = cast("dict[str, JsonValue]", team["properties"])
    properties = {
        "agents": _members("agent", "Agents by name."),
        "tasks": _members("task", "What to do, in order; tasks by name."),
        "map_reduce": {
            "allOf": [{"$ref": "#/definitions/map_reduce"}],
            "description": "In place of tasks: a task for each of many items, and how their outputs are brought together.",
        },
        **properties,
    }
    # As in Python: without a value, the workflow is found from the tasks' context.
    workflow = cast("dict[str, JsonValue]", properties["workflow"])
    workflow["enum"] = [*cast("list[JsonValue]", workflow["enum"]), None]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ensemble-ray team",
        "description": "A team of agents and its tasks; run it with `ensemble-ray run FILE`.",
        **team,
        "properties": properties,
        "oneOf": [{"required": ["tasks"]}, {"required": ["map_reduce"]}],
        "definitions": {
            "agent": _object(AGENT, Agent),
            "listed_agent": _listed(_object(AGENT, Agent), name_is_required=True),
            "task": _object(TASK, Task),
            "listed_task": _listed(_object(TASK, Task), name_is_required=False),
            "map_reduce": _object(MAP_REDUCE, MapReduceDefinition),
            "item_task": _object(ITEM_TASK, Task),
            "tool": dict(tool_schema()),
            "model": _object(MODEL_FIELDS, None),
            "rate_limit": _object(LIMIT, RateLimit),
            "cost_configuration": _object(COST, CostConfiguration),
            "retry": _object(RETRY, RetryPolicy),
            "hierarchical_constraints": _object(CONSTRAINT, HierarchicalConstraints),
        },
    }


def _object(table: Mapping[str, Field], kind: type[Value] | None) -> dict[str, JsonValue]:
    words = {} if kind is None else _words(kind)
    properties: dict[str, JsonValue] = {}
    for name, field in table.items():
        described: dict[str, JsonValue] = {**field.kind.schema}
        doc = field.doc or words.get(name, "")
        if "$ref" in described and doc:  # beside a reference, draft 7 reads nothing else
            described = {"allOf": [described]}
        if doc:
            described["description"] = doc
        default = _default(kind, name)
        if default is not None:
            described["default"] = default
        properties[name] = described
    required: list[JsonValue] = [name for name, field in table.items() if field.is_required]
    schema: dict[str, JsonValue] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _words(kind: type[Value]) -> dict[str, str]:
    """What the docstrings of the class, and of those that it is made of, say of its fields."""
    parsed = [docstring_parser.parse(each.__doc__ or "") for each in reversed(kind.__mro__) if issubclass(each, Value)]
    return {word.arg_name: " ".join((word.description or "").split()) for each in parsed for word in each.params}


def _default(kind: type[Value] | None, name: str) -> JsonValue:
    fields = {} if kind is None else {info.alias or field: info for field, info in kind.model_fields.items()}
    if name not in fields:
        return None
    default: object = fields[name].default
    if default is PydanticUndefined:
        return None
    return default if isinstance(default, str | int | float | bool) and default != "" else None


def _listed(schema: dict[str, JsonValue], *, name_is_required: bool) -> dict[str, JsonValue]:
    """The same as a member of a list, where the name is a key."""
    properties = {"name": _NAME, **cast("dict[str, JsonValue]", schema["properties"])}
    required = cast("list[JsonValue]", schema.get("required", []))
    return {**schema, "properties": properties, "required": ["name", *required] if name_is_required else required}


def _members(one: str, description: str) -> dict[str, JsonValue]:
    return {
        "description": description,
        "anyOf": [
            {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": f"#/definitions/{one}"}},
            {"type": "array", "minItems": 1, "items": {"$ref": f"#/definitions/listed_{one}"}},
        ],
    }
