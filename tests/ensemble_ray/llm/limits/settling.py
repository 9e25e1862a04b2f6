"""Lets an event loop run until nothing is left to do but wait for time."""

import asyncio


async def settle() -> None:
    """Give every ready callback, and those it makes ready, its turn; no time passes."""
    for _ in range(50):
        await asyncio.sleep(0)
