"""Runs the tasks of a dynamic run on a cluster, for the coordinator in the driver.

After a restart the scheduler receives the run and its unfinished orders again, under higher epochs (S-MR-164).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import ray.exceptions
from msgspec.structs import replace

from ensemble_ray.actors.driver.cluster import PROGRAM, ClusterHeartbeat
from ensemble_ray.actors.driver.driver_connection import DriverConnection
from ensemble_ray.actors.driver.node_check import check_loading
from ensemble_ray.actors.driver.packing import PackedOrder, Packer, pack_context
from ensemble_ray.actors.link import wire
from ensemble_ray.actors.link.events import HubSink
from ensemble_ray.actors.link.limiter import RemoteLimiter, shared_spending
from ensemble_ray.actors.link.packing import make_undone_result, unpack_result
from ensemble_ray.actors.link.reach import BackgroundTasks, last_line, ours, patiently, reach, run_error
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.events import Event
from ensemble_ray.execute.local_executor import MOST_TEMPLATES
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.plan.placement import MOST_DEATHS
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.stores import resume_advice
from ensemble_ray.runs.ports import Deliver, RunRequest
from ensemble_ray.values.ids import new_object_id

_log = bounded_logger(__name__)
#: Limits of a message: orders, and bytes except for a single large order.
_BATCH_ORDERS = 500
_BATCH_BYTES = 1_000_000
#: One call waits for results so long, s; also the interval of this driver's heartbeat.
_COLLECT_S = 10.0
#: Epochs allow no more (see `ensemble_ray.values.ids`).
_MOST_SESSIONS = 3
#: With more tasks in flight, results are collected in intervals of seconds, so that tasks share messages.
#: Measured for 1,111 tasks with spread delays: 4.4 s of processor time instead of 5.4 s.
_MANY = 64
_GATHER_S = 0.01


class RemoteExecutor:
    """Implements `ExecutorSession`. It starts no process before `open`."""

    def __init__(
        self, request: RunRequest, scheduler: Any, *, is_connected: bool, keep: wire.Keep, most_processes: int
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._run_id = request.run_id
        self._scheduler = scheduler
        self._is_connected = is_connected
        self._keep: wire.Keep = keep
        self._most_processes = most_processes
        self._heartbeat = ClusterHeartbeat(request.run_id, request.origin)
        self._connection = DriverConnection(request, self._heartbeat, scheduler)
        self._driver = new_object_id()
        self.spending = shared_spending(request.context, RemoteLimiter(), self._driver)
        self._numbers = itertools.count(1)
        #: state of the current session
        self._session = ""
        self._batches = itertools.count(1)
        self._cursor = 0
        self._sent: OrderedDict[str, None] = OrderedDict()
        self._packer = Packer()
        #: orders without a result, and the number of sessions that were lost with them
        self._in_flight: dict[str, PackedOrder] = {}
        self._lost: dict[str, int] = {}
        self._queue: list[str] = []
        self._stopping: set[str] = set()
        #: collected, since a run that ends stops its tasks one by one
        self._to_stop: list[str] = []
        self._undelivered: list[TaskResult] = []
        self._loading = asyncio.Lock()
        self._submitting = BackgroundTasks()
        self._background = BackgroundTasks()
        self._collecting: asyncio.Task[None] | None = None
        self._is_open = False
        self._is_closed = False
        self._sink: HubSink | None = None

    @property
    def most_processes(self) -> int | None:
        return self._most_processes

    async def open(self, deliver: Deliver) -> None:
        self._hand_over = deliver
        hub = await self._open_session()
        self._connection.begin(hub)
        if hub is not None:
            self._sink = HubSink(hub, self._run_id, self._request.context.interest)
        self._collecting = asyncio.get_running_loop().create_task(self._collect())

    def emit(self, event: Event) -> None:
        """The hub receives a task's events before its result arrives (S-PAR-41)."""
        if self._sink is not None:
            self._sink.emit(event)

    def start(self, orders: Sequence[TaskOrder]) -> None:
        """A task that cannot be pickled is delivered as failed (S-MR-106)."""
        for order in orders:
            try:
                packed = self._packer.pack(order)
            except Exception as error:  # noqa: BLE001  the order must have a result
                self._add_result(make_undone_result(order, error))
                continue
            self._in_flight[order.instance] = packed
            self._enqueue(order.instance)

    def stop(self, instances: Sequence[str]) -> None:
        in_flight = [name for name in instances if name in self._in_flight]
        self._stopping.update(in_flight)
        self._to_stop.extend(in_flight)
        if in_flight and len(in_flight) == len(self._to_stop):
            asyncio.get_running_loop().call_soon(self._stop_all)

    async def close(self) -> None:
        """Events of delivered tasks are emitted before it returns."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in (*self._submitting, *self._background, *filter(None, [self._collecting])):
            task.cancel()
        if self.spending is not None:
            self.spending.close()
        try:
            if not self._heartbeat.is_gone:
                if self._sink is not None:
                    await self._sink.flush()
                keep = None if self.failed.done() else self._keep
                closed = self._scheduler.close_session.remote(self._run_id, self._session, keep=keep)
                await self._heartbeat.wait_for(closed)
        except (ray.exceptions.RayError, EnsembleError) as error:  # its processes ended with the scheduler
            _log.warning("Run %s: the scheduler cannot be reached: %s", self._run_id, last_line(error))
        finally:
            await self._connection.detach()

    # Orders.

    def _enqueue(self, instance: str) -> None:
        self._queue.append(instance)
        if len(self._queue) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the orders of this turn of the loop, once a session is open."""
        if self._is_closed or self.failed.done() or not self._is_open:
            return
        queue, self._queue = self._queue, []
        waiting = [self._in_flight[name] for name in queue if name in self._in_flight]
        for orders in _batches(waiting):
            self._submitting.start(self._submit(self._session, self._batch(orders)))

    def _batch(self, orders: Sequence[PackedOrder]) -> wire.OrderBatch:
        templates: list[wire.AgentTemplate] = []
        bundles: dict[str, bytes] = {}
        for packed in orders:
            template = self._packer.template_of(packed)
            if template is not None and not self._was_sent(template.key):
                templates.append(template)
            needed = self._packer.bundles_of(packed)
            bundles.update({name: body for name, body in needed.items() if not self._was_sent(name)})
        return wire.OrderBatch(
            number=next(self._batches),
            orders=[packed.order for packed in orders],
            callables={packed.instance: packed.names for packed in orders if packed.names is not None},
            templates=templates,
            bundles=bundles,
        )

    def _was_sent(self, name: str) -> bool:
        """Whether the scheduler should have it. If it does not, it returns the order."""
        was_sent = name in self._sent
        self._sent[name] = None
        self._sent.move_to_end(name)
        if len(self._sent) > 2 * MOST_TEMPLATES:
            self._sent.popitem(last=False)
        return was_sent

    async def _submit(self, session: str, batch: wire.OrderBatch) -> None:
        """If the session is lost meanwhile, the next session sends the orders."""
        try:
            async with self._loading:  # batches stay in order
                await check_loading(self._scheduler, batch.list_payloads())
                if self._sink is not None:
                    await self._sink.flush()  # earlier events come before the events of these tasks
            await reach(lambda: self._scheduler.submit_orders.remote(self._run_id, session, batch), patiently())
        except ray.exceptions.RayError as error:
            self._fail(error)

    def _stop_all(self) -> None:
        names, self._to_stop = self._to_stop, []
        queued = set(self._queue)
        rest: list[str] = []
        for name in names:
            if name in self._in_flight and name in queued:
                self._cancel(name)
            elif name in self._in_flight:
                rest.append(name)
        if rest and not self._is_closed:
            self._background.start(self._stop(rest, self._session))

    async def _stop(self, instances: Sequence[str], session: str) -> None:
        if self._submitting:
            await asyncio.wait(list(self._submitting))  # the scheduler must have the orders first
        try:
            await reach(lambda: self._scheduler.stop_orders.remote(self._run_id, session, list(instances)), patiently())
        except ray.exceptions.RayError as error:
            self._fail(error)

    # Results.

    async def _collect(self) -> None:
        try:
            collect = self._scheduler.collect.remote
            while True:
                page: wire.ReportPage | None = await self._heartbeat.reach(
                    lambda: collect(self._run_id, self._session, self._cursor, _COLLECT_S)
                )
                if page is None:  # the scheduler does not know this session
                    await self._resubmit()
                else:
                    self._receive(page)
                    if len(self._in_flight) > _MANY:
                        await asyncio.sleep(_GATHER_S)
        except Exception as error:  # noqa: BLE001  the run must end, whatever failed
            self._fail(error)

    def _receive(self, page: wire.ReportPage) -> None:
        self._cursor = page.cursor
        for instance in page.unknown:
            packed = self._in_flight.get(instance)
            if packed is not None and instance in self._stopping:
                self._cancel(instance)  # it was not started, so the scheduler cannot stop it
            elif packed is not None:
                template = self._packer.template_of(packed)
                for name in (*(() if template is None else (template.key,)), *self._packer.bundles_of(packed)):
                    self._sent.pop(name, None)
                self._enqueue(instance)
        for result in page.results:
            packed = self._in_flight.get(result.instance)
            if packed is not None and result.epoch >= packed.order.epoch:
                self._finish(packed)
                self._add_result(_read(result, packed.order))
        self._deliver()

    def _finish(self, packed: PackedOrder) -> None:
        del self._in_flight[packed.instance]
        self._lost.pop(packed.instance, None)
        self._stopping.discard(packed.instance)
        self._packer.release(packed)

    def _cancel(self, instance: str) -> None:
        packed = self._in_flight[instance]
        self._finish(packed)
        self._add_result(make_undone_result(packed.order, None, "cancelled"))

    def _add_result(self, result: TaskResult) -> None:
        self._undelivered.append(result)
        if len(self._undelivered) == 1:
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        results, self._undelivered = self._undelivered, []
        if results and not self._is_closed:
            self._hand_over(results)

    # Sessions.

    async def _open_session(self) -> Any:
        """Register the run under a new session and return its hub. No order is sent until then."""
        self._is_open = False
        self._session = f"{self._driver}/{next(self._numbers)}"
        self._batches = itertools.count(1)
        self._cursor = 0
        self._sent.clear()
        request = self._request
        node_id = str(ray.get_runtime_context().get_node_id())
        opening = wire.SessionOpening(
            run_id=self._run_id,
            session=self._session,
            context=pack_context(request.context),
            program=PROGRAM,
            location=None if request.store is None else wire.RecordLocation(request.store, node_id),
            is_connected=self._is_connected,
            is_resubmission=self._collecting is not None,
        )
        hub = await self._heartbeat.reach(lambda: self._scheduler.open_session.remote(opening))
        self._is_open = True
        return hub

    async def _resubmit(self) -> None:
        await self._open_session()
        for instance in [name for name in self._in_flight if name in self._stopping]:
            self._cancel(instance)
        queued = set(self._queue)  # never sent
        for packed in [packed for name, packed in self._in_flight.items() if name not in queued]:
            count = self._lost[packed.instance] = self._lost.get(packed.instance, 0) + 1
            if count >= _MOST_SESSIONS and self._request.store is not None:
                advice = resume_advice(self._run_id, self._request.origin)
                raise run_error(
                    self._run_id,
                    f"the scheduler's process died {_MOST_SESSIONS} times with the same tasks. What was recorded is kept; "
                    f"continue the run: {advice}",
                )
            # The lost scheduler may have dispatched it again up to `MOST_DEATHS` times.
            self._in_flight[packed.instance] = packed.renew(MOST_DEATHS)
            self._queue.append(packed.instance)
        self._flush()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done() and not self._is_closed:
            self.failed.set_exception(ours(error, self._run_id, self._request.origin))
            self.failed.exception()  # marks it as retrieved: the user may read it later, or never


def _batches(waiting: Sequence[PackedOrder]) -> Iterator[Sequence[PackedOrder]]:
    begin = size = 0
    for position, packed in enumerate(waiting):
        if position > begin and (position - begin >= _BATCH_ORDERS or size + packed.size > _BATCH_BYTES):
            yield waiting[begin:position]
            begin, size = position, 0
        size += packed.size
    if begin < len(waiting):
        yield waiting[begin:]


def _read(result: wire.WireResult, order: wire.WireOrder) -> TaskResult:
    """Return a failed result if its objects cannot be loaded here."""
    try:
        return replace(unpack_result(result), packed=result.output)
    except Exception as error:  # noqa: BLE001  whatever loading raised, the order must have its result
        unreadable = EnsembleError(
            f"The result of task '{result.key}' cannot be loaded in this process: {message_of(error)}. "
            "Install the module it comes from here too, or use runtime='inline'"
        )
        unreadable.__cause__ = error
        return make_undone_result(order, unreadable)
