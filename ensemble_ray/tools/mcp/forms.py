"""The form of an MCP server's question, as a person at a review gate reads it and fills it in. Package: tools. Pure.

The protocol allows flat objects of texts, numbers, truth values, and choices among texts. Whether a value keeps the finer bounds of
its field, the server checks itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import cast

from ensemble_ray.errors import ValidationError

__all__ = ["FormValue", "approved_values", "form_prompt", "read_values"]

FormValue = str | int | float | bool | list[str] | None
_TRUE, _FALSE = frozenset({"true", "yes", "y"}), frozenset({"false", "no", "n"})


def form_prompt(schema: Mapping[str, object]) -> str:
    """Return what a reviewer is told to write."""
    fields = _fields(schema)
    if not fields:
        return "Approve to accept, exit to decline"
    needed, single = _list_needed(schema), _single(schema)
    how = "a JSON object" if single is None else "the value" if len(fields) == 1 else f"{single}, or a JSON object"
    lines = [f"Edit: write {how}. Exit: decline"]
    for name, field in fields.items():
        choices = _choices(field)
        kind = f"one of {choices}" if choices and field.get("type") != "array" else str(field.get("type", "string"))
        if choices and field.get("type") == "array":
            kind = f"some of {choices}"
        notes = [kind, "required" if name in needed else "may be left out"]
        if "default" in field:
            notes.append(f"default {json.dumps(field['default'], ensure_ascii=False)}")
        said = field.get("description") or field.get("title")
        lines.append(f"- {name} ({', '.join(notes)}){f': {said}' if said else ''}")
    return "\n".join(lines)


def approved_values(schema: Mapping[str, object]) -> dict[str, FormValue] | None:
    """Return what an approval means: each field's default, and true for a question that has none; None: it is not enough."""
    values: dict[str, FormValue] = {}
    needed = _list_needed(schema)
    for name, field in _fields(schema).items():
        if "default" in field:
            values[name] = cast("FormValue", field["default"])
        elif field.get("type") == "boolean" and name in needed:
            values[name] = True
        elif name in needed:
            return None
    return values


def read_values(text: str, schema: Mapping[str, object]) -> dict[str, FormValue]:
    """Return what a reviewer wrote: an object of the fields, or the value of the only one that is needed.

    Raises:
        ValidationError: it is neither, or does not fit a field.
    """
    fields = _fields(schema)
    given = _parse(text)
    if not isinstance(given, dict):
        name = _single(schema)
        if name is None:
            raise ValidationError(f"Write a JSON object with the fields {list(fields)}")
        given = {name: _value_of(text.strip(), fields[name])}
    known = cast("Mapping[str, object]", given)
    if spare := [name for name in known if name not in fields]:
        raise ValidationError(f"There are no fields {spare[:5]}. There are: {list(fields)}")
    if missing := [name for name in _list_needed(schema) if name in fields and name not in known]:
        raise ValidationError(f"Fields are missing: {missing}")
    return {name: _check(name, value, fields[name]) for name, value in known.items()}


def _parse(text: str) -> object:
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError):
        return None


def _value_of(text: str, field: Mapping[str, object]) -> object:
    """Return a text as a value of a field; one that fits no other type stays a text."""
    kind = field.get("type", "string")
    if kind == "boolean" and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind == "string":
        return text
    if kind == "array":
        parsed = _parse(text)
        return parsed if isinstance(parsed, list) else [each.strip() for each in text.split(",")]
    parsed = _parse(text)
    return text if parsed is None else parsed


def _check(name: str, value: object, field: Mapping[str, object]) -> FormValue:
    """Return a value that fits its field.

    Raises:
        ValidationError: it does not.
    """
    kind, choices = field.get("type", "string"), _choices(field)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    fits = {
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "number": is_number,
        "integer": is_number and float(cast("float", value)).is_integer(),
        "array": isinstance(value, list) and all(isinstance(each, str) for each in cast("list[object]", value)),
    }.get(str(kind), True)
    if not fits:
        raise ValidationError(f"Field '{name}' must be of the type {kind}, got: {json.dumps(value)[:100]}")
    chosen = cast("Sequence[object]", value) if isinstance(value, list) else [value]
    if choices and any(each not in choices for each in chosen):
        raise ValidationError(f"Field '{name}' must be of {choices}, got: {json.dumps(value)[:100]}")
    return cast("FormValue", value)


def _is_finite(value: float) -> bool:
    """Return whether every server can read a number: not infinity, and no more digits than a float has room for."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _fields(schema: Mapping[str, object]) -> Mapping[str, Mapping[str, object]]:
    found = schema.get("properties")
    if not isinstance(found, Mapping):
        return {}
    named = cast("Mapping[str, object]", found)
    return {name: cast("Mapping[str, object]", field) for name, field in named.items() if isinstance(field, Mapping)}


def _single(schema: Mapping[str, object]) -> str | None:
    """Return the field that a value alone is for: the only one, or the only one that is required; None: there is none."""
    fields = list(_fields(schema))
    needed = [name for name in _list_needed(schema) if name in fields]
    found = needed if len(fields) > 1 else fields
    return found[0] if len(found) == 1 else None


def _list_needed(schema: Mapping[str, object]) -> Sequence[str]:
    needed = schema.get("required")
    return [str(each) for each in cast("list[object]", needed)] if isinstance(needed, list) else []


def _choices(field: Mapping[str, object]) -> list[str]:
    """Return the texts that a field allows: plain, or each with a title; of a field for several, those of its entries."""
    inner = field.get("items")
    if isinstance(inner, Mapping):
        return _choices(cast("Mapping[str, object]", inner))
    plain = field.get("enum")
    if isinstance(plain, list):
        return [str(each) for each in cast("list[object]", plain)]
    titled = field.get("oneOf", field.get("anyOf"))
    if not isinstance(titled, list):
        return []
    entries = [cast("Mapping[str, object]", each) for each in cast("list[object]", titled) if isinstance(each, Mapping)]
    return [str(each["const"]) for each in entries if "const" in each]
