"""Sends messages about runs to every connected page of a dashboard. Thread-safe."""

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
    """Return the type and the data of a message of a client.

    Raises:
        ValueError: the text is not a JSON object with a type.
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


#: Capacity of the queue of a connection, characters: some thousand long outputs.
MOST_WAITING_CHARACTERS = 67_108_864
_log = bounded_logger(__name__)


class Connection:
    """The queue of messages to one page. Any thread adds messages; the loop of the server sends them."""

    def __init__(self) -> None:
        """Create an empty queue for the running loop."""
        #: returns the first message
        self._first: Callable[[], str] | None = None
        self._loop = asyncio.get_running_loop()
        self._lock = new_lock()
        self._waiting: deque[str] = deque()
        self._characters = 0
        self._is_overrun = False
        self._is_closing = False
        self._changed = asyncio.Event()
        #: filter that the page subscribed to; None: all messages
        self.wants: Callable[[Sent], bool] | None = None

    @property
    def is_overrun(self) -> bool:
        """Whether the queue overflowed, since the page did not read."""
        return self._is_overrun

    def begin(self, write: Callable[[], str]) -> None:
        """Set the first message of the connection. It does not count towards the capacity.

        Args:
            write: Returns the message. Called once, in a thread.
        """
        self._first = write
        self._wake()

    def put(self, text: str) -> None:
        """Queue a message. Thread-safe."""
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
        """Close the connection after the queued messages are sent. Thread-safe."""
        with self._lock:
            self._is_closing = True
        self._wake()

    async def take(self) -> list[str]:
        """Wait for messages, and return them; an empty list: the connection ends."""
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
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no message is sent
            self._loop.call_soon_threadsafe(self._changed.set)


class MessageHub:
    """The connections of a dashboard, and the snapshot for new ones.

    A connection first gets the snapshot, then every later message, without gaps and repetitions (S-WEB-45). The lock covers the
    copy of the snapshot, not its encoding, so a long history does not block runs. Sending never waits: the hub drops a connection
    when its queue is full (S-WEB-46). Errors are logged and do not affect runs (S-WEB-16).
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = new_lock()
        self._connections: set[Connection] = set()

    @property
    def connected(self) -> int:
        """Number of connections."""
        return len(self._connections)

    def publish(self, run_id: str, message: Message) -> None:
        """Send a message to all connections and add it to the snapshot. Does not wait. Thread-safe."""
        if message.type == "token" and not self._connections:
            return  # no page is connected, and the snapshot has no tokens
        try:
            sent = Sent(run_id=run_id, message=message, text=encode(message.type, {"run_id": run_id, **message.data}))
            with self._lock:
                self._snapshot.add(sent)
                for connection in self._connections:
                    if connection.wants is None or connection.wants(sent):
                        connection.put(sent.text)
        except Exception:  # noqa: BLE001  a page misses a message, but the run continues
            _log.warning("A message of type '%s' could not be sent to the dashboard", message.type, exc_info=True)

    def send_to_all(self, message: Message) -> None:
        """Send a message that is not stored, such as a heartbeat."""
        text = encode(message.type, message.data)
        with self._lock:
            for connection in self._connections:
                connection.put(text)

    def join(self) -> Connection:
        """Return a new connection. Its first message is `hello`. Call it on the loop of the server."""
        connection = Connection()
        with self._lock:
            connection.begin(self._snapshot.hello())
            self._connections.add(connection)
        return connection

    def detach(self, connection: Connection) -> None:
        """Remove an ended connection."""
        with self._lock:
            self._connections.discard(connection)

    def close(self) -> None:
        """Close all connections after their queued messages are sent."""
        with self._lock:
            for connection in self._connections:
                connection.close()


class PageClient(Protocol):
    """One connected page."""

    async def send(self, message: Mapping[str, object]) -> None:
        """Queue a message for the page, `type` included."""
        ...

    def subscribe(self, types: AbstractSet[str] | None, run_id: str | None) -> None:
        """Limit later messages to these types and that run; None: no limit."""
        ...


class ControlMessages(Protocol):
    """Answers further types of messages of pages."""

    @property
    def handlers(self) -> Mapping[str, Callable[[Any, Mapping[str, Any]], Awaitable[None]]]:
        """Handlers by message type. The arguments are the `PageClient` of the page and the message."""
        ...

    def drop(self, client: Any, /) -> None:
        """Release the state of a disconnected page."""
        ...


@runtime_checkable
class Control(Protocol):
    """Starts and controls runs for pages and programs."""

    @property
    def app(self) -> ASGIApp:
        """Its routes, below `/api`."""
        ...

    @property
    def sockets(self) -> ControlMessages:
        """Its message handlers."""
        ...

    async def __aenter__(self) -> object:
        """Start accepting requests."""
        ...

    async def __aexit__(self, *error: object) -> bool | None:
        """Stop accepting requests."""
        ...


#: Most stored runs: the newest.
_MOST = 10_000


class ShownRuns:
    """The runs of a dashboard, with the locations of their records. Implements `RunReader`."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._places: dict[str, StoreAddress] = {}

    def add(self, run: EnteredRun) -> None:
        """Add a new run, if it is recorded."""
        if not run.is_recorded:
            return
        with self._lock:
            self._places.pop(run.run_id, None)
            self._places[run.run_id] = StoreAddress(home=run.home, url=run.url)
            while len(self._places) > _MOST:
                del self._places[next(iter(self._places))]

    def place_of(self, run_id: str) -> StoreAddress | None:
        """Return the location of the record of a run; None: unknown run."""
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
        """Return the facts after a position; see `RunStore.read`."""
        store = self._store_of(run_id)
        if store is None:
            return
        pages = store.read(run_id, after=after, kinds=kinds, has_data=has_data, is_partial=is_partial)
        async with aclosing(pages):
            async for page in pages:
                yield page

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return the facts of one instance; see `RunStore.facts_of`."""
        store = self._store_of(run_id)
        return [] if store is None else await store.facts_of(run_id, instance)

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return the state of a run; None: unknown run, or no record so far."""
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
