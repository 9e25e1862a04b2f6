"""Delivers events to listeners. Each listener has its own queue and thread (S-SET-32, S-PAR-42).

Errors of listeners are only logged (S-EVT-3). KeyboardInterrupt ends the run (S-SET-27).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from ensemble_ray import events
from ensemble_ray.events import EVENT_TYPES, TRACED_EVENTS, EnsembleCompletedEvent, EnsembleStartedEvent, Event
from ensemble_ray.process.concurrency import library_loop, submit
from ensemble_ray.process.context import bounded_logger, log_context
from ensemble_ray.values.outputs import ExitReason


class EnsembleListener:
    """Base class of listeners: override the methods that you need; by default they have no effect.

    Methods may be `async`; they then run on the delivery thread's loop. If the attribute `trace_id` is not None, the
    run's trace contains it.
    """

    def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> object:
        """React to the start of the run."""

    def on_ensemble_completed(self, ensemble_id: str, total_duration: object, exit_reason: object) -> object:
        """React to the end of a run without failure."""

    def on_task_start(self, event: events.TaskStartEvent) -> object:
        """React to the start of a task."""

    def on_task_complete(self, event: events.TaskCompleteEvent) -> object:
        """React to the success of a task."""

    def on_task_failed(self, event: events.TaskFailedEvent) -> object:
        """React to the failure of a task."""

    def on_tool_call(self, event: events.ToolCallEvent) -> object:
        """React to an executed tool call."""

    def on_task_input(self, event: events.TaskInputEvent) -> object:
        """React to built prompts, before the first model call."""

    def on_llm_iteration_started(self, event: events.LlmIterationStartedEvent) -> object:
        """React to the start of a model call."""

    def on_llm_iteration_completed(self, event: events.LlmIterationCompletedEvent) -> object:
        """React to the end of a model call."""

    def on_token(self, event: events.TokenEvent) -> object:
        """React to a fragment of a streamed answer."""

    def on_delegation_started(self, event: events.DelegationStartedEvent) -> object:
        """React to the start of a delegation."""

    def on_delegation_completed(self, event: events.DelegationCompletedEvent) -> object:
        """React to the answer of a worker."""

    def on_delegation_failed(self, event: events.DelegationFailedEvent) -> object:
        """React to a delegation that was refused, or whose worker failed."""

    def on_file_changed(self, event: events.FileChangedEvent) -> object:
        """React to a file written by a file tool."""

    def on_loop_iteration_completed(self, event: events.LoopIterationCompletedEvent) -> object:
        """React to the end of an iteration of a loop, before its predicate is evaluated."""

    def on_graph_state_completed(self, event: events.GraphStateCompletedEvent) -> object:
        """React to the end of a step of a graph, after the next state is chosen."""

    def on_task_reflected(self, event: events.TaskReflectedEvent) -> object:
        """React to a stored reflection on a task's output."""

    def on_batch_progress(self, event: events.BatchProgressEvent) -> object:
        """React to another state, or more answers, of a batch of map requests."""


@runtime_checkable
class RunEndListener(Protocol):
    """A listener that is notified after the last event of any run (S-EVT-23)."""

    def on_run_ended(self, run_id: str, exit_reason: ExitReason, /) -> object:
        """React to the end of the run."""
        ...


def wanted_by(listener: object) -> frozenset[str]:
    """Return the listener methods that it overrides or has."""
    wanted: set[str] = set()
    for method in EVENT_TYPES:
        own = getattr(type(listener), method, None) or getattr(listener, method, None)
        if own is not None and own is not getattr(EnsembleListener, method):
            wanted.add(method)
    wanted.update(method for method in TRACED_EVENTS if hasattr(listener, method))
    return frozenset(wanted)


