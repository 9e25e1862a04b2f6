"""RemoteColleagues: agents of a run as a task sees them that hands work to them, wherever they live.

In: an order of delegated work. Out: its result; a process that died on the way is a failed one. The asking process owns
the delegation: it asks the scheduler once where an agent lives, calls its process directly, stops what it asked for when
it is stopped itself, and sends it again, under a higher epoch, where the worker's process died.
Never: a class of Ray's in a result; a worker that is asked again for what it recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray.exceptions

from actors.link.failures import last_line
from actors.link.reach import patiently, reach
from actors.link.wire import pack_order, unpack_report
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.definition.durability import Durability
from ensemble_ray.epochs import resend_step
from ensemble_ray.errors import AgentExecutionError, StaleEpochError, message_of
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.inline import SystemClock

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunFrame, TaskOrder

__all__ = ["RemoteColleagues"]

_log = bounded_logger(__name__)
#: A process of an agent: its name, which the scheduler knows it by, and its handle.
_Place = tuple[str, Any]


class RemoteColleagues:
    """The agents of one run, for tasks of one process. Fulfils `Colleagues`."""

    def __init__(self, scheduler: Any, frame: RunFrame, *, flush: Callable[[], Awaitable[None]]) -> None:
        """Make one.

        Args:
            scheduler: Knows where agents live.
            frame: What all tasks of the run share.
            flush: Returns when the events published here so far have arrived.
        """
        self._scheduler = scheduler
        self._run_id = frame.run_id
        self._flush = flush
        #: Where nothing is recorded, a second process would begin anew and repeat what the first one did.
        self._retries = 0 if frame.durability == Durability.OFF else frame.delegation.retries
        #: agent key -> its processes, as they were when the scheduler was asked
        self._places: dict[str, asyncio.Task[Sequence[_Place]]] = {}
        #: agent key -> name of a process of it that failed a call
        self._lost: dict[str, str] = {}
        #: agent key -> how often it was asked, so that its processes are asked in turn
        self._asked: dict[str, int] = {}
        #: instance -> handle of the process that was asked for it
        self._at_work: dict[str, Any] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run that task to its end where its agent lives; a cancelled caller stops it (S-DUR-31)."""
        await self._flush()  # what told of this delegation comes before what the worker tells
        left = self._retries
        while True:
            try:
                place = await self._place(order)
            except ray.exceptions.RayError as error:
                return _failed(order, f"Agent '{order.agent_role}' cannot be reached: {last_line(error)}")
            if place is None:
                return _failed(order, f"Agent '{order.agent_role}' cannot be reached: its run has ended")
            try:
                result = await self._result(place, order)
            except ray.exceptions.RayActorError as error:
                if not left:
                    return _failed(order, f"Agent '{order.agent_role}': its process died ({last_line(error)})")
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
                return _failed(order, cause if isinstance(cause, Exception) else text)
            else:
                if not _is_of_a_replaced(result, order):
                    return result

    async def _result(self, place: _Place, order: TaskOrder) -> TaskResult:
        name, handle = place
        self._at_work[order.instance] = handle
        try:
            report = await handle.perform.remote(self._run_id, pack_order(order))
        except asyncio.CancelledError:
            self.stop((order.instance,))
            raise
        except ray.exceptions.RayActorError:
            self._forget(name)
            raise
        finally:
            self._at_work.pop(order.instance, None)
        try:
            return unpack_report(report, order.instance)
        except Exception as error:  # noqa: BLE001  whatever loading raised, the asking model must be told
            text = f"The result of agent '{order.agent_role}' cannot be loaded by its asker: {message_of(error)}"
            return _failed(order, text)

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these where they are at work; never waits. What has not been sent yet ends with its asker's patience."""
        for instance in instances:
            if instance in self._at_work:
                self._in_background(self._stop(self._at_work[instance], instance))

    async def _stop(self, handle: Any, instance: str) -> None:
        try:
            await handle.stop.remote(self._run_id, [instance])
        except ray.exceptions.RayError as error:
            _log.warning("Delegated work '%s' could not be stopped: %s", instance, last_line(error))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.get_running_loop().create_task(work)
        self._stopping.add(job)
        job.add_done_callback(self._stopping.discard)

    # Where they live.

    async def _place(self, order: TaskOrder) -> _Place | None:
        """The next process of an agent, in turn, or the one where this is at work already; None when its run has ended."""
        key = order.agent_key or ""
        places = await self._processes(key)
        if order.epoch and len(places) > 1:
            # Whoever asked for it before may have died while one of them went on with it. A second one would do beside it
            # what the first one is doing, and neither would know: what they begin is not recorded yet.
            held = await asyncio.gather(*(self._holds(place, order.instance) for place in places))
            if True in held:
                return places[held.index(True)]
        count = self._asked[key] = self._asked.get(key, -1) + 1
        return places[count % len(places)] if places else None

    async def _holds(self, place: _Place, instance: str) -> bool:
        try:
            return bool(await place[1].holds.remote(self._run_id, instance))
        except ray.exceptions.RayError:
            return False  # one that is gone holds nothing

    async def _processes(self, key: str) -> Sequence[_Place]:
        """All processes of an agent; none when its run has ended."""
        locating = self._places.get(key)
        if locating is None:
            located = self._located(key, self._lost.pop(key, None))
            locating = self._places[key] = asyncio.get_running_loop().create_task(located)
        try:
            return await asyncio.shield(locating)
        except ray.exceptions.RayError:
            if self._places.get(key) is locating:
                del self._places[key]  # the next one asks again
            raise

    async def _located(self, key: str, lost: str | None) -> Sequence[_Place]:
        """Ask the scheduler. One that is out of reach for a moment is asked again; this process ends with it."""
        places: Sequence[_Place] = await reach(
            lambda: self._scheduler.locate.remote(self._run_id, key, lost), patiently()
        )
        return places

    def _forget(self, name: str) -> None:
        """A process failed a call: whoever lives there is looked for anew."""
        for key, locating in list(self._places.items()):
            is_known = locating.done() and not locating.cancelled() and locating.exception() is None
            if is_known and any(known == name for known, _ in locating.result()):
                del self._places[key]
                self._lost[key] = name


def _is_of_a_replaced(result: TaskResult, order: TaskOrder) -> bool:
    """Whether it only tells that an earlier dispatch of this work, which was met at work, is out of the way now."""
    if result.epoch >= order.epoch:
        return False
    error = result.error
    return result.status == "cancelled" or (isinstance(error, StaleEpochError) and error.newest <= order.epoch)


def _failed(order: TaskOrder, why: str | Exception) -> TaskResult:
    error = AgentExecutionError(why, order.agent_role, order.task.description) if isinstance(why, str) else why
    return TaskResult(
        key=order.key,
        instance=order.instance,
        epoch=order.epoch,
        status="failed",
        at=SystemClock().now(),
        duration_s=0.0,
        error=error,
    )
