"""Normalise parameter schemas to the subset of JSON schema that all model endpoints accept.

One unreadable schema makes an endpoint refuse the whole request. Servers and tools check arguments by their own schema.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import cast
from urllib.parse import unquote

import pydantic
from msgspec import Struct
from pydantic import TypeAdapter

LONGEST_NAME = 64
#: Nested schemas beyond these limits become `{}`, which accepts any value.
MOST_NODES = 2_000
DEEPEST = 24
LONGEST_SCHEMA = 200_000
_LONGEST_PATTERN = 500
_KINDS = ("string", "number", "integer", "boolean", "object", "array", "null")
#: Some endpoints refuse an empty schema for the entries of a list.
_ANY_ENTRY: Mapping[str, object] = {
    "anyOf": [
        *({"type": kind} for kind in ("string", "number", "boolean", "null")),
        {"type": "object", "additionalProperties": True},
    ]
}
#: dropped without a report
_SILENT = frozenset({"title", "$defs", "definitions", "additionalProperties"})
_COUNTS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}
#: for every type
_READ = frozenset({"type", "description", "default", "enum", "const", "anyOf", "oneOf", "allOf", "nullable", "$ref"})
_OF_KIND: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "minProperties", "maxProperties"}),
}
_PROPERTY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


#: facts about a schema while it is rewritten
_WITHIN = "\0within"
_HINT = "\0hint"

_Schema = dict[str, object]


class SchemaError(ValueError): ...


class ForeignSchema(Struct, frozen=True, kw_only=True):
    parameters: Mapping[str, object]
    dropped: tuple[str, ...] = ()  # keywords


def normalise_parameters(schema: object) -> ForeignSchema:
    """Return a tool's parameters in a form that all endpoints accept, or raise `SchemaError`."""
    if not isinstance(schema, Mapping):
        raise SchemaError(f"the schema of its arguments is no object: {json.dumps(schema, default=str)[:100]}")
    normaliser = _Normaliser(cast("Mapping[str, object]", schema))
    try:
        parameters = normaliser.root()
        size = len(json.dumps(parameters))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"the schema of its arguments is no JSON: {error}") from None
    if size > LONGEST_SCHEMA:
        raise SchemaError(f"the schema of its arguments has {size} characters; at most {LONGEST_SCHEMA} are sent")
    return ForeignSchema(parameters=parameters, dropped=tuple(sorted(normaliser.dropped)))


def rename_properties(schema: Mapping[str, object]) -> tuple[Mapping[str, object], Mapping[str, str]]:
    """Rename parameters that some endpoints refuse; return the original names, too."""
    properties = cast("Mapping[str, object]", schema["properties"])
    taken = {name for name in properties if _PROPERTY_NAME.fullmatch(name)}
    renamed: dict[str, str] = {}
    for name in properties:
        if name not in taken:
            fitting = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
            while not fitting or len(fitting) > LONGEST_NAME or fitting in taken or fitting in renamed:
                fitting = hash_name(fitting, f"{fitting}/{name}")
            renamed[fitting] = name
    if not renamed:
        return schema, renamed
    names = {original: new for new, original in renamed.items()}
    changed: dict[str, object] = {
        **schema,
        "properties": {names.get(name, name): inner for name, inner in properties.items()},
    }
    if "required" in schema:
        changed["required"] = [names.get(name, name) for name in cast("list[str]", schema["required"])]
    return changed, renamed


def hash_name(name: str, original: str) -> str:
    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}_{digest}"


