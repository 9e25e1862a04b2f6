"""Actor handles dressed as the core's ports. Ray is called here and in `runtime`, `scheduler`, `spawn`; nowhere else.

Each adapter is used inside one process and knows one run or one shared actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import cloudpickle
import ray
import ray.exceptions

from actors.link.failures import last_line
from actors.link.reach import RESTART_PAUSES_S, patiently, reach
from actors.link.wire import cannot_leave
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.errors import IllegalStateError, portable
from ensemble_ray.events import Event, TaskCompleteEvent, TaskFailedEvent, TokenEvent, ToolCallEvent
from ensemble_ray.trace import jsonable

if TYPE_CHECKING:
    from actors.link.wire import WireReport
    from ensemble_ray.limits.account_desk import AccountMessage, AccountReply
    from ensemble_ray.limits.desk import Message, Reply

__all__ = [
    "DriverLine",
    "HubSink",
    "LimiterLine",
    "RemoteCallables",
    "ReportedToolMetrics",
    "SchedulerCourier",
    "begin_events",
    "pack_event",
]

_log = bounded_logger(__name__)
#: How long a lost host of callables may take to be replaced, s.
_MOVE_S = 30.0
#: A callable whose process died so often while it was asked is not asked again: it may well be what kills them.
_MOST_LOST = 3
#: Tokens may wait so long for others to travel with them, s; all other events leave at once.
TOKEN_BATCH_S = 0.05


def as_bytes(value: object) -> bytes:
    """Any value as bytes for another process of the same cluster."""
    return bytes(cloudpickle.dumps(value))


def pack_event(event: Event) -> bytes:
    """The event as bytes. What of the user's cannot travel is replaced: a cause by its stand-in, a payload by its text.

    Raises:
        AgentExecutionError: the output of a completed task cannot travel, so that the task is not completed.
    """
    match event:
        case TaskFailedEvent():
            event = replace(event, cause=portable(event.cause))
        case ToolCallEvent() if not isinstance(event.structured_result, str | int | float | None):
            event = replace(event, structured_result=_Payload(event.structured_result))
        case TaskCompleteEvent() if event.task_output.output_type is not None:
            try:
                return as_bytes(event)
            except Exception as error:
                raise cannot_leave(event.task_description, event.agent_role, error) from error
        case _:
            # Data of ours, as a rule: that needs no search for the user's classes, which takes far longer.
            with contextlib.suppress(Exception):
                return pickle.dumps(event, protocol=5)
    return as_bytes(event)


class _Payload:
    """A tool's payload on its way in an event; it comes out as what it was, else as JSON data of it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[object, ...]:
        try:
            return (_payload, (as_bytes(self._value), jsonable(self._value)))
        except Exception:  # noqa: BLE001  whatever pickling raised, a listener must not change a run
            return (jsonable, (jsonable(self._value),))


def _payload(body: bytes, otherwise: object) -> object:
    try:
        return cast("object", pickle.loads(body))  # noqa: S301  bytes of our own cluster
    except Exception:  # noqa: BLE001  its class cannot be had here
        return otherwise


