"""RayRun: one run on the cluster, seen from its driver: submitted, attended, waited for. Used by `RayRuntime`.

It hands events to the driver's sink and answers what only the driver can. A scheduler that was started again is asked
again; a cluster that is gone is noticed within seconds.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
import ray.exceptions

from actors import spawn
from actors.connection import Pulse
from actors.event_hub import Page, Request
from actors.failures import last_line, ours
from actors.wire import RunPackage, unpack_output, unpack_result
from ensemble_ray.definition.durability import OnUnknown
from ensemble_ray.errors import EnsembleError, IllegalStateError, message_of, portable
from ensemble_ray.execute.conductor import Conducted, Failed
from ensemble_ray.execute.unknown import UnknownEffect, ask_unknown
from ensemble_ray.inline import outcome_of
from ensemble_ray.threads import USER_ERRORS, threads

if TYPE_CHECKING:
    from ensemble_ray.events import Event
    from ensemble_ray.execute.orders import RunOutcome, TaskResult
    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.runtime import RunRequest

__all__ = ["RayRun"]

_log = logging.getLogger(__name__)
#: How long one poll waits for events, s.
_POLL_S = 10.0
#: How long a scheduler that died is waited for before it is asked again, s.
_RESTART_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
#: Pause before a hub that could not be reached is asked again, s.
_RETRY_S = 0.5


def _lost(run_id: str) -> EnsembleError:
    lost = EnsembleError(
        f"Run {run_id}: the scheduler's process died, and the run is not recorded (durability 'off'), so that it cannot "
        "go on. Run it again, or use durability='effects'"
    )
    lost.run_id = run_id
    return lost


class RayRun:
    """A run on the cluster, seen from its driver."""

    def __init__(self, request: RunRequest, package: RunPackage, scheduler: Any) -> None:
        self.run_id = request.run_id
        self._request = request
        self._package = package
        self._scheduler = scheduler
        self._hub: Any = None
        self._cursor = 0
        self._hub_life = ""
        self._attending: asyncio.Task[None] | None = None
        self._is_leaving = False
        self._is_cancelled = False
        self._pulse = Pulse(request.run_id)
        #: answers that somebody in the run waits for
        self._answers: set[asyncio.Task[None]] = set()
        #: what this process was told, such as counts for the user's metrics
        self._told: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Hand the run over, then listen for events and answer requests until it ends."""
        self._hub = await self._submitted(self._package)
        if self._hub is not None:
            self._attending = asyncio.get_running_loop().create_task(self._attend())

    async def _submitted(self, package: RunPackage) -> Any:
        """Submit; a scheduler that died meanwhile and was started again may have the run already, or never heard of it."""
        for pause_s in _RESTART_PAUSES_S:
            try:
                return await self._scheduler.submit.remote(package)
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(pause_s)
                if await self._is_known():
                    return spawn.existing("event_hub") if package.is_attended else None
                package = package if package.is_resumed else replace(package, is_again=True)
        return await self._scheduler.submit.remote(package)

    async def _is_known(self) -> bool:
        try:
            return bool(await self._scheduler.attend.remote(self.run_id))
        except ray.exceptions.ActorUnavailableError:
            return False

    async def wait(self) -> RunOutcome:
        """Return when the run ended and all its events were handed on.

        Raises:
            EnsembleError: the cluster died, or the scheduler's process did in a run that is not recorded.
        """
        try:
            ended = await self._ended()
        except ray.exceptions.RayError as error:
            raise ours(error, self.run_id) from None
        finally:
            await self._leave()
        self._scheduler.forget.remote(self.run_id)
        try:
            return outcome_of(self.run_id, _opened(ended))
        except Exception as error:
            unreadable = EnsembleError(
                f"Run {self.run_id}: its results cannot be loaded in this process: {message_of(error)}. "
                "Install the module they come from here too, or use runtime='inline'"
            )
            unreadable.run_id = self.run_id
            raise unreadable from error

    async def _ended(self) -> Conducted[bytes, bytes]:
        """How the run ended, also when the scheduler's process died on the way and was started again (S-DUR-32)."""
        is_told = False
        while True:
            try:
                ended: Conducted[bytes, bytes] | None = await self._pulse.given(
                    self._scheduler.wait.remote(self.run_id)
                )
            except ray.exceptions.ActorUnavailableError:
                if not is_told:
                    _log.warning("Run %s: the scheduler's process died; the run goes on when it is back", self.run_id)
                    is_told = True
                await asyncio.sleep(_RETRY_S)
                await self._pulse.look()
                continue
            is_told = False
            if ended is not None:
                return ended
            if self._package.store is None:
                raise _lost(self.run_id)
            # What its record knows is used, its cancellation included.
            await self._submitted(replace(self._package, is_again=True, is_resumed=False, takes_over=False))
            if self._is_cancelled:
                await self.cancel()

    async def cancel(self) -> None:
        """Ask the run to end, also where the scheduler is just being started again; of one that is gone `wait` tells."""
        self._is_cancelled = True
        for pause_s in (*_RESTART_PAUSES_S, None):
            try:
                await self._scheduler.cancel.remote(self.run_id)
            except ray.exceptions.RayError as error:
                if pause_s is not None and isinstance(error, ray.exceptions.ActorUnavailableError):
                    await asyncio.sleep(pause_s)
                    continue
                _log.warning("Run %s: the scheduler cannot be reached: %s", self.run_id, last_line(error))
            return

    async def _leave(self) -> None:
        """Take what is still in the hub, and answer no more."""
        if self._attending is None:
            return
        self._is_leaving = True
        if self._pulse.is_gone:
            self._attending.cancel()
            return
        try:
            # Woken, not cancelled: a page that is on its way has requests that nobody could take again.
            await self._hub.publish.remote(self.run_id, [])
            await asyncio.wait([self._attending])
            while self._take(await self._hub.poll.remote(self.run_id, self._cursor, 0.0, attends=True)):
                pass
            for answer in self._answers:
                answer.cancel()  # the run has ended: whoever asked is gone
            if self._told:
                await asyncio.wait(self._told, timeout=5)
            await self._hub.desert.remote(self.run_id)
        except ray.exceptions.RayError as error:
            _log.warning("Run %s: the event hub cannot be reached; its last events are lost: %s", self.run_id, error)

    async def _attend(self) -> None:
        while not self._is_leaving:
            try:
                page: Page = await self._hub.poll.remote(self.run_id, self._cursor, _POLL_S, attends=True)
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: the event hub cannot be reached; events are lost: %s", self.run_id, error)
                await asyncio.sleep(_RETRY_S)  # it is started again; whoever asks something in the run waits for us
            else:
                self._take(page)

    def _take(self, page: Page) -> bool:
        """Hand on what a page brought; whether there may be more."""
        is_new_hub = bool(self._hub_life) and page.life != self._hub_life
        self._hub_life = page.life
        self._cursor = 0 if is_new_hub else page.cursor
        for body in () if is_new_hub else page.events:
            self._emit(body)
        for asked in page.requests:
            job = asyncio.get_running_loop().create_task(self._serve(asked))
            jobs = self._told if asked.number is None else self._answers
            jobs.add(job)
            job.add_done_callback(jobs.discard)
        return is_new_hub or bool(page.events or page.requests)

    def _emit(self, body: bytes) -> None:
        try:
            event = cast("Event", pickle.loads(body))  # noqa: S301  bytes of our own cluster
        except Exception as error:  # noqa: BLE001  one event that cannot be loaded here must not end the listening
            _log.warning("Run %s: an event cannot be loaded in this process: %s", self.run_id, message_of(error))
        else:
            self._request.events.emit(event)

    async def _serve(self, asked: Request) -> None:
        """Do what only the driver can, and answer."""
        try:
            body = cloudpickle.dumps(await self._service(asked.name, asked.payload))
        except USER_ERRORS as error:  # it belongs to whoever asked
            body = cloudpickle.dumps(portable(error))
        if asked.number is not None:
            try:
                await self._hub.answer.remote(self.run_id, {asked.number: body})
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: an answer is lost with the event hub: %s", self.run_id, last_line(error))

    async def _service(self, name: str, payload: Mapping[str, object]) -> object:
        if name == "tool_metrics":
            method = getattr(self._request.tool_metrics, str(payload["method"]))
            return await threads.run(method, *cast("Sequence[object]", payload["arguments"]))
        if name == "unknown_effect":
            how = self._request.on_unknown
            return await ask_unknown(UnknownEffect.from_dict(payload), None if isinstance(how, OnUnknown) else how)
        if name.startswith("scripted_model."):
            from ensemble_ray.testing.scripted import answer_scripted

            return await answer_scripted(payload)
        raise IllegalStateError(f"The driver has no service '{name}'")


def _opened(ended: Conducted[bytes, bytes]) -> Conducted[TaskOutput, TaskResult]:
    """The outcome with its outputs loaded."""
    return Conducted(
        state=ended.state,
        exit_reason=ended.exit_reason,
        started_at=ended.started_at,
        completed_at=ended.completed_at,
        completed=[(key, unpack_output(body)) for key, body in ended.completed],
        delegated=[unpack_output(body) for body in ended.delegated],
        lost_work=ended.lost_work,
        failures=[
            Failed(
                key=failed.key,
                at=failed.at,
                failure=unpack_result(failed.failure),
                completed_before=failed.completed_before,
            )
            for failed in ended.failures
        ],
        unfinished=[unpack_result(body) for body in ended.unfinished],
    )
