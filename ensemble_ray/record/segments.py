"""The segments of a run's record: one file of facts per writer. Room: record.

In: the files of a run's directory. Out: their facts, in one order. Never: a guess about a damaged line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ensemble_ray.errors import RecordError
from ensemble_ray.messages import Fact
from ensemble_ray.record.files import LineFile, Place, whole_lines
from ensemble_ray.record.rendering import FORMAT, Resolve, fact_of

__all__ = ["Located", "located_facts", "new_segment", "segment_files"]

_PREFIX = "facts-"
_SUFFIX = ".jsonl"


class Located(NamedTuple):
    """A fact and where it lies."""

    fact: Fact
    place: Place


def segment_files(directory: Path) -> list[Path]:
    """The segments of a run."""
    return sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}"))


def new_segment(directory: Path, run_id: str, writer: str) -> tuple[LineFile, str]:
    """A segment of its own for a writer; its name gets a number where that name is taken. Gives file and name.

    Raises:
        OSError: it cannot be made.
    """
    number = 1
    while True:
        name = writer if number == 1 else f"{writer}-{number}"
        try:
            file = LineFile(directory / f"{_PREFIX}{name}{_SUFFIX}")
        except FileExistsError:
            number += 1
            continue
        file.append([json.dumps({"format": FORMAT, "run": run_id, "writer": name}).encode() + b"\n"])
        return file, name


def located_facts(directory: Path, run_id: str, resolve: Resolve) -> list[Located]:
    """All facts of a run in the order of their times, those of one writer in the order in which it wrote them.

    Raises:
        RecordError: a file is damaged, or of a newer format.
    """
    keyed: list[tuple[tuple[float, str, int], Located]] = []
    for path in segment_files(directory):
        latest = float("-inf")
        for number, located in enumerate(_facts_of(path, run_id, resolve)):
            latest = max(latest, located.fact.at)  # a clock that was set back does not reorder a writer's facts
            keyed.append(((latest, path.name, number), located))
    keyed.sort(key=lambda pair: pair[0])
    return [located for _, located in keyed]


def _facts_of(path: Path, run_id: str, resolve: Resolve) -> Iterator[Located]:
    for number, (place, line) in enumerate(whole_lines(path), start=1):
        try:
            if number == 1:
                _check_header(line, path)
                continue
            fact = fact_of(run_id, line, resolve)
        except (ValueError, RecursionError) as error:
            if isinstance(error, RecordError):
                raise
            msg = f"The record is damaged: line {number} of {path} cannot be read ({error}). Without that line, the rest can."
            raise RecordError(msg, str(path)) from error
        yield Located(fact, place)


def _check_header(line: bytes, path: Path) -> None:
    header: object = json.loads(line)
    match header:
        case {"format": int(version)} if version <= FORMAT:
            return
        case {"format": int(version)}:
            msg = f"The record {path} is of format {version}, this version reads up to {FORMAT}: update ensemble-ray"
            raise RecordError(msg, str(path))
        case _:
            msg = "the first line must name the format"
            raise ValueError(msg)
