"""Context of work inside a process (log fields, effect, span, waits, output), loggers, and the garbage collector.

Context variables do not cross processes: the actor or the inline runtime sets them from a message (S-CONV-35).
"""

from __future__ import annotations

import gc
import logging
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar, Token
from typing import Any, Generic, Self, TypeVar, cast

from ensemble_ray.errors.texts import message_of
from ensemble_ray.process.concurrency import new_lock, new_rlock
from ensemble_ray.text.foreign_text import one_line, whole_text

T = TypeVar("T")


class ScopedVariable(Generic[T]):
    """Sets a context variable for a block, in a third of a generator's calls."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable = variable
        self._value = value
        self._token: Token[T]

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


# What every task sets, it sets by the variables themselves, without a block.

LOG_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("ensemble_ray_log_fields")
_NO_FIELDS: Mapping[str, str] = {}


def current_log_context() -> Mapping[str, str]:
    """Return the current log fields: `ensemble.id`, `task.index`, `agent.role`... (S-ENG-23 to S-ENG-27)."""
    return LOG_FIELDS.get(_NO_FIELDS)


def log_context(fields: Mapping[str, str], *, is_whole: bool = False) -> AbstractContextManager[None]:
    """Add log fields (S-ENG-20), or replace all if `is_whole`."""
    return ScopedVariable(LOG_FIELDS, dict(fields) if is_whole else {**current_log_context(), **fields})


class LogContextFilter(logging.Filter):
    """Adds the log context to records: as attributes with underscores for dots, and as `ensemble_context`."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields = current_log_context()
        record.ensemble_context = dict(fields)
        for name, value in fields.items():
            setattr(record, name.replace(".", "_"), value)
        return True


EFFECT_KEY: ContextVar[str] = ContextVar("ensemble_ray_effect_key", default="")


def current_effect_key() -> str:
    """Return the id of the effect and its repetitions; empty outside effects (S-DUR-27)."""
    return EFFECT_KEY.get()


def use_effect_key(key: str) -> AbstractContextManager[None]:
    return ScopedVariable(EFFECT_KEY, key)


TRACEPARENT: ContextVar[str] = ContextVar("ensemble_ray_traceparent", default="")


def current_traceparent() -> str:
    """Return the `traceparent` of the current span; empty without tracing (S-INT-37)."""
    return TRACEPARENT.get()


def use_traceparent(traceparent: str) -> AbstractContextManager[None]:
    return ScopedVariable(TRACEPARENT, traceparent)


class PermitWait:
    """Total time of waits for permits, by the clock `now`."""

    __slots__ = ("_now", "total_s")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.total_s = 0.0

    @property
    def waited_s(self) -> float:
        """Whole milliseconds, because a permit without a wait takes less than one."""
        return int(self.total_s * 1000) / 1000

    @contextmanager
    def measure(self) -> Generator[None]:
        began = self._now()
        try:
            yield
        finally:
            self.total_s += max(0.0, self._now() - began)


PERMIT_WAIT: ContextVar[PermitWait | None] = ContextVar("ensemble_ray_permit_wait", default=None)


def use_permit_wait(wait: PermitWait) -> AbstractContextManager[None]:
    return ScopedVariable(PERMIT_WAIT, wait)


def waiting_for_permit() -> AbstractContextManager[None]:
    wait = PERMIT_WAIT.get()
    return nullcontext() if wait is None else wait.measure()


_MOST_LINES = 25  # at the beginning, and at the end
_LONGEST_LINE = 500