def call_listener(listener: object, event: Event) -> object:
    """Call the listener's method and return its result, possibly an awaitable."""
    method = getattr(listener, event.method)
    if isinstance(event, EnsembleStartedEvent):
        return method(event.ensemble_id, event.workflow, event.total_tasks)
    if isinstance(event, EnsembleCompletedEvent):
        return method(event.ensemble_id, event.total_duration, event.exit_reason)
    return method(event)


_log = bounded_logger(__name__)


class _Recipient:
    def __init__(
        self, listener: object, fields: dict[str, str], on_interrupt: Callable[[BaseException], None] | None
    ) -> None:
        self.wanted = wanted_by(listener)
        self._listener = listener
        self._fields = fields
        self._on_interrupt = on_interrupt
        #: callbacks run between events; None is the end
        self._queue: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.done = threading.Event()
        threading.Thread(target=self._deliver, name="ensemble-ray-listener", daemon=True).start()

    def put(self, entry: Event | Callable[[], None] | None) -> None:
        self._queue.put(entry)

    def put_end(self, run_id: str, exit_reason: ExitReason) -> None:
        if isinstance(self._listener, RunEndListener):
            self.put(partial(self._call_guarded, "on_run_ended", self._listener.on_run_ended, run_id, exit_reason))

    def _deliver(self) -> None:
        with log_context(self._fields):
            while (entry := self._queue.get()) is not None:
                if isinstance(entry, Event):
                    self._call_guarded(entry.method, call_listener, self._listener, entry)
                else:
                    entry()
        if self._loop is not None:
            self._loop.close()
        self.done.set()

    def _call_guarded(self, name: str, function: Callable[..., object], *arguments: object) -> None:
        try:
            outcome = function(*arguments)
            if inspect.isawaitable(outcome):  # S-SET-33
                self._loop = self._loop or asyncio.new_event_loop()
                self._loop.run_until_complete(asyncio.ensure_future(outcome, loop=self._loop))
        except Exception:  # noqa: BLE001  S-EVT-3: errors of a listener do not spread
            _log.warning("Listener %s.%s raised", type(self._listener).__name__, name, exc_info=True)
        except BaseException as stop:  # noqa: BLE001  KeyboardInterrupt and SystemExit end the run, not this thread
            if self._on_interrupt is not None:
                self._on_interrupt(stop)


