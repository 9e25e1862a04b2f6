"""Rate limiters of one process (`LocalLimiter`) or a cluster (`LimiterService`, `LeasingLimiter`), and limited models.

Callers may be on several event loops and threads. The first waiter in a queue sets the timer on its own loop. A waiter
whose loop was closed without a cancellation leaves the queue at the next message.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from datetime import timedelta
from typing import Protocol, assert_never

import msgspec
from msgspec import Struct

from ensemble_ray.errors import IllegalStateError, RateLimitTimeoutError, ValidationError
from ensemble_ray.llm.limits.bucket import (
    LEASE_S,
    Dismiss,
    Expire,
    Grant,
    HolderGone,
    Instruction,
    Recall,
    Refunded,
    Requested,
    Returned,
    Stimulus,
    Ticked,
    TokenBucket,
    Used,
    WaiterCancelled,
    WakeAt,
)
from ensemble_ray.ports import ChatModel, Clock, Limiter, StreamingChatModel, StructuredChatModel, services
from ensemble_ray.process.concurrency import call_user, new_rlock, track
from ensemble_ray.process.context import bounded_logger, waiting_for_permit
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec
from ensemble_ray.values.metrics import MOST_BUCKETS, MOST_HOLDERS, BucketDescription
from ensemble_ray.values.value import RateLimit

_log = bounded_logger(__name__)

_MANY_BUCKETS = 4096  # the service drops idle buckets when it has this many
#: Without a stimulus for this long, and at least one period. A new bucket has one token, so dropping an idle one never
#: raises the limit.
_IDLE_S = 3600.0
MOST_WANTED = 32
_RETRY_S = 0.1


class MonotonicClock:
    """Only differences between its instants have a meaning."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class Wakeup:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        return self._loop.is_closed()

    def wake(self) -> bool:
        """Return False if the coroutine's loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return False
        return True

    def clear(self) -> None:
        """Call it before you check the state: a change after the check sets it again."""
        self._event.clear()

    async def wait(self) -> None:
        await self._event.wait()

    async def wait_until(self, at: float, clock: Clock) -> bool:
        woken = asyncio.ensure_future(self._event.wait())
        alarm = asyncio.ensure_future(clock.sleep(max(0.0, at - clock.now())))
        try:
            await asyncio.wait((woken, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_time = alarm.done()
            woken.cancel()
            alarm.cancel()
        return is_time


class Acquire(Struct, frozen=True, kw_only=True):
    """The reply is `Grant`, `Expire` or `Dismiss`."""

    bucket: str
    limit: RateLimit
    request: Requested


class BucketUpdate(Struct, frozen=True):
    bucket: str
    stimulus: WaiterCancelled | Refunded | Used | Returned


class AwaitRecall(Struct, frozen=True, kw_only=True):
    """The reply is None, after the recall."""

    bucket: str
    lease: str


Message = Acquire | BucketUpdate | AwaitRecall | HolderGone
_Answer = Grant | Expire | Dismiss
Reply = _Answer | None


class LimiterService:
    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or MonotonicClock()
        self._buckets: dict[str, _Bucket] = {}
        self._lock = new_rlock()
        track(self)

    def after_fork(self) -> None:
        self._buckets = {}

    async def receive(self, message: Message) -> Reply:
        match message:
            case Acquire():
                return await self._acquire(message)
            case AwaitRecall():
                with self._lock:
                    bucket = self._buckets.get(message.bucket)
                    if bucket is None or not bucket.machine.is_usable(message.lease):
                        return None
                    wakeup = bucket.recalls.setdefault(message.lease, Wakeup())
                await wakeup.wait()
            case BucketUpdate(bucket=name, stimulus=stimulus):
                self._handle(name, stimulus)
            case HolderGone():
                for name in list(self._buckets):
                    self._handle(name, message)
            case _:
                assert_never(message)
        return None

    def describe(self, most: int = MOST_BUCKETS) -> tuple[list[BucketDescription], int]:
        with self._lock:
            now = self._clock.now()
            chosen = heapq.nlargest(most, self._buckets.items(), key=lambda each: len(each[1].waiters))
            described = [
                BucketDescription(
                    name=name,
                    requests=bucket.limit.requests,
                    period_s=bucket.limit.period.total_seconds(),
                    tokens=bucket.machine.tokens_at(now),
                    waiting=len(bucket.waiters),
                    leased=sum(bucket.machine.leases.values()),
                    holders=bucket.machine.holders[:MOST_HOLDERS],
                )
                for name, bucket in chosen
            ]
            return described, len(self._buckets) - len(described)

    async def _acquire(self, message: Acquire) -> _Answer:
        name, waiter = message.request.waiter, _Waiter(Wakeup())
        with self._lock:
            bucket = self._bucket_of(message)
            if name in bucket.waiters:
                raise IllegalStateError(
                    f"Bucket '{message.bucket}': waiter '{name}' waits already. Waiters need unique names"
                )
            bucket.waiters[name] = waiter
            self._handle(message.bucket, message.request)
        try:
            while waiter.reply is None:
                waiter.wakeup.clear()
                alarm_at = waiter.alarm_at
                if waiter.reply is not None:
                    break
                if alarm_at is None:
                    await waiter.wakeup.wait()
                elif await waiter.wakeup.wait_until(alarm_at, self._clock):
                    self._handle(message.bucket, Ticked())
        except asyncio.CancelledError:
            with self._lock:  # S-RATE-13
                if waiter.reply is None:
                    self._handle(message.bucket, WaiterCancelled(waiter=name))
                elif isinstance(waiter.reply, Grant):
                    # The grant of a lease returns without waiting, so this is none.
                    self._handle(message.bucket, Refunded())
            raise
        return waiter.reply

    def _bucket_of(self, message: Acquire) -> _Bucket:
        name, limit = message.bucket, message.limit
        bucket = self._buckets.get(name)
        if bucket is None:
            now = self._clock.now()
            if len(self._buckets) >= _MANY_BUCKETS:
                for other, old in list(self._buckets.items()):
                    if old.machine.is_idle(now, for_s=max(_IDLE_S, old.limit.period.total_seconds())):
                        del self._buckets[other]
            machine = TokenBucket(requests=limit.requests, period_s=limit.period.total_seconds(), at=now)
            bucket = self._buckets[name] = _Bucket(limit, machine)
        elif bucket.limit != limit:
            raise IllegalStateError(f"Bucket '{name}' has the limit {bucket.limit!r} and was asked with {limit!r}")
        return bucket

    def _handle(self, name: str, stimulus: Stimulus) -> None:
        """Ignore a stimulus for an unknown bucket: it is out of date."""
        with self._lock:
            bucket = self._buckets.get(name)
            if bucket is None:
                return
            now = self._clock.now()
            stimuli = [stimulus]
            while stimuli:
                stimuli = self._carry_out(bucket, bucket.machine.handle(*stimuli, at=now))

    @staticmethod
    def _carry_out(bucket: _Bucket, instructions: list[Instruction]) -> list[Stimulus]:
        """Wake the waiters; return stimuli for those that cannot be woken."""
        lost: list[Stimulus] = []
        for instruction in instructions:
            match instruction:
                case Grant() | Expire() | Dismiss():
                    waiter = bucket.waiters.pop(instruction.waiter)
                    waiter.reply = instruction
                    if not waiter.wakeup.wake() and isinstance(instruction, Grant):
                        lost.append(Refunded())
                case Recall(lease=lease):
                    if lease in bucket.recalls:
                        bucket.recalls.pop(lease).wake()
                case WakeAt(waiter=name, at=at):
                    if not bucket.waiters[name].set_alarm(at):
                        lost.append(WaiterCancelled(waiter=name))
                case _:
                    assert_never(instruction)
        return lost


class LocalLimiter:
    def __init__(self, *, clock: Clock | None = None) -> None:
        self._service = LimiterService(clock=clock)
        self._waiters = itertools.count()

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        waiter = str(next(self._waiters))
        request = Requested(waiter=waiter, holder="local", timeout_s=timeout_s)
        if not isinstance(await self._service.receive(Acquire(bucket=bucket, limit=limit, request=request)), Grant):
            raise RateLimitTimeoutError(limit, timedelta(seconds=timeout_s))


_process_limiter = LocalLimiter()


def process_limiter() -> LocalLimiter:
    return _process_limiter


class Remote(Protocol):
    """Delivers messages to a `LimiterService` in another process; raises `ConnectionError` while it is unreachable."""

    async def __call__(self, message: Message) -> Reply: ...


class LeaseStock:
    """The leases of one bucket in one process, as a pure machine.

    1. A leased permit is used only if no caller of this process waits at the limiter, because that caller was first.
    2. The oldest lease is used up first, but never after its end or recall.
    3. A single caller requests as many permits as this process used within the last lease's life, so slow callers lease
       none. Of several concurrent callers, each requests only its own permit.
    """

    def __init__(self) -> None:
        self._leases: dict[str, _LocalLease] = {}
        self._asked_at: deque[float] = deque(maxlen=MOST_WANTED)
        self.asking = 0  # callers of this process that wait at the limiter

    def claim(self, at: float) -> str | None:
        """Use a leased permit; None: request one from the limiter."""
        self._asked_at.append(at)
        if self.asking:
            return None
        for name, lease in self._leases.items():
            if lease.used < lease.size and at < lease.expires_at and not lease.is_recalled:
                lease.used += 1
                return name
        return None

    def permits_to_request(self, at: float) -> int:
        return 1 if self.asking else max(1, sum(at - asked_at < LEASE_S for asked_at in self._asked_at))

    def add(self, lease: str, *, size: int, expires_at: float) -> None:
        self._leases[lease] = _LocalLease(size=size, expires_at=expires_at)

    def count_used(self, lease: str) -> int | None:
        found = self._leases.get(lease)
        return None if found is None else found.used

    def recall(self, lease: str) -> None:
        if (found := self._leases.get(lease)) is not None:
            found.is_recalled = True

    def end(self, lease: str) -> int:
        return self._leases.pop(lease).used


class LeasingLimiter:
    """Leases permits of another process, for callers on one event loop."""

    def __init__(self, remote: Remote, *, holder: str | None = None, clock: Clock | None = None) -> None:
        self._remote = remote
        self._holder = holder or new_object_id()
        self._clock: Clock = clock or MonotonicClock()
        self._waiters = itertools.count()
        self._stocks: dict[str, LeaseStock] = {}
        self._unreported: set[tuple[str, str]] = set()  # (bucket, lease) with unreported uses
        self._background: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def acquire(self, bucket: str, limit: RateLimit, *, timeout_s: float) -> None:
        """Retry until the timeout if the limiter cannot be reached."""
        stock = self._stocks.setdefault(bucket, LeaseStock())
        now = self._clock.now()
        lease = stock.claim(now)
        if lease is not None:

            async def report() -> None:
                while self._unreported:
                    bucket, lease = self._unreported.pop()
                    used = self._stocks[bucket].count_used(lease)
                    if used is not None:  # the return of an ended lease had its final count
                        await self._send(BucketUpdate(bucket, Used(lease=lease, used=used)))

            if not self._unreported:  # the uses of one turn of the loop are one report
                self._start(report())
            self._unreported.add((bucket, lease))
            return
        deadline = now + timeout_s
        while not self._is_closed:
            reply, lost = await self._ask(bucket, stock, limit, now=now, deadline=deadline)
            if isinstance(reply, Grant):
                return
            now = self._clock.now()
            if isinstance(reply, Expire) or now >= deadline:
                raise RateLimitTimeoutError(limit, timedelta(seconds=timeout_s)) from lost
            await self._clock.sleep(min(_RETRY_S, deadline - now))
            now = self._clock.now()
        raise IllegalStateError(f"Limiter of holder '{self._holder}' is closed")

    async def close(self) -> None:
        self._is_closed = True
        leaving = list(self._background)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        self._stocks.clear()
        await self._send(HolderGone(holder=self._holder))

    async def _ask(
        self, bucket: str, stock: LeaseStock, limit: RateLimit, *, now: float, deadline: float
    ) -> tuple[Reply, ConnectionError | None]:
        waiter = f"{self._holder}/{next(self._waiters)}"
        request = Requested(
            waiter=waiter, holder=self._holder, timeout_s=max(0.0, deadline - now), want=stock.permits_to_request(now)
        )
        call = asyncio.create_task(self._remote(Acquire(bucket=bucket, limit=limit, request=request)))
        stock.asking += 1
        try:
            # If the caller is cancelled, `_withdraw` needs the reply.
            reply = await asyncio.shield(call)
        except asyncio.CancelledError:
            if not call.cancelling():  # otherwise the loop is ending, and the end of this process is the report
                self._start(self._withdraw(bucket, waiter, call))
            raise
        except ConnectionError as lost:
            return None, lost
        finally:
            stock.asking -= 1
        if isinstance(reply, Grant) and reply.permits > 1:
            stock.add(waiter, size=reply.permits - 1, expires_at=now + LEASE_S)
            self._start(self._tend(bucket, stock, waiter, until=now + LEASE_S))
        return reply, None

    async def _withdraw(self, bucket: str, waiter: str, call: asyncio.Task[Reply]) -> None:
        await self._send(BucketUpdate(bucket, WaiterCancelled(waiter=waiter)))
        try:
            reply = await call
        except ConnectionError:
            return
        if isinstance(reply, Grant):
            await self._send(BucketUpdate(bucket, Returned(lease=waiter, used=0)))
            await self._send(BucketUpdate(bucket, Refunded()))

    async def _tend(self, bucket: str, stock: LeaseStock, lease: str, *, until: float) -> None:
        """End a lease in time, or at its recall."""

        async def wait_for_recall() -> None:
            await self._send(AwaitRecall(bucket=bucket, lease=lease))
            stock.recall(lease)

        recall = asyncio.ensure_future(wait_for_recall())
        end = asyncio.ensure_future(self._clock.sleep(max(0.0, until - self._clock.now())))
        try:
            await asyncio.wait((recall, end), return_when=asyncio.FIRST_COMPLETED)
        finally:
            recall.cancel()
            end.cancel()
            used = stock.end(lease)
        await self._send(BucketUpdate(bucket, Returned(lease=lease, used=used)))

    async def _send(self, message: Message) -> None:
        """An unreachable limiter ends leases and waiters by itself."""
        try:
            await self._remote(message)
        except ConnectionError as lost:
            _log.debug("Limiter not reached for %s: %s", type(message).__name__, lost)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Waiter(Struct):
    wakeup: Wakeup
    reply: _Answer | None = None
    alarm_at: float | None = None  # when to send `Ticked`; only for the head of the queue

    def set_alarm(self, at: float) -> bool:
        if self.alarm_at == at:
            return not self.wakeup.is_lost
        self.alarm_at = at
        return self.wakeup.wake()


class _Bucket(Struct):
    limit: RateLimit
    machine: TokenBucket
    waiters: dict[str, _Waiter] = msgspec.field(default_factory=dict[str, _Waiter])
    #: lease -> its holder, which waits for the recall
    recalls: dict[str, Wakeup] = msgspec.field(default_factory=dict[str, Wakeup])


class _LocalLease(Struct, kw_only=True):
    size: int
    expires_at: float
    used: int = 0
    is_recalled: bool = False


_DEFAULT_WAIT = timedelta(seconds=30)


class RateLimitedChatModel:
    """A chat model with calls that wait for permits; make one with `of`.

    All pickled copies of it, in any process, share one bucket. Wrappers are equal if they share their bucket.

    It has no blocking `chat`: a model's client belongs to one event loop. A cancelled wait raises `CancelledError`.

    Args:
        delegate: The model that answers.
        rate_limit: Calls per period.
        wait_timeout: Longest wait for a permit.

    Examples:
        >>> from ensemble_ray.values.value import RateLimit
        >>> from ensemble_ray.testing import ScriptedModel
        >>> model = RateLimitedChatModel.of(ScriptedModel("hello"), RateLimit.per_minute(60))
        >>> model.wait_timeout
        datetime.timedelta(seconds=30)
    """

    def __init__(self, delegate: ChatModel, rate_limit: RateLimit, wait_timeout: timedelta = _DEFAULT_WAIT) -> None:
        self._delegate = _resolve(delegate)
        self._rate_limit = rate_limit
        self._wait_timeout = wait_timeout
        self._bucket = new_object_id()  # pickled with the wrapper (S-RATE-20)

    @classmethod
    def of(
        cls,
        delegate: ChatModel | str | Sequence[ChatModel | str],
        rate_limit: RateLimit,
        wait_timeout: timedelta | float = _DEFAULT_WAIT,
    ) -> RateLimitedChatModel:
        """Return a model with a new limit; it streams if the delegate does.

        Args:
            delegate: A model, its name as in `Agent.llm`, or a list of these: a fallback chain.
            rate_limit: Calls per period.
            wait_timeout: Longest wait for a permit; a number means seconds.

        Raises:
            ValueError: an argument is None.
            ValidationError: the model's name is unknown, or the timeout is negative.
        """
        arguments = {"delegate": delegate, "rate_limit": rate_limit, "wait_timeout": wait_timeout}
        for name, value in arguments.items():
            if value is None:
                raise ValueError(f"RateLimitedChatModel {name} must not be None")
        model = _resolve(delegate)
        wait = timedelta(seconds=wait_timeout) if isinstance(wait_timeout, int | float) else wait_timeout
        if wait < timedelta():
            raise ValidationError(f"RateLimitedChatModel wait_timeout must not be negative, got: {wait}")
        kind = _RateLimitedStreamingModel if isinstance(model, StreamingChatModel) else RateLimitedChatModel
        return kind(model, rate_limit, wait)

    def around(self, delegate: ChatModel) -> RateLimitedChatModel:
        """Return a wrapper of another model with the same limit: both models share the bucket."""
        rebuilt = self.of(delegate, self._rate_limit, self._wait_timeout)
        rebuilt._bucket = self._bucket  # noqa: SLF001  a model of its own class
        return rebuilt

    @property
    def delegate(self) -> ChatModel:
        """The model that answers."""
        return self._delegate

    @property
    def rate_limit(self) -> RateLimit:
        """Calls per period."""
        return self._rate_limit

    @property
    def wait_timeout(self) -> timedelta:
        """Longest wait for a permit."""
        return self._wait_timeout

    @property
    def bucket(self) -> str:
        """Name of the bucket, which is the same for all copies."""
        return self._bucket

    @property
    def model_name(self) -> str:
        """The delegate's name; empty if it has none."""
        found: object = getattr(self._delegate, "model_name", None) or getattr(self._delegate, "model", "")
        return found if isinstance(found, str) else ""

    @property
    def provider_name(self) -> str:
        """The delegate's provider; empty if it is unknown."""
        found: object = getattr(self._delegate, "provider_name", "")
        return found if isinstance(found, str) else ""

    @property
    def endpoint_id(self) -> str:
        """The delegate's endpoint; empty if it has none."""
        return str(getattr(self._delegate, "endpoint_id", ""))

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Wait for a permit, then ask the model. A failed call has used its permit.

        Raises:
            RateLimitTimeoutError: there was no permit within `wait_timeout`; the model was not called.
        """
        await self._permit()
        # A delegate may have no parameter for tools.
        offered = (tools,) if tools else ()
        return await call_user(self._delegate.chat, messages, *offered)

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer as `chat` does, in the form of that schema if the delegate supports schemas."""
        await self._permit()
        if isinstance(self._delegate, StructuredChatModel):
            return await call_user(self._delegate.chat_structured, messages, schema)
        return await call_user(self._delegate.chat, messages)

    async def _permit(self) -> None:
        scope = services()
        limiter: Limiter = process_limiter() if scope is None else scope.limiter
        with waiting_for_permit():  # a cancelled wait raises `CancelledError` (S-RATE-14)
            await limiter.acquire(self._bucket, self._rate_limit, timeout_s=self._wait_timeout.total_seconds())

    def __eq__(self, other: object) -> bool:
        return self._bucket == other._bucket if isinstance(other, RateLimitedChatModel) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bucket)

    def __repr__(self) -> str:
        per = f"{self._rate_limit.requests} requests per {self._rate_limit.period}"
        return f"RateLimitedChatModel({self._delegate!r}, {per})"


class _RateLimitedStreamingModel(RateLimitedChatModel):
    """`StreamingChatModel` is recognized by the method `stream`."""

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        assert isinstance(self._delegate, StreamingChatModel)  # noqa: S101  `of` chose this class because of it
        await self._permit()
        pieces = self._delegate.stream(messages, tools)
        try:
            async for piece in pieces:
                yield piece
        finally:
            # Otherwise the garbage collector closes it later.
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()


def _resolve(delegate: ChatModel | str | Sequence[ChatModel | str]) -> ChatModel:
    from ensemble_ray.llm.fallback import resolve_chain  # few models have limits

    return resolve_chain(delegate)
