"""Sends messages about runs to every connected page of a dashboard, stores them for new pages, and asks pages for reviews."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

import msgspec
from msgspec import Struct

from ensemble_ray.events import messages
from ensemble_ray.events.messages import Message
from ensemble_ray.execute.review.handlers import ReviewHandler
from ensemble_ray.process.concurrency import SystemClock, new_lock
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.text.foreign_text import whole_data
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.reviews import (
    OnTimeoutAction,
    Review,
    ReviewAnswer,
    ReviewDecision,
    ReviewRequest,
    decision_at_timeout,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.ports import DashboardRun
    from ensemble_ray.record.stores import GatesOfRun, RecordedRun, RunStore


def encode(kind: str, data: Mapping[str, object]) -> str:
    whole = whole_data({"type": kind, **data})
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def decode(text: str) -> tuple[str, Mapping[str, object]]:
    """Return the type and the data of a message of a client."""
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


MOST_WAITING_CHARACTERS = 67_108_864  # queue of a connection: some thousand long outputs
_log = bounded_logger(__name__)


class Connection:
    """The queue of messages to one page. Any thread adds messages; the loop of the server sends them."""

    def __init__(self) -> None:
        self._first: Callable[[], str] | None = None
        self._loop = asyncio.get_running_loop()
        self._lock = new_lock()
        self._waiting: deque[str] = deque()
        self._characters = 0
        self.is_overrun = False  # the page did not read
        self._is_closing = False
        self._changed = asyncio.Event()
        self.wants: Callable[[Sent], bool] | None = None  # None: all messages

    def begin(self, write: Callable[[], str]) -> None:
        """Set the function that returns the first message. A thread calls it. The message needs no capacity."""
        self._first = write
        self._wake()

    def put(self, text: str) -> None:
        """Thread-safe."""
        with self._lock:
            if self.is_overrun or self._is_closing:
                return
            self._waiting.append(text)
            self._characters += len(text)
            if self._characters > MOST_WAITING_CHARACTERS:
                self.is_overrun = True
                self._waiting.clear()
        self._wake()

    def close(self) -> None:
        """Close the connection after the queued messages are sent. Thread-safe."""
        with self._lock:
            self._is_closing = True
        self._wake()

    async def take(self) -> list[str]:
        """Wait for messages; an empty list: the connection ends."""
        write, self._first = self._first, None
        first = [] if write is None or self.is_overrun else [await asyncio.to_thread(write)]
        while True:
            self._changed.clear()
            with self._lock:
                texts, self._characters = list(self._waiting), 0
                self._waiting.clear()
                if first or texts or self.is_overrun or self._is_closing:
                    return [*first, *texts]
            await self._changed.wait()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no message is sent
            self._loop.call_soon_threadsafe(self._changed.set)


class MessageHub:
    """The connections of a dashboard, and the snapshot for new ones.

    A connection first gets the snapshot, then every later message, without gaps and repetitions (S-WEB-45). The lock does not cover
    the encoding of the snapshot, so a long history does not block runs. The hub drops a connection when its queue is full
    (S-WEB-46). Errors are logged and do not affect runs (S-WEB-16).
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = new_lock()
        self._connections: set[Connection] = set()

    @property
    def connected(self) -> int:
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
        """Send a message that is not stored."""
        text = encode(message.type, message.data)
        with self._lock:
            for connection in self._connections:
                connection.put(text)

    def join(self) -> Connection:
        """Return a new connection, whose first message is `hello`. Call it on the loop of the server."""
        connection = Connection()
        with self._lock:
            connection.begin(self._snapshot.hello())
            self._connections.add(connection)
        return connection

    def detach(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def close(self) -> None:
        """Close all connections after their queued messages are sent."""
        with self._lock:
            for connection in self._connections:
                connection.close()


class ControlMessages(Protocol):
    """Answers further types of messages of pages."""

    @property
    def handlers(self) -> Mapping[str, Callable[[Any, Mapping[str, Any]], Awaitable[None]]]:
        """By message type. The arguments are the page, with `send` and `subscribe`, and the message."""
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


_MOST = 10_000


class ShownRuns:
    """The newest runs of a dashboard. Implements `RunReader`."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._places: dict[str, StoreAddress] = {}

    def add(self, run: DashboardRun) -> None:
        if not run.is_recorded:
            return
        with self._lock:
            self._places.pop(run.run_id, None)
            self._places[run.run_id] = StoreAddress(home=run.home, url=run.url)
            while len(self._places) > _MOST:
                del self._places[next(iter(self._places))]

    def place_of(self, run_id: str) -> StoreAddress | None:
        """Return the location of the record of a run."""
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
        store = self._store_of(run_id)
        if store is None:
            return
        pages = store.read(run_id, after=after, kinds=kinds, has_data=has_data, is_partial=is_partial)
        async with aclosing(pages):
            async for page in pages:
                yield page

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        store = self._store_of(run_id)
        return [] if store is None else await store.facts_of(run_id, instance)

    async def read_content(self, run_id: str, sha256: str) -> bytes | None:
        store = self._store_of(run_id)
        return None if store is None else await store.read_content(run_id, sha256)

    async def summary(self, run_id: str) -> RecordedRun | None:
        """None: unknown run, or no record so far."""
        store = self._store_of(run_id)
        return None if store is None else await store.summary(run_id)

    async def runs(self) -> list[RecordedRun]:
        found = [each for store in self._stores() for each in await store.runs() if each.run_id in self._places]
        return sorted(found, key=lambda each: (each.created_at, each.run_id), reverse=True)

    async def gates(self) -> list[GatesOfRun]:
        found = [each for store in self._stores() for each in await store.gates() if each.run.run_id in self._places]
        return sorted(found, key=lambda each: each.run.created_at)

    def _store_of(self, run_id: str) -> RunStore | None:
        place = self.place_of(run_id)
        return None if place is None else store_at(place)

    def _stores(self) -> list[RunStore]:
        with self._lock:
            places = dict.fromkeys(self._places.values())
        return [store_at(place) for place in places]


_STARTED = "ensemble_started"
_ITERATIONS = {"llm_iteration_started": "started", "llm_iteration_completed": "completed"}
_REVIEW_ENDS = frozenset({"review_timed_out", "review_decided"})
_NOT_STORED = frozenset({"token", "heartbeat", "hello", "pong", *_ITERATIONS})
MOST_CHARACTERS = 67_108_864  # stored characters of one run (S-WEB-66)
_KEPT_TASKS = 100  # the last active tasks: a map over ten thousand items has as many


class Sent(Struct, frozen=True, kw_only=True):
    run_id: str  # empty: no run
    message: Message
    text: str  # as JSON


class _Run(Struct):
    started_at: object
    stored: deque[tuple[int, str]] = msgspec.field(default_factory=deque[tuple[int, str]])
    characters: int = 0

    def add(self, position: int, text: str) -> None:
        """Over the limit the oldest messages are evicted, except the first: it reports the start of the run."""
        self.stored.append((position, text))
        self.characters += len(text)
        while self.characters > MOST_CHARACTERS and len(self.stored) > 2:  # noqa: PLR2004  the first, and the newest
            first = self.stored.popleft()
            self.characters -= len(self.stored.popleft()[1])
            self.stored.appendleft(first)


_Pair = dict[str, str]  # the messages of a request to a model, by name


class Snapshot:
    """The messages of the newest runs.

    Tokens, model requests and messages to one connection are not stored in the list of a run. An open review is stored until
    its end, also of an unknown run. The newest model requests per task are stored until the next run starts.
    """

    def __init__(self, *, most_runs: int, most_iterations: int) -> None:
        self._most_runs = most_runs
        self._most_iterations = most_iterations
        self._positions = itertools.count()
        self._runs: dict[str, _Run] = {}
        self._reviews: dict[str, tuple[int, str]] = {}  # by id
        self._iterations: dict[tuple[str, str], deque[_Pair]] = {}  # by run and task, the last active at the end

    def add(self, sent: Sent) -> None:
        kind, data = sent.message
        if kind == _STARTED:
            self._iterations.clear()
            self._runs.pop(sent.run_id, None)  # a run that resumes in this process sends its tasks again
            self._runs[sent.run_id] = _Run(data.get("started_at"))
            while len(self._runs) > self._most_runs:
                del self._runs[next(iter(self._runs))]
        if kind in _ITERATIONS:
            self._add_iteration(sent)
        elif kind == "review_requested":
            self._reviews[str(data["review_id"])] = (next(self._positions), sent.text)
        elif kind in _REVIEW_ENDS:
            self._reviews.pop(str(data["review_id"]), None)
        if kind == "review_decided" or kind not in _NOT_STORED | _REVIEW_ENDS | {"review_requested"}:
            run = self._runs.get(sent.run_id)
            if run is not None:
                run.add(next(self._positions), sent.text)

    def hello(self) -> Callable[[], str]:
        """Copy the current messages, and return a thread-safe function that encodes them in their order (S-WEB-40, S-WEB-41)."""
        latest = next(reversed(self._runs.items()), None)
        return partial(
            _hello,
            None if latest is None else (latest[0], latest[1].started_at),
            [*(list(run.stored) for run in self._runs.values()), sorted(self._reviews.values())],
            [dict(pair) for kept in self._iterations.values() for pair in kept],
        )

    def _add_iteration(self, sent: Sent) -> None:
        if not self._most_iterations or sent.run_id not in self._runs:
            return
        kind, data = sent.message
        task = (sent.run_id, str(data.get("instance", "")))
        pairs = self._iterations.pop(task, None)
        pairs = self._iterations[task] = deque(maxlen=self._most_iterations) if pairs is None else pairs
        while len(self._iterations) > _KEPT_TASKS:
            del self._iterations[next(iter(self._iterations))]
        part = _ITERATIONS[kind]
        if part == "started" or not pairs or "completed" in pairs[-1]:
            pairs.append({part: sent.text})
        else:
            pairs[-1][part] = sent.text


def _hello(
    latest: tuple[str, object] | None, stored: Sequence[Sequence[tuple[int, str]]], pairs: Sequence[_Pair]
) -> str:
    parts = ['"type":"hello"']
    if latest is not None:
        parts += [f'"ensemble_id":{json.dumps(latest[0])}', f'"started_at":{json.dumps(latest[1])}']
    if texts := [text for _, text in heapq.merge(*stored)]:
        parts.append(f'"snapshot_trace":[{",".join(texts)}]')
    if pairs:
        objects = ("{" + ",".join(f'"{name}":{text}' for name, text in pair.items()) + "}" for pair in pairs)
        parts.append(f'"recent_iterations":[{",".join(objects)}]')
    return f"{{{','.join(parts)}}}"


_RUN_ENDING = "(run ending)"
_APPROVALS = frozenset({"approve", "continue"})


class _Open(Struct, frozen=True, kw_only=True):
    request: ReviewRequest
    created_at: float
    decided: asyncio.Future[ReviewDecision]
    loop: asyncio.AbstractEventLoop

    def decide(self, decision: ReviewDecision) -> None:
        """Thread-safe."""

        def set_result() -> None:
            if not self.decided.done():
                self.decided.set_result(decision)

        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self.loop.call_soon_threadsafe(set_result)


class WebReviewHandler(ReviewHandler):
    """Asks the users of the pages of a dashboard. `WebDashboard.review_handler` is the instance of a dashboard.

    The first decision of a gate counts; later ones are ignored. A timeout is a decision too. A gate stays open until a
    decision or its timeout, also when pages disconnect. When a run stops waiting, the pages close its gate.
    """

    is_concurrent: ClassVar[bool] = True  # gates are decided in any order (S-WEB-58)

    def __init__(self, hub: MessageHub, *, timeout: timedelta, on_timeout: OnTimeoutAction) -> None:
        """`timeout` and `on_timeout` are those of the gates of a review policy."""
        self._hub = hub
        self._clock = SystemClock()
        self._lock = new_lock()
        self._open: dict[str, _Open] = {}
        self.default_review = Review(timeout=timeout, on_timeout=on_timeout)  # of a review policy

    async def review(self, request: ReviewRequest, /) -> ReviewDecision:
        """Ask, and return the decision of a user or of the timeout.

        Raises:
            ReviewTimeoutError: the gate timed out, and its timeout fails the task.
        """
        review_id = request.review_id or new_object_id()
        loop = asyncio.get_running_loop()
        gate = _Open(request=request, created_at=self._clock.now(), decided=loop.create_future(), loop=loop)
        with self._lock:  # a concurrent decision is published after the request
            self._open[review_id] = gate
            self._hub.publish(request.run_id, _make_request(review_id, request))
        try:
            await asyncio.wait([gate.decided], timeout=request.timeout_s)
            if self._take(review_id) is None:  # decided; the decision may still be on its way to this loop
                return await gate.decided
        except asyncio.CancelledError:
            if self._take(review_id) is not None:
                self._hub.publish(request.run_id, messages.review_decided(review_id, "exit", _RUN_ENDING))
            raise
        self._hub.publish(request.run_id, messages.review_timed_out(review_id, request.on_timeout.value))
        return decision_at_timeout(request, request.timeout_s or 0.0)

    def decide(self, review_id: str, decision: str, revised_output: str | None = None) -> bool:
        """Decide a gate, and return whether it was open. Thread-safe.

        Args:
            review_id: Id of the gate.
            decision: `approve`, `continue` or `edit`, in any case. Any other word ends the run.
            revised_output: The new text of an edit; None: an empty text.
        """
        word = decision.strip().lower()
        if word in _APPROVALS:
            taken = ReviewDecision.continue_execution()
        elif word == "edit":
            taken = ReviewDecision.edit(revised_output or "")
        else:
            taken = ReviewDecision.exit_early()
        gate = self._take(review_id)
        if gate is None:
            return False
        verdict = str(ReviewAnswer(decision=taken).to_data()["verdict"])
        self._hub.publish(gate.request.run_id, messages.review_decided(review_id, verdict, type(self).__name__))
        gate.decide(taken)
        return True

    def open_reviews(self) -> list[Mapping[str, object]]:
        """Return the open gates as data, oldest first."""
        with self._lock:
            waiting = list(self._open.items())
        return [_to_json(review_id, gate) for review_id, gate in waiting]

    def is_open(self, review_id: str) -> bool:
        """Return whether this handler waits for the decision of a gate."""
        return review_id in self._open

    def _take(self, review_id: str) -> _Open | None:
        """Close and return an open gate."""
        with self._lock:
            return self._open.pop(review_id, None)


def _make_request(review_id: str, request: ReviewRequest) -> Message:
    return messages.review_requested(
        review_id=review_id,
        task_description=request.task_description,
        task_output=request.task_output,
        timing=request.timing.value,
        prompt=request.prompt,
        timeout_s=request.timeout_s,
        on_timeout=request.on_timeout.value,
        required_role=request.required_role,
    )


def _to_json(review_id: str, gate: _Open) -> Mapping[str, object]:
    request, timeout_s = gate.request, gate.request.timeout_s
    return {
        "review_id": review_id,
        "run_id": request.run_id,
        "task_description": request.task_description,
        "task_output": request.task_output,
        "timing": request.timing.value,
        "prompt": request.prompt,
        "timeout_ms": None if timeout_s is None else messages.milliseconds(timeout_s),
        "created_at": messages.instant(gate.created_at),
        "expires_at": None if timeout_s is None else messages.instant(gate.created_at + timeout_s),
    }
