"""Values of JSON data of which nothing is known: folds of broken records go on without what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast


def as_mapping(value: object) -> Mapping[str, object]:
    """Return the value if it is a mapping, else an empty one."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def as_sequence(value: object) -> Sequence[object]:
    """Return the value if it is a list or tuple, else an empty one."""
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


def as_count(value: object) -> int:
    """Return the value if it is a whole number, else 0."""
    return value if isinstance(value, int) else 0


def as_text(value: object, default: str = "") -> str:
    """Return the value if it is a text."""
    return value if isinstance(value, str) else default
