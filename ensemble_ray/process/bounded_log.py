"""Loggers whose warnings and errors are bounded lines, whatever others wrote (S-SEC-58). Package: process.

In: a module's name. Out: its logger. Must never happen: a line break of a model, an endpoint or a user that makes a
second line of a warning, a page of theirs in a log, an exception because of a text.
"""

from __future__ import annotations

import logging
from typing import Any

from ensemble_ray.text.foreign_text import one_line

__all__ = ["BoundedLogger", "bounded_logger"]


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
