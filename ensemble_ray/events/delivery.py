"""Brings events to listeners. Package: events.

Each listener has a queue and a thread of its own, so a slow one delays only itself and none delays the run
(S-SET-32, S-PAR-42). What a listener raises is logged and goes no further (S-EVT-3); only KeyboardInterrupt ends the
run (S-SET-27).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ensemble_ray.events import Event
from ensemble_ray.events.listeners import RunEndListener, call_listener, wanted_by
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.context import log_context
from ensemble_ray.values.outputs import ExitReason

__all__ = ["Delivery", "listeners_of"]

_log = bounded_logger(__name__)


class _Recipient:
    """One listener with its queue and thread."""

    def __init__(self, listener: object, fields: dict[str, str], on_interrupt: Callable[[BaseException], None]) -> None:
        self.wanted = wanted_by(listener)
        self._listener = listener
        self._fields = fields
        self._on_interrupt = on_interrupt
        #: events, who waits until it is their turn, and None at the end
        self._queue: queue.SimpleQueue[Event | Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.done = threading.Event()
        threading.Thread(target=self._deliver, name="ensemble-ray-listener", daemon=True).start()

    def put(self, entry: Event | Callable[[], None] | None) -> None:
        self._queue.put(entry)

    def put_end(self, run_id: str, exit_reason: ExitReason) -> None:
        """Queue the end of the run, where the listener takes it (S-EVT-23)."""
        if isinstance(self._listener, RunEndListener):
            self.put(partial(self._call_guarded, "on_run_ended", self._listener.on_run_ended, run_id, exit_reason))

    def _deliver(self) -> None:
        with log_context(self._fields):
            while (entry := self._queue.get()) is not None:
                if isinstance(entry, Event):
                    self._call(entry)
                else:
                    entry()
        if self._loop is not None:
            self._loop.close()
        self.done.set()

    def _call(self, event: Event) -> None:
        self._call_guarded(event.method, call_listener, self._listener, event)

    def _call_guarded(self, name: str, function: Callable[..., object], *arguments: object) -> None:
        try:
            outcome = function(*arguments)
            if inspect.isawaitable(outcome):
                self._await(outcome)
        except Exception:  # noqa: BLE001  S-EVT-3: whatever a listener raises stays with it
            _log.warning("Listener %s.%s raised", type(self._listener).__name__, name, exc_info=True)
        except BaseException as stop:  # noqa: BLE001  KeyboardInterrupt and SystemExit end the run, not this thread
            self._on_interrupt(stop)

    def _await(self, outcome: object) -> None:
        """Async callbacks run on this thread's loop (S-SET-33)."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()

        async def wait() -> None:
            if inspect.isawaitable(outcome):
                await outcome

        self._loop.run_until_complete(wait())


def _ignore(_stop: BaseException) -> None:
    """Nobody waits for an interrupt."""


class Delivery:
    """The listeners of one run. A `RunEventSink`: takes events in order, never waits for their delivery unless asked to."""

    def __init__(
        self,
        listeners: Sequence[object],
        *,
        fields: dict[str, str] | None = None,
        on_interrupt: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._recipients = [_Recipient(listener, dict(fields or {}), on_interrupt or _ignore) for listener in listeners]
        self.interest: frozenset[str] = frozenset[str]().union(*(r.wanted for r in self._recipients))

    def wants(self, event_type: type[Event]) -> bool:
        """Whether any listener overrides that event's method."""
        return event_type.method in self.interest

    def emit(self, event: Event) -> None:
        """Queue the event for everybody who wants it."""
        for recipient in self._recipients:
            if event.method in recipient.wanted:
                recipient.put(event)

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return when the listeners to one of these types have heard of all that happened so far (S-SET-30)."""
        methods = {event_type.method for event_type in event_types}
        loop = asyncio.get_running_loop()
        for recipient in self._recipients:
            if not recipient.done.is_set() and not methods.isdisjoint(recipient.wanted):
                reached: asyncio.Future[None] = loop.create_future()
                recipient.put(partial(_wake, loop, reached))
                await reached

    def end(self, run_id: str, exit_reason: ExitReason) -> None:
        """Queue the end of the run for those who take it, behind all events."""
        for recipient in self._recipients:
            recipient.put_end(run_id, exit_reason)

    async def close(self) -> None:
        """Return when every queued event was delivered (S-EVT-6)."""
        loop = asyncio.get_running_loop()
        for recipient in self._recipients:
            recipient.put(None)
        for recipient in self._recipients:
            if not recipient.done.is_set():
                await _wait(loop, recipient.done)


async def _wait(loop: asyncio.AbstractEventLoop, done: threading.Event) -> None:
    """Wait for a thread's event without holding the loop."""
    ready: asyncio.Future[None] = loop.create_future()

    def watch() -> None:
        done.wait()
        _wake(loop, ready)

    threading.Thread(target=watch, name="ensemble-ray-delivery-wait", daemon=True).start()
    await ready


def _wake(loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
    """Let whoever waits for that future go on; called on another thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(lambda: None if ready.done() else ready.set_result(None))


class _Callbacks:
    """One `on_*` callable as a listener: an object with a method for each kind of event it was registered for."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function


def listeners_of(
    listeners: Sequence[object], callbacks: Mapping[str, tuple[Callable[..., object], ...]]
) -> tuple[object, ...]:
    """All listeners in order: the objects, then the `on_*` callables by method, in table order (S-EVT-2).

    A callable that is registered for several kinds of events is one listener: it is told of them in their order
    (S-EVT-22). Registered twice for the same kind, it is told twice.
    """
    added: list[_Callbacks] = []
    for method, functions in callbacks.items():
        for function in functions:
            # Methods of an object are made anew at each look at them: equal, not the same.
            mine = (each for each in added if each.function == function and not hasattr(each, method))
            listener = next(mine, None)
            if listener is None:
                added.append(listener := _Callbacks(function))
            setattr(listener, method, function)
    return (*listeners, *added)
