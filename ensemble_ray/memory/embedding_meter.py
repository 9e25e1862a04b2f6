"""Counts the tokens that models of embeddings read for one piece of work. Package: memory.

The meter is found by context, which threads for user code take over: stores are called without knowing of it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from ensemble_ray.process.forks import new_lock

__all__ = ["EmbeddingMeter", "count_embedding", "metered_embeddings"]


class EmbeddingMeter:
    """Counts; any thread may add."""

    def __init__(self) -> None:
        self.tokens = 0
        self._lock = new_lock()

    def add(self, tokens: int) -> None:
        """Add what one request read."""
        with self._lock:
            self.tokens += tokens


_meter: ContextVar[EmbeddingMeter | None] = ContextVar("ensemble_ray_embedding_meter", default=None)


@contextmanager
def metered_embeddings() -> Generator[EmbeddingMeter]:
    """Count what is embedded in the block, also in threads that are started from it."""
    meter = EmbeddingMeter()
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


def count_embedding(tokens: int) -> None:
    """Count the tokens of an answered request; outside any meter nobody wants to know."""
    if (meter := _meter.get()) is not None:
        meter.add(tokens)
