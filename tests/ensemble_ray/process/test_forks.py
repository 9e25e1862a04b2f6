"""What a forked child finds: free locks, and holders that have begun anew."""

from __future__ import annotations

import os
import threading
import time

import pytest

from ensemble_ray.process.concurrency import (
    new_lock,
    new_rlock,
    no_fork,
    on_library_loop,
    run_blocking,
    threads,
    track,
    was_quiet,
)
from tests.forking import PATIENCE_S, Child, call_in_child

pytestmark = [pytest.mark.program, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


class Counted:
    """Counts its forks."""

    forks = 0

    def after_fork(self) -> None:
        self.forks += 1


async def one() -> int:
    return 1


async def in_thread() -> int:
    return await threads.run(lambda: 1)


def test_locks_that_another_thread_holds_are_free_in_a_child() -> None:
    """S-ENG-81: and stay held in the parent."""
    locks = (new_lock(), new_rlock())
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with locks[0], locks[1]:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    try:
        assert held.wait(PATIENCE_S)
        assert call_in_child(lambda: [each.acquire(timeout=0) for each in locks]) == [True, True]
        assert not locks[0].acquire(timeout=0)
    finally:
        over.set()
    thread.join(PATIENCE_S)


def test_holders_begin_anew_once_in_each_child_alone() -> None:
    """S-ENG-80: also in a child of a child."""
    holder = track(Counted())
    assert call_in_child(lambda: (holder.forks, call_in_child(lambda: holder.forks))) == (1, 2)
    assert holder.forks == 0


def test_loop_and_threads_work_in_a_child_after_their_use() -> None:
    """S-ENG-80: also in a child of a child."""

    def use() -> tuple[int, int]:
        return run_blocking(one()), run_blocking(in_thread())

    assert use() == (1, 1)
    assert call_in_child(lambda: (use(), call_in_child(use))) == ((1, 1), (1, 1))
    assert use() == (1, 1)


def test_loop_works_in_a_child_that_was_forked_on_the_loop() -> None:
    """S-ENG-81: its only thread is that of its parent's loop."""

    async def fork() -> tuple[bool, tuple[bool, int]]:
        return on_library_loop(), call_in_child(lambda: (on_library_loop(), run_blocking(one())))

    assert run_blocking(fork()) == (True, (False, 1))


def test_fork_waits_for_other_threads_inside_and_they_for_it() -> None:
    """S-ENG-81: what is inside is whole in the child."""
    inside, over, parts = threading.Event(), threading.Event(), [0, 0]

    def change() -> None:
        while not over.is_set():
            with no_fork(), no_fork():
                parts[0] += 1
                inside.set()
                time.sleep(0)
                parts[1] += 1

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        assert inside.wait(PATIENCE_S)
        for _ in range(5):
            quiet, (first, second) = call_in_child(lambda: (was_quiet(), parts))
            assert quiet
            assert first == second
            assert thread.is_alive()
    finally:
        over.set()
    thread.join(PATIENCE_S)


def test_fork_inside_of_its_own_block_goes_through() -> None:
    """S-ENG-81: a thread does not wait for itself."""
    with no_fork():
        assert call_in_child(lambda: (was_quiet(), os.getppid())) == (True, os.getpid())
    child = Child(was_quiet)
    assert child.result() is True
