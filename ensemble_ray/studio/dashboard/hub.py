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
from collections import deque
from collections.abc import Callable

from ensemble_ray.events.messages import Message
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import new_lock
from ensemble_ray.studio.dashboard.snapshot import Sent, Snapshot
from ensemble_ray.studio.dashboard.texts import encode

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
