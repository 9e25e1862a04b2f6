"""DriverConnection: what a run on the cluster has from its driver. It takes the run's events, and answers what only it can.

In: the hub of a run, from when the run has begun. Out: events for the driver's sink, answers for whoever asks in the
run. Must never happen: an event that is handed on twice, or an answer that is lost while the hub lives.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray.exceptions

from ensemble_ray.actors.driver.log_listener import LineListener
from ensemble_ray.actors.driver.services import driver_services
from ensemble_ray.actors.link.background_tasks import BackgroundTasks
from ensemble_ray.actors.link.failures import last_line
from ensemble_ray.errors import IllegalStateError, message_of
from ensemble_ray.errors.travel import Chain
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.pickling import dumps
from ensemble_ray.process.threads import USER_ERRORS

if TYPE_CHECKING:
    from ensemble_ray.actors.driver.cluster import ClusterHeartbeat
    from ensemble_ray.actors.link.log_lines import LogLine
    from ensemble_ray.actors.shared.event_hub import DriverRequest, EventPage
    from ensemble_ray.events import Event
    from ensemble_ray.runs.ports import RunRequest

__all__ = ["DriverConnection"]

_log = bounded_logger(__name__)
#: How long one poll waits for events, s.
_POLL_S = 10.0
#: Pause before a hub that could not be reached is asked again, s.
_RETRY_S = 0.5


class DriverConnection:
    """One run's driver, as its event hub sees it."""

    def __init__(self, run: RunRequest, heartbeat: ClusterHeartbeat, scheduler: Any) -> None:
        """Make one; it does nothing before `begin`.

        Args:
            run: Which run, and who takes what comes of it.
            heartbeat: Knows whether the cluster lives.
            scheduler: Has the lines that the run's processes say.
        """
        self._run = run
        self._run_id = run.run_id
        self._services = driver_services(run)
        self._heartbeat = heartbeat
        self._scheduler = scheduler
        self._listener: LineListener | None = None
        self._hub: Any = None
        self._cursor = 0
        self._hub_life = ""
        self._polling: asyncio.Task[None] | None = None
        self._is_leaving = False
        #: answers that somebody in the run waits for
        self._answers = BackgroundTasks()
        #: requests without an answer, such as counts for the user's metrics
        self._notifications = BackgroundTasks()
        #: they are served one after the other, in the order in which they came (S-MET-35)
        self._turn = asyncio.Lock()

    def begin(self, hub: Any) -> None:
        """Listen from now on; without a hub only to what the run's processes say."""
        if self._run.context.forwards_logs:
            self._listener = LineListener(self._scheduler, self._run_id)
        if hub is None:
            return
        self._hub = hub
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    def keep_last_lines(self, lines: Sequence[LogLine] | None) -> None:
        """Take what the run's processes said last, where it came with the run's end."""
        if self._listener is not None:
            self._listener.keep_last(lines)

    async def leave(self) -> None:
        """Take what is still in the hub and what was said last, and answer no more."""
        if self._listener is not None:
            await self._listener.leave(is_gone=self._heartbeat.is_gone)
        if self._polling is None:
            return
        self._is_leaving = True
        if self._heartbeat.is_gone:
            self._polling.cancel()
            return
        try:
            # Woken, not cancelled: a page that is on its way has requests that nobody could take again.
            await self._hub.publish.remote(self._run_id, [])
            await asyncio.wait([self._polling])
            while self._receive(await self._hub.poll.remote(self._run_id, self._cursor, 0.0, is_driver=True)):
                pass
            for answer in self._answers:
                answer.cancel()  # the run has ended: whoever asked is gone
            if self._notifications:
                await asyncio.wait(list(self._notifications), timeout=5)
            await self._hub.mark_driver_gone.remote(self._run_id)
        except ray.exceptions.RayError as error:
            _log.warning("Run %s: the event hub cannot be reached; its last events are lost: %s", self._run_id, error)

    async def _poll(self) -> None:
        while not self._is_leaving:
            try:
                page: EventPage = await self._hub.poll.remote(self._run_id, self._cursor, _POLL_S, is_driver=True)
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: the event hub cannot be reached; events are lost: %s", self._run_id, error)
                await asyncio.sleep(_RETRY_S)  # it is started again; whoever asks something in the run waits for us
            else:
                self._receive(page)

    def _receive(self, page: EventPage) -> bool:
        """Hand on what a page brought; return whether there may be more."""
        is_new_hub = bool(self._hub_life) and page.life != self._hub_life
        self._hub_life = page.life
        self._cursor = 0 if is_new_hub else page.cursor
        for body in () if is_new_hub else page.events:
            self._emit(body)
        for asked in page.requests:
            if asked.number is None:
                self._notifications.start(self._serve_in_turn(asked))
            else:
                self._answers.start(self._serve(asked))
        return is_new_hub or bool(page.events or page.requests)

    def _emit(self, body: bytes) -> None:
        try:
            event = cast("Event", pickle.loads(body))  # noqa: S301  bytes of our own cluster
        except Exception as error:  # noqa: BLE001  one event that cannot be loaded here must not end the listening
            _log.warning("Run %s: an event cannot be loaded in this process: %s", self._run_id, message_of(error))
        else:
            self._run.events.emit(event)

    async def _serve_in_turn(self, asked: DriverRequest) -> None:
        async with self._turn:
            await self._serve(asked)

    async def _serve(self, asked: DriverRequest) -> None:
        """Do what only the driver can, and answer."""
        try:
            body = dumps(await self._service(asked.name, asked.payload))
        except USER_ERRORS as error:  # it belongs to whoever asked
            body = dumps(Chain(error))
        if asked.number is not None:
            try:
                await self._hub.answer.remote(self._run_id, {asked.number: body})
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: an answer is lost with the event hub: %s", self._run_id, last_line(error))

    async def _service(self, name: str, payload: Mapping[str, object]) -> object:
        service = self._services.get(name)
        if service is None:
            raise IllegalStateError(f"The driver has no service '{name}'")
        return await service(payload)
