"""What travels with a piece of work inside a process: log fields, the effect that is performed, its span, and what it waited for.

Layer: above errors and ids (ports are named in annotations only). Context variables do not cross processes; the actor
or the inline runtime sets them when work arrives, from the message's envelope (S-CONV-35).
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

from ensemble_ray.text.foreign_text import one_line

T = TypeVar("T")


class ScopedVariable(Generic[T]):
    """A context variable that has a value for a block; what it had before, it has behind it, also on failure.

    A class, since every task enters several: written as generators, they take three times as many calls.
    """

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        """Make one; the variable is set when the block is entered."""
        self._variable = variable
        self._value = value
        self._token: Token[T]

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


_log_fields: ContextVar[Mapping[str, str]] = ContextVar("ensemble_ray_log_fields")
_NOTHING: Mapping[str, str] = {}


def current_log_context() -> Mapping[str, str]:
    """Return the log fields in force here: `ensemble.id`, `task.index`, `agent.role`... (S-ENG-23 to S-ENG-27)."""
    return _log_fields.get(_NOTHING)


def log_context(fields: Mapping[str, str], *, is_whole: bool = False) -> AbstractContextManager[None]:
    """Add log fields for the block; they are gone after it, also on failure (S-ENG-20).

    Args:
        fields: What records inside the block are given.
        is_whole: These are all; what was there before is not seen inside.
    """
    return ScopedVariable(_log_fields, dict(fields) if is_whole else {**current_log_context(), **fields})


class LogContextFilter(logging.Filter):
    """Puts the log context on records: attributes with dots as underscores, and `ensemble_context`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; every record passes."""
        fields = current_log_context()
        record.ensemble_context = dict(fields)
        for name, value in fields.items():
            setattr(record, name.replace(".", "_"), value)
        return True


_effect_key: ContextVar[str] = ContextVar("ensemble_ray_effect_key")


def current_effect_key() -> str:
    """Return the id of the effect performed here, the same for its every repetition; empty outside any (S-DUR-27)."""
    return _effect_key.get("")


def use_effect_key(key: str) -> AbstractContextManager[None]:
    """Perform an effect of that id in the block."""
    return ScopedVariable(_effect_key, key)


_traceparent: ContextVar[str] = ContextVar("ensemble_ray_traceparent")


def current_traceparent() -> str:
    """Return the `traceparent` of the span that work here is part of; empty where nothing is traced (S-INT-37)."""
    return _traceparent.get("")


def use_traceparent(traceparent: str) -> AbstractContextManager[None]:
    """Do the work of the block as part of that span."""
    return ScopedVariable(_traceparent, traceparent)


class PermitWait:
    """How long a piece of work waited for permits of rate limits."""

    __slots__ = ("_now", "_waited_s")

    def __init__(self, now: Callable[[], float]) -> None:
        """Begin with nothing; `now` is the clock of the work."""
        self._now = now
        self._waited_s = 0.0

    @property
    def waited_s(self) -> float:
        """Whole milliseconds, in seconds: a permit that is there costs less than one."""
        return int(self._waited_s * 1000) / 1000

    @contextmanager
    def measure(self) -> Generator[None]:
        """Count the time of the block."""
        began = self._now()
        try:
            yield
        finally:
            self._waited_s += max(0.0, self._now() - began)


_permit_wait: ContextVar[PermitWait | None] = ContextVar("ensemble_ray_permit_wait", default=None)


def use_permit_wait(wait: PermitWait) -> AbstractContextManager[None]:
    """Count there what the block waits for permits."""
    return ScopedVariable(_permit_wait, wait)


def waiting_for_permit() -> AbstractContextManager[None]:
    """Count the block as waiting for a permit, where somebody asks for that."""
    wait = _permit_wait.get()
    return nullcontext() if wait is None else wait.measure()


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