class Delivery:
    """The listeners of one run, as a `RunEventSink` that waits for delivery only on request."""

    def __init__(
        self,
        listeners: Sequence[object],
        *,
        fields: dict[str, str] | None = None,
        on_interrupt: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._recipients = [_Recipient(listener, dict(fields or {}), on_interrupt) for listener in listeners]
        self.interest: frozenset[str] = frozenset[str]().union(*(r.wanted for r in self._recipients))

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether any listener has that event's method."""
        return event_type.method in self.interest

    def emit(self, event: Event) -> None:
        """Queue the event for the listeners that have its method."""
        for recipient in self._recipients:
            if event.method in recipient.wanted:
                recipient.put(event)

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return when listeners to these types have received all queued events (S-SET-30)."""
        methods = {event_type.method for event_type in event_types}
        loop = asyncio.get_running_loop()
        for recipient in self._recipients:
            if not recipient.done.is_set() and not methods.isdisjoint(recipient.wanted):
                reached: asyncio.Future[None] = loop.create_future()
                recipient.put(partial(_wake, loop, reached))
                await reached

    def end(self, run_id: str, exit_reason: ExitReason) -> None:
        """Notify each `RunEndListener` after all events."""
        for recipient in self._recipients:
            recipient.put_end(run_id, exit_reason)

    async def close(self) -> None:
        """Return when all queued events are delivered (S-EVT-6)."""
        for recipient in self._recipients:
            recipient.put(None)
        for recipient in self._recipients:
            if not recipient.done.is_set():
                await _wait(recipient.done)


async def _wait(done: threading.Event) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def watch() -> None:
        done.wait()
        _wake(loop, ready)

    threading.Thread(target=watch, name="ensemble-ray-delivery-wait", daemon=True).start()
    await ready


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if ready.done() else ready.set_result(None))


class _Callbacks:
    """A callable as a listener, with a method for each kind of event."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function


def listeners_of(
    listeners: Sequence[object], callbacks: Mapping[str, tuple[Callable[..., object], ...]]
) -> tuple[object, ...]:
    """Return the listeners, then the callables by method (S-EVT-2).

    A callable for several kinds of events is one listener (S-EVT-22). Two registrations for one kind mean two calls.
    """
    added: list[_Callbacks] = []
    for method, functions in callbacks.items():
        for function in functions:
            # Bound methods are equal, but not identical.
            mine = (each for each in added if each.function == function and not hasattr(each, method))
            listener = next(mine, None)
            if listener is None:
                added.append(listener := _Callbacks(function))
            setattr(listener, method, function)
    return (*listeners, *added)


#: Events for late readers.
KEPT_EVENTS = 10_000


class EventLog:
    """Stores a run's events and wakes its readers. Thread-safe."""

    def __init__(self, *, is_open: bool, kept: int | None = None) -> None:
        """Create a log that stores the newest `kept` events, or none if it is not open."""
        self._is_open = is_open
        self._most = KEPT_EVENTS if kept is None else kept
        self._kept: deque[Event] = deque()
        self._first = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._waiters: set[asyncio.Event] = set()

    @property
    def interest(self) -> frozenset[str]:
        """The event types that readers receive."""
        return frozenset(EVENT_TYPES) if self._is_open else frozenset()

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether events of that type are stored."""
        return self._is_open and event_type.method in EVENT_TYPES

    def emit(self, event: Event) -> None:
        """Store the event and wake readers."""
        if not self._is_open or event.method not in EVENT_TYPES:
            return
        with self._changed:
            self._kept.append(event)
            if len(self._kept) > self._most:
                self._kept.popleft()
                self._first += 1
            self._wake()

    def close(self) -> None:
        """Mark the log as complete and wake readers."""
        with self._changed:
            self._is_closed = True
            self._wake()

    def stream(self) -> EventStream:
        """Return a reader that starts at the oldest stored event."""
        return EventStream(self)

    def read(self, cursor: int) -> tuple[list[Event], int, bool]:
        """Return the events from a cursor on, the next cursor, and whether the log is closed."""
        with self._changed:
            start = max(0, cursor - self._first)
            found = [self._kept[position] for position in range(start, len(self._kept))]
            return found, self._first + len(self._kept), self._is_closed

    def wait(self, cursor: int) -> None:
        """Block until there are events after the cursor or the log is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._first + len(self._kept) > cursor)

    async def wait_until_changed(self, cursor: int, *, timeout_s: float | None = None) -> bool:
        """Wait on the library's loop; False: the timeout was first."""
        waiter = asyncio.Event()
        with self._changed:
            self._waiters.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    _, reached, is_closed = self.read(cursor)
                    if is_closed or reached > cursor:
                        return True
                    waiter.clear()
                    await waiter.wait()
        except TimeoutError:
            return False
        finally:
            with self._changed:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._waiters:
            waiters = tuple(self._waiters)

            def wake() -> None:
                for waiter in waiters:
                    waiter.set()

            library_loop().call_soon_threadsafe(wake)


class EventStream:
    """A reader: `for event in stream` in a thread, `async for event in stream` on any loop."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __iter__(self) -> Iterator[Event]:
        cursor = 0
        while True:
            found, cursor, is_closed = self._log.read(cursor)
            yield from found
            if is_closed:
                return
            self._log.wait(cursor)

    async def __aiter__(self) -> AsyncIterator[Event]:
        cursor = 0
        while True:
            found, cursor, is_closed = self._log.read(cursor)
            for event in found:
                yield event
            if is_closed:
                return
            await asyncio.wrap_future(submit(self._log.wait_until_changed(cursor)))
