"""Where golden records lie. In: a case. Out: its record, and what the version that made it said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.golden.cases import Case
from tests.golden.records import Record

__all__ = ["load", "load_observed", "path_of", "write_observed"]

_CASES = Path(__file__).parent / "cases"


def path_of(case: Case) -> Path:
    """Return the file of a case's record."""
    return _CASES / case.runtime / f"{case.name}.jsonl"


def load(case: Case) -> Record:
    """Return the record of a case."""
    return Record.of_text(path_of(case).read_text(encoding="utf-8"))


def load_observed(case: Case) -> dict[str, Any]:
    """Return what was said of it."""
    found: dict[str, Any] = json.loads(path_of(case).with_suffix(".said.json").read_text(encoding="utf-8"))
    return found


def write_observed(case: Case, said: dict[str, Any]) -> None:
    """Write what is said of it."""
    parts = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(each, separators=(',', ':'))}" for key, each in part.items())
        + "\n}"
        for name, part in said.items()
    ]
    path_of(case).with_suffix(".said.json").write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
