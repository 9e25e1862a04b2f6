"""One run's share of the scheduler. It keeps no state about a reported task."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import ray.exceptions
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.actors.link import wire
from ensemble_ray.actors.link.packing import make_undone_result, pack, pack_result
from ensemble_ray.actors.link.reach import BackgroundTasks, BatchSender, last_line
from ensemble_ray.actors.scheduler.continuations import Continuations
from ensemble_ray.actors.scheduler.process_groups import CALLABLES, ProcessGroups
from ensemble_ray.actors.scheduler.processes import Lease, ProcessPool, ProcessType
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.execute.local_executor import MOST_TEMPLATES, RefCountedCache
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.plan.placement import NOTHING, ClusterNode, Placement, ResourceRequirements, room_for, show_nodes
from ensemble_ray.plan.plan import MANAGER_KEY
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.runs.ports import GRACE_S

Answer = TypeVar("Answer")
_NONE = wire.CallablesUpdate(bundles={}, tasks={})
_log = bounded_logger(__name__)
#: The predicate itself may be the cause of deaths.
_MOST_LOST = 3


class SessionLimits(Struct, frozen=True, kw_only=True):
    """The cluster's nodes, and the number of processes that a run may use on them."""

    max_own: int
    #: for agents that set none
    most_replicas: int
    nodes: tuple[ClusterNode, ...] = ()

    @property
    def spread_over(self) -> tuple[ClusterNode, ...]:
        """Empty if there is only one node."""
        return self.nodes if len(self.nodes) > 1 else ()


class ReportReceiver(Protocol):
    async def receive(self, reports: Sequence[wire.WireResult]) -> None:
        """Accept results. Each arrives once."""
        ...

    def return_order(self, instance: str) -> None:
        """Return an order that was not started because a template or callable is missing here."""
        ...


