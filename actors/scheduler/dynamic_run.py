"""FedRun: one run in the scheduler whose tasks its driver makes while it goes on; beside `ScheduledRun`.

In: orders in batches. Out: their reports, a page at a time, each until the driver says that it has it. The driver owns
the run: it conducts and records it, and sends what is in flight again to another scheduler. Must never happen: anything
that stays here of a task that was reported, or processes that outlive their driver by more than a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from actors.link.fed_wire import FedBatch, FedKind, FedOrder, FedPackage, FedPage
from actors.link.wire import UNKNOWN_KIND, WireOrder, WireReport
from actors.scheduler.callables import FedCallables
from actors.scheduler.kind_houses import KindHouses
from actors.scheduler.process_groups import CALLABLES, Dispatch, ProcessHouses, report_undone
from actors.scheduler.processes import Kind, Process, ProcessPool
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.errors import EnsembleError
from ensemble_ray.execute.kinds import MOST_KINDS, Shelf
from ensemble_ray.execute.orders import RunFrame
from ensemble_ray.inline import GRACE_S

__all__ = ["FedRun"]

_log = bounded_logger(__name__)
#: How long a driver may be silent before it counts as dead, s; a living one asks every few seconds.
DESERTED_S = 30.0
#: A page holds at most so many entries, and not many more bytes than that.
_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1_000_000


class FedRun:
    """One fed run in the scheduler."""

    def __init__(
        self,
        package: FedPackage,
        pool: ProcessPool,
        *,
        hub: Any,
        max_own: int,
        most_replicas: int,
        is_spread: bool,
    ) -> None:
        self._package = package
        self.hub = hub
        self._max_own = max_own
        self._houses = ProcessHouses(self, pool, hub=hub, is_spread=is_spread)
        self._housing = KindHouses(max_houses=max_own, most_replicas=most_replicas)
        self._kinds: Shelf[FedKind] = Shelf(on_drop=self._forget)
        self._callables = FedCallables(package.run_id, self._houses, ready=self._hand_out, lost=self._lose)
        #: instance -> kind of its agent, empty for a handler; of tasks that are not reported
        self._in_flight: dict[str, str] = {}
        #: numbers of batches that came, as far as one before them has not; the lowest that has not come
        self._early: set[int] = set()
        self._next_batch = 1
        #: reports and instances that could not be begun, until the driver has them
        self._outbox: list[WireReport | str] = []
        #: how many entries the driver has
        self._told = 0
        self._news = asyncio.Event()
        self._heard_at = asyncio.get_running_loop().time()
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._package.run_id

    @property
    def session(self) -> str:
        """Which opening this is."""
        return self._package.session

    # What the driver asks.

    def feed(self, batch: FedBatch) -> None:
        """Do these tasks; never waits. A batch that came before is nothing new."""
        if batch.number < self._next_batch or batch.number in self._early:
            return
        self._early.add(batch.number)
        while self._next_batch in self._early:
            self._early.discard(self._next_batch)
            self._next_batch += 1
        for name, kind in batch.kinds.items():
            self._kinds.put(name, kind)
        self._callables.put(batch.callables)
        taken = [order for order in batch.orders if self._take_in(order)]
        self._callables.send([order for order in taken if order.callables is not None])
        self._hand_out([order for order in taken if order.callables is None])
        self._callables.trim()
        self._kinds.trim()

    async def collect(self, cursor: int, wait_s: float) -> FedPage:
        """What came since; waits up to that long for something to come.

        Args:
            cursor: How many entries the driver has; they are forgotten here.
            wait_s: Longest wait when there is nothing new.
        """
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        if cursor > self._told:
            del self._outbox[: cursor - self._told]
            self._told = cursor
        if not self._outbox:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
            self._heard_at = loop.time()
        entries = list(_page_of(self._outbox))
        return FedPage(
            cursor=cursor + len(entries),
            reports=[entry for entry in entries if not isinstance(entry, str)],
            unknown=[entry for entry in entries if isinstance(entry, str)],
        )

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these tasks; processes that hold on to one are ended after a grace."""
        for instance in instances:
            waiting = self._callables.withdraw(instance)
            if waiting is not None:
                self._report_undone(waiting, None)
        self._houses.stop(instances)
        asyncio.get_running_loop().call_later(GRACE_S + 1.0, self._houses.end_stuck, tuple(instances))

    async def close(self, *, keep: bool) -> None:
        """Let all processes go; who waits for results is told that there are none."""
        self._news.set()
        await self._houses.close(keep=keep)

    async def deserted(self) -> None:
        """Return when the driver has not been heard for so long that it must be dead."""
        left = DESERTED_S
        while left > 0:
            await asyncio.sleep(left)
            left = self._heard_at + DESERTED_S - asyncio.get_running_loop().time()

    # Orders.

    def _take_in(self, fed: FedOrder) -> bool:
        """Whether the order is new here and can be handed out; the driver hears what is missing for it."""
        order = fed.order
        if order.instance in self._in_flight:
            return False
        kind = order.agent_key or ""
        if (kind and kind not in self._kinds) or not self._callables.knows(fed.callables or ()):
            self._post(order.instance)
            return False
        self._in_flight[order.instance] = kind
        template = self._kinds.use(kind) if kind else None
        if template is not None:
            self._housing.move_in(kind, isolation=template.isolation, replicas=template.replicas)
        return True

    def _hand_out(self, orders: Sequence[FedOrder]) -> None:
        dispatches = [Dispatch(fed.order, self._house_of(fed.order), fed.description) for fed in orders]
        for house in {dispatch.house for dispatch in dispatches}:
            if house != CALLABLES:
                self._grow(house, sum(dispatch.house == house for dispatch in dispatches))
        self._houses.start(dispatches)

    def _house_of(self, order: WireOrder) -> str:
        return CALLABLES if order.agent_key is None else self._housing.house_of(order.agent_key)

    def _grow(self, house: str, coming: int) -> None:
        """Start the processes that a house should have for what it does and what comes."""
        alive = self._houses.alive(house)
        in_flight = coming + sum(len(process.busy) for process in alive)
        must, may = self._housing.processes(house, in_flight=in_flight)
        for count in range(len(alive), may):
            if count >= must and self._houses.size >= self._max_own:
                break
            self._houses.settle(house)

    def _lose(self, orders: Sequence[FedOrder], error: BaseException) -> None:
        why = EnsembleError(f"The process of the run's handlers and guardrails died again and again: {error}")
        for order in orders:
            self._report_undone(order, why)

    def _report_undone(self, fed: FedOrder, error: EnsembleError | None) -> None:
        """Report a task that was not handed out."""
        self._done(fed.order.instance, fed.order.key)
        self._post(report_undone(fed.order, "cancelled" if error is None else "failed", error))

    def _done(self, instance: str, key: str) -> None:
        kind = self._in_flight.pop(instance)
        if kind:
            self._kinds.done(kind)
        self._callables.done(key)

    def _post(self, entry: WireReport | str) -> None:
        self._outbox.append(entry)
        self._news.set()

    def _forget(self, kind: str, _: FedKind) -> None:
        """Nobody needs a kind any more."""
        house = self._housing.move_out(kind)
        if house is not None:
            self._in_background(self._houses.leave(house, keep=False))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    # What its processes ask of a run.

    @property
    def frame(self) -> RunFrame:
        """What all its tasks share."""
        return self._package.frame

    @property
    def is_recorded(self) -> bool:
        """Whether a task whose process died can go on elsewhere."""
        return self._package.place is not None

    async def take(self, reports: Sequence[WireReport]) -> None:
        """Take results."""
        for report in reports:
            if report.status == UNKNOWN_KIND:
                self._houses.again(report)
        for report in self._houses.reported(each for each in reports if each.status != UNKNOWN_KIND):
            self._done(report.instance, report.key)
            self._post(report)

    def kinds_for(self, process: Process, orders: Sequence[WireOrder]) -> Mapping[str, bytes]:
        """Kinds of agents that these orders need and that process was not sent."""
        missing: dict[str, bytes] = {}
        for kind in {order.agent_key for order in orders} - {None}:
            template = self._kinds.get(kind or "")
            if template is not None and kind not in process.kinds:
                missing[kind or ""] = template.body
        for kind in {order.agent_key or "": None for order in orders}:
            process.kinds[kind] = None
            process.kinds.move_to_end(kind)
        while len(process.kinds) > MOST_KINDS:
            process.kinds.popitem(last=False)
        return missing

    def process_kind(self, house: str) -> Kind:
        """What a house's processes are for."""
        return "callables" if house == CALLABLES else "agent"

    async def bind(self, house: str, process: Process, callables: Any) -> None:
        """Make a new process of a house ready for the run."""
        if house == CALLABLES:
            callables = None
            await process.handle.hold_more.remote(self.run_id, self._callables.whole())
            if self._houses.is_closed:
                return  # it was released, and is not to have the run for ever
        place, frame = self._package.place, self._package.frame
        await process.handle.bind.remote(frame, {}, store=place, hub=self.hub, callables=callables)


def _page_of(outbox: Sequence[WireReport | str]) -> Sequence[WireReport | str]:
    """The first entries that make a page."""
    size = 0
    for count, entry in enumerate(outbox[:_PAGE_ENTRIES]):
        if size > _PAGE_BYTES:
            return outbox[:count]
        size += 0 if isinstance(entry, str) else len(entry.output or b"") + len(entry.failure or b"")
    return outbox[:_PAGE_ENTRIES]
