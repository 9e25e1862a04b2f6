"""RateLimiter: one desk of permits for the whole cluster. Thin: the desk and its machines are in `limits`."""

from __future__ import annotations

from ensemble_ray.limits.desk import LimiterDesk, Message, Reply

__all__ = ["RateLimiter"]


class RateLimiter:
    """Holds all buckets of the cluster."""

    def __init__(self) -> None:
        self._desk = LimiterDesk()

    async def receive(self, message: Message) -> Reply:
        """Take a message of a process; see `limits.desk`."""
        return await self._desk.receive(message)
