"""The terminal of this process, which one question has at a time. Package: process."""

from __future__ import annotations

import threading
from typing import Any, cast

__all__ = ["is_terminal", "terminal_lock"]

#: Held while a person is asked at the terminal: questions of several tasks and runs come one after the other.
terminal_lock = threading.Lock()


def is_terminal(stream: object) -> bool:
    """Return whether a person is at it; a process may have none, or a closed one."""
    try:
        return bool(cast("Any", stream).isatty())
    except (AttributeError, ValueError):
        return False
