"""What a run leaves outside its record.

Lines of tools, and of policies that were asked, each with its effect's key; rows and dead letters of items.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pyarrow import parquet

from ensemble_ray.values.ids import uuid_of

__all__ = ["World", "key_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Files in one directory."""

    #: where tools leave a line for each time that they did something
    lines: Path

    @property
    def questions(self) -> Path:
        """Where policies leave a line for each time that they were asked about a delegation."""
        return self.lines.with_name("questions")

    def done(self) -> list[Mapping[str, str]]:
        """What tools did, oldest first."""
        return _whole_lines(self.lines)

    def asked(self) -> list[Mapping[str, str]]:
        """What policies were asked, oldest first."""
        return _whole_lines(self.questions)

    def rows(self) -> list[Mapping[str, Any]]:
        """The outputs of items, oldest first; a parquet file's stand elsewhere until it is complete."""
        packed = self.lines.with_name("rows.parquet")
        until_then = packed.with_name("rows.parquet.rows.jsonl")
        if packed.exists() and not until_then.exists():
            return cast("list[Mapping[str, Any]]", cast("Any", parquet).read_table(packed).to_pylist())
        return _whole_lines(until_then) or _whole_lines(self.lines.with_name("rows.jsonl"))

    def letters(self) -> list[Mapping[str, Any]]:
        """The items that failed, oldest first."""
        return _whole_lines(self.lines.with_name("letters.jsonl"))


def _whole_lines(path: Path) -> list[Mapping[str, Any]]:
    """The lines; that of a process that died while it wrote is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def key_of(run_id: str, effect: str) -> str:
    """The key of an effect: a model call's and a tool call's idempotency key, a delegation's id."""
    return uuid_of(f"{run_id}/{effect}")
