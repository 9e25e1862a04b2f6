"""Sends a run's events to the hub: as bytes, in order, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray.exceptions

from ensemble_ray.actors.link.packing import cannot_leave, unpack_output
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, BatchSender, last_line, reach
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
#: Tokens wait for more tokens, s; all other events are sent immediately.
TOKEN_BATCH_S = 0.05


class HubSink:
    def __init__(self, hub: Any, run_id: str, interest: frozenset[str]) -> None:
        self._interest = interest
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sender: BatchSender[bytes] = BatchSender(
            lambda batch: note_lost_events(hub.publish.remote(run_id, batch), run_id)
        )

    def wants(self, event_type: type[Event]) -> bool:
        return event_type.method in self._interest

    def emit(self, event: Event) -> None:
        """Thread-safe."""
        self.emit_packed(pack_event(event), TOKEN_BATCH_S if isinstance(event, TokenEvent) else 0.0)

    def emit_packed(self, body: bytes, delay_s: float = 0.0) -> None:
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
        return self._sender.is_idle and not self._waiting

    async def flush(self) -> None:
        self._start_sending()
        await self._sender.flush()

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
        waiting, self._waiting = self._waiting, []
        self._sender.add(*waiting)


async def begin_events(hub: Any, run_id: str) -> None:
    """Register a new run at the hub. If a restarting hub takes too long, the run starts without it."""
    try:
        await reach(lambda: hub.begin.remote(run_id), RESTART_PAUSES_S)
    except ray.exceptions.RayError as error:
        _log.warning("Run %s: the event hub cannot be reached: %s", run_id, last_line(error))


async def note_lost_events(reference: Any, run_id: str) -> None:
    try:
        await reference
    except ray.exceptions.RayError as error:
        _log.warning("Run %s: the event hub cannot be reached; events are lost: %s", run_id, error)


def pack_event(event: Event) -> bytes:
    """A cause that cannot be pickled is replaced by a stand-in, and a payload by its text."""
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
            # Usually only data of this library. Plain pickling is much faster than the search for users' classes.
            with contextlib.suppress(Exception):
                return pickle.dumps(event, protocol=5)
    return dumps(event)


def pack_announcement(run_id: str, unit: Unit, what: IterationEnded | StepEnded, outputs: Sequence[bytes]) -> bytes:
    """Return the pickled event of an iteration or a step. Its outputs stay bytes until it is loaded."""
    return pickle.dumps(_Announcement(run_id, unit, what, tuple(outputs)), protocol=5)


@dataclass(frozen=True, slots=True)
class _Announcement:
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
    """A tool's payload in an event. Unpickles as the original value, or as JSON data if that fails."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[object, ...]:
        try:
            return (_payload, (dumps(self._value), jsonable(self._value)))
        except Exception:  # noqa: BLE001  a listener must not change a run
            return (jsonable, (jsonable(self._value),))


def _payload(body: bytes, otherwise: object) -> object:
    try:
        return cast("object", pickle.loads(body))  # noqa: S301  bytes of our own cluster
    except Exception:  # noqa: BLE001  its class cannot be loaded here
        return otherwise
