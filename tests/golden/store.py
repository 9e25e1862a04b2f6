"""Where golden records lie. In: a case. Out: its record, and what the version that made it said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.golden.cases import Case
from tests.golden.records import Record

__all__ = ["PROJECT", "ROOT", "load", "load_observed", "path_of", "write_observed"]

#: The project's folder, and what stands for it in golden files.
ROOT, PROJECT = Path(__file__).parents[2], "{PROJECT}"
_CASES = Path(__file__).parent / "cases"


def path_of(case: Case) -> Path:
    """Return the file of a case's record."""
    return _CASES / case.runtime / f"{case.name}.jsonl"


def load(case: Case) -> Record:
    """Return the record of a case; what it names of the project is where the project is here."""
    return Record.of_text(path_of(case).read_text(encoding="utf-8").replace(PROJECT, str(ROOT)))


def load_observed(case: Case) -> dict[str, Any]:
    """Return what was said of it."""
    found: dict[str, Any] = json.loads(path_of(case).with_suffix(".said.json").read_text(encoding="utf-8"))
    return found


def write_observed(case: Case, said: dict[str, Any]) -> None:
    """Write what is said of it."""
    parts: list[str] = []
    for name, part in said.items():
        lines = [
            f" {json.dumps(key)}: {json.dumps(each, ensure_ascii=False, separators=(',', ':'))}"
            for key, each in part.items()
        ]
        joined = ",\n".join(lines)
        parts.append(f"{json.dumps(name)}: {{\n{joined}\n}}")
    path_of(case).with_suffix(".said.json").write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
