"""A run's events on their way to the hub: as bytes, in order, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray.exceptions

from ensemble_ray.actors.link.packing import cannot_leave, unpack_output
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, last_line, reach
from ensemble_ray.errors import portable
from ensemble_ray.events import (
    Event,
    GraphStateCompletedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TokenEvent,
    ToolCallEvent,
)
from ensemble_ray.plan.plan import Unit
from ensemble_ray.process.config import dumps
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.runs.unit_evaluations import build_announcement
from ensemble_ray.schedule.instructions import IterationEnded, StepEnded
from ensemble_ray.values.trace import jsonable

_log = bounded_logger(__name__)
#: Tokens may wait so long for others to travel with them, s; all other events leave at once.
TOKEN_BATCH_S = 0.05


def pack_event(event: Event) -> bytes:
    """Return the event as bytes. What of the user's cannot travel is replaced: a cause by its stand-in, a payload by its text.

    Raises:
        AgentExecutionError: the output of a completed task cannot travel, so that the task is not completed.
    """
    match event:
        case TaskFailedEvent():
            event = replace(event, cause=portable(event.cause))
        case ToolCallEvent() if not isinstance(event.structured_result, str | int | float | None):
            event = replace(event, structured_result=_Payload(event.structured_result))
        case TaskCompleteEvent() if (event.task_output.output_type, event.task_output.parsed_output) != (None, None):
            try:
                return dumps(event)
            except Exception as error:
                raise cannot_leave(event.task_description, event.agent_role, error) from error
        case _:
            # Data of ours, as a rule: that needs no search for the user's classes, which takes far longer.
            with contextlib.suppress(Exception):
                return pickle.dumps(event, protocol=5)
    return dumps(event)


def pack_announcement(run_id: str, unit: Unit, what: IterationEnded | StepEnded, outputs: Sequence[bytes]) -> bytes:
    """Return the event of an iteration or a step as bytes, its outputs as they are: they are loaded where it arrives."""
    return pickle.dumps(_Announcement(run_id, unit, what, tuple(outputs)), protocol=5)


@dataclass(frozen=True, slots=True)
class _Announcement:
    """The event of a loop or a graph on its way; it comes out as that event."""

    run_id: str
    unit: Unit
    what: IterationEnded | StepEnded
    outputs: tuple[bytes, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return (_load_announcement, (self.run_id, self.unit, self.what, self.outputs))


def _load_announcement(
    run_id: str, unit: Unit, what: IterationEnded | StepEnded, outputs: Sequence[bytes]
) -> LoopIterationCompletedEvent | GraphStateCompletedEvent:
    return build_announcement(run_id, unit, what, [unpack_output(body) for body in outputs])


class _Payload:
    """A tool's payload on its way in an event; it comes out as what it was, else as JSON data of it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[object, ...]:
        try:
            return (_payload, (dumps(self._value), jsonable(self._value)))
        except Exception:  # noqa: BLE001  whatever pickling raised, a listener must not change a run
            return (jsonable, (jsonable(self._value),))


def _payload(body: bytes, otherwise: object) -> object:
    try:
        return cast("object", pickle.loads(body))  # noqa: S301  bytes of our own cluster
    except Exception:  # noqa: BLE001  its class cannot be had here
        return otherwise


class HubSink:
    """Publishes one run's events from this process to the hub, in order and in batches.

    One batch is on its way at a time, what comes meanwhile goes with the next: Ray starts calls of an asynchronous
    actor out of order as soon as one of them is large (measured: 400 kB beside 10 bytes, in 52 of 60 rounds).
    """

    def __init__(self, hub: Any, run_id: str, interest: frozenset[str]) -> None:
        self._hub = hub
        self._run_id = run_id
        self._interest = interest
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        #: whether what waits should leave with the next batch, and not with the tokens' timer
        self._is_due = False
        self._sending: asyncio.Task[None] | None = None

    def wants(self, event_type: type[Event]) -> bool:
        """Whether anybody listens to that type."""
        return event_type.method in self._interest

    def emit(self, event: Event) -> None:
        """Send it with the next batch; may be called from any thread."""
        self.emit_packed(pack_event(event), TOKEN_BATCH_S if isinstance(event, TokenEvent) else 0.0)

    def emit_packed(self, body: bytes, delay_s: float = 0.0) -> None:
        """Send an event that is bytes already; may be called from any thread."""
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._add(body, delay_s)
        else:
            self._loop.call_soon_threadsafe(self._add, body, delay_s)

    @property
    def is_idle(self) -> bool:
        """Whether the hub has acknowledged everything emitted so far."""
        return self._sending is None and not self._waiting

    async def flush(self) -> None:
        """Return when the hub has acknowledged everything emitted so far."""
        self._start_sending()
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def _add(self, body: bytes, delay_s: float) -> None:
        self._waiting.append(body)
        if self._timer is not None and delay_s == 0.0:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_later(delay_s, self._start_sending)

    def _start_sending(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_due = bool(self._waiting)
        if self._is_due and self._sending is None:
            self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._is_due:
                self._is_due = False
                batch, self._waiting = self._waiting, []
                await note_lost_events(self._hub.publish.remote(self._run_id, batch), self._run_id)
        finally:
            self._sending = None


async def begin_events(hub: Any, run_id: str) -> None:
    """Tell the hub of a run that begins.

    One that is just being started again is waited for: what is published meanwhile would be lost, and who asks the driver
    something would fail. A run begins without it where that takes too long; what is listened to matters less.
    """
    try:
        await reach(lambda: hub.begin.remote(run_id), RESTART_PAUSES_S)
    except ray.exceptions.RayError as error:
        _log.warning("Run %s: the event hub cannot be reached: %s", run_id, last_line(error))


async def note_lost_events(reference: Any, run_id: str) -> None:
    """Return when the hub has what it was sent. A hub that died took events with it; the tasks they tell of are not concerned."""
    try:
        await reference
    except ray.exceptions.RayError as error:
        _log.warning("Run %s: the event hub cannot be reached; events are lost: %s", run_id, error)
