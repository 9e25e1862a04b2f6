"""Memory that several processes use at once, and one that is killed while it writes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from ensemble_ray import MemoryEntry
from ensemble_ray.memory.lasting import LastingMemory
from tests.contracts.memory_adapters import LASTING, Place
from tests.template import ForkedProgram

_WRITERS, _EACH = 8, 200
_TOPICS = ("money", "sea", "soup")


class _Topics:
    """As far from each other as can be, by the first word."""

    model = "topics"

    def embed(self, text: str) -> Sequence[float]:
        """Return the topic."""
        return [float(text.split(maxsplit=1)[0] == topic) for topic in _TOPICS]


@pytest.fixture(params=LASTING)
def place(request: pytest.FixtureRequest) -> Place:
    """An empty one."""
    return LASTING[request.param](request)


def _entry(writer: int, number: int) -> MemoryEntry:
    content = f"{_TOPICS[number % 3]} {writer} {number} " + "x" * (number % 50)
    return MemoryEntry(content=content, metadata={"n": str(number)}, entry_id=f"{writer}/{number}")


def _write(memory: LastingMemory, writer: int) -> None:
    for number in range(_EACH):
        memory.store("a", _entry(writer, number))
        if number % 40 == 0:
            _check_whole(memory.retrieve("a", "sea", 50))
            memory.entities.put(f"{writer}", f"{number}")


def _check_whole(found: Sequence[MemoryEntry]) -> None:
    """Each entry that is read is as it was written."""
    for entry in found:
        topic, _, number, rest = entry.content.split(" ", 3)
        assert entry.get_meta("n") == number
        assert (topic, rest) == (_TOPICS[int(number) % 3], "x" * (int(number) % 50))


def test_processes_store_side_by_side(place: Place) -> None:
    """S-MEM-117, S-MEM-142, S-MEM-68: 8 processes, 1,600 entries; nothing is lost or half-read; each writer's are in order."""
    memory = place(_Topics())
    starting = multiprocessing.get_context("forkserver")  # what they all need is imported once
    starting.set_forkserver_preload([__name__])
    writers = [starting.Process(target=_write, args=(memory, number)) for number in range(_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * _WRITERS
    assert memory.scopes() == {"a": _WRITERS * _EACH}
    found = place(None).retrieve("a", None, _WRITERS * _EACH)
    _check_whole(found)
    for writer in range(_WRITERS):
        numbers = [int(entry.content.split()[2]) for entry in found if entry.content.split()[1] == str(writer)]
        assert numbers == list(range(_EACH))
    near = memory.retrieve("a", "sea", _WRITERS * _EACH)
    assert sum(entry.content.startswith("sea ") for entry in near) == sum(n % 3 == 1 for n in range(_EACH)) * _WRITERS
    assert [entry.content.startswith("sea ") for entry in near] == sorted(
        (entry.content.startswith("sea ") for entry in near), reverse=True
    )
    assert dict(memory.entities.get_all()) == {str(writer): "160" for writer in range(_WRITERS)}


_SCRIPT = """
import itertools, pickle, sys
from ensemble_ray import MemoryEntry
memory = pickle.loads(bytes.fromhex(sys.argv[1]))
for number in itertools.count():
    memory.store("a", MemoryEntry(content=f"{number}" + "x" * 5000, metadata={"n": str(number)}))
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_the_place_whole(place: Place) -> None:
    """S-MEM-117, S-MEM-142: every entry is there whole, and others go on."""
    memory = place(None)
    command = [sys.executable, "-c", _SCRIPT, pickle.dumps(memory).hex()]
    with ForkedProgram[str](command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = [writer.stdout.readline() for _ in range(20)]
        os.kill(writer.pid, signal.SIGKILL)
        told += writer.stdout.readlines()
    acknowledged = int([line for line in told if line.endswith("\n")][-1])
    found = memory.retrieve("a", "", 100_000)
    assert len(found) >= acknowledged + 1
    assert all(entry.content == f"{n}{'x' * 5000}" and entry.get_meta("n") == str(n) for n, entry in enumerate(found))
    memory.store("a", MemoryEntry(content="after"))
    assert [entry.content for entry in memory.retrieve("a", "", 1)] == ["after"]
