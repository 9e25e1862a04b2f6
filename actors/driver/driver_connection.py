"""DriverConnection: what a run on the cluster has from its driver. It takes the run's events, and answers what only it can.

In: the hub of a run, from when the run has begun. Out: events for the driver's sink, answers for whoever asks in the
run. Must never happen: an event that is handed on twice, or an answer that is lost while the hub lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import ray.exceptions

from ensemble_ray.actors.link.limiter import MEMORY_SERVICE, REFLECTION_SERVICE
from ensemble_ray.actors.link.packing import packed_evaluation
from ensemble_ray.actors.link.reach import BackgroundTasks, last_line
from ensemble_ray.actors.link.wire import LogLine
from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.errors import IllegalStateError, message_of
from ensemble_ray.errors.travel import Chain
from ensemble_ray.execute.effects import UnknownEffect
from ensemble_ray.execute.review.gates import REVIEW_SERVICE, answer_review
from ensemble_ray.execute.tools.unknown import ask_unknown
from ensemble_ray.process.config import dumps
from ensemble_ray.process.context import bounded_logger, is_repeated, notify
from ensemble_ray.process.forks import USER_ERRORS, threads
from ensemble_ray.runs.unit_evaluations import LocalMemoryResets
from ensemble_ray.tools.waiting import record_metric

if TYPE_CHECKING:
    from ensemble_ray.actors.driver.cluster import ClusterHeartbeat
    from ensemble_ray.actors.shared.event_hub import DriverRequest, EventPage
    from ensemble_ray.definition.task import ReflectionInput
    from ensemble_ray.events import Event
    from ensemble_ray.plan.plan import LoopUnit
    from ensemble_ray.runs.ports import RunRequest
    from ensemble_ray.values.memory import MemoryNote, MemoryQuery, TaskReflection


#: Takes a request's data, returns the answer.
DriverService: TypeAlias = Callable[[Mapping[str, object]], Awaitable[object]]


def driver_services(run: RunRequest) -> Mapping[str, DriverService]:
    """Return the services of a run's driver, by name."""

    async def count_tool_call(payload: Mapping[str, object]) -> object:
        arguments = cast("Sequence[object]", payload["arguments"])
        return await threads.run(record_metric, run.tool_metrics, str(payload["method"]), *arguments)

    async def ask_about_effect(payload: Mapping[str, object]) -> object:
        how = run.on_unknown
        return await ask_unknown(UnknownEffect.from_dict(payload), None if isinstance(how, OnUnknown) else how)

    async def answer_scripted_model(payload: Mapping[str, object]) -> object:
        from ensemble_ray.testing.scripted import answer_scripted  # only where a scripted model takes part

        return await answer_scripted(payload)

    async def call_held_object(payload: Mapping[str, object]) -> object:
        from ensemble_ray.memory.tools import answer_held  # only where a tool of memory takes part

        return await answer_held(payload)

    async def review(payload: Mapping[str, object]) -> object:
        if run.reviewer is None:
            raise IllegalStateError(f"Run {run.run_id} has nobody to ask at its review gates")
        return await answer_review(run.reviewer, payload)

    async def use_memory(payload: Mapping[str, object]) -> object:
        return await _use_memory(run, payload)

    async def use_reflections(payload: Mapping[str, object]) -> object:
        return await _use_reflections(run, payload)

    return {
        "tool_metrics": count_tool_call,
        "unknown_effect": ask_about_effect,
        "scripted_model.chat": answer_scripted_model,
        REVIEW_SERVICE: review,
        MEMORY_SERVICE: use_memory,
        REFLECTION_SERVICE: use_reflections,
        "held_object": call_held_object,
    }


async def _use_memory(run: RunRequest, payload: Mapping[str, object]) -> object:
    """Do what a task or a loop asks of the run's memory."""
    if run.memory is None:
        raise IllegalStateError(f"Run {run.run_id} has no memory")
    asked: object = pickle.loads(cast("bytes", payload["body"]))  # noqa: S301  bytes of our own cluster
    match payload["method"]:
        case "recall":
            return await run.memory.recall(cast("MemoryQuery", asked))
        case "remember":
            return await run.memory.remember(cast("MemoryNote", asked))
        case _:
            failed = await LocalMemoryResets(run.memory).reset(cast("LoopUnit", asked))
            return None if failed is None else packed_evaluation(failed)  # whoever asks loads nothing of the user's


