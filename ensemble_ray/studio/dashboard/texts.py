"""Messages as the text of a frame, and back (S-WEB-30, S-WEB-31). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from ensemble_ray.text.foreign_text import whole_data


def encode(kind: str, data: Mapping[str, object]) -> str:
    """Return a message as one JSON object."""
    whole = whole_data({"type": kind, **data})
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def decode(text: str) -> tuple[str, Mapping[str, object]]:
    """Return the type and the data of what a client sent.

    Raises:
        ValueError: it is no JSON object with a type.
    """
    try:
        data: object = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("it is no object")  # noqa: TRY004  of a text, not of an argument
    fields = cast("dict[str, object]", data)
    kind = fields.get("type")
    if not isinstance(kind, str):
        raise ValueError("it has no type")  # noqa: TRY004  of a text, not of an argument
    return kind, fields
