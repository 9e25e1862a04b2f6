"""Whether two definitions are the same, and where they differ. Pure.

In: JSON-able data of plans. Out: a hash of its canonical text; the paths of what differs.
Never: ids that are drawn anew for every object, which say nothing about what will run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import cast

from ensemble_ray.record.identity.names import stable_name
from ensemble_ray.values.trace import jsonable

#: The hidden id of a definition: for look-up inside a process, never part of the record.
_HIDDEN = "object_id"
_ABSENT = object()
#: Longest text of a value in a difference, characters.
_SHOWN = 60


def without_object_ids(data: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON form of some data without the hidden ids in it."""
    return cast("dict[str, object]", _strip(jsonable(data)))


def digest_of(data: Mapping[str, object]) -> str:
    """SHA-256 in hex of the canonical JSON text: keys sorted, no spaces, hidden ids left out."""
    text = json.dumps(without_object_ids(data), sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field that differs; its values as they are shown."""

    path: str
    recorded: str
    current: str

    def __str__(self) -> str:
        return f"{self.path}: {self.recorded} -> {self.current}"


def differences(recorded: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Return what differs, one line per field: `nodes.0.description: 'a' -> 'b'`; empty when nothing does."""
    return [str(each) for each in compare_fields(recorded, current)]


def compare_fields(recorded: Mapping[str, object], current: Mapping[str, object]) -> list[FieldDifference]:
    """Return what differs, field by field."""
    found: list[FieldDifference] = []
    _compare(without_object_ids(recorded), without_object_ids(current), "", found)
    return found


def _strip(value: object) -> object:
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        return {key: _strip(each) for key, each in mapping.items() if key != _HIDDEN}
    if isinstance(value, list):
        return [_strip(each) for each in cast("list[object]", value)]
    return value


def _compare(old: object, new: object, path: str, found: list[FieldDifference]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        was, now = cast("dict[str, object]", old), cast("dict[str, object]", new)
        for key in sorted({*was, *now}):
            _compare(was.get(key, _ABSENT), now.get(key, _ABSENT), f"{path}.{key}" if path else key, found)
    elif isinstance(old, list) and isinstance(new, list):
        pairs = zip_longest(cast("Sequence[object]", old), cast("Sequence[object]", new), fillvalue=_ABSENT)
        for position, (left, right) in enumerate(pairs):
            _compare(left, right, f"{path}.{position}" if path else str(position), found)
    elif old != new and not _is_same_name(old, new):
        found.append(FieldDifference(path or "value", _format(old), _format(new)))


def _is_same_name(old: object, new: object) -> bool:
    """Return whether both are names of the same code of the library, which was in another module before."""
    return isinstance(old, str) and isinstance(new, str) and stable_name(old) == stable_name(new)


def _format(value: object) -> str:
    text = "absent" if value is _ABSENT else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
