"""The events of each run in order, and the requests to its driver. A cluster has one hub.

Events stay bytes; older ones are in a temporary file, so that a late reader receives all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from ensemble_ray.actors.shared.journal import describe_this_process
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.descriptions import ActorDescription, dump_actor
from ensemble_ray.values.ids import new_object_id

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
            raise IllegalStateError(f"Run {run_id}: its driver is gone and cannot answer '{name}'")
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


@dataclass(frozen=True, slots=True)
class DriverRequest:
    """A request that only the driver can handle; `number` None: without an answer."""

    name: str
    payload: Mapping[str, object]
    number: int | None


@dataclass(frozen=True, slots=True)
class EventPage:
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


@dataclass(slots=True)
class _HubRun:
    log: HubEventLog = field(default_factory=HubEventLog)
    requests: list[DriverRequest] = field(default_factory=list["DriverRequest"])
    waiting: dict[int, asyncio.Future[bytes]] = field(default_factory=dict[int, "asyncio.Future[bytes]"])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_driver_gone: bool = False
    #: when the driver last polled, s of the monotonic clock
    heartbeat_at: float = field(default_factory=time.monotonic)


def _mark_driver_gone(run: _HubRun, run_id: str) -> None:
    run.is_driver_gone = True
    gone = pickle.dumps(IllegalStateError(f"Run {run_id}: its driver is gone"))
    for waiting in run.waiting.values():
        if not waiting.done():
            waiting.set_result(gone)
