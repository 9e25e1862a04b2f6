"""The hub of a run's events, and what sends events to it: as bytes, in order, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, cast

import msgspec
import ray.exceptions
from msgspec import Struct

from ensemble_ray.actors.link.packing import cannot_leave, unpack_output
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, BatchSender, last_line, reach
from ensemble_ray.actors.shared.journal import describe_this_process
from ensemble_ray.errors import DriverGoneError, portable
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
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.metrics import ActorDescription, dump_actor
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


class _Announcement(Struct, frozen=True):
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


#: Of one run.
KEPT_IN_MEMORY = 4096
KEPT_RUNS = 32
#: Then a silent driver is gone, s: it polls every ten seconds.
MOST_SILENT_S = 40.0
_LOOK_S = 5.0


class EventHub:
    def __init__(self) -> None:
        self._runs: OrderedDict[str, _HubRun] = OrderedDict()
        self._numbers = itertools.count(1)
        self._life = new_object_id()

    async def begin(self, run_id: str) -> None:
        left = self._runs.pop(run_id, None)
        if left is not None:
            left.log.close()
            left.changed.set()
            _mark_driver_gone(left, run_id)  # requests of the earlier run must not reach the new one

    async def publish(self, run_id: str, events: Sequence[bytes]) -> None:
        run = self._run(run_id)
        run.log.extend(events)
        run.changed.set()

    async def poll(
        self, run_id: str, cursor: int, wait_s: float, *, is_driver: bool = False, limit: int = 512
    ) -> EventPage:
        """Return the events after the first `cursor` ones, and the open requests to the driver. Wait up to `wait_s` for some."""
        run = self._run(run_id)
        if is_driver:
            run.heartbeat_at = time.monotonic()
        if cursor >= run.log.length and not (is_driver and run.requests) and wait_s > 0:
            run.changed.clear()
            try:
                await asyncio.wait_for(run.changed.wait(), wait_s)
            except TimeoutError:
                return EventPage((), cursor, (), self._life)
        requests: list[DriverRequest] = []
        if is_driver:
            requests, run.requests = run.requests, []
        events = run.log.read(cursor, limit)
        return EventPage(events, cursor + len(events), requests, self._life)

    async def ask(self, run_id: str, name: str, payload: Mapping[str, object]) -> bytes:
        """Send a request to the driver of a run and return its pickled answer."""
        run = self._run(run_id)
        if run.is_driver_gone:
            raise DriverGoneError(f"Run {run_id}: its driver is gone and cannot answer '{name}'")
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        run.waiting[number] = answer
        run.requests.append(DriverRequest(name, payload, number))
        run.changed.set()
        try:
            # A killed driver never answers; no request waits for it forever (S-DUR-33).
            while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
                if time.monotonic() - run.heartbeat_at > MOST_SILENT_S:
                    _mark_driver_gone(run, run_id)
            return answer.result()
        finally:
            run.waiting.pop(number, None)

    async def notify(self, run_id: str, requests: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        run = self._run(run_id)
        run.requests.extend(DriverRequest(name, payload, None) for name, payload in requests)
        run.changed.set()

    async def answer(self, run_id: str, answers: Mapping[int, bytes]) -> None:
        run = self._run(run_id)
        for number, body in answers.items():
            waiting = run.waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(body)

    async def mark_driver_gone(self, run_id: str) -> None:
        _mark_driver_gone(self._run(run_id), run_id)

    async def describe(self) -> bytes:
        events = sum(run.log.length for run in self._runs.values())
        requests = sum(len(run.waiting) for run in self._runs.values())
        note = f"runs: {len(self._runs)}, events kept: {events}, requests that wait for drivers: {requests}"
        return dump_actor(ActorDescription(process=describe_this_process("events", "event_hub", note=note)))

    def _run(self, run_id: str) -> _HubRun:
        if run_id not in self._runs:
            self._runs[run_id] = _HubRun()
            self._drop_old()
        return self._runs[run_id]

    def _drop_old(self) -> None:
        """Drop the oldest runs without a driver. Runs with a driver stay, however many."""
        now = time.monotonic()
        left = [
            name for name, run in self._runs.items() if run.is_driver_gone or now - run.heartbeat_at > MOST_SILENT_S
        ]
        for run_id in left[: max(0, len(left) - KEPT_RUNS)]:
            dropped = self._runs.pop(run_id)
            dropped.log.close()
            _mark_driver_gone(dropped, run_id)


class DriverRequest(Struct, frozen=True):
    """A request that only the driver can handle; `number` None: without an answer."""

    name: str
    payload: Mapping[str, object]
    number: int | None


class EventPage(Struct, frozen=True):
    events: Sequence[bytes]
    cursor: int
    requests: Sequence[DriverRequest]
    #: id of the hub's process; cursors are only valid within one
    life: str


class HubEventLog:
    def __init__(self, kept_in_memory: int = KEPT_IN_MEMORY) -> None:
        self._kept = kept_in_memory
        self._spilled: IO[bytes] | None = None
        self._offsets: list[int] = []
        self._recent: list[bytes] = []

    @property
    def length(self) -> int:
        return len(self._offsets) + len(self._recent)

    def extend(self, events: Sequence[bytes]) -> None:
        self._recent.extend(events)
        excess = len(self._recent) - self._kept
        if excess > 0:
            if self._spilled is None:
                self._spilled = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the log
            self._spilled.seek(0, 2)
            for event in self._recent[:excess]:
                self._offsets.append(self._spilled.tell())
                self._spilled.write(len(event).to_bytes(8, "big") + event)
            del self._recent[:excess]

    def read(self, cursor: int, limit: int) -> list[bytes]:
        found: list[bytes] = []
        if self._spilled is not None and cursor < len(self._offsets):
            self._spilled.seek(self._offsets[cursor])
            for _ in range(min(limit, len(self._offsets) - cursor)):
                size = int.from_bytes(self._spilled.read(8), "big")
                found.append(self._spilled.read(size))
        start = max(0, cursor - len(self._offsets))
        found.extend(self._recent[start : start + limit - len(found)])
        return found

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()


class _HubRun(Struct):
    log: HubEventLog = msgspec.field(default_factory=HubEventLog)
    requests: list[DriverRequest] = msgspec.field(default_factory=list["DriverRequest"])
    waiting: dict[int, asyncio.Future[bytes]] = msgspec.field(default_factory=dict[int, "asyncio.Future[bytes]"])
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    is_driver_gone: bool = False
    #: when the driver last polled, s of the monotonic clock
    heartbeat_at: float = msgspec.field(default_factory=time.monotonic)


def _mark_driver_gone(run: _HubRun, run_id: str) -> None:
    run.is_driver_gone = True
    gone = pickle.dumps(DriverGoneError(f"Run {run_id}: its driver is gone"))
    for waiting in run.waiting.values():
        if not waiting.done():
            waiting.set_result(gone)