class _Normaliser:
    def __init__(self, root: Mapping[str, object]) -> None:
        self._root = root
        self._nodes_left = MOST_NODES
        self.dropped: set[str] = set()

    def root(self) -> _Schema:
        found = self._merge_choices(self._resolve(self._root, ()), ())
        kinds = _kinds_of(found) or ["a choice"] * bool({"anyOf", "oneOf"} & found.keys())
        if kinds and "object" not in kinds:
            raise SchemaError(f"the schema of its arguments describes no object, but: {', '.join(kinds)}")
        if found.pop("enum", None) is not None or found.pop("const", None) is not None:
            self.dropped.add("enum")
        found.pop("nullable", None)
        result = self._rewrite({**found, "type": "object"}, 0, ())
        result.pop("default", None)
        result.setdefault("properties", {})
        return result

    def _rewrite(self, schema: object, depth: int, within: tuple[str, ...]) -> _Schema:
        self._nodes_left -= 1
        if depth > DEEPEST or self._nodes_left < 0:
            self.dropped.add("schemas that are nested too deeply" if depth > DEEPEST else "schemas beyond the limit")
            return {}
        if not isinstance(schema, Mapping):
            if schema is not True:
                self.dropped.add("schemas that are no objects")
            return {}
        found = self._resolve(cast("Mapping[str, object]", schema), within)
        within = cast("tuple[str, ...]", found.pop(_WITHIN, within))
        characters = sum(len(cast("str", value)) for value in found.values() if isinstance(value, str | list | tuple))
        self._nodes_left -= (characters + len(found)) // 500
        if "properties" in found or found.get("type") == "object":
            found = self._merge_choices(found, within)
        kinds = _kinds_of(found)
        listed = [] if kinds else _list_of(found.get("anyOf", found.get("oneOf")))
        choices = [each for each in listed if each is not False]
        result: _Schema
        if choices:
            result = _one_of([self._rewrite(each, depth + 1, within) for each in choices])
        elif len(kinds) > 1:
            result = _one_of([_describe(self._of_kind(found, kind, depth, within), None) for kind in kinds])
        else:
            result = self._of_kind(found, kinds[0], depth, within) if kinds else {}
        if kinds:
            self.dropped.update({"anyOf", "oneOf"} & found.keys())
        if found.get("nullable") is True and result and kinds != ["null"]:
            result = _one_of([_describe(result, None), {"type": "null"}])
        known = _READ.union(_SILENT, *[_OF_KIND.get(kind, frozenset()) for kind in kinds])
        self.dropped.update(str(key)[:40] for key in found if key not in known)
        result = _describe(result, found.get("description"))
        return {**result, "default": found["default"]} if "default" in found else result

    def _of_kind(self, found: _Schema, kind: str, depth: int, within: tuple[str, ...]) -> _Schema:
        result: _Schema = {"type": kind}
        if kind in {"string", "number", "integer", "boolean"}:
            self._add_values(found, kind, result)
        for keyword in _COUNTS.get(kind, ()):
            if keyword in found:
                if _is_number(found[keyword]):
                    result[keyword] = found[keyword]
                else:
                    self.dropped.add(keyword)
        match kind:
            case "string":
                self._add_text(found, result)
            case "number" | "integer":
                self._add_bounds(found, kind, result)
            case "array":
                items = found.get("items")
                places = _list_of(items if isinstance(items, list | tuple) else found.get("prefixItems"))
                if places:  # a schema per position
                    self.dropped.add("prefixItems" if "prefixItems" in found else "items")
                    inner = _one_of([self._rewrite(each, depth + 1, within) for each in places])
                else:
                    inner = {} if items is None else self._rewrite(items, depth + 1, within)
                result["items"] = inner if inner.keys() - {"description", "default"} else {**_ANY_ENTRY, **inner}
            case "object":
                self._add_object(found, result, depth, within)
            case _:
                pass
        return result

    def _add_values(self, found: _Schema, kind: str, result: _Schema) -> None:
        """Add the allowed values: texts as `enum`, others in the description."""
        if "const" not in found and "enum" not in found:
            return
        values = [found["const"]] if "const" in found else _list_of(found["enum"])
        if kind == "string":
            texts = list(dict.fromkeys(each for each in values if isinstance(each, str) and each))
            if "" in values:
                self.dropped.add("enum ''")
            if texts:
                result["enum"] = texts
        elif fitting := [
            each for each in values if _json_type(each) in ({kind} if kind != "number" else {kind, "integer"})
        ]:
            self.dropped.add(f"enum of kind {kind}")
            shown = ", ".join(json.dumps(each) for each in fitting[:50])
            result[_HINT] = f"one of {shown}" if len(fitting) > 1 else f"always {shown}"

    def _add_text(self, found: _Schema, result: _Schema) -> None:
        form = found.get("format")
        if form == "date-time":
            result["format"] = form
        elif form is not None:
            self.dropped.add("format")
            if isinstance(form, str) and form.strip():
                result[_HINT] = f"format: {form[:40]}"
        pattern = found.get("pattern")
        if pattern is not None:
            is_short = isinstance(pattern, str) and len(pattern) <= _LONGEST_PATTERN
            try:
                result["pattern"] = _patterns().validate_python(pattern if is_short else None).pattern
            except (pydantic.ValidationError, OverflowError, RecursionError):
                self.dropped.add("pattern")

    def _add_bounds(self, found: _Schema, kind: str, result: _Schema) -> None:
        if "format" in found:
            self.dropped.add("format")
        for bound, step in (("minimum", 1), ("maximum", -1)):
            exclusive = found.get(f"exclusive{bound.capitalize()}")
            if _is_number(found.get(bound)):
                result[bound] = found[bound]
            elif bound in found:
                self.dropped.add(bound)
            if exclusive is None:
                continue
            limit = found.get(bound) if exclusive is True else exclusive
            if not _is_number(limit):
                self.dropped.add(f"exclusive{bound.capitalize()}")
            elif kind == "integer" and float(cast("float", limit)).is_integer():
                result[bound] = int(cast("float", limit)) + step
            else:
                self.dropped.add(f"exclusive{bound.capitalize()}")
                result[bound] = limit

    def _add_object(self, found: _Schema, result: _Schema, depth: int, within: tuple[str, ...]) -> None:
        properties: _Schema = {}
        listed = found.get("properties", {})
        if not isinstance(listed, Mapping):
            self.dropped.update(() if listed is None else ("properties",))
            listed = {}
        for name, inner in cast("Mapping[str, object]", listed).items():
            if inner is False or not isinstance(cast("object", name), str):
                self.dropped.add("properties that nothing fits")
            elif self._nodes_left <= 0:
                self.dropped.add("schemas beyond the limit")
            else:
                properties[name] = self._rewrite(inner, depth + 1, within)
        required = found.get("required", [])
        if properties:
            result["properties"] = properties
            if needed := [name for name in dict.fromkeys(_texts_of(required)) if name in properties]:
                result["required"] = needed
            if not isinstance(required, list | tuple) or any(each not in needed for each in _list_of(required)):
                self.dropped.add("required")
        elif isinstance(entries := found.get("additionalProperties"), Mapping) and entries:
            result["additionalProperties"] = self._rewrite(entries, depth + 1, within) or True
        elif depth:
            result["additionalProperties"] = True

    def _resolve(self, schema: Mapping[str, object], within: tuple[str, ...]) -> _Schema:
        """Resolve the reference and `allOf`; the key `_WITHIN` lists the resolved references."""
        found = dict(schema)
        for _ in range(DEEPEST):
            if "$ref" not in found:
                break
            reference = found.pop("$ref")
            target = self._target(reference)
            if reference in within or not isinstance(target, Mapping):
                self.dropped.add("$ref")
                kinds = _kinds_of(dict(cast("Mapping[str, object]", target))) if isinstance(target, Mapping) else []
                if kinds:
                    found.setdefault("type", kinds[0])
                break
            within = (*within, cast("str", reference))
            found = {**cast("Mapping[str, object]", target), **found}
        if "allOf" in found:
            joined: _Schema = {}
            for each in _list_of(found.pop("allOf")):
                self._nodes_left -= 1
                if isinstance(each, Mapping) and self._nodes_left > 0 and len(within) < DEEPEST:
                    part = self._resolve(cast("Mapping[str, object]", each), (*within, "allOf"))
                    part.pop(_WITHIN, None)
                    self._join(joined, part)
                else:
                    self.dropped.add("allOf")
            self._join(joined, found)
            found = joined
        found[_WITHIN] = within
        return found

    def _join(self, into: _Schema, part: Mapping[str, object]) -> None:
        for key, value in part.items():
            here = into.get(key)
            if key == "properties" and isinstance(here, Mapping) and isinstance(value, Mapping):
                into[key] = {**cast("_Schema", here), **cast("_Schema", value)}
            elif key == "required" and isinstance(here, list) and isinstance(value, list):
                into[key] = [*cast("list[object]", here), *cast("list[object]", value)]
            else:
                into[key] = value

    def _merge_choices(self, found: _Schema, within: tuple[str, ...]) -> _Schema:
        """Merge a choice between objects into one object; only names that all require are required."""
        within = cast("tuple[str, ...]", found.pop(_WITHIN, within))
        for keyword in ("anyOf", "oneOf"):
            if keyword not in found:
                continue
            parts: list[_Schema] = []
            for each in _list_of(found[keyword]):
                self._nodes_left -= 1
                if isinstance(each, Mapping) and self._nodes_left > 0:
                    part: _Schema = {}
                    if len(within) <= DEEPEST:
                        part = self._resolve(cast("Mapping[str, object]", each), within)
                        inside = cast("tuple[str, ...]", part.pop(_WITHIN))
                        part = self._merge_choices(part, (*inside, "anyOf"))
                    if "object" in (_kinds_of(part) or ["object"]):
                        parts.append(part)
            if not parts and "properties" not in found and "type" not in found:
                return found
            self.dropped.add(keyword)
            del found[keyword]
            own = found.get("properties")
            merged = dict(cast("_Schema", own)) if isinstance(own, Mapping) else {}
            for part in parts:
                listed = part.get("properties")
                if isinstance(listed, Mapping):
                    merged = {**cast("_Schema", listed), **merged}
            shared = [set(_texts_of(part.get("required"))) for part in parts]
            common = set[str].intersection(*shared) if shared else set[str]()
            found["properties"] = merged
            found["type"] = "object"
            found["required"] = [*_texts_of(found.get("required")), *sorted(common)]
        return found

    def _target(self, reference: object) -> object:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: object = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(key)
            elif isinstance(found, list) and key.isdecimal() and int(key[:9]) < len(cast("list[object]", found)):
                found = cast("list[object]", found)[int(key[:9])]
            else:
                return None
        return found


