"""A memory file that several processes use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble_ray import MemoryEntry, SqliteMemory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a file may be."""
    return tmp_path / "memory.db"


def stored(memory: SqliteMemory) -> list[str]:
    """All contents of the scope."""
    return [entry.content for entry in memory.retrieve("a", "", 100_000)]


_WRITERS, _EACH = 8, 100


def _write(path: Path, number: int) -> None:
    memory = SqliteMemory(path)
    for each in range(_EACH):
        memory.store("a", MemoryEntry(content=f"{number} {each}", entry_id=f"{number}/{each}"))


def test_processes_store_side_by_side(path: Path) -> None:
    """S-MEM-117, S-MEM-68: nothing is lost; each process's entries are in its order."""
    spawning = multiprocessing.get_context("spawn")
    writers = [spawning.Process(target=_write, args=(path, number)) for number in range(_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * _WRITERS
    found = stored(SqliteMemory(path))
    for number in range(_WRITERS):
        of_writer = [content for content in found if content.startswith(f"{number} ")]
        assert of_writer == [f"{number} {each}" for each in range(_EACH)]
    assert len(found) == _WRITERS * _EACH


def test_a_killed_writer_leaves_the_file_whole(path: Path) -> None:
    """S-MEM-117: every entry is there whole, and others go on."""
    script = (
        "import itertools, sys\n"
        "from ensemble_ray import MemoryEntry, SqliteMemory\n"
        "memory = SqliteMemory(sys.argv[1])\n"
        "for number in itertools.count():\n"
        "    memory.store('a', MemoryEntry(content=str(number) + 'x' * 5000, metadata={'n': str(number)}))\n"
        "    print(number, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as writer:  # noqa: S603  our own text
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        told += writer.stdout.readlines()
    acknowledged = int([line for line in told if line.endswith("\n")][-1])
    memory = SqliteMemory(path)
    found = memory.retrieve("a", "", 100_000)
    assert len(found) >= acknowledged + 1
    assert all(entry.content == f"{n}{'x' * 5000}" and entry.get_meta("n") == str(n) for n, entry in enumerate(found))
    memory.store("a", MemoryEntry(content="after"))
    assert stored(memory)[-1] == "after"
