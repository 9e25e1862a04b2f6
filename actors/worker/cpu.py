"""CPU-heavy tools on the cluster: a stateless function, one CPU, any node. Adapter of the `CpuPool` port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
import ray.exceptions

from ensemble_ray.errors import ToolExecutionError
from ensemble_ray.tools.cpu import pack, unpack_reply

__all__ = ["RayCpuPool"]


class RayCpuPool:
    """Runs functions as tasks with one CPU each."""

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
        """Call a packed function with keyword arguments somewhere in the cluster; what it raises is raised here.

        Raises:
            CannotTravelError: function or arguments cannot be loaded there.
            TimeoutError: it took longer; its worker is stopped.
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
