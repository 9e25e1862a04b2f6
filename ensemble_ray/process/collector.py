"""Settings of Python's garbage collector, in processes of ours and while runs are active."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

from ensemble_ray.process.concurrency import new_lock

#: Allocations before a collection of the youngest generation; Python's default is 700. A task allocates thousands of
#: objects that are freed without the collector: with the default it takes a fifth of the time of a wide run.
_YOUNGEST = 20_000


def freeze_modules() -> None:
    """Exclude all existing objects from garbage collection. Call it once, when a process of ours has its modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, 20, 20)


class _ActiveRuns:
    """Counts active runs, and stores the settings that the program had before the first."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._count = 0
        self._before: tuple[int, int, int] | None = None

    def enter(self) -> None:
        with self._lock:
            self._count += 1
            youngest, middle, oldest = before = gc.get_threshold()
            # A program that collects less often, or not at all, has its reasons.
            if self._count == 1 and 0 < youngest < _YOUNGEST:
                self._before = before
                gc.set_threshold(_YOUNGEST, middle, oldest)

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._before is not None:
                if gc.get_threshold()[0] == _YOUNGEST:  # the program has not changed it meanwhile
                    gc.set_threshold(*self._before)
                self._before = None


_active_runs = _ActiveRuns()


@contextmanager
def collecting_less() -> Generator[None]:
    """Collect garbage less often while a run of this process is active; runs may overlap.

    Nothing is frozen: garbage that the program made before the run would stay until its end.
    """
    _active_runs.enter()
    try:
        yield
    finally:
        _active_runs.leave()
