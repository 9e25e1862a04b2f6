"""Requests of maps through the Batch API of a provider (S-BAT).

`BatchSession` stands between the coordinator and the executor of a run. Each map runs twice. First it runs in this process
up to its first model call: the request goes into a file, and the map's objects are dropped. When the answer is recorded,
the map is made again and runs as a resumed task, which finds the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from ensemble_ray.definition.delivery import BatchDelivery
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import BatchError, ValidationError
from ensemble_ray.errors.texts import brief, message_of
from ensemble_ray.events import BatchProgressEvent, Event
from ensemble_ray.execute.agent.attempts import answer_of
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.effects import ModelEffect
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import FirstRequest, Request, RequestDeferredError, RunnerPorts
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact, find_fact
from ensemble_ray.facts.runs import BatchRecorded
from ensemble_ray.llm.failures import backoff_s, fault_of, patience_asked_s
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.llm.names import model_names
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.llm.prices import price_mark
from ensemble_ray.llm.protocol.batches import BatchEndpoint, BatchLine, ProviderBatch, request_line
from ensemble_ray.ports import EventSink, Persistence, Services
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.batches import RecordedBatch, RecordedBatches, members_of
from ensemble_ray.record.identity.definition import position_of
from ensemble_ray.record.opening import store_at
from ensemble_ray.runs.coordinator import RunBackgroundTasks, RunJournal
from ensemble_ray.runs.map_reduce.orders import FailedMap, PreparedLoop, PreparedTask
from ensemble_ray.tools.cpu import LokyCpuPool
from ensemble_ray.values.ids import RUN, effect_name, key_of, new_object_id
from ensemble_ray.values.messages import ChatResponse, TokenUsage, whole_response
from ensemble_ray.values.metrics import BATCH

if TYPE_CHECKING:
    from ensemble_ray.execute.scope import Spending
    from ensemble_ray.runs.map_reduce.tasks import MapReduceTasks
    from ensemble_ray.runs.ports import Deliver, ExecutorSession, RunRequest

T = TypeVar("T")
_log = bounded_logger(__name__)

_CHUNK = 64  # maps that are made together
_ANSWERS = 256  # per commit
_WATCH_S = 0.1
_FIRST_POLL_S, _POLL_GROWTH = 1.0, 1.5
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 60.0
_MOST_ATTEMPTS = 8  # of one request of the Batch API; a request for a state has no limit
_END_S = 10.0  # for cancelling batches when a run ends
_KEEP = "keep"  # in the id of a line: the agent keeps the reasoning inside the answer


def batch_model_of(model: object) -> OpenAIChatModel | None:
    """Return the model that has a Batch API; a limit of calls per minute does not apply to batches."""
    while not isinstance(model, OpenAIChatModel) and (inner := getattr(model, "delegate", None)) is not None:
        model = inner
    return model if isinstance(model, OpenAIChatModel) else None


def check_batched(made: PreparedTask) -> None:
    """Refuse a map that cannot be delivered in a batch (S-BAT-3)."""
    if isinstance(made, PreparedLoop):
        raise ValidationError(_refusal("map_task returned a loop", "Return a task"))
    if isinstance(made, FailedMap) or made.level:
        return
    order = made.order
    task, agent = order.task, order.agent
    what = f"Task '{brief(task.description)}'"
    if agent is None:
        raise ValidationError(_refusal(f"{what} has a handler", "A handler calls no model"))
    role = f"its agent '{brief(agent.role)}'"
    if agent.runner is not None:
        raise ValidationError(_refusal(f"{what}: {role} is run by another framework", "Give it a model"))
    if agent.tools or agent.allow_delegation:
        has = "tools" if agent.tools else "delegation"
        raise ValidationError(_refusal(f"{what}: {role} has {has}", "An answer of a batch comes alone. Leave them out"))
    if order.is_streaming:
        raise ValidationError(_refusal(f"{what} streams its answer", "Leave out streaming"))
    model = agent.llm if task.llm is None else task.llm
    if batch_model_of(model) is None:
        known = "Use an OpenAIChatModel, such as llm='openai:gpt-4o-mini'"
        raise ValidationError(_refusal(f"{what}: {role} has the model {type(model).__name__}", known))


def _refusal(problem: str, advice: str) -> str:
    return f"delivery='batch': {problem}, which a batch cannot deliver. {advice}, or leave out delivery"


class _Events:
    """Collects the events of a task, which are sent only if it ends before its first model call."""

    def __init__(self, events: EventSink) -> None:
        self.wants = events.wants
        self.emitted: list[Event] = []

    def emit(self, event: Event) -> None:
        self.emitted.append(event)


class _Shard:
    """The requests of one batch."""

    def __init__(self, key: str, model: OpenAIChatModel, members: Iterable[str] = ()) -> None:
        self.key = key
        self.model = model
        self.members: dict[str, None] = dict.fromkeys(members)
        self.answered: set[str] = set()
        self.file: IO[bytes] | None = None  # None: an earlier process had it
        self.size_bytes = 0
        self.provider_batch = ""
        self.is_late = False
        self.is_ended = False  # at the provider

    def add(self, instance: str, line: bytes) -> None:
        if self.file is None:
            self.file = tempfile.TemporaryFile(prefix="ensemble-ray-")  # noqa: SIM115  closed when it is sent
        self.file.write(line)
        self.size_bytes += len(line)
        self.members[instance] = None

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class BatchSession:
    """Fulfils `ExecutorSession`: collects the requests of maps, and passes all other orders to the executor."""

    def __init__(
        self,
        delivery: BatchDelivery | None,
        journal: RunJournal,
        tasks: MapReduceTasks,
        request: RunRequest,
        *,
        deliver: Deliver,
        break_off: Callable[[BaseException], None],
        recorded: RecordedBatches | None,
    ) -> None:
        """`deliver` and `break_off` are the coordinator's.

        `recorded` has the batches of earlier owners of the run. Without `delivery` only their answers are read.
        """
        self._collects = delivery is not None
        self._delivery = delivery or BatchDelivery()
        self._journal = journal
        self._tasks = tasks
        self._context = request.context
        self._deliver_to_run = deliver
        self._inner: ExecutorSession
        self.batches = recorded or RecordedBatches()  # with those of this process
        self._called: dict[str, Task] = {}  # tasks with input guardrails
        self._ports = RunnerPorts(
            clock=journal.clock,
            journal=journal.journal,
            events=request.events,
            callables=LocalCallables(self._called),
            services=Services(limiter=process_limiter(), cpu=LokyCpuPool()),
            tool_metrics=request.tool_metrics,
            reviewer=request.reviewer,
            memory=request.memory,
            reflections=request.reflections,
            answers=None if request.store is None else store_at(request.store),
        )
        self._break_off = break_off
        self._background = RunBackgroundTasks(break_off)
        self._window = self._limit = 1
        self._collecting: dict[str, asyncio.Task[None]] = {}  # maps that run up to their first model call
        self._stopped: set[str] = set()
        self._blocked = 0  # of these, how many wait for the budget
        self._filling: dict[OpenAIChatModel, _Shard] = {}
        self._filled_at = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._shards: dict[str, _Shard] = {}  # sent, or found in the record
        self._waiting: dict[str, _Shard] = {}  # maps without an answer
        self._claims: dict[str, tuple[str, Request]] = {}  # reservations of the budget
        self._reuse_digests: dict[str, str] = {}  # of maps with `reuse`
        self._ready: dict[str, None] = {}  # maps that can run
        self._making: set[str] = set()  # of these, those that are made again
        self._queue: deque[TaskOrder] = deque()  # orders that wait for a slot of the executor
        self._released: set[str] = set()  # in the executor
        self._sending: set[asyncio.Task[Any]] = set()  # requests for which the end of the run waits
        self._is_ending = False
        self.keeps_batches = False  # at the end of this process's work; otherwise they are cancelled

    def open(self, inner: ExecutorSession, *, limit: int) -> int:
        """Return the most tasks of the run at the same time; the executor has `limit` of them."""
        self._inner, self._limit = inner, limit
        self.emit, self.failed = inner.emit, inner.failed
        self._window = max(limit, self._delivery.max_items) if self._collects else limit
        return self._window

    @property
    def most_processes(self) -> int | None:
        return self._inner.most_processes

    @property
    def spending(self) -> Spending | None:
        return self._inner.spending

    def deliver(self, results: Sequence[TaskResult]) -> None:
        """Pass results of the executor to the run."""
        self._released.difference_update([result.instance for result in results])
        self._deliver_to_run(results)
        self._release()

    def start(self, orders: Sequence[TaskOrder]) -> None:
        for order in orders:
            position, instance = position_of(order.key), order.instance
            if position is None or position[0]:  # no map
                self._queue.append(order)
            elif instance in self._making:
                self._making.remove(instance)
                self._queue.append(replace(order, is_resubmission=True, input_guardrails=0))  # it has passed them
            elif (batch := self.batches.find(instance)) is None or batch.state == "void":
                if self._collects:
                    self._collect(order)
                else:
                    self._queue.append(order)
            elif batch.is_open:
                self._join(order, batch)
            else:  # its answer is recorded, or it needs a call of its own
                self._set_ready((instance,))
        self._release()

    def stop(self, instances: Sequence[str]) -> None:
        """Stop maps; the open batches are cancelled, since only the end of a run stops maps."""
        passed: list[str] = []
        cancelled: set[str] = set()
        for instance in instances:
            if (collecting := self._collecting.get(instance)) is not None:
                self._stopped.add(instance)
                collecting.cancel()
            elif instance in self._released:
                passed.append(instance)
            else:
                self._waiting.pop(instance, None)
                self._ready.pop(instance, None)
                cancelled.add(instance)
        self._queue = deque(order for order in self._queue if order.instance not in cancelled)
        asyncio.get_running_loop().call_soon(self._deliver_to_run, [self._cancelled(each) for each in cancelled])
        self._inner.stop(passed)
        if not self._is_ending:
            self._is_ending = True
            self._background.detach()
            if not self.keeps_batches:
                for shard in self._shards.values():
                    self._send(self._cancel(shard))

    async def close(self) -> None:
        """Wait for the provider's answers to cancellations, then stop waiting for batches."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=_END_S)
        self._background.detach()
        if self._watching is not None:
            self._watching.cancel()
        for sending in (*self._sending, *self._collecting.values()):
            sending.cancel()
        for shard in (*self._filling.values(), *self._shards.values()):
            shard.close()
        await self._inner.close()
        if self._context.deps is not None:  # an input guardrail may have needed them here
            await self._context.deps.close()

    # Requests.

    def _collect(self, order: TaskOrder) -> None:
        """Run a map up to its first model call."""
        if order.input_guardrails:
            self._called[order.key] = order.task
        instance = order.instance

        def on_done(task: asyncio.Task[None]) -> None:
            self._collecting.pop(instance, None)
            self._called.pop(order.key, None)
            if task.cancelled():  # before it had started
                self._deliver_to_run([self._cancelled(instance)])
            elif (error := task.exception()) is not None:  # such as a full disk
                self._break_off(error)

        task = asyncio.get_running_loop().create_task(self._run_to_request(order))
        self._collecting[instance] = task
        task.add_done_callback(on_done)
        self._watch()

    async def _run_to_request(self, order: TaskOrder) -> None:
        taken: list[tuple[FirstRequest, bytes]] = []

        async def take(first: FirstRequest) -> None:
            line = b"" if first.is_answered else self._line_of(first)
            if line:
                await self._reserve(first)
                if first.reuse_digest:
                    self._reuse_digests[first.order.instance] = first.reuse_digest
            taken.append((first, line))
            raise RequestDeferredError

        events = _Events(self._ports.events)
        ports = replace(self._ports, events=events, defer=take)
        is_stopped = self._stopped.__contains__
        runner = TaskRunner(self._context, ports, {})
        result = await runner.run(order, is_stopped=lambda: is_stopped(order.instance))
        if not taken:  # it ended before
            for event in events.emitted:
                self._inner.emit(event)
            self._deliver_to_run([result])
            return
        ((first, line),) = taken
        if order.instance in self._stopped:
            self._free(order.instance)
            self._deliver_to_run([self._cancelled(order.instance)])
        elif line and len(line) <= self._delivery.max_bytes:
            self._add(first, line)
        else:
            self._free(order.instance)
            self._tasks.defer(order.instance)
            self._set_ready((order.instance,))

    def _line_of(self, first: FirstRequest) -> bytes:
        """Return a line of a file of requests; empty if the map needs a call (a directive chose another model)."""
        model, agent = batch_model_of(first.model), first.order.agent
        if model is None:
            return b""
        mark = f"/{_KEEP}" if agent is not None and agent.keep_reasoning else ""
        body = model.request_body(first.messages, first.schema)
        return request_line(f"{first.order.instance}/{first.digest}{mark}", model.batch_path, body)

    async def _reserve(self, first: FirstRequest) -> None:
        """Reserve the price of an answer in a batch; may raise `BudgetExhaustedError` (S-BAT-31)."""
        spending, order = self._inner.spending, first.order
        if spending is None:
            return
        request = spending.request(order.agent_key or order.agent_role, first.model, first.messages)
        self._blocked += 1
        try:
            estimate = TokenUsage(request.input_tokens, request.output_tokens)
            claim = await spending.account.reserve(spending.price(first.model, estimate, delivery=BATCH))
        finally:
            self._blocked -= 1
        self._claims[order.instance] = (claim, request)

    def _free(self, instance: str) -> None:
        held = self._claims.pop(instance, None)
        if held is not None and (spending := self._inner.spending) is not None:
            spending.account.charge(held[0])

    def _add(self, first: FirstRequest, line: bytes) -> None:
        model, instance = cast("OpenAIChatModel", batch_model_of(first.model)), first.order.instance
        shard = self._filling.get(model)
        if shard is not None and shard.size_bytes + len(line) > self._delivery.max_bytes:
            self._seal(shard)
            shard = None
        if shard is None:
            shard = self._filling[model] = _Shard(new_object_id(), model)
        shard.add(instance, line)
        self._waiting[instance] = shard
        self._tasks.defer(instance)
        self._filled_at = self._journal.now()
        if len(shard.members) >= self._delivery.max_requests:
            self._seal(shard)

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._filled_at = self._journal.now()
            self._watching = asyncio.get_running_loop().create_task(self._seal_when_quiet())

    async def _seal_when_quiet(self) -> None:
        """Seal batches that are not full when no further request comes, or none has come for a while."""
        linger_s = self._delivery.linger.total_seconds()
        while self._filling or self._collecting:
            await self._journal.clock.sleep(_WATCH_S)
            is_last = self._tasks.are_all_made or len(self._waiting) + len(self._ready) >= self._window
            is_blocked = len(self._collecting) == self._blocked
            is_quiet = self._journal.now() - self._filled_at >= linger_s
            if is_quiet or (is_blocked and (is_last or self._blocked)):
                for shard in tuple(self._filling.values()):
                    self._seal(shard)

    def _seal(self, shard: _Shard) -> None:
        del self._filling[shard.model]
        self._shards[shard.key] = shard
        self._background.start(self._carry(shard))

    def _join(self, order: TaskOrder, batch: RecordedBatch) -> None:
        """Wait for the answer of a batch that an earlier owner of the run planned."""
        shard = self._shards.get(batch.batch)
        if shard is None:
            agent = order.agent
            model = batch_model_of(order.task.llm or (None if agent is None else agent.llm))
            if model is None:  # the definition has another model now
                self._queue.append(order)
                return
            shard = self._shards[batch.batch] = _Shard(batch.batch, model, batch.instances())
            self._background.start(self._carry(shard))
        self._waiting[order.instance] = shard
        self._tasks.defer(order.instance)

    # Maps that can run.

    def _set_ready(self, instances: Iterable[str]) -> None:
        for instance in instances:
            self._tasks.defer(instance)
            self._ready[instance] = None

    def _release(self) -> None:
        """Start orders, and make maps again, as many as the executor has slots for."""
        started: list[TaskOrder] = []
        while self._queue and len(self._released) < self._limit:
            started.append(self._queue.popleft())
            self._released.add(started[-1].instance)
        if started:
            self._inner.start(started)
        while self._ready and (room := self._limit - len(self._released) - len(self._making) - len(self._queue)) > 0:
            chosen = [each for each, _ in zip(self._ready, range(min(room, _CHUNK)), strict=False)]
            for each in chosen:
                del self._ready[each]
            self._making.update(chosen)
            self._background.start(self._make_again(chosen))

    async def _make_again(self, instances: Sequence[str]) -> None:
        await self._tasks.make_again(instances)
        self._making.difference_update(instances)
        self._release()

    def _collect_again(self, shard: _Shard, instances: Sequence[str]) -> None:
        """Make maps of a void batch again, so that `start` collects their requests."""
        del self._shards[shard.key]

        async def make() -> None:
            for first in range(0, len(instances), _CHUNK):
                await self._tasks.make_again(instances[first : first + _CHUNK])

        self._background.start(make())

    def _cancelled(self, instance: str) -> TaskResult:
        now, epoch = self._journal.now(), self._journal.epoch
        return TaskResult(key=key_of(instance), instance=instance, status="cancelled", at=now, epoch=epoch)

    # Batches.

    async def _carry(self, shard: _Shard) -> None:
        """Deliver one batch: record, send, wait, read the answers."""
        api = shard.model.batches()
        batch = await asyncio.shield(self._send(self._submit(shard, api)))  # the end of the run waits for it
        if batch is None:
            if not self._is_ending:
                self._collect_again(shard, self._take_waiting(shard))
            return
        batch = await self._wait(shard, api, batch)
        if batch.is_over_queue_limit:
            await self._send_later(shard, batch)
        else:
            await self._read(shard, api, batch)

    async def _submit(self, shard: _Shard, api: BatchEndpoint) -> ProviderBatch | None:
        """Return the provider's batch, which is created at most once (S-BAT-11); None: it was never sent."""
        recorded = self.batches.get(shard.key)
        if recorded is None:
            recorded = await self._record(
                shard, "planned", items=members_of(shard.members), total=len(shard.members),
                model=shard.model.model, endpoint=api.endpoint.origin.endpoint,
            )  # fmt: skip
        batch = None
        if recorded.provider_batch:
            shard.provider_batch = recorded.provider_batch
            return await self._ask(shard, lambda: api.get(shard.provider_batch))
        file_id = recorded.file
        if shard.file is None and file_id:
            batch = await self._find(shard, api)
        if batch is None and not file_id:
            if shard.file is None or self._is_ending:
                await self._record(shard, "void")
                return None
            file, name = shard.file, f"ensemble-ray-{shard.key}.jsonl"
            file_id = await self._ask(shard, lambda: api.upload(name, file))
            await self._record(shard, "uploaded", file=file_id)
        if batch is None:
            batch = await self._create(shard, api, file_id)
        shard.close()
        shard.provider_batch = batch.id
        await self._record(shard, "submitted", provider_batch=batch.id, status=batch.status)
        if self._is_ending and not self.keeps_batches:
            await self._cancel(shard)
        return batch

    async def _create(self, shard: _Shard, api: BatchEndpoint, file_id: str) -> ProviderBatch:
        """Create the batch. After a failure it may exist, so it is looked up before another attempt."""
        window, metadata = self._delivery.completion_window, {"run": self._journal.run_id}
        attempt = 0
        while True:
            attempt += 1
            try:
                return await api.create(file_id, key=shard.key, window=window, metadata=metadata)
            except Exception as error:  # noqa: BLE001  `_delay_after` raises all but failures of the provider
                await self._journal.clock.sleep(self._delay_after(shard, error, attempt))
            if (found := await self._find(shard, api)) is not None:
                return found

    async def _find(self, shard: _Shard, api: BatchEndpoint) -> ProviderBatch | None:
        since = self.batches[shard.key].planned_at
        return await self._ask(shard, lambda: api.find(shard.key, since=since))

    async def _wait(self, shard: _Shard, api: BatchEndpoint, batch: ProviderBatch) -> ProviderBatch:
        """Request the state of a batch until it has ended."""
        longest_s, max_age = self._delivery.poll_interval.total_seconds(), self._delivery.max_age
        recorded = self.batches[shard.key]
        deadline = None if max_age is None else recorded.planned_at + max_age.total_seconds()
        delay_s, shown = min(_FIRST_POLL_S, longest_s), (recorded.status, recorded.answered, recorded.failed)
        while True:
            if (batch.status, batch.completed, batch.failed) != shown:
                shown = (batch.status, batch.completed, batch.failed)
                await self._record(
                    shard,
                    "",
                    status=batch.status,
                    answered=batch.completed,
                    failed=batch.failed,
                    until=Persistence.SOON,
                )
            if batch.is_ended:
                shard.is_ended = True
                return batch
            if deadline is not None and not shard.is_late and self._journal.now() >= deadline:
                shard.is_late = True
                _log.warning("Batch %s is older than max_age and is cancelled", batch.id)
                await self._ask(shard, lambda: api.cancel(shard.provider_batch))
            await self._journal.clock.sleep(delay_s)
            delay_s = min(longest_s, delay_s * _POLL_GROWTH)
            batch = await self._ask(shard, lambda: api.get(shard.provider_batch), most_attempts=None)

    async def _send_later(self, shard: _Shard, batch: ProviderBatch) -> None:
        """Send the requests in another batch, once the provider has room for them."""
        _log.warning("Batch %s was refused and is sent again: %s", batch.id, _describe(batch))
        await self._journal.clock.sleep(self._delivery.poll_interval.total_seconds())
        await self._record(shard, "void")
        self._collect_again(shard, self._take_waiting(shard))

    async def _read(self, shard: _Shard, api: BatchEndpoint, batch: ProviderBatch) -> None:
        """Record the answers, and let all maps of the batch run; those without an answer make calls."""
        problems: Counter[str] = Counter()
        attempt = 0
        for file_id in (batch.output_file, batch.error_file):
            while file_id:
                attempt += 1
                try:
                    await self._read_file(shard, api, file_id, problems)
                    break
                except Exception as error:  # noqa: BLE001  `_delay_after` raises all but failures of the provider
                    await self._journal.clock.sleep(self._delay_after(shard, error, attempt))
        open_count = len(shard.members) - len(shard.answered)
        recorded = self.batches[shard.key]
        is_ours = recorded.state == "cancelled" and not shard.is_late
        state = "void" if is_ours else "collected"
        await self._record(shard, state, status=batch.status, answered=len(shard.answered), failed=open_count)
        waiting = self._take_waiting(shard)
        answered = [each for each in waiting if each in shard.answered]
        rest = [each for each in waiting if each not in shard.answered]
        if rest:
            told = ", ".join(f"{reason} ({count})" for reason, count in problems.most_common(5))
            _log.warning(
                "Batch %s %s: %d of %d requests have no answer and are %s: %s",
                batch.id, batch.status, len(rest), len(shard.members),
                "sent again in another batch" if is_ours else "called one by one",
                brief(told or _describe(batch) or "they are missing in its files"),
            )  # fmt: skip
        self._set_ready(answered)
        if is_ours:
            self._collect_again(shard, rest)
        else:
            del self._shards[shard.key]
            self._set_ready(rest)
        self._release()

    async def _read_file(self, shard: _Shard, api: BatchEndpoint, file_id: str, problems: Counter[str]) -> None:
        page: list[tuple[str, str, ChatResponse]] = []
        async with contextlib.aclosing(api.lines(file_id)) as lines:
            async for line in lines:
                if (entry := self._answer_in(shard, line, problems)) is not None:
                    page.append(entry)
                if len(page) >= _ANSWERS:
                    await self._record_answers(shard, page)
                    page = []
        await self._record_answers(shard, page)

    def _answer_in(
        self, shard: _Shard, line: BatchLine, problems: Counter[str]
    ) -> tuple[str, str, ChatResponse] | None:
        """Return the map, the digest of its request, and its answer; None for a repeated, unknown or failed line."""
        instance, _, rest = line.custom_id.partition("/")
        if instance in shard.answered or instance not in shard.members:
            if not instance:
                problems[line.problem] += 1
            return None
        if line.response is None:
            problems[line.problem] += 1
            return None
        shard.answered.add(instance)
        digest, _, mark = rest.partition("/")
        return instance, digest, whole_response(line.response, keep_reasoning=mark == _KEEP)

    async def _record_answers(self, shard: _Shard, page: Sequence[tuple[str, str, ChatResponse]]) -> None:
        """Record answers, each once: an earlier owner may have recorded some of them."""
        recorded, names = self.batches[shard.key], model_names(shard.model)
        now = self._journal.now()
        facts: list[Fact] = []
        for instance, digest, response in page:
            name = effect_name(instance, 0)
            if self._journal.epoch:
                known = await self._journal.journal.lookup_recorded(instance)
                if find_fact(known, name, ModelAnswered) is not None:
                    continue
            effect = ModelEffect(
                started_at=recorded.planned_at,
                latency_s=now - recorded.planned_at,
                response=response,
                is_final=True,
                delivery=BATCH,
                estimated=self._charge(instance, shard.model, response),
                model=names.model,
                provider=names.provider,
                price=price_mark(self._context.cost, shard.model),
                reuse_digest=self._reuse_digests.pop(instance, ""),
            )
            facts.append(self._journal.fact(name, answer_of(digest, effect, self._context.declared_model), now))
        if facts:
            await self._journal.append(*facts, until=Persistence.COMMITTED)

    def _charge(self, instance: str, model: OpenAIChatModel, response: ChatResponse) -> tuple[int, int] | None:
        """Charge an answer at the price of a batch; return the estimated tokens if the provider counted none."""
        spending = self._inner.spending
        if spending is None:
            return None
        claim, request = self._claims.pop(instance, ("", None))
        if request is None:  # of an earlier owner, whose reservation is gone
            request = Request(spending=spending, template="", model=model, input_tokens=0, output_tokens=0)
        request.charge(claim, response, delivery=BATCH)
        return request.estimated

    def _take_waiting(self, shard: _Shard) -> list[str]:
        waiting = [each for each in shard.members if self._waiting.get(each) is shard]
        for each in waiting:
            del self._waiting[each]
            self._free(each)
        return waiting

    async def _cancel(self, shard: _Shard) -> None:
        """Cancel a batch at the provider; its answers so far can be read when the run resumes."""
        if not shard.provider_batch or shard.is_ended:
            return
        api = shard.model.batches()
        await self._record(shard, "cancelled")
        try:
            await self._ask(shard, lambda: api.cancel(shard.provider_batch), most_attempts=3)
        except BatchError as error:
            _log.warning("%s. Cancel it at the provider: %s", message_of(error), shard.provider_batch)

    # Requests to the provider.

    async def _ask(
        self, shard: _Shard, send: Callable[[], Awaitable[T]], *, most_attempts: int | None = _MOST_ATTEMPTS
    ) -> T:
        attempt = 0
        while True:
            attempt += 1
            try:
                return await send()
            except Exception as error:  # noqa: BLE001  `_delay_after` raises all but failures of the provider
                delay_s = self._delay_after(shard, error, attempt, most_attempts=most_attempts)
            await self._journal.clock.sleep(delay_s)

    def _delay_after(
        self, shard: _Shard, error: Exception, attempt: int, *, most_attempts: int | None = _MOST_ATTEMPTS
    ) -> float:
        """Return the delay before another attempt, or raise `BatchError`."""
        fault = fault_of(error)
        if fault is None and not _is_of_provider(error):
            raise error
        if fault is None or (most_attempts is not None and attempt >= most_attempts):
            raise BatchError(
                f"Batch '{shard.key}' of {len(shard.members)} requests: {message_of(error)} Resume the run when that is "
                "mended. If the endpoint has no Batch API, leave out delivery='batch'",
                shard.key,
            ) from error
        asked_s = patience_asked_s(fault.retry_after, time.time())
        jitter = random.random()  # noqa: S311  spreads load
        delay_s = backoff_s(attempt, first_s=_FIRST_DELAY_S, longest_s=_LONGEST_DELAY_S, jitter=jitter)
        delay_s = delay_s if asked_s is None else asked_s
        _log.warning("Batch '%s': %s, again in %.3g s: %s", shard.key, fault.what, delay_s, brief(fault.text))
        return delay_s

    async def _record(
        self, shard: _Shard, state: str, *, until: Persistence = Persistence.COMMITTED, **fields: object
    ) -> RecordedBatch:
        """Record a step of a batch, and report it; an empty state keeps the last one."""
        data = BatchRecorded(batch=shard.key, state=state or self.batches[shard.key].state, **fields)  # type: ignore[arg-type]  # its fields
        fact = cast("Fact[BatchRecorded]", self._journal.fact(RUN, data))
        await self._journal.append(fact, until=until)
        batch = self.batches.apply(fact)
        if self._ports.events.wants(BatchProgressEvent):
            self._inner.emit(batch.to_event(self._journal.run_id))
        return batch

    def _send(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a request for which the end of the run waits."""

        def on_done(task: asyncio.Task[T]) -> None:
            self._sending.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and self._is_ending:
                _log.warning("The run ends while a request of the Batch API fails: %s", brief(message_of(error)))

        task = asyncio.get_running_loop().create_task(work)
        self._sending.add(task)
        task.add_done_callback(on_done)
        return task


def _is_of_provider(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "openai"


def _describe(batch: ProviderBatch) -> str:
    return "; ".join(f"{code}: {text}" for code, text in batch.problems[:3])