class HubSink:
    """Publishes one run's events from this process to the hub, in order and in batches.

    One batch is on its way at a time, what comes meanwhile goes with the next: Ray starts calls of an asynchronous
    actor out of order as soon as one of them is large (measured: 400 kB beside 10 bytes, in 52 of 60 rounds).
    """

    def __init__(self, hub: Any, run_id: str, interest: frozenset[str]) -> None:
        self._hub = hub
        self._run_id = run_id
        self._interest = interest
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        #: whether what waits should leave with the next batch, and not with the tokens' timer
        self._is_due = False
        self._sending: asyncio.Task[None] | None = None

    def wants(self, kind: type[Event]) -> bool:
        """Whether anybody listens to that type."""
        return kind.method in self._interest

    def emit(self, event: Event) -> None:
        """Send it with the next batch; may be called from any thread."""
        body = pack_event(event)
        delay_s = TOKEN_BATCH_S if isinstance(event, TokenEvent) else 0.0
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._add(body, delay_s)
        else:
            self._loop.call_soon_threadsafe(self._add, body, delay_s)

    async def flushed(self) -> None:
        """Return when the hub has acknowledged everything emitted so far."""
        self._flush()
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def _add(self, body: bytes, delay_s: float) -> None:
        self._waiting.append(body)
        if self._timer is not None and delay_s == 0.0:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_later(delay_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_due = bool(self._waiting)
        if self._is_due and self._sending is None:
            self._sending = self._loop.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._is_due:
                self._is_due = False
                batch, self._waiting = self._waiting, []
                await _arrived(self._hub.publish.remote(self._run_id, batch), self._run_id)
        finally:
            self._sending = None


async def begin_events(hub: Any, run_id: str) -> None:
    """Tell the hub of a run that begins.

    One that is just being started again is waited for: what is published meanwhile would be lost, and who asks the driver
    something would fail. A run begins without it where that takes too long; what is listened to matters less.
    """
    try:
        await reach(lambda: hub.begin.remote(run_id), RESTART_PAUSES_S)
    except ray.exceptions.RayError as error:
        _log.warning("Run %s: the event hub cannot be reached: %s", run_id, last_line(error))


async def _arrived(reference: Any, run_id: str) -> None:
    """Return when the hub has it. A hub that died took events with it; the tasks they tell of are not concerned."""
    try:
        await reference
    except ray.exceptions.RayError as error:
        _log.warning("Run %s: the event hub cannot be reached; events are lost: %s", run_id, error)


class SchedulerCourier:
    """Brings reports to the scheduler."""

    def __init__(self, scheduler: Any, house: str) -> None:
        self._scheduler = scheduler
        self._house = house

    async def report(self, run_id: str, reports: Sequence[WireReport]) -> None:
        """Return when the scheduler has them. It ignores what it has had already, so sending again does no harm.

        Never given up: a run whose report is lost never ends, and this process ends with the scheduler that made it.
        """
        await reach(lambda: self._scheduler.report.remote(run_id, self._house, list(reports)), patiently())


class RemoteCallables:
    """Asks the run's callables in the process that hosts them; None: in one that is started when somebody needs it."""

    def __init__(self, host: Any, run_id: str) -> None:
        self._host: Any = host
        self._run_id = run_id
        self._moved = asyncio.Event()

    def move(self, host: Any) -> None:
        """They are hosted by another process now; what the lost one was asked is asked again there."""
        self._host = host
        self._moved.set()
        self._moved = asyncio.Event()

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it there; what it raises is raised here."""
        asked = cloudpickle.dumps(argument)
        lost = ""
        if self._host is None:
            await self._until_moved(self._moved, "it has not been started")
        for count in range(_MOST_LOST):
            host: Any = self._host
            moved = self._moved
            try:
                return _opened(await host.evaluate.remote(self._run_id, path, asked))
            except ray.exceptions.RayError as error:  # S-CONV-32: no class of Ray's, not as a cause either
                lost = last_line(error)
            if count + 1 < _MOST_LOST:
                await self._until_moved(moved, lost)
        raise RuntimeError(f"the process of the run's callables died {_MOST_LOST} times when it was asked: {lost}")

    @staticmethod
    async def _until_moved(moved: asyncio.Event, why: str) -> None:
        try:
            await asyncio.wait_for(moved.wait(), _MOVE_S)
        except TimeoutError:
            raise RuntimeError(f"the process of the run's callables cannot be reached: {why}") from None


def _opened(body: bytes) -> object:
    """A value or an error that came as bytes: `(value, None)` or `(None, error)`."""
    value, error = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    if error is not None:
        raise error
    return value


class DriverLine:
    """The driver's services, for processes away from the driver. Fulfils the `DriverServices` port."""

    def __init__(self, hub: Any, run_id: str) -> None:
        self._hub = hub
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._telling: set[asyncio.Future[None]] = set()

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        """Ask and wait.

        Raises:
            IllegalStateError: the driver is gone or has no such service.
        """
        try:
            body = await self._hub.ask.remote(self._run_id, name, dict(payload))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, IllegalStateError):
                raise cause from None
            text = f"Run {self._run_id}: the event hub cannot be reached, so the driver cannot be asked"
            raise IllegalStateError(f"{text}: {last_line(error)}") from None
        answer = pickle.loads(body)  # noqa: S301  our own driver's bytes
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def tell(self, name: str, payload: Mapping[str, object]) -> None:
        """Tell, without an answer; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._send, name, dict(payload))

    async def flushed(self) -> None:
        """Return when the hub has everything that was told so far."""
        await asyncio.sleep(0)  # what other threads told is sent in the loop's next turn
        if self._telling:
            await asyncio.wait(self._telling)

    def _send(self, name: str, payload: Mapping[str, object]) -> None:
        told = self._hub.tell.remote(self._run_id, [(name, payload)])
        telling = asyncio.ensure_future(_arrived(told, self._run_id))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)


class ReportedToolMetrics:
    """`ToolMetrics` whose counts go to the driver's own object (S-CONV-33)."""

    def __init__(self, line: DriverLine) -> None:
        self._line = line

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        """A call succeeded."""
        self._tell("increment_success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        """A call returned a failure."""
        self._tell("increment_failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        """A call raised."""
        self._tell("increment_error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        """How long a call took, s."""
        self._tell("record_duration", tool_name, agent_role, duration_s)

    def _tell(self, method: str, *arguments: object) -> None:
        self._line.tell("tool_metrics", {"method": method, "arguments": arguments})


class LimiterLine:
    """The way to the cluster's rate limiter; a `Remote` for `LeasingLimiter`, a `RemoteDesk` for `RemoteAccount`."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def __call__(self, message: Message) -> Reply:
        """Deliver a message and give the reply; the limiter is started by the first one who needs it.

        Raises:
            ConnectionError: the limiter cannot be reached now.
        """
        reply: Reply = await self._delivered("receive", message)
        return reply

    async def account(self, message: AccountMessage) -> AccountReply:
        """`__call__` for messages about budgets."""
        reply: AccountReply = await self._delivered("account", message)
        return reply

    async def _delivered(self, method: str, message: object) -> Any:
        try:
            if self._actor is None:
                from actors.spawn import rate_limiter

                self._actor = rate_limiter()
            return await getattr(self._actor, method).remote(message)
        except ray.exceptions.RayActorError as error:
            raise ConnectionError(f"the cluster's rate limiter cannot be reached: {error}") from error
        except ray.exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or IllegalStateError(str(error)) from None