def _kinds_of(schema: Mapping[str, object]) -> list[str]:
    """Return the types that a schema allows; empty: any type."""
    named = schema.get("type")
    listed = [named] if isinstance(named, str) else _list_of(named)
    if kinds := [each for each in dict.fromkeys(_texts_of(listed)) if each in _KINDS]:
        if "integer" in kinds and "number" in kinds:
            kinds.remove("integer")
        return kinds
    if "anyOf" in schema or "oneOf" in schema:
        return []
    if "enum" in schema or "const" in schema:
        values = [schema["const"]] if "const" in schema else _list_of(schema["enum"])
        return list(dict.fromkeys(kind for each in values if (kind := _json_type(each))))
    for kind in ("object", "array", "string", "number"):
        if _OF_KIND[kind] - {"format"} & schema.keys() or (kind == "object" and "additionalProperties" in schema):
            return [kind]
    return []


def _json_type(value: object) -> str | None:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, Mapping) else "array"


def _describe(result: _Schema, description: object) -> _Schema:
    """Return a schema with its description and hint first."""
    words = description if isinstance(description, str) else cast("str", result.get("description", ""))
    hint = result.get(_HINT)
    if hint is not None:
        words = f"{words} ({hint})" if words else cast("str", hint)
    body = {key: value for key, value in result.items() if key not in {"description", _HINT}}
    return {"description": words, **body} if words else body


def _one_of(choices: list[_Schema]) -> _Schema:
    unique: list[_Schema] = []
    for each in choices:
        inner = cast("list[_Schema]", each["anyOf"]) if each.keys() == {"anyOf"} else [each]
        unique.extend(one for one in inner if one not in unique)
    if any(not each for each in unique):
        return {}
    return unique[0] if len(unique) == 1 else {"anyOf": unique}


def _list_of(value: object) -> list[object]:
    return list(cast("list[object]", value)) if isinstance(value, list | tuple) else []


def _texts_of(value: object) -> Iterator[str]:
    return (each for each in _list_of(value) if isinstance(each, str))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@cache
def _patterns() -> TypeAdapter[re.Pattern[str]]:
    """Compiles patterns; they are never matched here."""
    return TypeAdapter(re.Pattern[str])
