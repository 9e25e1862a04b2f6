"""How a driver comes to a cluster: joins one, or starts a local one; and whether the two fit together."""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import ray

from ensemble_ray.actors.driver.local_instance import is_on_loopback_only, on_loopback, quiet, start_local
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, patiently, reach
from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.config import package_version
from ensemble_ray.process.forks import after_fork, is_ray_inherited
from ensemble_ray.record.resume.advice import resume_advice
from ensemble_ray.values.ids import new_object_id

__all__ = ["LOCAL", "PROGRAM", "ClusterHeartbeat", "check_fork", "check_version", "connection_id", "join_or_start"]

Reply = TypeVar("Reply")
_log = bounded_logger(__name__)
#: Address that means: start one on this machine.
LOCAL = "local"
#: This process, as a cluster knows it: its runs may share processes there.
PROGRAM = new_object_id()
#: How long a cluster's port may take to accept a connection, s; Ray itself would try for minutes.
_REACH_S = 5.0
#: How often a driver that waits looks whether the cluster is still there, s, and how often in vain before it gives up.
_LOOK_S = 2.0
_MOST_MISSES = 3
#: For how long the answer that one run had is good for the others, s.
_FRESH_S = 1.0


def join_or_start(address: str, init_options: Mapping[str, object]) -> bool:
    """Join the cluster at that address, or start a local one; return False if this process is connected already.

    Raises:
        EnsembleError: the cluster cannot be joined or started; the message says what to look at.
    """
    check_fork()
    if ray.is_initialized():
        return False
    options: dict[str, object] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    options.update(init_options)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if options["address"] == LOCAL:
            start_local(options)
        else:
            _join(str(options["address"]), options)
    except Exception as error:  # Ray raises no less than that itself, where its own processes take more than 30 s
        raise EnsembleError(_cannot_connect(address, error)) from error
    return True


def check_fork() -> None:
    """Refuse a process that was forked from one with a connection to a cluster.

    Raises:
        EnsembleError: it was; Ray's threads and sockets are its parent's.
    """
    if is_ray_inherited():
        raise EnsembleError(
            f"Process {os.getpid()} was forked from a process that was connected to Ray, and cannot use that connection or open "
            "another one. Use Ray first after the fork (Celery: worker_process_init; gunicorn: post_fork, without --preload), "
            "start processes with multiprocessing's 'spawn', or run here with runtime='inline'"
        )


@after_fork
def _leave_instance() -> None:
    """Have Ray end none of its parent's processes when the child ends."""
    if is_ray_inherited():
        worker = cast("Any", ray)._private.worker  # noqa: SLF001  Ray has no other way
        atexit.unregister(worker.shutdown)
        if worker._global_node is not None:  # noqa: SLF001
            worker._global_node.all_processes.clear()  # noqa: SLF001


def _join(address: str, options: Mapping[str, object]) -> None:
    """Join a cluster. The port of a plain `host:port` address is tried first; other forms are Ray's own business."""
    host, _, port = address.rpartition(":")
    is_plain = bool(host) and port.isdigit() and "/" not in address
    if is_plain:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    is_local = is_plain and is_on_loopback_only(host.strip("[]"), int(port))
    with quiet(), on_loopback() if is_local else nullcontext():
        cast("Callable[..., object]", ray.init)(**options)


class ClusterHeartbeat:
    """Notices the death of the cluster of a run; Ray itself does after a minute only."""

    def __init__(self, run_id: str, origin: str) -> None:
        self._run_id, self._origin = run_id, origin
        self._misses = 0

    @property
    def is_gone(self) -> bool:
        """Whether it was found to be dead."""
        return self._misses >= _MOST_MISSES

    async def wait_for(self, reference: Any) -> Any:
        """Return the reply of a call, as long as the cluster lives.

        Raises:
            EnsembleError: nobody answers at the cluster's address any more.
        """
        waiting = asyncio.ensure_future(reference)
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0]:
                await self.check()
        finally:
            waiting.cancel()  # of no effect where it is done
        return await waiting

    async def reach(self, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """Make a call to the scheduler, also where it is just being started again, as long as the cluster lives.

        Raises:
            EnsembleError: nobody answers at the cluster's address any more.
        """
        is_noted = False

        async def ask() -> Reply:
            reply: Reply = await self.wait_for(call())
            return reply

        async def note() -> None:
            nonlocal is_noted
            if not is_noted:
                _log.warning("Run %s: the scheduler's process died; the run goes on when it is back", self._run_id)
                is_noted = True
            await self.check()

        return await reach(ask, patiently(), before_retry=note)

    async def check(self) -> None:
        """Check that it is there; calls to a dead cluster may fail faster than anybody checks during them.

        Raises:
            EnsembleError: nobody answered, again and again.
        """
        self._misses = 0 if await _head_liveness.within(_FRESH_S) else self._misses + 1
        if self.is_gone:
            gone = EnsembleError(
                f"Run {self._run_id}: the cluster is gone. What was recorded is kept; continue the run: "
                f"{resume_advice(self._run_id, self._origin)}"
            )
            gone.run_id = self._run_id
            raise gone


class _HeadLiveness:
    """When the cluster's head answered last. Many runs wait at the same time, and one of them asks for all."""

    def __init__(self) -> None:
        self._answered_at: dict[str, float] = {}

    async def within(self, seconds: float) -> bool:
        """Return whether it answered so short a time ago, or answers now."""
        connection, now = connection_id(), time.monotonic()
        if now - self._answered_at.get(connection, -math.inf) < seconds:
            return True
        is_there = await _answers()
        if is_there:
            self._answered_at = {connection: now}
        return is_there


_head_liveness = _HeadLiveness()


async def _answers() -> bool:
    """Return whether anybody listens at the address of the cluster's head."""
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _LOOK_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def connection_id() -> str:
    """Return which connection of this process to a cluster this is; empty when there is none."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    # A driver's own id is made of its job's number, which is the same in every new cluster.
    return f"{context.get_node_id()}/{context.get_worker_id()}"


async def check_version(scheduler: Any) -> None:
    """Refuse a scheduler of another version: it outlives its drivers, so it may be older than this process."""
    theirs, ours_ = await reach(scheduler.version.remote, RESTART_PAUSES_S), package_version()
    if theirs != ours_:
        raise ValidationError(
            f"The cluster's scheduler runs ensemble-ray {theirs}, this process {ours_}. "
            "Install the same version on all nodes and restart the cluster, or join another one"
        )


def _cannot_connect(address: str, error: Exception) -> str:
    """Return what to say when Ray refuses: what, where, what to do."""
    if address == "local":
        return f"Ray cannot be started on this machine: {message_of(error)}. Look with 'ensemble-ray doctor'"
    return (
        f"The Ray cluster at '{address}' cannot be joined: {message_of(error)}. Check RAY_ADDRESS or address=, that the "
        "cluster runs, and its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH); without an address a local one is started"
    )