class RunSession:
    """The processes and orders of one run. It starts no process before `open` or the first order.

    `check` raises if the cluster cannot provide the requirements of an agent that is added later.
    """

    def __init__(
        self,
        opening: wire.SessionOpening,
        pool: ProcessPool,
        receiver: ReportReceiver,
        *,
        hub: Any,
        limits: SessionLimits,
        is_managed: bool = False,
        beside_callables: frozenset[str] = frozenset(),
        check: Callable[[Sequence[wire.AgentTemplate], SessionLimits], None] | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._opening = opening
        self._receiver = receiver
        self._hub = hub
        self._limits = limits
        self._check = check
        self._warn = warn or _log.warning
        self._is_managed = is_managed
        self._beside_callables = beside_callables
        is_recorded = opening.location is not None
        # A run without a record cannot resume when another run kills a shared process.
        may_share = is_recorded and bool(opening.program)
        self._groups = ProcessGroups(
            self,
            pool,
            hub=hub,
            is_recorded=is_recorded,
            nodes=limits.spread_over,
            program=opening.program,
            share_from=limits.max_own if may_share else None,
        )
        self._placement = Placement(max_own=limits.max_own, most_replicas=limits.most_replicas)
        self._templates: RefCountedCache[wire.AgentTemplate] = RefCountedCache(on_drop=self._on_drop)
        #: the processes of their groups are bound to them
        self._declared = frozenset(template.key for template in opening.templates)
        for template in opening.templates:
            self._templates.put(template.key, template)
            self._templates.use(template.key)
        placed = (each for each in opening.templates if each.key not in beside_callables)
        self._placement.place(template.placement for template in placed)
        self._callables = CallablesDelivery(
            opening.run_id, self._groups, opening.callables, ready=self._dispatch, lost=self._fail
        )
        self.continuations = Continuations(opening.run_id, self._groups, self.report)
        #: unreported tasks, and the templates of their agents; empty for a handler
        self._in_flight: dict[str, str] = {}
        self._background = BackgroundTasks()

    @property
    def run_id(self) -> str:
        return self._opening.run_id

    @property
    def context(self) -> RunContext:
        return self._opening.context

    def open(self) -> None:
        if self._opening.callables is not None:
            self._groups.host_callables()
        for group in self._placement.groups:
            self._grow(group, 0)

    def resize(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._groups.use_cluster(limits.spread_over, most=limits.max_own)
        self._placement.resize(max_own=limits.max_own, most_replicas=limits.most_replicas)
        if not self._groups.is_closed:
            for group in self._placement.groups:
                if self._groups.load(group):
                    self._grow(group, 0)

    # Orders.

    def submit(
        self,
        orders: Iterable[wire.WireOrder],
        *,
        callables: Mapping[str, wire.TaskCallables] | None = None,
        templates: Iterable[wire.AgentTemplate] = (),
        bundles: Mapping[str, bytes] | None = None,
    ) -> None:
        """An order that is already in flight has no effect."""
        for template in templates:
            self._templates.put(template.key, template)
        self._callables.put(bundles or {})
        own = callables or {}
        accepted = [order for order in orders if self._accept(order, own.get(order.instance))]
        self._callables.send((each, own[each.instance]) for each in accepted if each.instance in own)
        self.continuations.dispatch((order for order in accepted if order.instance not in own), self._dispatch)
        self._callables.trim()
        self._templates.trim()

    def continue_with(
        self, order: wire.WireOrder, list_following: Callable[[wire.WireOrder], Sequence[wire.WireOrder]]
    ) -> wire.WireOrder:
        """Return the order with the tasks that its process may start after it."""
        is_possible = order.agent_key is not None and self.continuations.may_begin(self.group_of(order))
        return self.continuations.begin(order, list_following(order)) if is_possible else order

    def stop(self, instances: Sequence[str]) -> None:
        """A process that does not stop its task in time is ended."""
        for instance in instances:
            waiting = self._callables.withdraw(instance)
            if waiting is not None:
                self._report_undone(waiting, None)
        self._groups.stop(instances)
        asyncio.get_running_loop().call_later(GRACE_S + 1.0, self._groups.end_stuck, tuple(instances))

    async def report(self, reports: Sequence[wire.WireResult]) -> None:
        """Accept reports of processes. Late reports are ignored."""
        for report in reports:
            if report.status == "unknown_template":
                self._groups.retry(report)
        reports = self.continuations.accept_reports(reports)
        fresh = self._groups.accept_reports(each for each in reports if each.status != "unknown_template")
        for report in fresh:
            self._release(report.instance, report.key)
        if fresh:
            await self._receiver.receive(fresh)

    @property
    def waiting(self) -> int:
        return self._callables.waiting

    @property
    def callables_host(self) -> Lease | None:
        return self._groups.callables

    async def ask_callables(self, ask: Callable[[Any], Awaitable[Answer]]) -> Answer:
        try:
            return await ask_host(self._groups, lambda host: ask(host.handle), most_lost=_MOST_LOST)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"the process of the run's callables died at each call: {last_line(error)}") from None

    def locate(self, agent_key: str, *, lost: str | None = None) -> list[tuple[str, Any]]:
        """Return names and handles of an agent's processes for another agent; empty if the run has ended."""
        return [] if self._groups.is_closed else self._groups.locate(self._home_of(agent_key), lost=lost)

    async def close(self, *, keep: wire.Keep | None) -> None:
        """After this call no process is started, whatever dies."""
        self.continuations.drop()
        await self._groups.close(keep=keep)

    def _accept(self, order: wire.WireOrder, callables: wire.TaskCallables | None) -> bool:
        """Whether the order is new and can be dispatched. An order with missing parts is returned to the receiver."""
        if order.instance in self._in_flight:
            return False
        key = order.agent_key or ""
        template = self._templates.get(key)
        if (key and template is None) or not self._callables.knows(callables):
            self._receiver.return_order(order.instance)
            return False
        self._in_flight[order.instance] = key
        if template is not None:
            self._templates.use(key)
            try:
                if self._check is not None and template.requirements and key not in self._placement:
                    self._check((template,), self._limits)  # agents placed before wait for lost nodes to return
            except ValidationError as error:
                self._report_undone(order, error)
                return False
            if key not in self._beside_callables:
                self._placement.place((template.placement,))
        return True

    def _dispatch(self, orders: Sequence[wire.WireOrder]) -> None:
        for group, count in Counter(map(self.group_of, orders)).items():
            if group != CALLABLES:
                self._grow(group, count)
        self._groups.start(orders)

    def _grow(self, group: str, coming: int) -> None:
        requirements = self._placement.requirements_of(group)
        missing = self._placement.missing(
            group,
            room=room_for(requirements, self._limits.nodes) if requirements else math.inf,
            alive=len(self._groups.alive(group)),
            in_flight=coming + self._groups.load(group),
            busy_s=self._groups.busy_s(group),
            in_run=self._groups.size,
            starting=self._groups.starting(group),
        )
        for _ in range(missing):
            self._groups.start_process(group)

    def _fail(self, orders: Sequence[wire.WireOrder], error: BaseException) -> None:
        why = EnsembleError(f"The process of the run's handlers and guardrails died at each attempt: {error}")
        for order in orders:
            self._report_undone(order, why)

    def _report_undone(self, order: wire.WireOrder, error: EnsembleError | None) -> None:
        self._release(order.instance, order.key)
        result = pack_result(make_undone_result(order, error, "cancelled" if error is None else "failed"))
        self._background.start(self._receiver.receive((result,)))

    def _release(self, instance: str, key: str) -> None:
        template = self._in_flight.pop(instance)
        if template:
            self._templates.release(template)
        self._callables.release(key)

    def _on_drop(self, key: str, _: wire.AgentTemplate) -> None:
        group = self._placement.release(key)
        if group is not None:
            self._background.start(self._groups.detach(group, keep=None))

    # The port `GroupOwner`.

    def group_of(self, order: wire.WireOrder) -> str:
        return self._home_of(order.agent_key)

    def is_beside_callables(self, agent_key: str | None) -> bool:
        return agent_key is None or agent_key in self._beside_callables

    def _home_of(self, agent_key: str | None) -> str:
        if agent_key is None or self.is_beside_callables(agent_key):
            return CALLABLES
        return self._placement.group_of(agent_key)

    def roles_of(self, group: str) -> Sequence[str]:
        keys = sorted(self._beside_callables) if group == CALLABLES else self._placement.members(group)
        found = (self._templates.get(key) for key in keys)
        return list(dict.fromkeys(each.role for each in found if each is not None))

    def process_type(self, group: str) -> ProcessType:
        if group == CALLABLES:
            return "callables"
        is_manager = self._is_managed and group == self._placement.group_of(MANAGER_KEY)
        return "manager" if is_manager else "agent"

    def requirements_of(self, group: str) -> ResourceRequirements:
        return NOTHING if group == CALLABLES else self._placement.requirements_of(group)

    def may_share(self, group: str) -> bool:
        return group == CALLABLES or not self._placement.is_isolated(group)

    def on_death(self, lease: Lease) -> None:
        self.continuations.on_death(lease)

    def on_ready(self, group: str) -> None:
        if not self._groups.is_closed and group in self._placement.groups:
            self._grow(group, 0)

    def on_wait(self, group: str, waited_s: float) -> None:
        if group not in self._placement.groups:
            return  # no longer needed
        found = (self._templates.get(key) for key in self._placement.members(group))
        who = ", ".join(dict.fromkeys(f"Agent '{each.role}'" for each in found if each is not None))
        self._warn(
            f"{who}: its process waits for a node that has {self._placement.requirements_of(group)} free, {waited_s:.0f} s "
            f"so far. {show_nodes(self._limits.nodes)}, in use or not"
        )

    def templates_for(self, lease: Lease, orders: Sequence[wire.WireOrder]) -> Mapping[str, bytes]:
        missing: dict[str, bytes] = {}
        for key in {order.agent_key: None for order in orders if order.agent_key not in self._declared}:
            template = None if key is None or key in lease.templates else self._templates.get(key)
            if template is not None:
                missing[template.key] = template.body
            lease.templates[key or ""] = None
            lease.templates.move_to_end(key or "")
        while len(lease.templates) > MOST_TEMPLATES:
            lease.templates.popitem(last=False)
        return missing

    async def bind(self, group: str, lease: Lease, callables: Any) -> None:
        if group == CALLABLES:
            members, callables = self._beside_callables, None
            await lease.handle.hold.remote(pack((self.run_id, self._callables.whole())))
            if self._groups.is_closed:
                return  # released meanwhile: it must not keep the run
        else:
            members = self._declared.intersection(self._placement.members(group))
        templates = {key: found.body for key in members if (found := self._templates.get(key)) is not None}
        body = pack(wire.Binding(self.context, templates, self._opening.location))
        await lease.handle.bind.remote(body, hub=self._hub, callables=callables)


class CallablesDelivery:
    """The callables of one run. Only one message to their host is in flight, so no message overtakes another."""

    def __init__(
        self,
        run_id: str,
        groups: ProcessGroups,
        declared: wire.CallablesUpdate | None,
        *,
        ready: Callable[[Sequence[wire.WireOrder]], None],
        lost: Callable[[Sequence[wire.WireOrder], BaseException], None],
    ) -> None:
        self._run_id = run_id
        self._groups = groups
        self._declared = declared or _NONE
        self._ready = ready
        self._lost = lost
        self._bundles: RefCountedCache[bytes] = RefCountedCache(on_drop=self._on_drop)
        self._tasks: dict[str, wire.TaskCallables] = {}
        self._sender = BatchSender(self._deliver)
        self._done_tasks: list[str] = []
        self._done_bundles: list[str] = []
        self._sent: set[str] = set()
        self._host: Lease | None = None

    def put(self, bundles: Mapping[str, bytes]) -> None:
        """Store callables at least until the next `trim`."""
        for name, body in bundles.items():
            self._bundles.put(name, body)

    def trim(self) -> None:
        self._bundles.trim()

    def knows(self, callables: wire.TaskCallables | None) -> bool:
        return callables is None or all(name in self._bundles for name in callables.bundles)

    def send(self, orders: Iterable[tuple[wire.WireOrder, wire.TaskCallables]]) -> None:
        for order, callables in orders:
            self._tasks[order.key] = callables
            for name in callables.bundles:
                self._bundles.use(name)
            self._sender.add(order)

    @property
    def waiting(self) -> int:
        return len(self._sender.waiting)

    def withdraw(self, instance: str) -> wire.WireOrder | None:
        waiting = self._sender.waiting
        position = next((n for n, order in enumerate(waiting) if order.instance == instance), None)
        return None if position is None else waiting.pop(position)

    def release(self, key: str) -> None:
        callables = self._tasks.pop(key, None)
        if callables is not None:
            self._done_tasks.append(key)
            for name in callables.bundles:
                self._bundles.release(name)

    def whole(self) -> wire.CallablesUpdate:
        """Return the data that a new host needs."""
        tasks = self._tasks
        return replace(
            self._declared,
            bundles={**self._declared.bundles, **self._load_bundles(_bundles_of(tasks))},
            tasks={**self._declared.tasks, **tasks},
        )

    def _load_bundles(self, names: Iterable[str]) -> dict[str, bytes]:
        return {name: self._bundles.get(name) or b"" for name in names}

    def _on_drop(self, name: str, _: bytes) -> None:
        if name in self._sent:
            self._sent.discard(name)
            self._done_bundles.append(name)

    async def _deliver(self, orders: Sequence[wire.WireOrder]) -> None:
        try:
            await ask_host(
                self._groups, lambda host: host.handle.hold.remote(pack((self._run_id, self._update(host, orders))))
            )
        except ray.exceptions.RayError as error:
            self._lost(orders, error)
        else:
            self._ready(orders)

    def _update(self, host: Lease, orders: Sequence[wire.WireOrder]) -> wire.CallablesUpdate:
        if host is not self._host:
            self._host = host
            self._done_tasks.clear()
            self._done_bundles.clear()
            self._sent = _bundles_of(self._tasks)
            return self.whole()
        tasks = {order.key: self._tasks[order.key] for order in orders if order.key in self._tasks}
        names = _bundles_of(tasks) - self._sent
        self._sent |= names
        done_tasks, self._done_tasks = self._done_tasks, []
        done_bundles, self._done_bundles = self._done_bundles, []
        return wire.CallablesUpdate(
            bundles=self._load_bundles(names), tasks=tasks, done_tasks=done_tasks, done_bundles=done_bundles
        )


def _bundles_of(tasks: Mapping[str, wire.TaskCallables]) -> set[str]:
    return {name for callables in tasks.values() for name in callables.bundles}


async def ask_host(
    groups: ProcessGroups, ask: Callable[[Lease], Awaitable[Answer]], *, most_lost: int | None = None
) -> Answer:
    """Call the process of the run's callables. A process that dies is replaced and called again."""
    for lost in itertools.count(1):
        host = groups.host_callables()
        try:
            return await ask(host)
        except ray.exceptions.RayError as error:
            groups.mark_lost(host, error)
            if lost == most_lost or groups.callables is host:  # it was replaced too often
                raise
    raise AssertionError("unreachable")
