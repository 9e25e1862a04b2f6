"""Convert a task's output type to the JSON schema that endpoints enforce."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind

from ensemble_ray.execute.agent.structured import adapter_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.messages import JsonSchema
from ensemble_ray.values.task_output import type_name

_log = bounded_logger(__name__)

Node = Mapping[str, Any]

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST_NAME = 64
_PLAIN = ("type", "enum", "const", "required", "description")
_FORMATS = frozenset({"date", "time", "date-time", "duration", "uuid"})  # the parser refuses other spellings
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


@lru_cache(maxsize=256)
def answer_schema(output_type: Hashable) -> JsonSchema | None:
    """Return the schema of an output type's fields and choices; None if endpoints cannot enforce it (S-OUT-46)."""
    name = _NOT_IN_NAMES.sub("_", type_name(output_type))[:_LONGEST_NAME] or "answer"
    try:
        generated = adapter_of(output_type).json_schema(schema_generator=_Generator)
        definitions = {name: _form(node) for name, node in generated.get("$defs", {}).items()}
        root = _form(generated)
        if "$ref" in root:  # a recursive type; endpoints do not accept a reference as root
            root = dict(definitions[str(root["$ref"]).rpartition("/")[2]])
        if definitions:
            root["$defs"] = definitions
    except Exception as error:  # noqa: BLE001  a type's own hooks may raise anything; the prompt describes the type, too
        _log.debug("No JSON schema for %s: %s", name, error)
        return None
    if root.get("type") != "object":
        return None
    return JsonSchema(name=name, schema=root, strict=_is_strict(root))


class _Generator(GenerateJsonSchema):
    def field_is_required(self, field: Any, total: bool) -> bool:  # noqa: FBT001  pydantic's signature
        # Only keys of a `TypedDict` may be absent.
        return bool(field.get("required", total)) if field["type"] == "typed-dict-field" else True

    def field_is_present(self, field: Any) -> bool:
        return field.get("init") is not False and super().field_is_present(field)  # the parser refuses `init=False`

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        """Ignore defaults, which the schema leaves out."""


def _form(node: Node) -> dict[str, Any]:
    """Return a schema reduced to keywords that all endpoints know."""
    if "$ref" in node:
        return {"$ref": node["$ref"]}  # the only keyword
    form: dict[str, Any] = {name: node[name] for name in _PLAIN if name in node}
    if node.get("format") in _FORMATS:
        form["format"] = node["format"]
    choices = [_form(each) for each in (*node.get("anyOf", ()), *node.get("oneOf", ()))]
    if choices:
        form["anyOf"] = choices
    if "allOf" in node:
        form["allOf"] = [_form(each) for each in node["allOf"]]
    if "items" in node:
        form["items"] = _form(node["items"]) if isinstance(node["items"], Mapping) else {}
    if "prefixItems" in node:
        form["prefixItems"] = [_form(each) for each in node["prefixItems"]]
        form |= {name: node[name] for name in ("minItems", "maxItems") if name in node}
    if node.get("type") == "object":
        form["properties"] = {name: _form(each) for name, each in node.get("properties", {}).items()}
        form.setdefault("required", [])
        by_pattern = tuple(node.get("patternProperties", {}).values())
        more: object = node.get("additionalProperties", by_pattern[0] if len(by_pattern) == 1 else bool(by_pattern))
        form["additionalProperties"] = _form(cast("Node", more)) if isinstance(more, Mapping) else more
    return form


def _is_strict(node: Node) -> bool:
    if not all(map(_is_strict, node.get("$defs", {}).values())):
        return False
    if "$ref" in node:
        return True
    if "anyOf" in node:
        return "type" not in node and all(map(_is_strict, cast("Sequence[Node]", node["anyOf"])))
    match node.get("type"):
        case "object":
            fields = cast("Mapping[str, Node]", node["properties"])
            is_whole = node["additionalProperties"] is False and set(node["required"]) == set(fields)
            return is_whole and all(map(_is_strict, fields.values()))
        case "array":
            return "prefixItems" not in node and "items" in node and _is_strict(node["items"])
        case name:
            return isinstance(name, str) and name in _SCALARS and "allOf" not in node
