"""What a process and all its descendants use, read from `/proc` (Linux). In: a process id. Out: seconds and bytes."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Memory",
    "cpu_seconds",
    "kill_tree",
    "memory_by_process",
    "memory_of",
    "own_cpu_seconds",
    "processes_of",
    "tree_of",
]

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a tree of processes."""

    #: proportional set size: a page shared by n processes counts 1/n in each
    pss_bytes: int
    #: resident set size: a shared page counts fully in each
    rss_bytes: int
    processes: int


def tree_of(pid: int) -> list[int]:
    """Return the ids of the process and its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, open_ = [], [pid]
    while open_:
        current = open_.pop()
        found.append(current)
        open_ += children.get(current, [])
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree, with that of children that have ended and were waited for."""
    ticks = 0
    for member in tree_of(pid):
        if fields := _stat(member):
            ticks += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return ticks / _TICKS_PER_S


def own_cpu_seconds(pid: int) -> float | None:
    """Processor time of one process; None: it has ended."""
    fields = _stat(pid)
    return sum(int(field) for field in fields[11:13]) / _TICKS_PER_S if fields else None


def memory_of(pid: int) -> Memory:
    """Memory of the tree now."""
    pss = rss = processes = 0
    for member in tree_of(pid):
        # A process may end, or replace itself, while it is looked at.
        with contextlib.suppress(OSError):
            sizes = _rollup(member)
            pss += sizes["Pss"]
            rss += sizes["Rss"]
            processes += 1
    return Memory(pss_bytes=pss, rss_bytes=rss, processes=processes)


def processes_of(pid: int) -> dict[int, str]:
    """Return the processes of the tree by their ids, as they call themselves; what Ray runs in one comes first."""
    found: dict[int, str] = {}
    for member in tree_of(pid):
        if command := command_of(member):
            found[member] = command
    return found


def command_of(pid: int) -> str:
    """Return the command of a process as it calls itself; empty if it has ended."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)


def memory_by_process(pid: int) -> dict[tuple[int, str], int]:
    """Return the proportional set size of each process of the tree now, bytes, by its id and what it calls itself."""
    found: dict[tuple[int, str], int] = {}
    for member, name in processes_of(pid).items():
        with contextlib.suppress(OSError):
            found[member, name] = _rollup(member)["Pss"]
    return found


def kill_tree(pid: int) -> None:
    """End the tree at once."""
    for member in tree_of(pid):
        with contextlib.suppress(OSError):
            os.kill(member, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """Fields of `stat` from the state on; the command's name, which may hold anything, is left out."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def _rollup(pid: int) -> dict[str, int]:
    sizes = {"Pss": 0, "Rss": 0}
    for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes
