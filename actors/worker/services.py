"""Services of agent processes: CPU-heavy tools on any node, and a limiter that measures waits."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import ray
import ray.exceptions
from ray.util import metrics

from ensemble_ray.errors import ToolExecutionError
from ensemble_ray.tools.cpu import pack, unpack_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray.ports import Limiter
    from ensemble_ray.values.value import RateLimit


class RayCpuPool:
    """Runs functions as Ray tasks with one CPU each. Implements `CpuPool`."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote

    async def run(
        self,
        function: bytes,
        arguments: Mapping[str, object],
        *,
        timeout_s: float | None,
        may_repeat: bool = True,  # noqa: ARG002  a lost worker's call is never repeated here
    ) -> object:
        """Call a packed function with keyword arguments somewhere in the cluster. Its exception is raised here.

        Raises:
            CannotTravelError: the function or its arguments cannot be loaded there.
            TimeoutError: it took too long; its worker is stopped.
            ToolExecutionError: its worker died.
        """
        reference = self._remote.remote(function, pack(dict(arguments)))
        try:
            async with asyncio.timeout(timeout_s):
                reply: bytes = await reference
        except ray.exceptions.WorkerCrashedError as error:
            raise ToolExecutionError("the worker that ran it ended unexpectedly") from error
        except (TimeoutError, asyncio.CancelledError):
            ray.cancel(reference, force=True)
            raise
        return unpack_reply(reply)


#: Upper bounds of the histogram's buckets, s.
_BOUNDARIES_S = [0.001, 0.01, 0.1, 1.0, 10.0, 60.0]


@functools.cache
def _histogram() -> Any:
    # No label: teams choose any number of names for their buckets.
    return cast("Any", metrics).Histogram(
        "ensemble_ray_limiter_wait_seconds",
        description="How long model calls waited for a permit of the cluster's rate limiter",
        boundaries=_BOUNDARIES_S,
    )


def report_wait(waited_s: float) -> None:
    """Report how long one call waited, s."""
    _histogram().observe(waited_s)


class MeasuredLimiter:
    """A `Limiter` that reports waits, including waits that ended without a permit.

    Args:
        report: Receives the wait, s.
    """

    def __init__(self, limiter: Limiter, report: Callable[[float], None] = report_wait) -> None:
        self._limiter = limiter
        self._report = report

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        began = time.monotonic()
        try:
            await self._limiter.acquire(bucket, limit, timeout_s=timeout_s)
        finally:
            self._report(time.monotonic() - began)
