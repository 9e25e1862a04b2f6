"""Runs in SQLite files for tests: facts, rows as they lie there, and programs that own a run."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import ensemble_ray
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.sqlite.losses import COUNT, RECORD, CountFile
from tests.template import run_forked

RUN = "run-1"
HOME_OF_CODE = Path(ensemble_ray.__file__).parents[1]
#: Beginning of a program that owns a run; its argument is the home.
_PROGRAM = """
import asyncio, errno, os, pathlib, resource, sys
from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.values.outputs import RunState
from ensemble_ray.ports import Persistence
from ensemble_ray.record.sqlite.store import SqliteStore

store = SqliteStore(pathlib.Path(sys.argv[1]))

def fact(turn, **data):
    return read_fact(run="run-1", kind="model", name=f"a#0/{turn}/model", at=1.0, data=data)
"""


def fact(name: str = "facts#0/0/model", at: float = 1.0, **data: object) -> Fact:
    """A model's answer."""
    return read_fact(run=RUN, kind="model", name=name, at=at, data=data)


async def output_of(rest: str, home: Path, cwd: Path = HOME_OF_CODE, *, arguments: Sequence[str] = ()) -> str:
    """What a program prints that begins with a store of that home and goes on with this."""
    command = [sys.executable, "-c", _PROGRAM + rest, str(home), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(HOME_OF_CODE)}
    done = await asyncio.to_thread(
        run_forked, command, check=True, cwd=cwd, capture_output=True, text=True, timeout=60, env=environment
    )
    return str(done.stdout)


def rows(home: Path, query: str) -> list[tuple[object, ...]]:
    """What a query of the run's file gives."""
    connection = sqlite3.connect(home / "runs" / RUN / RECORD)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def permit(home: Path, directories: int, files: int) -> None:
    """Set the rights of everything in a home."""
    for path in (home, *home.rglob("*")):
        path.chmod(directories if path.is_dir() else files)


def restart(directory: Path) -> None:
    """Let the notes of a run's record be of an earlier start of the machine."""
    count = directory / COUNT
    notes = count.read_bytes()
    count.unlink()
    with patch("ensemble_ray.record.sqlite.losses._boot", return_value=b"00000000-0000-0000-0000-000000000000"):
        file = CountFile(directory)
        committed, synced, effect = (notes[place * 64 : place * 64 + 12].strip(b" \0") for place in range(3))
        if effect:
            file.note(int(effect), has_effect=True)
        if synced:
            file.note_synced(int(synced))
        file.note(int(committed))
        file.close()
