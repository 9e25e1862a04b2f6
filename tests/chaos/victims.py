"""What is killed or frozen, by name: signals to processes of the harness's own programs, found in /proc by their session.

Never: a process of somebody else's, or one found by its name alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

__all__ = [
    "VICTIMS",
    "Ground",
    "Victim",
    "actors_of",
    "children_of",
    "end_session",
    "is_there",
    "kill_all",
    "one_of",
    "processes_of",
    "stop_all",
    "wait_gone",
    "wake_all",
    "workers_of",
]

#: Where the run lives: in one process; on a cluster that its driver started; on one that was there; on its second node.
Ground = Literal["inline", "own_cluster", "cluster", "two_nodes"]
#: Ray's own: two that stay when their node is gone, and workers that have not come to be anything, which take up to a
#: minute to notice that there is nothing to belong to.
_HELPERS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
_STARTING = "ray/_private/workers/default_worker.py"
#: How long killed processes may take to be gone, and stopped ones to stand still, s.
_GONE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A kind of process."""

    name: str
    ground: Ground
    #: title of its actor processes; empty: no actor
    actor: str = ""
    #: whether the driver is gone after it
    takes_driver: bool = False
    #: whether the run is over for now: nothing goes on until it is resumed
    interrupts_run: bool = False
    #: whether a model call that was on its way may be made again
    repeats_calls: bool = True
    #: how long what belonged to it may work on until it notices, s
    lives_on_s: float = 0.0
    #: how often one run may suffer it; None: as often as one likes
    most: int | None = None

    def in_dynamic_run(self) -> Victim:
        """The same where the driver makes the tasks and owns the run: it goes on nowhere without it.

        The processes of its tasks work on until somebody who goes on with it takes them away. The third death of a
        scheduler under the same tasks interrupts it.
        """
        if self.name == "scheduler":
            return replace(self, most=2)
        if self.name != "driver":
            return self
        return replace(self, interrupts_run=True, repeats_calls=True, lives_on_s=10.0)


VICTIMS = {
    each.name: each
    for each in (
        Victim(name="process", ground="inline", takes_driver=True, interrupts_run=True),
        # The third death under a task fails it, as is promised; so two a run.
        Victim(name="agent", ground="cluster", actor="ray::AgentActor", most=2),
        # Its workers go on, and its successor asks them for what they are at.
        Victim(name="manager", ground="cluster", actor="ray::ManagerActor", most=2),
        # The process of handlers and of policies; a scenario without any has none.
        Victim(name="callables", ground="cluster", actor="ray::CallableHost", most=2),
        Victim(name="scheduler", ground="cluster", actor="ray::SchedulerActor"),
        Victim(name="hub", ground="cluster", actor="ray::EventHub", repeats_calls=False),
        Victim(name="driver", ground="cluster", takes_driver=True, repeats_calls=False),
        Victim(name="own-driver", ground="own_cluster", takes_driver=True, interrupts_run=True),
        Victim(name="cluster", ground="own_cluster", takes_driver=True, interrupts_run=True),
        # Only its raylet is killed; its workers notice that it is gone, or are told.
        Victim(name="node", ground="two_nodes", most=2, lives_on_s=15.0),
    )
}


def processes_of(session: int) -> Iterator[tuple[int, str]]:
    """Ids and titles of a session's processes, zombies left out."""
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            pid = int(place.name)
            if os.getsid(pid) == session and not _is_zombie(place):
                yield pid, (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def is_there(pid: int) -> bool:
    """Whether a process can still do something."""
    with contextlib.suppress(OSError):
        return not _is_zombie(Path("/proc", str(pid)))
    return False


def _is_zombie(place: Path) -> bool:
    return _state(place) == "Z"


def _state(place: Path) -> str:
    # The name in brackets may hold anything, so the state is what follows the last bracket.
    return (place / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


def children_of(parent: int) -> list[int]:
    """Processes that a process started and that are there, in the order of their ids."""
    found: list[int] = []
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            stat = (place / "stat").read_text(encoding="utf-8", errors="replace") if place.name.isdigit() else ""
            if stat and int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(place.name))
    return sorted(found)


def actors_of(session: int, title: str) -> list[int]:
    """Processes of that actor class in a session, in the order of their ids."""
    return sorted(pid for pid, shown in processes_of(session) if shown.startswith(title))


def workers_of(session: int) -> list[str]:
    """Titles of a session's processes that can still do something when its node is gone."""
    shown = [title for _, title in processes_of(session)]
    return [title for title in shown if not title.startswith(_HELPERS) and _STARTING not in title]


def kill_all(pids: Sequence[int]) -> float:
    """SIGKILL to all of them; gives the time of it."""
    at = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at


def stop_all(pids: Sequence[int]) -> float:
    """SIGSTOP to all of them; gives the time at which all their threads stood still.

    Raises:
        AssertionError: they do not.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _GONE_S
    while moving := [pid for pid in pids if not _stands_still(pid)]:
        assert time.monotonic() < deadline, f"stopped, and still moving: {moving}"
        time.sleep(0.0005)
    return time.time()


def wake_all(pids: Collection[int]) -> float:
    """SIGCONT to all of them; gives the time just before it."""
    at = time.time()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return at


def _stands_still(pid: int) -> bool:
    """Whether no thread of it does anything: all are stopped, or it is gone."""
    with contextlib.suppress(OSError):
        return all(_state(thread) in "TtZX" for thread in Path("/proc", str(pid), "task").iterdir())
    return True


def wait_gone(still_there: Callable[[], Sequence[str]], what: str) -> None:
    """Wait until killed processes are gone.

    Raises:
        AssertionError: they are not.
    """
    deadline = time.monotonic() + _GONE_S
    while left := still_there():
        assert time.monotonic() < deadline, f"{what} was killed and is still there: {[each[:100] for each in left]}"
        time.sleep(0.02)


def end_session(session: int) -> float:
    """Kill a program and all that it started; gives the time at which the first of them was killed.

    Killing the oldest first would let the others see it and clean up; so all are stopped before any is killed.
    """
    pids = [pid for pid, _ in processes_of(session)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return kill_all(pids)


def one_of(pids: Sequence[int], rng: random.Random) -> int | None:
    """One of them by lot; None when there is none."""
    return rng.choice(list(pids)) if pids else None
