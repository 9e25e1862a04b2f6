"""Settings of Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

from ensemble_ray.process.concurrency import new_lock

#: Python's default is 700. Objects of a task are freed without the collector, which takes a fifth of a wide run's time
#: with the default.
_YOUNGEST = 20_000


def freeze_modules() -> None:
    """Exclude all existing objects from garbage collection; for processes of this library, after their imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, 20, 20)


class _ActiveRuns:
    """Stores the settings that the program had before the first run."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._count = 0
        self._before: tuple[int, int, int] | None = None

    def enter(self) -> None:
        with self._lock:
            self._count += 1
            youngest, middle, oldest = before = gc.get_threshold()
            # Respect a program that collects less often, or not at all.
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
    """Collect garbage less often inside the block; runs may overlap.

    Do not freeze objects: earlier garbage would stay until the end of the run.
    """
    _active_runs.enter()
    try:
        yield
    finally:
        _active_runs.leave()
