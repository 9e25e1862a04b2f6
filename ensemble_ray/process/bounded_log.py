"""Loggers whose warnings and errors are bounded lines, whatever others wrote (S-SEC-58). Package: process.

In: a module's name. Out: its logger. Must never happen: a line break of a model, an endpoint or a user that makes a
second line of a warning, a page of theirs in a log, an exception because of a text. Equal warnings of many tasks of one run
are merged where `merge_warnings` says so.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ensemble_ray.process.context import current_log_context
from ensemble_ray.text.foreign_text import one_line

__all__ = ["BoundedLogger", "bounded_logger", "is_repeated", "merge_warnings"]

_NUMBER = re.compile(r"\d+")
#: Different warnings of a run that are remembered; further ones are logged each time.
_MOST_REMEMBERED = 1000


class BoundedLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose warnings and errors stay one bounded line each, whatever others wrote into what they show.

    Texts and errors among the arguments go through `one_line`; numbers and `TextLine`s are left as they are. Lines below
    WARNING, which people ask for to see all, are not changed.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as any logger does."""
        if not self.logger.isEnabledFor(level):
            return
        if level >= logging.WARNING:
            args = tuple(_bound(each) for each in args)
            fields = current_log_context()
            if "agent.role" in fields and is_repeated(fields.get("ensemble.id", ""), self.logger, level, msg, *args):
                return
        # This method is a frame between the caller and the library's own.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.logger.log(level, msg, *args, **kwargs)

    def say(self, level: int, text: str) -> None:
        """Log a text that was made elsewhere."""
        self.log(level, "%s", text, stacklevel=2)


def _bound(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        return one_line(value if isinstance(value, str) else str(value))
    except Exception:  # noqa: BLE001  a text of somebody's class that fails must not fail what is logged
        return f"<{type(value).__name__}>"


def bounded_logger(name: str) -> BoundedLogger:
    """Return the module's logger; every module that logs gets its own here."""
    return BoundedLogger(logging.getLogger(name), {})


class _RunWarnings:
    """Warnings of the tasks of one run: each is logged once, and at the end how many there were that differ in numbers alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: by its text without numbers
        self._first: dict[str, tuple[logging.Logger, int, str]] = {}
        self._more: Counter[str] = Counter()

    def is_repeated(self, logger: logging.Logger, level: int, text: str) -> bool:
        key = _NUMBER.sub("#", text)
        with self._lock:
            if key in self._first:
                self._more[key] += 1
                return True
            if len(self._first) < _MOST_REMEMBERED:
                self._first[key] = logger, level, text
            return False

    def log_counts(self) -> None:
        for key, count in self._more.items():
            logger, level, text = self._first[key]
            logger.log(level, "%s more like: %s", f"{count:,}", text)


#: by run, in the process that began it
_warnings: dict[str, _RunWarnings] = {}


@contextmanager
def merge_warnings(run_id: str) -> Generator[None]:
    """Inside the block, log warnings of a run's tasks that differ in numbers alone once; after it, how many more there were."""
    merged = _warnings[run_id] = _RunWarnings()
    try:
        yield
    finally:
        del _warnings[run_id]
        merged.log_counts()


def is_repeated(run_id: str, logger: logging.Logger, level: int, msg: object, *args: object) -> bool:
    """Return whether a warning of a task is only counted, since the run has logged the like (S-MR-206)."""
    merged = _warnings.get(run_id)
    return merged is not None and merged.is_repeated(logger, level, str(msg) % args if args else str(msg))
