"""MessageHub: brings messages about runs to every page that is connected. Thread-safe.

In: messages, from whatever thread they come. Out: texts in the queue of each connection. Rules:

1. A connection gets what late joiners are told, and then every message that is sent behind that: no gap, no repetition (S-WEB-45).
   What they are told is taken while nothing is sent, and written out beside that: a long past holds no run.
2. Sending never waits: a connection that takes nothing has a queue, and is given up when that is full (S-WEB-46).
3. What fails here is logged, and concerns no run (S-WEB-16).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from ensemble_ray.events.messages import Message
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import new_lock
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.dashboard.snapshot import Sent, Snapshot
from ensemble_ray.text.foreign_text import whole_data

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.ports import EnteredRun
    from ensemble_ray.record.stores import GatesOfRun, RecordedRun, RunStore


def encode(kind: str, data: Mapping[str, object]) -> str:
    """Return a message as one JSON object."""
    whole = whole_data({"type": kind, **data})
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def decode(text: str) -> tuple[str, Mapping[str, object]]:
    """Return the type and the data of what a client sent.

    Raises:
        ValueError: it is no JSON object with a type.
    """
    try:
        data: object = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("it is no object")  # noqa: TRY004  of a text, not of an argument
    fields = cast("dict[str, object]", data)
    kind = fields.get("type")
    if not isinstance(kind, str):
        raise ValueError("it has no type")  # noqa: TRY004  of a text, not of an argument
    return kind, fields


#: What may wait for a connection, characters of all its messages: some thousand long outputs.
MOST_WAITING_CHARACTERS = 67_108_864
_log = bounded_logger(__name__)


class Connection:
    """What waits to be sent to one page. Filled from any thread, emptied on the loop of its server."""

    def __init__(self) -> None:
        """Make one for the running loop."""
        #: writes what it is told before everything else
        self._first: Callable[[], str] | None = None
        self._loop = asyncio.get_running_loop()
        self._lock = new_lock()
        self._waiting: deque[str] = deque()
        self._characters = 0
        self._is_overrun = False
        self._is_closing = False
        self._changed = asyncio.Event()
        #: whether a message is for it, such as a filter that it asked for; None: every one is
        self.wants: Callable[[Sent], bool] | None = None

    @property
    def is_overrun(self) -> bool:
        """Whether it was given up, since it took nothing for too long."""
        return self._is_overrun

    def begin(self, write: Callable[[], str]) -> None:
        """Let it be told before everything else what this returns, which is never too much.

        Args:
            write: Is called once, in a thread.
        """
        self._first = write
        self._wake()

    def put(self, text: str) -> None:
        """Queue a whole message; from any thread."""
        with self._lock:
            if self._is_overrun or self._is_closing:
                return
            self._waiting.append(text)
            self._characters += len(text)
            if self._characters > MOST_WAITING_CHARACTERS:
                self._is_overrun = True
                self._waiting.clear()
        self._wake()

    def close(self) -> None:
        """Let it end when what waits is sent; from any thread."""
        with self._lock:
            self._is_closing = True
        self._wake()

    async def take(self) -> list[str]:
        """Return what waits, as soon as there is anything; nothing when it is to end."""
        write, self._first = self._first, None
        first = [] if write is None or self._is_overrun else [await asyncio.to_thread(write)]
        while True:
            self._changed.clear()
            with self._lock:
                texts, self._characters = list(self._waiting), 0
                self._waiting.clear()
                if first or texts or self._is_overrun or self._is_closing:
                    return [*first, *texts]
            await self._changed.wait()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody sends any more
            self._loop.call_soon_threadsafe(self._changed.set)


class MessageHub:
    """All connections of a dashboard, and what late joiners are told."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = new_lock()
        self._connections: set[Connection] = set()

    @property
    def connected(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def publish(self, run_id: str, message: Message) -> None:
        """Send a message to everybody, and keep it for those who come later; from any thread, and without waiting."""
        if message.type == "token" and not self._connections:
            return  # nobody sees it, and nobody will
        try:
            sent = Sent(run_id=run_id, message=message, text=encode(message.type, {"run_id": run_id, **message.data}))
            with self._lock:
                self._snapshot.add(sent)
                for connection in self._connections:
                    if connection.wants is None or connection.wants(sent):
                        connection.put(sent.text)
        except Exception:  # noqa: BLE001  a page misses a message; its run goes on
            _log.warning("A message of type '%s' could not be sent to the dashboard", message.type, exc_info=True)

    def send_to_all(self, message: Message) -> None:
        """Send what is of this moment alone, such as a heartbeat."""
        text = encode(message.type, message.data)
        with self._lock:
            for connection in self._connections:
                connection.put(text)

    def join(self) -> Connection:
        """Return a new connection, whose first text is `hello`; on the loop of its server."""
        connection = Connection()
        with self._lock:
            connection.begin(self._snapshot.hello())
            self._connections.add(connection)
        return connection

    def leave(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._connections.discard(connection)

    def close(self) -> None:
        """Let all connections end when what waits for them is sent."""
        with self._lock:
            for connection in self._connections:
                connection.close()


class PageClient(Protocol):
    """One page that is connected."""

    async def send(self, message: Mapping[str, object]) -> None:
        """Send it a message, `type` included, behind what it has been sent."""
        ...

    def subscribe(self, types: AbstractSet[str] | None, run_id: str | None) -> None:
        """Send it from now on only what is of these types and of that run; None: whatever it is."""
        ...


class ControlMessages(Protocol):
    """Answers messages of pages that the dashboard itself does not know."""

    @property
    def handlers(self) -> Mapping[str, Callable[[Any, Mapping[str, Any]], Awaitable[None]]]:
        """What answers a message, by type; it is given the page's `PageClient` and the message."""
        ...

    def forget(self, client: Any, /) -> None:
        """Take notice that a page has gone."""
        ...


@runtime_checkable
class Control(Protocol):
    """Begins and steers runs on behalf of pages and programs."""

    @property
    def app(self) -> ASGIApp:
        """Its routes, below `/api`."""
        ...

    @property
    def sockets(self) -> ControlMessages:
        """Its messages."""
        ...

    async def __aenter__(self) -> object:
        """Be ready to be asked."""
        ...

    async def __aexit__(self, *error: object) -> bool | None:
        """Be asked no more."""
        ...


#: Runs that are remembered; who shows more shows the newest.
_MOST = 10_000


class ShownRuns:
    """Runs by id, with the places of their records."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._places: dict[str, StoreAddress] = {}

    def add(self, run: EnteredRun) -> None:
        """Take notice of a run that begins."""
        if not run.is_recorded:
            return
        with self._lock:
            self._places.pop(run.run_id, None)
            self._places[run.run_id] = StoreAddress(home=run.home, url=run.url)
            while len(self._places) > _MOST:
                del self._places[next(iter(self._places))]

    def place_of(self, run_id: str) -> StoreAddress | None:
        """Return where a run is recorded; None: it was not seen."""
        return self._places.get(run_id)

    async def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts behind a position; see `RunStore.read`."""
        store = self._store_of(run_id)
        if store is None:
            return
        pages = store.read(run_id, after=after, kinds=kinds, has_data=has_data, is_partial=is_partial)
        async with aclosing(pages):
            async for page in pages:
                yield page

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return what is recorded of one instance; see `RunStore.facts_of`."""
        store = self._store_of(run_id)
        return [] if store is None else await store.facts_of(run_id, instance)

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return how a run stands; None: it was not seen, or has no record yet."""
        store = self._store_of(run_id)
        return None if store is None else await store.summary(run_id)

    async def runs(self) -> list[RecordedRun]:
        """Return the runs, newest first."""
        found = [each for store in self._stores() for each in await store.runs() if each.run_id in self._places]
        return sorted(found, key=lambda each: (each.created_at, each.run_id), reverse=True)

    async def gates(self) -> list[GatesOfRun]:
        """Return the runs with review gates, oldest first; see `RunStore.gates`."""
        found = [each for store in self._stores() for each in await store.gates() if each.run.run_id in self._places]
        return sorted(found, key=lambda each: each.run.created_at)

    def _store_of(self, run_id: str) -> RunStore | None:
        place = self.place_of(run_id)
        return None if place is None else store_at(place)

    def _stores(self) -> list[RunStore]:
        with self._lock:
            places = dict.fromkeys(self._places.values())
        return [store_at(place) for place in places]
