"""Facts of two runs of one case, compared. In: texts and records. Out: what is the same in every run of it."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any

from ensemble_ray.facts.runs import whole_output
from ensemble_ray.record.identity.definition import stable_name
from tests.golden.records import Record

__all__ = ["difference", "plain", "plain_facts"]

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00| UTC)?")
_UNIT = r"\d[\d,]*(?:\.\d+)? ?(?:ms|s|min|h|d)\b"
_PERIOD = re.compile(rf"P(?:\d+D)?T[\d.]+S|\b{_UNIT}(?: {_UNIT})*")
_LINE = re.compile(r", line \d+")
#: Fields of facts that are times.
_TIMES = ("_at", "_s")
_TIMED = frozenset({"at", "duration", "latency"})
#: Fields of recorded errors that golden records are older than.
_LATER = frozenset({"causes", "is_own", "place"})


def plain(text: str) -> str:
    """Return a text with a sign in the place of each instant, duration and random id."""
    return _LINE.sub(", line N", _PERIOD.sub("TIME", _ISO.sub("INSTANT", _UUID.sub("ID", text))))


def plain_facts(record: Record) -> list[str]:
    """Return the facts as texts without times, in an order that does not hang on who was faster."""
    return sorted(
        plain(json.dumps([kind, name, instance, _timeless(_whole(kind, data), record)], sort_keys=True))
        for _, kind, name, instance, _, _, data in record.facts
    )


def _whole(kind: str, data: Any) -> Any:
    """Return the data of a fact without what a format leaves out."""
    return {**data, "output": whole_output(data["output"])} if kind == "output" else data


def _timeless(value: Any, record: Record) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$body"}:
            return record.bodies[value["$body"]]
        return {
            name: "TRACE"
            if name == "stack_trace" and each
            else "DIGEST"
            if name == "digest" and "definition" in value
            else "TIME"
            if (name.endswith(_TIMES) or name in _TIMED) and each is not None
            else _timeless(each, record)
            for name, each in value.items()
            if not (name in _LATER and "error_type" in value)
        }
    if isinstance(value, str):
        return stable_name(value)  # code of the library may have been in another module
    return [_timeless(each, record) for each in value] if isinstance(value, list) else value


def difference(one: Record, other: Record) -> str:
    """Return the lines in which the facts of two records of one case differ; empty where they do not."""
    pairs = [plain_facts(each) for each in (one, other)]
    return "\n".join(difflib.unified_diff(*pairs, "one", "other", lineterm="", n=0))
