"""RemotePeers: agents of a run as a task sees them that hands work to them, wherever they live.

In: an order of delegated work. Out: its result; a process that died on the way is a failed one. The asking process owns
the delegation: it asks the scheduler once where an agent lives, calls its process directly, stops what it asked for when
it is stopped itself, and sends it again, under a higher epoch, where the worker's process died.
Never: a class of Ray's in a result; a worker that is asked again for what it recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray.exceptions

from ensemble_ray.actors.link.packing import make_undone_result, pack_dispatch, pack_order, unpack_report, unpack_result
from ensemble_ray.actors.link.reach import BackgroundTasks, last_line, patiently, reach
from ensemble_ray.definition.fields import Durability
from ensemble_ray.errors import AgentExecutionError, StaleEpochError, message_of
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.ids import resend_step

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunContext, TaskOrder

_log = bounded_logger(__name__)
#: A process of an agent: its name, which the scheduler knows it by, and its handle.
_Location = tuple[str, Any]


class RemotePeers:
    """The agents of one run, for tasks of one process. Fulfils `Peers`."""

    def __init__(self, scheduler: Any, context: RunContext, *, flush: Callable[[], Awaitable[None]]) -> None:
        """Make one.

        Args:
            scheduler: Knows where agents live.
            context: What all tasks of the run share.
            flush: Returns when the events published here so far have arrived.
        """
        self._scheduler = scheduler
        self._run_id = context.run_id
        self._flush = flush
        #: Where nothing is recorded, a second process would begin anew and repeat what the first one did.
        self._retries = 0 if context.durability == Durability.OFF else context.delegation.retries
        #: agent key -> its processes, as they were when the scheduler was asked
        self._locations: dict[str, asyncio.Task[Sequence[_Location]]] = {}
        #: agent key -> name of a process of it that failed a call
        self._lost: dict[str, str] = {}
        #: agent key -> how often it was asked, so that its processes are asked in turn
        self._asked: dict[str, int] = {}
        #: instance -> handle of the process that was asked for it
        self._working: dict[str, Any] = {}
        self._background = BackgroundTasks()

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run that task to its end where its agent lives; a cancelled caller stops it (S-DUR-31)."""
        await self._flush()  # what told of this delegation comes before what the worker tells
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
                    "The process of agent '%s' died with work that was delegated to it, which goes on in another: %s",
                    order.agent_role,
                    last_line(error),
                )
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                text = f"Agent '{order.agent_role}': {last_line(error)}"
                return _make_failure(order, cause if isinstance(cause, Exception) else text)
            else:
                if not _is_of_replaced(result, order):
                    return result

    async def _ask(self, location: _Location, order: TaskOrder) -> TaskResult:
        name, handle = location
        self._working[order.instance] = handle
        try:
            report: bytes = await handle.perform.remote(pack_dispatch(self._run_id, (pack_order(order),)))
        except asyncio.CancelledError:
            self.stop((order.instance,))
            raise
        except ray.exceptions.RayActorError:
            self._forget(name)
            raise
        finally:
            self._working.pop(order.instance, None)
        try:
            return unpack_result(unpack_report(report))
        except Exception as error:  # noqa: BLE001  whatever loading raised, the asking model must be told
            text = f"The result of agent '{order.agent_role}' cannot be loaded by its asker: {message_of(error)}"
            return _make_failure(order, text)

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these where they are at work; never waits. What has not been sent yet ends with its asker's patience."""
        for instance in instances:
            if instance in self._working:
                self._background.start(self._stop(self._working[instance], instance))

    async def _stop(self, handle: Any, instance: str) -> None:
        try:
            await handle.stop.remote(self._run_id, [instance])
        except ray.exceptions.RayError as error:
            _log.warning("Delegated work '%s' could not be stopped: %s", instance, last_line(error))

    # Where they live.

    async def _next_location(self, order: TaskOrder) -> _Location | None:
        """Return the next process of an agent, in turn, or the one where this is at work already; None when its run has ended."""
        key = order.agent_key or ""
        locations = await self._locate(key)
        if order.epoch and len(locations) > 1:
            # Whoever asked for it before may have died while one of them went on with it. A second one would do beside it
            # what the first one is doing, and neither would know: what they begin is not recorded yet.
            held = await asyncio.gather(*(self._holds(each, order.instance) for each in locations))
            if True in held:
                return locations[held.index(True)]
        count = self._asked[key] = self._asked.get(key, -1) + 1
        return locations[count % len(locations)] if locations else None

    async def _holds(self, location: _Location, instance: str) -> bool:
        try:
            return bool(await location[1].holds.remote(self._run_id, instance))
        except ray.exceptions.RayError:
            return False  # one that is gone holds nothing

    async def _locate(self, key: str) -> Sequence[_Location]:
        """Return all processes of an agent; none when its run has ended."""
        locating = self._locations.get(key)
        if locating is None:
            asking = self._ask_scheduler(key, self._lost.pop(key, None))
            locating = self._locations[key] = asyncio.get_running_loop().create_task(asking)
        try:
            return await asyncio.shield(locating)
        except ray.exceptions.RayError:
            if self._locations.get(key) is locating:
                del self._locations[key]  # the next one asks again
            raise

    async def _ask_scheduler(self, key: str, lost: str | None) -> Sequence[_Location]:
        """Ask the scheduler where an agent lives. One that is out of reach for a moment is asked again; this process ends with it."""
        locations: Sequence[_Location] = await reach(
            lambda: self._scheduler.locate.remote(self._run_id, key, lost), patiently()
        )
        return locations

    def _forget(self, name: str) -> None:
        """Look anew for the agents of a process that failed a call."""
        for key, locating in list(self._locations.items()):
            is_located = locating.done() and not locating.cancelled() and locating.exception() is None
            if is_located and any(found == name for found, _ in locating.result()):
                del self._locations[key]
                self._lost[key] = name


def _is_of_replaced(result: TaskResult, order: TaskOrder) -> bool:
    """Return whether it only tells that an earlier dispatch of this work, which was met at work, is out of the way now."""
    if result.epoch >= order.epoch:
        return False
    error = result.error
    return result.status == "cancelled" or (isinstance(error, StaleEpochError) and error.newest <= order.epoch)


def _make_failure(order: TaskOrder, why: str | Exception) -> TaskResult:
    error = AgentExecutionError(why, order.agent_role, order.task.description) if isinstance(why, str) else why
    return make_undone_result(order, error)
