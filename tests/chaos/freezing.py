"""Freezes a process of a run at its moment, and wakes it: soon, or when others have gone on with its work.

In: a run, and a moment. Out: whether there was anybody to freeze. A process that wakes when it was replaced is a zombie:
what it still tries to write must be refused. Never: a process that is left frozen.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ensemble_ray.record.sqlite.journal import COMMIT_LOCK
from tests.chaos.disturbed import PATIENCE_S, Disturbed
from tests.chaos.killing import actor_of
from tests.chaos.kills import Kill
from tests.chaos.moments import GIVEN_UP, ORPHANED, PAUSED, Moment
from tests.chaos.victims import (
    VICTIMS,
    Victim,
    children_of,
    end_session,
    is_there,
    kill_all,
    processes_of,
    stop_all,
    wait_gone,
    wake_all,
)
from tests.processes import Program

__all__ = ["REFUSED", "freeze", "holds"]

#: What a process says whose facts are refused, since another one has taken its run or its task.
REFUSED = "must stop"
#: How long somebody is hunted for who is in the middle of a commit, s.
_HUNT_S = 3.0
#: Longest time of being frozen where nothing else is waited for, s.
_PAUSE_S = 1.5
#: How long a node may be there again when it was given up, s.
_BACK_S = 5.0
#: How long a woken actor may take to be told that its time is over, s; it says so to nobody.
_LIVES_ON_S = 15.0


def freeze(run: Disturbed, moment: Moment, rng: random.Random) -> bool:
    """Wait for the moment, freeze, let others go on where that is to be, and wake; False when the run ended before."""
    if not run.until_reached(moment):
        return False
    with contextlib.nullcontext() if moment.most is None else run.gate.closed(run.server, moment.most):
        time.sleep(moment.delay_s)
        if run.is_over():
            return False
        pids = _pids(run, moment.victim, rng)
        if not pids:
            return not run.is_over()
        if moment.is_in_commit:
            _hunt(run, pids[0])
        at = _stop(run, pids)
    is_in_commit = any(holds(pid, run.record / COMMIT_LOCK) for pid in pids)
    run.tell(f"freeze {moment}{', in a commit' if is_in_commit else ''}")
    run.report.in_commits += is_in_commit
    run.report.strikes += 1
    try:
        return _frozen(run, replace(moment, is_in_commit=is_in_commit), at, pids, rng)
    finally:
        _wake(run, pids)


def _frozen(run: Disturbed, moment: Moment, at: float, pids: Sequence[int], rng: random.Random) -> bool:
    if moment.way == ORPHANED:
        return _orphaned(run, moment, at, pids, rng)
    if moment.way == GIVEN_UP:
        return _given_up(run, moment, at, pids)
    if moment.way == PAUSED or not run.has_begun:  # of a run that has no plan yet there is nothing to take over
        count = run.server.stats()["requests"] + moment.more
        with contextlib.suppress(TimeoutError):
            run.server.wait_arrived(count, timeout_s=rng.uniform(0.02, _PAUSE_S))
        _wake(run, pids)
        return True
    return _taken_over(run, moment, at, pids)


def _pids(run: Disturbed, victim: Victim, rng: random.Random) -> list[int]:
    """Who stands still together."""
    if victim.takes_driver:
        if run.driver is None:
            return []
        session = run.driver.process.pid
        return [pid for pid, _ in processes_of(session)] if victim.name == "cluster" else [session]
    pid = actor_of(run, victim, rng)
    if pid is None:
        return []
    return [pid, *children_of(pid)] if victim.ground == "two_nodes" else [pid]


def _stop(run: Disturbed, pids: Sequence[int]) -> float:
    run.frozen.update(pids)
    return stop_all(pids)


def _wake(run: Disturbed, pids: Sequence[int]) -> float:
    run.frozen.difference_update(pids)
    return wake_all(pids)


# Who wakes too late.


def _taken_over(run: Disturbed, moment: Moment, at: float, pids: Sequence[int]) -> bool:
    """Another process takes the run; the one that had it is refused when it wakes."""
    zombie, owners = run.driver, run.owners()
    assert zombie is not None
    is_scheduler = not moment.victim.takes_driver
    options = ["--runtime", "inline"] if is_scheduler else []  # its cluster can do nothing for it meanwhile
    heir = run.start("resume", run.run_id, "--take-over", *options)
    run.until(lambda: run.wait_owner(owners))
    if run.owners() <= owners:
        return _not_taken(run, zombie, heir)
    count = run.server.stats()["served"] + moment.more
    run.until(lambda: run.server.wait_served(count, timeout_s=0.1))
    _wake(run, pids)
    _judge_zombie(run, zombie, moment)
    run.kills.append(_as_kill(moment, at, until=time.time()))
    return not is_scheduler  # nothing more of it is on the cluster


def _not_taken(run: Disturbed, zombie: Program, heir: Program) -> bool:
    """Nobody had to go on with it: it was about to say that it has ended, or it could not be taken."""
    code = heir.process.wait(timeout=PATIENCE_S)
    if code == run.scenario.exit_code:
        return False
    run.break_promise(f"the run could not be taken over: exit code {code}: {heir.text[-500:]}")
    run.driver = zombie
    return False


def _judge_zombie(run: Disturbed, zombie: Program, moment: Moment) -> None:
    """It ends, without an output, and says why."""
    try:
        code = zombie.process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        run.break_promise(f"{moment.victim.name} woke when its run was taken over, and did not end")
        return
    finally:
        end_session(zombie.process.pid)
    if moment.is_in_commit and (code == -signal.SIGKILL or not moment.victim.takes_driver):
        run.report.ended += 1  # it held the file's locks: who took the run over ended it
        return
    if code in {0, run.scenario.exit_code} or REFUSED not in zombie.text:
        run.break_promise(
            f"{moment.victim.name} woke when its run was taken over: exit code {code}: {zombie.text[-500:]}"
        )
    run.report.refused += REFUSED in zombie.text


def _orphaned(run: Disturbed, moment: Moment, at: float, pids: Sequence[int], rng: random.Random) -> bool:
    """The scheduler dies, and its successor hands the frozen one's tasks out again."""
    scheduler, owners = actor_of(run, VICTIMS["scheduler"], rng), run.owners()
    if scheduler is None:
        return not run.is_over()
    kill_all([scheduler])
    wait_gone(lambda: [str(scheduler)] if is_there(scheduler) else [], "scheduler")
    count = run.server.stats()["requests"] + moment.more
    if moment.is_in_commit:  # nobody else can write to the run: it waits for the frozen one
        time.sleep(rng.uniform(0, _PAUSE_S))
        _wake(run, pids)
    if not run.scenario.is_fed:
        run.until(lambda: run.wait_owner(owners))
    went_on = run.until(lambda: run.server.wait_arrived(count, timeout_s=0.1))
    woken_at = _wake(run, pids)
    run.kills.append(_as_kill(moment, at, until=woken_at + _LIVES_ON_S))
    return went_on


