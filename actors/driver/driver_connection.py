"""Receives a run's events and log lines in its driver, and answers requests to the driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import ray.exceptions

from ensemble_ray.actors.driver.cluster import ClusterHeartbeat
from ensemble_ray.actors.link.events import DriverRequest, EventPage
from ensemble_ray.actors.link.limiter import MEMORY_SERVICE, REFLECTION_SERVICE
from ensemble_ray.actors.link.packing import packed_evaluation
from ensemble_ray.actors.link.reach import BackgroundTasks, last_line
from ensemble_ray.actors.link.wire import LogLine
from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.errors import IllegalStateError, message_of
from ensemble_ray.errors.travel import ErrorChain
from ensemble_ray.events import Event
from ensemble_ray.execute.callables import CALLABLE_SERVICE, answer_callable
from ensemble_ray.execute.effects import UnknownEffect
from ensemble_ray.execute.orders import EvaluationFailed
from ensemble_ray.execute.review.gates import REVIEW_SERVICE, answer_review
from ensemble_ray.execute.tools.unknown import ask_unknown
from ensemble_ray.process.concurrency import USER_ERRORS, threads
from ensemble_ray.process.config import dumps
from ensemble_ray.process.context import bounded_logger, is_repeated, notify
from ensemble_ray.process.run_context import CurrentRun, use_run
from ensemble_ray.runs.ports import RunRequest
from ensemble_ray.runs.unit_evaluations import LocalMemoryResets
from ensemble_ray.tools.call import TOOL_SERVICE, answer_tool_call
from ensemble_ray.tools.user_code import GuardedToolMetrics, record_metric

#: How long a call waits for lines, s, and pauses before its retry, s.
_WAIT_S = 10.0
_RETRY_S = 0.5
_LEAVE_S = 2.0
_log = bounded_logger(__name__)
_POLL_S = 10.0
DriverService: TypeAlias = Callable[[Mapping[str, object]], Awaitable[object]]


class DriverConnection:
    def __init__(self, run: RunRequest, heartbeat: ClusterHeartbeat, scheduler: Any) -> None:
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
        self._answers = BackgroundTasks()
        #: without an answer, such as counts for the user's metrics
        self._notifications = BackgroundTasks()
        #: serves notifications in order of arrival (S-MET-35)
        self._turn = asyncio.Lock()

    def begin(self, hub: Any) -> None:
        """Without a hub, receive only log lines."""
        if self._run.context.forwards_logs:
            self._listener = LineListener(self._scheduler, self._run_id)
        if hub is None:
            return
        self._hub = hub
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    def keep_last_lines(self, lines: Sequence[LogLine] | None) -> None:
        if self._listener is not None:
            self._listener.keep_last(lines)

    async def detach(self) -> None:
        try:
            await self._detach()
        finally:
            if self._polling is not None and (deps := self._run.context.deps) is not None:
                await deps.close()

    async def _detach(self) -> None:
        if self._listener is not None:
            await self._listener.detach(is_gone=self._heartbeat.is_gone)
        if self._polling is None:
            return
        self._is_leaving = True
        if self._heartbeat.is_gone:
            self._polling.cancel()
            return
        try:
            # Wake the poll and do not cancel it: requests on a page in flight would be lost.
            await self._hub.publish.remote(self._run_id, [])
            await asyncio.wait([self._polling])
            while self._receive(await self._hub.poll.remote(self._run_id, self._cursor, 0.0, is_driver=True)):
                pass
            for answer in self._answers:
                answer.cancel()  # the run has ended: their callers are gone
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
                await asyncio.sleep(_RETRY_S)  # it restarts, and requests of the run wait for us
            else:
                self._receive(page)

    def _receive(self, page: EventPage) -> bool:
        """Return whether there may be more."""
        is_new_hub = bool(self._hub_life) and page.life != self._hub_life
        self._hub_life = page.life
        self._cursor = 0 if is_new_hub else page.cursor
        for body in () if is_new_hub else page.events:
            try:
                event = cast("Event", pickle.loads(body))  # noqa: S301  bytes of our own cluster
            except Exception as error:  # noqa: BLE001  one such event must not stop the others
                _log.warning("Run %s: an event cannot be loaded in this process: %s", self._run_id, message_of(error))
            else:
                self._run.events.emit(event)
        for asked in page.requests:
            tasks = self._notifications if asked.number is None else self._answers
            tasks.start(self._serve(asked))
        return is_new_hub or bool(page.events or page.requests)

    async def _serve(self, asked: DriverRequest) -> None:
        try:
            service = self._services.get(asked.name)
            if service is None:
                raise IllegalStateError(f"The driver has no service '{asked.name}'")
            async with self._turn if asked.number is None else contextlib.nullcontext():
                body = dumps(await service(asked.payload))
        except USER_ERRORS as error:  # it is raised in the caller
            body = dumps(ErrorChain(error))
        if asked.number is not None:
            try:
                await self._hub.answer.remote(self._run_id, {asked.number: body})
            except ray.exceptions.RayError as error:
                _log.warning("Run %s: an answer is lost with the event hub: %s", self._run_id, last_line(error))


async def _open_run(run: RunRequest) -> CurrentRun:
    """Return the run for user code in this process, with open deps."""
    current_run = run.context.current_run()
    await current_run.open_deps()
    return current_run


def _user_code(run: RunRequest) -> Mapping[str, DriverService]:
    """Return the services that call user code which needs the deps of this process."""

    async def call_tool(payload: Mapping[str, object]) -> object:
        body, metrics = cast("bytes", payload["body"]), GuardedToolMetrics(run.tool_metrics)
        return await answer_tool_call(body, await _open_run(run), metrics, run.events.emit)

    async def call_callable(payload: Mapping[str, object]) -> object:
        return await answer_callable(cast("bytes", payload["body"]), await _open_run(run))

    return {TOOL_SERVICE: call_tool, CALLABLE_SERVICE: call_callable}


def driver_services(run: RunRequest) -> Mapping[str, DriverService]:
    async def count_tool_call(payload: Mapping[str, object]) -> object:
        arguments = cast("Sequence[object]", payload["arguments"])
        return await threads.run(record_metric, run.tool_metrics, str(payload["method"]), *arguments)

    async def ask_about_effect(payload: Mapping[str, object]) -> object:
        how = run.on_unknown
        return await ask_unknown(UnknownEffect.from_dict(payload), None if isinstance(how, OnUnknown) else how)

    async def answer_scripted_model(payload: Mapping[str, object]) -> object:
        from ensemble_ray.testing.scripted import answer_scripted  # only if a scripted model takes part

        return await answer_scripted(payload)

    async def call_held_object(payload: Mapping[str, object]) -> object:
        from ensemble_ray.memory.tools import answer_held  # only if a tool of memory takes part

        return await answer_held(payload)

    async def review(payload: Mapping[str, object]) -> object:
        if run.reviewer is None:
            raise IllegalStateError(f"Run {run.run_id} has nobody to ask at its review gates")
        with use_run(await _open_run(run)):
            return await answer_review(run.reviewer, payload)

    async def use_memory(payload: Mapping[str, object]) -> object:
        memory = run.memory
        target = memory if memory is None or payload["method"] != "reset" else LocalMemoryResets(memory)
        answer = await _call(run, target, "memory", payload)
        # Bytes: the caller loads no user code.
        return packed_evaluation(answer) if isinstance(answer, EvaluationFailed) else answer

    return {
        "tool_metrics": count_tool_call,
        "unknown_effect": ask_about_effect,
        "scripted_model.chat": answer_scripted_model,
        REVIEW_SERVICE: review,
        MEMORY_SERVICE: use_memory,
        REFLECTION_SERVICE: lambda payload: _call(run, run.reflections, "store of reflections", payload),
        "held_object": call_held_object,
        **_user_code(run),
    }


async def _call(run: RunRequest, target: object | None, what: str, payload: Mapping[str, object]) -> object:
    if target is None:
        raise IllegalStateError(f"Run {run.run_id} has no {what}")
    arguments = pickle.loads(cast("bytes", payload["body"]))  # noqa: S301  bytes of our own cluster
    answer: object = await getattr(target, str(payload["method"]))(*arguments)
    return answer


class LineListener:
    def __init__(self, service: Any, run_id: str) -> None:
        self._service = service
        self._run_id = run_id
        self._is_leaving = False
        #: None: still to be requested
        self._last: Sequence[LogLine] | None = None
        self._collecting = asyncio.get_running_loop().create_task(self._collect())

    def keep_last(self, lines: Sequence[LogLine] | None) -> None:
        self._last = lines

    async def detach(self, *, is_gone: bool) -> None:
        """Show the last lines and stop listening; stop immediately if the cluster is gone."""
        self._is_leaving = True
        if is_gone:
            self._collecting.cancel()
            return
        last = self._last or ()
        if self._last is None:
            with contextlib.suppress(ray.exceptions.RayError):  # the scheduler is gone, and its lines with it
                last = await self._service.drain_lines.remote(self._run_id)
        # This woke the other call. It is not cancelled, since lines in flight would be lost.
        await asyncio.wait([self._collecting], timeout=_LEAVE_S)
        self._collecting.cancel()
        for line in last:
            show_line(line, self._run_id)

    async def _collect(self) -> None:
        while not self._is_leaving:
            try:
                lines: Sequence[LogLine] | None = await self._service.collect_lines.remote(self._run_id, _WAIT_S)
            except ray.exceptions.RayError:  # it restarts, or is gone, which the run itself reports
                await asyncio.sleep(_RETRY_S)
            else:
                if lines is None:  # the run has ended
                    return
                for line in lines:
                    show_line(line, self._run_id)


def show_line(line: LogLine, run_id: str = "") -> None:
    """Log a record under its logger and level, a printed line as a notice."""
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
