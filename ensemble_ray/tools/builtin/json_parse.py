"""Picks one value out of JSON. Package: built-in tools. In: a path and a JSON text; out: the value as text.

Pure. What cannot be parsed or found is a failure for the model to read, never a crash: not even by a number of ten
thousand digits, brackets nested beyond Python's stack, or half a surrogate pair.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable
from typing import cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.typed import AbstractTypedAgentTool

__all__ = ["JsonParserTool"]

#: one step of a path: a key, or an index in brackets
_STEP = re.compile(r"([^.\[\]]+)|\[(-?[0-9]{1,18})\]")


class JsonParserInput(BaseModel):
    """Where to look, and in what."""

    model_config = ConfigDict(populate_by_name=True)

    json_path: str = Field(description="Path to the value, for example user.name, items[0].title or [1].x")
    #: pydantic keeps `json` for itself, hence the alias (S-BIT-54)
    text: str = Field(alias="json", description="The JSON text to read from")


class JsonParserTool(AbstractTypedAgentTool[JsonParserInput]):
    """Extracts a value from JSON by a path of dots and brackets.

    Given one plain string, as by a pipeline or a handler, it takes the path from the first line and the JSON from the
    rest.
    """

    input_type = JsonParserInput

    name = "json_parser"
    effect = "none"
    description = (
        "Extracts one value from a JSON text. The path names keys separated by dots and array positions in "
        "brackets, counted from 0: user.name, items[0].title, [1].x"
    )

    def do_execute(self, text: str, /) -> ToolResult | Awaitable[ToolResult]:
        """Take named arguments as JSON, or the two-line form."""
        text = text or ""
        if _is_named(text):
            return super().do_execute(text)
        path, _, document = text.partition("\n")
        return extract(path, document)

    def execute_typed(self, arguments: JsonParserInput, /) -> ToolResult:
        """Give the value at the path."""
        return extract(arguments.json_path, arguments.text)


def _is_named(text: str) -> bool:
    """Whether it is named arguments. No path begins with a brace, but a path may be missing and its line be empty."""
    if not text.lstrip().startswith("{"):
        return False
    if text.partition("\n")[0].strip():
        return True
    try:
        arguments: object = from_json(text)
    except (ValueError, TypeError):  # the latter: half of a surrogate pair
        return False
    return isinstance(arguments, dict) and "json_path" in arguments


class _NotFoundError(ValueError):
    """The path leads nowhere; the text says where it ends."""


def extract(path: str, text: str) -> ToolResult:
    """Return the value at a path of a JSON text, as the model shall see it (S-BIT-51 to S-BIT-53)."""
    if not path.strip():
        return ToolResult.failure("Path expression must not be blank")
    if not text.strip():
        return ToolResult.failure("JSON content must not be blank")
    try:
        document: object = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        return ToolResult.success(_render(_walk(document, path.strip())))
    except _NotFoundError as error:
        return ToolResult.failure(str(error))
    except RecursionError:
        return ToolResult.failure("Invalid JSON: nested too deeply")
    except ValueError as error:
        return ToolResult.failure(f"Invalid JSON: {error}")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"number {digits} is out of range")
    return value


def _walk(document: object, path: str) -> object:
    value = document
    for step in _steps(path):
        if isinstance(step, int):
            value = _item(value, step, path)
        elif not isinstance(value, dict):
            raise _NotFoundError(f"Path not found: '{path}'")
        else:
            members = cast("dict[str, object]", value)
            if step not in members:
                raise _NotFoundError(f"Path not found: '{step}'")
            value = members[step]
    return value


def _item(value: object, index: int, path: str) -> object:
    if not isinstance(value, list):
        raise _NotFoundError(f"Path not found: '{path}'")
    items = cast("list[object]", value)
    if not 0 <= index < len(items):
        raise _NotFoundError(
            f"Array index out of bounds: index {index} is out of bounds for array of size {len(items)}"
        )
    return items[index]


def _steps(path: str) -> list[str | int]:
    """Keys and indexes in order: `m[0].x` is `m`, 0, `x`."""
    steps: list[str | int] = []
    at = 0
    while at < len(path):
        # a dot stands between a step and a key, nowhere else
        if steps and path[at] == ".":
            at += 1
            found = _STEP.match(path, at)
            expected = found is not None and found[1] is not None
        else:
            found = _STEP.match(path, at)
            expected = found is not None and (found[1] is None or not steps)
        if found is None or not expected:
            raise _NotFoundError(f"Path not found: '{path}'")
        steps.append(found[1] if found[1] is not None else int(found[2]))
        at = found.end()
    return steps


def _render(value: object) -> str:
    """Strings bare, everything else as compact JSON; half a surrogate pair, which no file takes, becomes U+FFFD."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return whole_text(text)