class CallLog:
    """Collects the lines that one call logs and prints in this process. They also go where they go without it.

    Calls may overlap, in tasks and in threads with a copy of the context. The levels of loggers apply. Prints pass through the
    `sys.stdout` of the time at which the block begins.

    Attributes:
        lines: After the block, the first 25 and the last 25 lines, each cut at 500 characters; between them, the number of
            the others.
    """

    # No `__init__`: every call of a tool passes here, and few of them print.
    lines: tuple[str, ...] = ()
    _first: list[str] | None = None
    _last: deque[str]
    _count = 0
    _begun = ""  # a printed line without its end
    _token: Token[CallLog | None]

    def __enter__(self) -> Self:
        with _output.lock:
            _output.calls += 1
            if _output.calls == 1:
                make = logging.getLogRecordFactory()
                if not _output.is_linked or make is _output.make_record:
                    _output.make_record, _output.is_linked = make, True
                    # A handler would change `basicConfig`, and the output of loggers without any handler.
                    logging.setLogRecordFactory(_make_record)
            stream: Any = sys.stdout
            write, attributes = getattr(stream, "write", None), getattr(stream, "__dict__", None)
            if callable(write) and isinstance(attributes, dict) and id(stream) not in _output.streams:
                # The stream stays in place, since other threads may replace or compare it meanwhile.
                namespace = cast("dict[str, object]", attributes)
                observed = _observed_write(cast("Callable[[str], int]", write))
                _output.streams[id(stream)] = stream, namespace, namespace.get("write"), observed
                namespace["write"] = observed
        self._token = _CALL_LOG.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # another context, if the garbage collector closes an abandoned call
            _CALL_LOG.reset(self._token)
        with _output.lock:
            if self._first is not None or self._begun:
                self._close()
            _output.calls -= 1
            if _output.calls:
                return
            if logging.getLogRecordFactory() is _make_record:  # otherwise another factory calls it
                logging.setLogRecordFactory(_output.make_record)
                _output.is_linked = False
            for _stream, namespace, before, observed in _output.streams.values():
                if namespace.get("write") is observed:
                    namespace["write"] = before
                    if before is None:
                        del namespace["write"]
            _output.streams.clear()

    def add_text(self, text: str) -> None:
        """Add printed text, which may end inside a line."""
        with _output.lock:
            # Lines between both ends are only counted: a text may have millions of them.
            first = (self._begun + text).split("\n", _MOST_LINES)
            last = first.pop().rsplit("\n", _MOST_LINES)
            self._count += last[0].count("\n")
            last[0] = last[0][last[0].rfind("\n") + 1 :]
            self._begun = last.pop()[: _LONGEST_LINE + 1]
            self._add([*first, *last])

    def add_record(self, record: logging.LogRecord) -> None:
        """Add the message of a log record, with its level, its logger and its error."""
        if not record.name:  # of `logging.makeLogRecord`: a copy of another record
            return
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  its handlers report a message that cannot be formatted
            text = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = f"{text} ({type(error).__name__}: {message_of(error)})"
        with _output.lock:
            self._add(f"{record.levelname} {record.name}: {text}".split("\n", 2 * _MOST_LINES))

    def _add(self, lines: Iterable[str]) -> None:
        first = self._first
        if first is None:
            first = self._first = []
            self._last = deque(maxlen=_MOST_LINES)
        for line in lines:
            self._count += 1
            kept = first if len(first) < _MOST_LINES else self._last
            kept.append(line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…")

    def _close(self) -> None:
        self._add([self._begun] if self._begun else [])
        first, last = self._first or [], self._last
        more = self._count - len(first) - len(last)
        between = [f"{more:,} more {'line' if more == 1 else 'lines'}"] if more else []
        self.lines = tuple(map(whole_text, [*first, *between, *last]))


_CALL_LOG: ContextVar[CallLog | None] = ContextVar("ensemble_ray_call_log", default=None)


class _ObservedOutput:
    def __init__(self) -> None:
        self.lock = new_rlock()  # a finalizer may print while its thread holds the lock
        self.calls = 0
        self.is_linked = False  # whether `_make_record` is the factory of log records, or called by it
        self.make_record: Callable[..., logging.LogRecord] = logging.LogRecord
        #: by id: the stream, its attributes, and its own `write` before and now
        self.streams: dict[int, tuple[object, dict[str, object], object, object]] = {}


_output = _ObservedOutput()


def _make_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    log = _CALL_LOG.get()
    if log is None:
        return _output.make_record(*args, **kwargs)
    with ScopedVariable(_CALL_LOG, None):  # what it calls may be observed, too
        record = _output.make_record(*args, **kwargs)
        log.add_record(record)
    return record


def _observed_write(write: Callable[[str], int]) -> Callable[[str], int]:
    def observed(text: str, /) -> int:
        log = _CALL_LOG.get()
        if log is None:
            return write(text)
        with ScopedVariable(_CALL_LOG, None):
            written = write(text)
            log.add_text(text)
        return written

    return observed


_NUMBER = re.compile(r"\d+")
_MOST_WARNINGS = 1000  # later distinct warnings of a run are logged each time


class BoundedLogger(logging.LoggerAdapter[logging.Logger]):
    """Writes each warning and error as one line of bounded length.

    Numbers and `TextLine`s do not change, and lines below WARNING do not either.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if not self.logger.isEnabledFor(level):
            return
        if level >= logging.WARNING:
            args = tuple(_bound(each) for each in args)
            fields = current_log_context()
            if "agent.role" in fields and is_repeated(fields.get("ensemble.id", ""), self.logger, level, msg, *args):
                return
        # Skip this frame in the reported location.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.logger.log(level, msg, *args, **kwargs)

    def log_text(self, level: int, text: str) -> None:
        self.log(level, "%s", text, stacklevel=2)


def _bound(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        return one_line(value if isinstance(value, str) else str(value))
    except Exception:  # noqa: BLE001  a failing `__str__` must not fail the caller
        return f"<{type(value).__name__}>"


def bounded_logger(name: str) -> BoundedLogger:
    return BoundedLogger(logging.getLogger(name), {})


class _RunWarnings:
    """Warnings of one run that differ only in numbers are logged once and counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[str, tuple[logging.Logger, int, str]] = {}  # by the text without numbers
        self._more: Counter[str] = Counter()

    def is_repeated(self, logger: logging.Logger, level: int, text: str) -> bool:
        key = _NUMBER.sub("#", text)
        with self._lock:
            if key in self._first:
                self._more[key] += 1
                return True
            if len(self._first) < _MOST_WARNINGS:
                self._first[key] = logger, level, text
            return False

    def log_counts(self) -> None:
        for key, count in self._more.items():
            logger, level, text = self._first[key]
            logger.log(level, "%s more like: %s", f"{count:,}", text)


_warnings: dict[str, _RunWarnings] = {}


@contextmanager
def merge_warnings(run_id: str) -> Generator[None]:
    """Log similar warnings of a run once inside the block, and their counts at its end."""
    merged = _warnings[run_id] = _RunWarnings()
    try:
        yield
    finally:
        del _warnings[run_id]
        merged.log_counts()


def is_repeated(run_id: str, logger: logging.Logger, level: int, msg: object, *args: object) -> bool:
    """Whether the run has logged a similar warning, so that this one is only counted (S-MR-206)."""
    merged = _warnings.get(run_id)
    return merged is not None and merged.is_repeated(logger, level, str(msg) % args if args else str(msg))


NOTICES = "ensemble_ray.notices"  # logger of notices to the user

_log = logging.getLogger(NOTICES)
if _log.level == logging.NOTSET:  # otherwise the root's level, WARNING, applies
    _log.setLevel(logging.INFO)


def notify(text: str) -> None:
    """Log as INFO, or write to standard error if logging is not configured."""
    if not _log.isEnabledFor(logging.INFO):
        return
    line = one_line(text)
    if _log.hasHandlers():
        _log.info("%s", line)
    elif sys.stderr is not None:
        sys.stderr.write(f"{line}\n")


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