async def _use_reflections(run: RunRequest, payload: Mapping[str, object]) -> object:
    """Do what a task asks of the run's reflections."""
    if run.reflections is None:
        raise IllegalStateError(f"Run {run.run_id} has no store of reflections")
    asked: object = pickle.loads(cast("bytes", payload["body"]))  # noqa: S301  bytes of our own cluster
    match payload["method"]:
        case "recall":
            return await run.reflections.recall(*cast("tuple[str]", asked))
        case "find_prior":
            return await run.reflections.find_prior(*cast("tuple[str]", asked))
        case "store":
            await run.reflections.store(*cast("tuple[str, TaskReflection]", asked))
            return None
        case _:
            return await run.reflections.ask_strategy(*cast("tuple[ReflectionInput]", asked))


#: How long the driver's call waits for lines, s; and how long it waits before it asks again where that failed.
_WAIT_S = 10.0
_RETRY_S = 0.5
#: How long lines that are on their way are waited for at the end, s.
_LEAVE_S = 2.0


class LineListener:
    """Logs again in the driver what the processes of its run say."""

    def __init__(self, service: Any, run_id: str) -> None:
        self._service = service
        self._run_id = run_id
        self._is_leaving = False
        #: what was said last, where that came with the run's end; None: it is still to be asked for
        self._last: Sequence[LogLine] | None = None
        self._collecting = asyncio.get_running_loop().create_task(self._collect())

    def keep_last(self, lines: Sequence[LogLine] | None) -> None:
        """Take what was said last, which `leave` shows behind what is on its way; the call for lines has ended with it."""
        self._last = lines

    async def leave(self, *, is_gone: bool) -> None:
        """Show what was said last, and listen no more; at once where the cluster is gone."""
        self._is_leaving = True
        if is_gone:
            self._collecting.cancel()
            return
        last = self._last or ()
        if self._last is None:
            with contextlib.suppress(ray.exceptions.RayError):  # its lines are lost with it
                last = await self._service.drain_lines.remote(self._run_id)
        # That woke the other call. It is not cancelled: lines that are on their way could not be taken again.
        await asyncio.wait([self._collecting], timeout=_LEAVE_S)
        self._collecting.cancel()
        for line in last:
            show_line(line, self._run_id)

    async def _collect(self) -> None:
        while not self._is_leaving:
            try:
                lines: Sequence[LogLine] | None = await self._service.collect_lines.remote(self._run_id, _WAIT_S)
            except ray.exceptions.RayError:  # it is being started again, or gone, which the run itself tells
                await asyncio.sleep(_RETRY_S)
            else:
                if lines is None:  # the run has ended
                    return
                for line in lines:
                    show_line(line, self._run_id)


def show_line(line: LogLine, run_id: str = "") -> None:
    """Log a line in this process: a record under its own logger and level, what was printed as a notice.

    Args:
        line: The line.
        run_id: Of the run that says it, whose equal warnings are merged.
    """
    text = f"{line.agent_role}: {line.text}" if line.agent_role else line.text
    if not line.logger:
        notify(text)
        return
    logger = logging.getLogger(line.logger)
    if not logger.isEnabledFor(line.level):
        return
    is_of_library = line.logger.startswith("ensemble_ray.") and not line.logger.startswith("ensemble_ray.tool.")
    if line.agent_role and is_of_library and is_repeated(run_id, logger, line.level, text):
        return
    record = logger.makeRecord(line.logger, line.level, "(agent)", 0, "%s", (text,), None)
    record.template = line.template
    record.exc_text = line.traceback or None
    logger.handle(record)


_log = bounded_logger(__name__)
#: How long one poll waits for events, s.
_POLL_S = 10.0


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
