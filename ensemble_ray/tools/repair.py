"""Package tools: arguments that nearly fit a tool's schema, repaired. Pure.

In: the text that a model wrote for a call, and the schema of its parameters. Out: the text that it meant, and what was changed. Only what
does not fit is changed, and only where the schema leaves one reading; half an answer is not completed. The work is linear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

__all__ = ["RepairedArguments", "repair_arguments"]

#: How deep values are compared with their schema.
_DEEPEST = 40
#: Changes that are named; more are made, and not named.
_MOST_REPAIRS = 20
_LONGEST_NAME = 60
_WHOLE = "arguments"
_FENCE = "```"
#: Texts, also one without an end, are stepped over; what is left are commas before a bracket that closes.
_SPARE_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+(?:"|\\?\Z))|,(?=\s*+[}\]])', re.DOTALL)
_lenient = json.JSONDecoder(strict=False)


class RepairedArguments(NamedTuple):
    """Arguments as JSON text, and what was repaired in them, one short text each."""

    text: str
    repairs: tuple[str, ...]


def repair_arguments(text: str, schema: Mapping[str, object]) -> RepairedArguments | None:
    """Return arguments as the model meant them; None: there is nothing to repair, or no sure way to do it.

    Args:
        text: What the model wrote.
        schema: JSON schema of the parameters; its keywords about types, properties and required ones are read.
    """
    repair = _Repair(schema)
    try:
        arguments = repair.read_object(text)
        if arguments is None:
            return None
        fitting = repair.fit(arguments, schema, "", 0)
        if not repair.changes:
            return None
        return RepairedArguments(json.dumps(fitting), tuple(list(repair.changes)[:_MOST_REPAIRS]))
    except RecursionError:  # nested beyond reason
        return None


class _Repair:
    """Reads one text, and notes what it changes."""

    def __init__(self, schema: Mapping[str, object]) -> None:
        self._definitions = schema.get("$defs")
        self.changes: dict[str, None] = {}

    def read_object(self, text: str) -> dict[str, object] | None:
        """Return the object that a text is, or is meant to be."""
        value = self._decode(text, _WHOLE)
        if value is None and text.strip() == "null":
            value = {}
            self._note(_WHOLE, "null")
        if isinstance(value, str):
            value = self._decode(value, _WHOLE)
            self._note(_WHOLE, "JSON in a string")
        return cast("dict[str, object]", value) if isinstance(value, dict) else None

    def fit(self, value: object, schema: object, where: str, depth: int) -> object:
        """Return a value such that it fits its schema as far as types go."""
        if depth > _DEEPEST or not isinstance(schema, Mapping):
            return value
        schemas = list(self._alternatives(cast("Mapping[str, object]", schema), 0))
        kinds = _kinds_of(schemas)
        if isinstance(value, str) and kinds and "string" not in kinds:
            inner = self._decode(value, where, is_whole=False)
            if inner is not _NO_JSON and not isinstance(inner, str) and kinds & _kind_of(inner):
                self._note(where, "JSON in a string")
                value = inner
        matching = [each for each in schemas if (_kinds_of([each]) or set()) & _kind_of(value)]
        if len(matching) != 1:
            return value
        (schema,) = matching
        if isinstance(value, list):
            return [self.fit(each, schema.get("items"), where, depth + 1) for each in cast("list[object]", value)]
        if isinstance(value, dict):
            return self._fit_object(cast("dict[str, object]", value), schema, where, depth)
        return value

    def _fit_object(
        self, value: dict[str, object], schema: Mapping[str, object], where: str, depth: int
    ) -> dict[str, object]:
        named = schema.get("properties")
        properties = cast("Mapping[str, object]", named) if isinstance(named, Mapping) else {}
        required = schema.get("required")
        needed = cast("list[object]", required) if isinstance(required, list) else []
        fitting: dict[str, object] = {}
        for name, each in value.items():
            inner = properties.get(name, schema.get("additionalProperties"))
            place = f"{where}.{name}" if where else name
            if each is None and name in properties and name not in needed and not self._may_be_null(inner):
                self._note(place, "null for an argument that can be left out")
            else:
                fitting[name] = self.fit(each, inner, place, depth + 1)
        return fitting

    def _may_be_null(self, schema: object) -> bool:
        if not isinstance(schema, Mapping):
            return True
        kinds = _kinds_of(list(self._alternatives(cast("Mapping[str, object]", schema), 0)))
        return kinds is None or "null" in kinds

    def _alternatives(self, schema: Mapping[str, object], depth: int) -> Iterable[Mapping[str, object]]:
        """Return the schemas of which a value fits one; references are followed."""
        reference = schema.get("$ref")
        if isinstance(reference, str) and isinstance(self._definitions, Mapping):
            named = cast("Mapping[str, object]", self._definitions).get(reference.rpartition("/")[2])
            schema = cast("Mapping[str, object]", named) if isinstance(named, Mapping) else {}
        choices = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(choices, list) or depth > _DEEPEST:
            yield schema
            return
        for each in cast("list[object]", choices):
            if isinstance(each, Mapping):
                yield from self._alternatives(cast("Mapping[str, object]", each), depth + 1)
            else:
                yield {}

    def _decode(self, text: str, where: str, *, is_whole: bool = True) -> object:
        """Return the JSON value of a text, around which a model may have written more."""
        try:
            return cast("object", json.loads(text))
        except ValueError:
            pass
        body, notes = text.strip(), dict[str, None]()
        if body.startswith(_FENCE) and body.endswith(_FENCE) and "\n" in body:
            body = body.partition("\n")[2].removesuffix(_FENCE).strip()
            notes["a code fence"] = None
        for repaired in (body, _SPARE_COMMA.sub(r"\1", body)):
            try:
                value, end = _lenient.raw_decode(repaired)
            except ValueError:
                continue
            rest = repaired[end:].strip()
            if not isinstance(value, dict | list) or any(each in rest for each in "{[") or (rest and not is_whole):
                return _NO_JSON
            if len(repaired) < len(body):
                notes["a comma too many"] = None
            if rest:
                notes["text after it"] = None
            for note in notes or {"raw control characters": None}:
                self._note(where, note)
            return cast("object", value)
        return _NO_JSON

    def _note(self, where: str, what: str) -> None:
        self.changes[f"{where[:_LONGEST_NAME] or _WHOLE}: {what}"] = None


#: What a text is that is no JSON; None is.
_NO_JSON = object()


def _kinds_of(schemas: Iterable[Mapping[str, object]]) -> set[str] | None:
    """Return the types that schemas allow together; None: any."""
    kinds: set[str] = set()
    for schema in schemas:
        named = schema.get("type")
        listed = cast("list[object]", named) if isinstance(named, list) else [named]
        if not listed or not all(isinstance(each, str) for each in listed):
            return None
        kinds.update(cast("list[str]", listed))
        if schema.get("nullable") is True:
            kinds.add("null")
    return kinds


def _kind_of(value: object) -> set[str]:
    """Return the types that a value is of."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}
