"""Which of several schedulers has a run. Package: plan. Pure.

A run's id says it, so that every program that knows how many there are comes to the same scheduler without asking.
"""

from __future__ import annotations

import hashlib

__all__ = ["shard_of"]


def shard_of(run_id: str, shards: int) -> int:
    """Return the number of the scheduler that a run of that id belongs to, from 0; the same in every process."""
    return int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8]) % shards
