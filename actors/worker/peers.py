"""Runs delegated work in the processes of a run's agents.

If the worker's process dies, the work is sent again under a higher epoch, and recorded work is not repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray.exceptions
from msgspec.structs import replace

from ensemble_ray.actors.link.packing import make_undone_result, pack, pack_order, unpack, unpack_result
from ensemble_ray.actors.link.reach import BackgroundTasks, last_line, patiently, reach
from ensemble_ray.actors.link.wire import Dispatch, WireResult
from ensemble_ray.definition.fields import Durability
from ensemble_ray.errors import AgentExecutionError, StaleEpochError, message_of
from ensemble_ray.execute.orders import RunContext, TaskOrder, TaskResult
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.ids import resend_step

_log = bounded_logger(__name__)
_Location = tuple[str, Any]


class RemotePeers:
    """The agents of one run, for tasks of one process. Implements `Peers`."""

    def __init__(self, scheduler: Any, context: RunContext, *, flush: Callable[[], Awaitable[None]]) -> None:
        self._scheduler = scheduler
        self._run_id = context.run_id
        self._flush = flush
        #: 0 without a record: a second process would repeat the work
        self._retries = 0 if context.durability == Durability.OFF else context.delegation.retries
        self._locations: dict[str, asyncio.Task[Sequence[_Location]]] = {}
        self._lost: dict[str, str] = {}
        #: number of calls per agent, to call its processes in turn
        self._asked: dict[str, int] = {}
        self._working: dict[str, Any] = {}
        self._background = BackgroundTasks()

    async def perform(self, order: TaskOrder) -> TaskResult:
        """If the caller is cancelled, the task is stopped (S-DUR-31)."""
        await self._flush()  # events of this delegation come before the worker's
        left = self._retries
        while True:
            try:
                location = await self._next_location(order)
            except ray.exceptions.RayError as error:
                return _make_failure(order, f"Agent '{order.agent_role}' cannot be reached: {last_line(error)}")
            if location is None:
                return _make_failure(order, f"Agent '{order.agent_role}' cannot be reached: its run has ended")
            try:
                result = await self._ask(location, order)
            except ray.exceptions.RayActorError as error:
                if not left:
                    return _make_failure(order, f"Agent '{order.agent_role}': its process died ({last_line(error)})")
                left -= 1
                order = replace(order, epoch=order.epoch + resend_step(order.depth))
                _log.warning(
                    "The process of agent '%s' died with delegated work, which continues in another: %s",
                    order.agent_role,
                    last_line(error),
                )
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                text = f"Agent '{order.agent_role}': {last_line(error)}"
                return _make_failure(order, cause if isinstance(cause, Exception) else text)
            else:
                # An earlier dispatch of this work, still running there, may have ended instead.
                refusal = result.error
                is_stale = isinstance(refusal, StaleEpochError) and refusal.newest <= order.epoch
                if result.epoch >= order.epoch or not (result.status == "cancelled" or is_stale):
                    return result

    async def _ask(self, location: _Location, order: TaskOrder) -> TaskResult:
        name, handle = location
        self._working[order.instance] = handle
        try:
            report: bytes = await handle.perform.remote(pack(Dispatch(self._run_id, (pack_order(order),), {})))
        except asyncio.CancelledError:
            self.stop((order.instance,))
            raise
        except ray.exceptions.RayActorError:
            for key, locating in list(self._locations.items()):
                is_located = locating.done() and not locating.cancelled() and locating.exception() is None
                if is_located and any(found == name for found, _ in locating.result()):
                    del self._locations[key]
                    self._lost[key] = name
            raise
        finally:
            self._working.pop(order.instance, None)
        try:
            return unpack_result(unpack(report, WireResult))
        except Exception as error:  # noqa: BLE001  the delegating model must be told, whatever loading raised
            text = f"The result of agent '{order.agent_role}' cannot be loaded by the delegating process: {message_of(error)}"
            return _make_failure(order, text)

    def stop(self, instances: Sequence[str]) -> None:
        """Never waits. An order that is not sent yet ends with its caller."""
        for instance in instances:
            if instance in self._working:
                self._background.start(self._stop(self._working[instance], instance))

    async def _stop(self, handle: Any, instance: str) -> None:
        try:
            await handle.stop.remote(self._run_id, [instance])
        except ray.exceptions.RayError as error:
            _log.warning("Delegated work '%s' could not be stopped: %s", instance, last_line(error))

    async def _next_location(self, order: TaskOrder) -> _Location | None:
        """Return the next process in turn, or the process that already runs this task. None: the run has ended."""
        key = order.agent_key or ""
        locations = await self._locate(key)
        if order.epoch and len(locations) > 1:
            # An earlier caller may have died while one of these processes still runs the task. A second process would
            # repeat that work, since steps in progress are not recorded yet.
            held = await asyncio.gather(*(self._holds(each, order.instance) for each in locations))
            if True in held:
                return locations[held.index(True)]
        count = self._asked[key] = self._asked.get(key, -1) + 1
        return locations[count % len(locations)] if locations else None

    async def _holds(self, location: _Location, instance: str) -> bool:
        try:
            return bool(await location[1].holds.remote(self._run_id, instance))
        except ray.exceptions.RayError:
            return False  # it is gone

    async def _locate(self, key: str) -> Sequence[_Location]:
        locating = self._locations.get(key)
        if locating is None:
            locate, lost = self._scheduler.locate.remote, self._lost.pop(key, None)
            # Calls of an unreachable scheduler are repeated: this process ends with it.
            asking = reach(lambda: locate(self._run_id, key, lost), patiently())
            locating = self._locations[key] = asyncio.get_running_loop().create_task(asking)
        try:
            return await asyncio.shield(locating)
        except ray.exceptions.RayError:
            if self._locations.get(key) is locating:
                del self._locations[key]  # the next caller asks again
            raise


def _make_failure(order: TaskOrder, why: str | Exception) -> TaskResult:
    error = AgentExecutionError(why, order.agent_role, order.task.description) if isinstance(why, str) else why
    return make_undone_result(order, error)
