"""What travels with a piece of work inside a process: log fields, the effect that is performed, its span, and what it waited for.

Layer: above errors and ids (ports are named in annotations only). Context variables do not cross processes; the actor
or the inline runtime sets them when work arrives, from the message's envelope (S-CONV-35).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from typing import Generic, TypeVar

__all__ = [
    "LogContextFilter",
    "PermitWait",
    "ScopedVariable",
    "current_effect_key",
    "current_log_context",
    "current_traceparent",
    "log_context",
    "use_effect_key",
    "use_permit_wait",
    "use_traceparent",
    "waiting_for_permit",
]

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
