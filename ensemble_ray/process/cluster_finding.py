"""Which cluster a process of this machine belongs to, by the programs around it (S-STU-35, S-DUR-34). Package: process.

The raylet starts the processes of actors, and its command line has the address of its cluster. A local Ray's raylet is a child of the driver,
and a template forks the processes for it: the template's command line has the raylet's process id. Only processes of this user are looked at. Must never happen: a cluster that is joined because it is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

__all__ = ["FoundCluster", "find_cluster"]

_ADDRESS = re.compile(r"--gcs-address=(\S+)")
_RAYLET = "raylet"
_RAYLET_OF_TEMPLATE = re.compile(r"--raylet-pid=(\d+)")
#: How such a program is let into its cluster; who asks there needs the same.
_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: How many programs are looked at upwards.
_MOST_PARENTS = 4


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """A cluster that a process belongs to."""

    address: str
    #: variables with which its programs were let in
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def find_cluster(pid: int) -> FoundCluster | None:
    """Return the cluster of a process of this machine; None where it is in none, or is not this user's."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            return None
        for each in _around(process):
            found = _cluster_of(each)
            if found is not None:
                return found
    except psutil.Error:
        pass  # it has gone: nothing is to be found any more
    return None


def _around(process: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the programs that started it, and those that it started."""
    for parent in process.parents()[:_MOST_PARENTS]:
        yield parent
        if raylet := _RAYLET_OF_TEMPLATE.search(" ".join(parent.cmdline())):
            yield psutil.Process(int(raylet[1]))
    yield from process.children()


def _cluster_of(process: psutil.Process) -> FoundCluster | None:
    """Return the cluster of a raylet; None: it is none."""
    try:
        if process.name() != _RAYLET or process.uids().real != os.getuid():
            return None
        line = " ".join(process.cmdline())
        given = process.environ()
    except psutil.Error:
        return None
    found = _ADDRESS.search(line)
    if found is None:
        return None
    return FoundCluster(found[1], tuple((name, given[name]) for name in _TOKENS if name in given))
