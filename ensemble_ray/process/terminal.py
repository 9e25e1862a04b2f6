"""The terminal of this process, which one question has at a time. Package: process."""

from __future__ import annotations

from typing import Any, cast

from ensemble_ray.process.forks import new_lock

__all__ = ["is_terminal", "terminal_lock"]

#: Held while a person is asked at the terminal: questions of several tasks and runs come one after the other.
terminal_lock = new_lock()


def is_terminal(stream: object) -> bool:
    """Return whether a person is at it; a process may have none, or a closed one."""
    try:
        return bool(cast("Any", stream).isatty())
    except (AttributeError, ValueError):
        return False