def _given_up(run: Disturbed, moment: Moment, at: float, pids: Sequence[int]) -> bool:
    """The node stands still until the run has ended without it."""
    deadline = time.monotonic() + run.scenario.patience_s
    while not run.is_over() and time.monotonic() < deadline:
        time.sleep(0.05)
    if not run.is_over():
        run.break_promise("the run did not end without the node that stood still")
    woken_at = _wake(run, pids)
    # It hears that it was given up, and ends; where the run ended before that, there is nothing to hear.
    while is_there(pids[0]) and time.time() < woken_at + _BACK_S:
        time.sleep(0.05)
    kill_all(pids)
    wait_gone(lambda: [str(pid) for pid in pids[:1] if is_there(pid)], "the node that came back")
    run.kills.append(_as_kill(moment, at, until=woken_at + _LIVES_ON_S))
    return False


def _as_kill(moment: Moment, at: float, *, until: float) -> Kill:
    """What the freeze explains: for its work it was as good as dead."""
    return Kill(
        victim=f"frozen {moment.victim.name}", at=at, repeats_calls=True, when=str(moment), until=until, is_zombie=True
    )


# In the middle of a commit.


def _hunt(run: Disturbed, pid: int) -> None:
    """Stop a process while it commits; it goes on when it is not caught at it."""
    lock = run.record / COMMIT_LOCK
    deadline = time.monotonic() + _HUNT_S
    while time.monotonic() < deadline and is_there(pid):
        _stop(run, [pid])
        if holds(pid, lock):
            return
        _wake(run, [pid])
        time.sleep(0.0005)


def holds(pid: int, lock: Path) -> bool:
    """Whether a process holds the lock of a file, as the kernel tells."""
    with contextlib.suppress(OSError):
        inode = lock.stat().st_ino
        for line in Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[4] == str(pid) and fields[5].endswith(f":{inode}"):
                return True
    return False
