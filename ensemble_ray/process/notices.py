"""Lines for people that are no warnings: what takes a while, what user code prints elsewhere. Layer: above foreign text.

In: a line. Out: a record of level INFO of the logger `ensemble_ray.notices`, which is shown without any configuration:
on standard error where no handler is set up. Level WARNING on that logger turns it off.
"""

from __future__ import annotations

import logging
import sys

from ensemble_ray.text.foreign_text import one_line

__all__ = ["NOTICES", "notify"]

#: Name of the logger.
NOTICES = "ensemble_ray.notices"

_log = logging.getLogger(NOTICES)
if _log.level == logging.NOTSET:  # else the root's level, which is WARNING, would hold
    _log.setLevel(logging.INFO)


def notify(text: str) -> None:
    """Log the line as INFO; standard error gets it where no logging is set up."""
    if not _log.isEnabledFor(logging.INFO):
        return
    line = one_line(text)
    if _log.hasHandlers():
        _log.info("%s", line)
    elif sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
