"""Package tools: the text a model sees for what a tool returned. In: any value. Out: text. Pure; never blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from pydantic import BaseModel
from pydantic_core import to_json

from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.trace import jsonable

__all__ = ["render_value"]


def render_value(value: object) -> str:
    """Text of a tool's return value (S-TOOL-14): strings as they are, None as "", data as JSON, the rest by `str`."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, BaseModel | list | Mapping):
        try:
            return to_json(cast("object", value), fallback=str).decode()
        except ValueError:  # halves of surrogate pairs, data that contains itself
            return json.dumps(whole_data(jsonable(cast("object", value))), ensure_ascii=False, separators=(",", ":"))
    return str(value)
