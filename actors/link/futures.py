"""Futures that several may wait for."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["refuse"]


def refuse(awaited: asyncio.Future[Any], error: BaseException) -> None:
    """Raise that error for everybody who waits for it, now and later; that nobody does is no defect."""
    if not awaited.done():  # else nobody waits for it any more
        awaited.set_exception(error)
        awaited.exception()
