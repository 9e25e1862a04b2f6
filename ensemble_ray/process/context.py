"""What travels with a piece of work inside a process: log fields, and the effect that is performed.

Layer: above errors and ids (ports are named in annotations only). Context variables do not cross processes; the actor
or the inline runtime sets them when work arrives, from the message's envelope (S-CONV-35).
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["LogContextFilter", "current_effect_key", "current_log_context", "log_context", "use_effect_key"]

_log_fields: ContextVar[Mapping[str, str]] = ContextVar("ensemble_ray_log_fields")
_NOTHING: Mapping[str, str] = {}


def current_log_context() -> Mapping[str, str]:
    """Return the log fields in force here: `ensemble.id`, `task.index`, `agent.role`... (S-ENG-23 to S-ENG-27)."""
    return _log_fields.get(_NOTHING)


@contextmanager
def log_context(fields: Mapping[str, str], *, is_whole: bool = False) -> Generator[None]:
    """Add log fields for the block; they are gone after it, also on failure (S-ENG-20).

    Args:
        fields: What records inside the block are given.
        is_whole: These are all; what was there before is not seen inside.
    """
    token = _log_fields.set(dict(fields) if is_whole else {**current_log_context(), **fields})
    try:
        yield
    finally:
        _log_fields.reset(token)


class LogContextFilter(logging.Filter):
    """Puts the log context on records: attributes with dots as underscores, and `ensemble_context` (S-ENG-21)."""

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


@contextmanager
def use_effect_key(key: str) -> Generator[None]:
    """Perform an effect of that id in the block."""
    token = _effect_key.set(key)
    try:
        yield
    finally:
        _effect_key.reset(token)
