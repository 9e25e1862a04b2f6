"""EventHub: ordered events per run with cursors, and the requests that its driver answers. One per cluster.

Events come as bytes and leave as bytes; nothing is loaded here. Newest events are kept in memory up to a bound, older
ones go to an anonymous temporary file, so that a late reader still gets all of them.
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

#: Events of one run kept in memory.
KEPT_IN_MEMORY = 4096
#: Runs whose events are kept after they ended.
KEPT_RUNS = 32
#: A driver that has not asked for events for so long is gone, s: it asks every ten seconds.
MOST_SILENT_S = 40.0
#: How often somebody who waits for a driver's answer looks whether it is still there, s.
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class DriverRequest:
    """Something only the driver can answer; `number` None: it needs no answer."""

    name: str
    payload: Mapping[str, object]
    number: int | None


@dataclass(frozen=True, slots=True)
class EventPage:
    """What a reader gets: events from its cursor on, the next cursor, and open requests."""

    events: Sequence[bytes]
    cursor: int
    requests: Sequence[DriverRequest]
    #: which life of the hub this is from; cursors of an earlier life mean nothing in it
    life: str


class HubEventLog:
    """A run's events in order; bounded in memory, complete in sum."""

    def __init__(self, kept_in_memory: int = KEPT_IN_MEMORY) -> None:
        self._kept = kept_in_memory
        self._spilled: IO[bytes] | None = None
        self._offsets: list[int] = []
        self._recent: list[bytes] = []

    @property
    def length(self) -> int:
        """Events so far."""
        return len(self._offsets) + len(self._recent)

    def extend(self, events: Sequence[bytes]) -> None:
        """Add events; the oldest go to disk when there are too many."""
        self._recent.extend(events)
        excess = len(self._recent) - self._kept
        if excess > 0:
            self._spill(self._recent[:excess])
            del self._recent[:excess]

    def read(self, cursor: int, limit: int) -> list[bytes]:
        """Return at most so many events from a cursor on."""
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
        """Let the file go; it has no name and vanishes."""
        if self._spilled is not None:
            self._spilled.close()

    def _spill(self, events: Sequence[bytes]) -> None:
        if self._spilled is None:
            self._spilled = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the log
        self._spilled.seek(0, 2)
        for event in events:
            self._offsets.append(self._spilled.tell())
            self._spilled.write(len(event).to_bytes(8, "big") + event)


@dataclass(slots=True)
class _HubRun:
    log: HubEventLog = field(default_factory=HubEventLog)
    requests: list[DriverRequest] = field(default_factory=list["DriverRequest"])
    waiting: dict[int, asyncio.Future[bytes]] = field(default_factory=dict[int, "asyncio.Future[bytes]"])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_driver_gone: bool = False
    #: when the driver was last heard, s of the steady clock
    heartbeat_at: float = field(default_factory=time.monotonic)


class EventHub:
    """Keeps the events of runs, newest runs last."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _HubRun] = OrderedDict()
        self._numbers = itertools.count(1)
        self._life = new_object_id()

    async def begin(self, run_id: str) -> None:
        """Begin a run. What an earlier one of the same id left is dropped: its events, and that its driver is gone."""
        left = self._runs.pop(run_id, None)
        if left is not None:
            left.log.close()
            left.changed.set()
            _mark_driver_gone(left, run_id)  # who still asks in it is not to hear of the new one, nor it of them

    async def publish(self, run_id: str, events: Sequence[bytes]) -> None:
        """Add events of one producer, in its order; returning is the acknowledgement."""
        run = self._run(run_id)
        run.log.extend(events)
        run.changed.set()

    async def poll(
        self, run_id: str, cursor: int, wait_s: float, *, is_driver: bool = False, limit: int = 512
    ) -> EventPage:
        """Return events from a cursor on; waits up to that long for something to come.

        Args:
            run_id: Which run.
            cursor: Number of events the reader has had.
            wait_s: Longest wait when there is nothing new.
            is_driver: Whether the reader is the driver, who also takes the open requests.
            limit: Most events of one page.
        """
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
        """Ask the driver of a run and return its pickled answer.

        Raises:
            IllegalStateError: the driver is gone.
        """
        run = self._run(run_id)
        if run.is_driver_gone:
            raise IllegalStateError(f"Run {run_id}: its driver is gone and cannot answer '{name}'")
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        run.waiting[number] = answer
        run.requests.append(DriverRequest(name, payload, number))
        run.changed.set()
        try:
            # A driver that was killed says nothing; nobody is to wait for it for ever (S-DUR-33).
            while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
                if time.monotonic() - run.heartbeat_at > MOST_SILENT_S:
                    _mark_driver_gone(run, run_id)
            return answer.result()
        finally:
            run.waiting.pop(number, None)

    async def notify(self, run_id: str, requests: Sequence[tuple[str, Mapping[str, object]]]) -> None:
        """Send requests to the driver of a run that need no answer."""
        run = self._run(run_id)
        run.requests.extend(DriverRequest(name, payload, None) for name, payload in requests)
        run.changed.set()

    async def answer(self, run_id: str, answers: Mapping[int, bytes]) -> None:
        """Take the driver's answers by request number."""
        run = self._run(run_id)
        for number, body in answers.items():
            waiting = run.waiting.get(number)
            if waiting is not None and not waiting.done():
                waiting.set_result(body)

    async def mark_driver_gone(self, run_id: str) -> None:
        """Note that the driver answers no more."""
        _mark_driver_gone(self._run(run_id), run_id)

    async def describe(self) -> bytes:
        """Return how many events it has, as `dump_actor` does."""
        kept, asked = (
            sum(run.log.length for run in self._runs.values()),
            sum(len(r.waiting) for r in self._runs.values()),
        )
        note = f"runs: {len(self._runs)}, events kept: {kept}, requests that wait for drivers: {asked}"
        return dump_actor(ActorDescription(process=describe_this_process("events", "event_hub", note=note)))

    def _run(self, run_id: str) -> _HubRun:
        if run_id not in self._runs:
            self._runs[run_id] = _HubRun()
            self._drop_old()
        return self._runs[run_id]

    def _drop_old(self) -> None:
        """Forget the oldest runs whose drivers have left, or were killed; runs with a driver stay, however many."""
        now = time.monotonic()
        left = [
            name for name, run in self._runs.items() if run.is_driver_gone or now - run.heartbeat_at > MOST_SILENT_S
        ]
        for run_id in left[: max(0, len(left) - KEPT_RUNS)]:
            forgotten = self._runs.pop(run_id)
            forgotten.log.close()
            _mark_driver_gone(forgotten, run_id)


def _mark_driver_gone(run: _HubRun, run_id: str) -> None:
    """Let everybody who waits for the run's driver know that it is gone."""
    run.is_driver_gone = True
    gone = pickle.dumps(IllegalStateError(f"Run {run_id}: its driver is gone"))
    for waiting in run.waiting.values():
        if not waiting.done():
            waiting.set_result(gone)
