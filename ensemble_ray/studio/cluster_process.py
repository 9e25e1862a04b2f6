"""Queries a cluster from a helper process, so that studio survives the death of the cluster (S-STU-34).

The process starts with the first query and ends when it is idle. Runs on the library's loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from typing import cast

from ensemble_ray.errors import EnsembleError
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.descriptions import ClusterDescription, load_cluster

_MODULE = "ensemble_ray.actors.driver.cluster_probe"
#: Timeouts of the first answer, which imports Ray and joins the cluster, and of later answers, s.
_FIRST_S, _NEXT_S = 40.0, 20.0
#: How long an idle process stays, s.
_IDLE_S = 60.0
#: Pause between a failure and the next query, s.
_PAUSE_S = 10.0
#: Longest answer, bytes.
_MOST_BYTES = 64 * 2**20
#: Longest reported error, characters.
_TOLD = 500
_start_process = asyncio.create_subprocess_exec


class ClusterProcess:
    """Queries one cluster. A failed query blocks further queries for a pause."""

    def __init__(self, address: str, environment: Mapping[str, str] | None = None) -> None:
        """Store the address. The first query starts the process.

        Args:
            address: Address of the cluster.
            environment: Extra environment variables of the helper process.
        """
        self._address = address
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None
        self._asking: asyncio.Task[ClusterDescription] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._failure: tuple[float, str] | None = None

    async def describe(self) -> ClusterDescription:
        """Return the description of the cluster from its actors. Concurrent calls share one query.

        Raises:
            EnsembleError: the query failed, with the reason.
        """
        loop = asyncio.get_running_loop()
        if self._failure is not None and loop.time() < self._failure[0]:
            raise EnsembleError(self._failure[1])
        if self._asking is None or self._asking.done():
            self._asking = loop.create_task(self._ask())
        asking = self._asking
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not asking.cancelled() or (task is not None and task.cancelling()):
                raise
            raise EnsembleError(f"The cluster at {self._address} is not asked any more") from None

    async def close(self) -> None:
        """Cancel the current query and end the process. The next query starts a new process."""
        if self._idle is not None:
            self._idle.cancel()
        while self._asking is not None and not self._asking.done():
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._end_process()
        if self._ending is not None:
            await self._ending

    async def _ask(self) -> ClusterDescription:
        loop = asyncio.get_running_loop()
        if self._idle is not None:
            self._idle.cancel()
        try:
            described = _description(self._address, await self._exchange())
        except (OSError, ValueError, TimeoutError, EnsembleError) as error:
            await self._end_process()
            text = str(error) if isinstance(error, EnsembleError) else _describe_unreachable(self._address, error)
            self._failure = (loop.time() + _PAUSE_S, text)
            raise EnsembleError(text) from error
        self._failure = None
        self._idle = loop.call_later(_IDLE_S, self._end_if_idle)
        return described

    def _end_if_idle(self) -> None:
        if self._asking is None or self._asking.done():
            self._ending = asyncio.get_running_loop().create_task(self._end_process())

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _exchange(self) -> bytes:
        """Send a query, and return the line of its answer."""
        is_first = self._process is None or self._process.returncode is not None
        if is_first:
            starting = asyncio.create_task(self._start())
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                await starting  # the cancelled query ends the process, so `_process` must be set
                raise
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "just made"  # noqa: S101, PT018  for the type
        async with asyncio.timeout(_FIRST_S if is_first else _NEXT_S):
            process.stdin.write(b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            raise EnsembleError(f"The cluster at {self._address} is gone, or cannot be joined")
        return line

    async def _start(self) -> None:
        self._process = await _start_process(
            sys.executable,
            "-m",
            _MODULE,
            self._address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **self._environment},
            limit=_MOST_BYTES,
        )


def _description(address: str, line: bytes) -> ClusterDescription:
    """Return the description in a line.

    Raises:
        EnsembleError: the line reports an error.
        ValueError: the line is not an answer.
    """
    found: object = json.loads(line)
    said = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    if "error" in said:
        raise EnsembleError(f"The cluster at {address} cannot be asked: {one_line(str(said['error']), _TOLD)}")
    return load_cluster(json.dumps(said.get("description")).encode())


def _describe_unreachable(address: str, error: Exception) -> str:
    why = "it did not answer in time" if isinstance(error, TimeoutError) else one_line(str(error), _TOLD)
    return f"The cluster at {address} cannot be asked: {why}"
