"""Runs the tasks of an actor, and the ports through which they reach the scheduler and the driver."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
import ray.exceptions
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.actors.link.events import note_lost_events
from ensemble_ray.actors.link.packing import make_undone_result, pack_result, unpack, unpack_order
from ensemble_ray.actors.link.reach import BackgroundTasks, BatchSender, last_line, patiently, reach
from ensemble_ray.actors.link.wire import WireOrder, WireResult
from ensemble_ray.definition.agent import Agent
from ensemble_ray.errors import IllegalStateError, ValidationError, message_of
from ensemble_ray.execute.local_executor import LocalExecutor, RefCountedCache, apply_overrides
from ensemble_ray.execute.orders import Continuation, OutputOf, Peers, RunContext, TaskOrder, TaskResult
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import Callables, RunnerPorts, RunReflections, Spending
from ensemble_ray.ports import EventSink, Journal, RunMemory, Services, StoredAnswers, ToolMetrics
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.process.config import dumps
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.runs.ports import GRACE_S

T = TypeVar("T")

_log = bounded_logger(__name__)
_NO_TEMPLATES: Mapping[str, bytes] = {}
#: A lost host of callables may take so long to be replaced, s.
_MOVE_S = 30.0
#: A report waits so long for others if its process continues by itself, s; and how many wait at most.
_GATHER_S = 0.02
_MOST_UNREPORTED = 16
#: The callable itself may be the cause of deaths.
_MOST_LOST = 3


class TemplateUnknownError(Exception):
    """The template of a task's agent is not stored here."""


class TaskHost:
    """Runs tasks of any number of runs. `report` returns when the reports have arrived."""

    def __init__(self, report: Callable[[str, Sequence[WireResult]], Awaitable[None]]) -> None:
        self._report = report
        self._runs: dict[str, _HostedRun] = {}
        self._background = BackgroundTasks()

    def host(
        self,
        context: RunContext,
        declared: Mapping[str, bytes],
        *,
        journal: Journal,
        sink: EventSink,
        callables: Callables,
        services: Services,
        tool_metrics: ToolMetrics,
        spending: Spending | None = None,
        memory: RunMemory | None = None,
        reflections: RunReflections | None = None,
        answers: StoredAnswers | None = None,
        peers: Peers | None = None,
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        ports = RunnerPorts(
            clock=SystemClock(),
            journal=journal,
            events=sink,
            callables=callables,
            services=services,
            tool_metrics=tool_metrics,
            spending=spending,
            memory=memory,
            reflections=reflections,
            answers=answers,
        )
        run_id, runner = context.run_id, TaskRunner(context, ports, {}, peers)
        executor = LocalExecutor(runner, {}, partial(self._deliver, run_id), grace_s=GRACE_S)
        templates: RefCountedCache[Agent] = RefCountedCache(on_drop=lambda key, _: executor.drop(key))

        async def send(reports: Sequence[WireResult]) -> None:
            # Events arrive before the reports that they belong to, so that the start of a dependent task cannot overtake them
            # (S-PAR-41).
            await flush()
            await self._report(run_id, reports)

        self._runs[run_id] = _HostedRun(
            runner=runner,
            executor=executor,
            journal=journal,
            flush=flush,
            declared=declared,
            templates=templates,
            outbox=BatchSender(send),
        )

    def accept(self, run_id: str, orders: Sequence[WireOrder], templates: Mapping[str, bytes] = _NO_TEMPLATES) -> None:
        """A task that cannot be loaded here is reported as failed."""
        hosted, loaded = self._runs[run_id], list[TaskOrder]()
        for order in orders:
            if order.continuation is not None:
                self._background.start(self._run_in_turn(run_id, order, order.continuation, templates))
                continue
            try:
                loaded.append(hosted.load(order, templates))
            except TemplateUnknownError:
                hosted.outbox.add(_unknown_template(order))
            except Exception as error:  # noqa: BLE001  the task must be reported, whatever loading raised
                self._deliver(run_id, [_loading_failure(order, error)])
        hosted.templates.trim()
        hosted.executor.start(loaded)

    async def _run_in_turn(
        self, run_id: str, first: WireOrder, following: Continuation[WireOrder], templates: Mapping[str, bytes]
    ) -> None:
        """Run tasks one after the other and report each, until one does not complete or the rest is revoked.

        A process that cannot reach the scheduler starts few tasks by itself.
        """
        hosted = self._runs[run_id]
        outputs: dict[str, bytes] = {}
        for order in (first, *following.orders):
            if order is not first:
                if hosted.revoked >= following.number or self._runs.get(run_id) is not hosted:
                    return
                context = [outputs[each.instance] if isinstance(each, OutputOf) else each for each in order.context]
                order = replace(order, context=context)  # noqa: PLW2901  the same order
            hosted.in_turn.add(order.instance)
            report = await self._run_order(hosted, order, templates)
            goes_on = report.status == "completed" and report.output is not None and order is not following.orders[-1]
            if len(hosted.outbox.waiting) >= _MOST_UNREPORTED:
                await hosted.outbox.flush()
            hosted.outbox.add(report, within_s=_GATHER_S if goes_on else 0.0)
            hosted.in_turn.remove(order.instance)
            if not goes_on or report.output is None:
                return
            outputs[order.instance] = report.output

    async def perform(
        self, run_id: str, order: WireOrder, templates: Mapping[str, bytes] = _NO_TEMPLATES
    ) -> WireResult:
        """Return the report of a task, which may already run here for an earlier caller, instead of sending it."""
        hosted = self._runs[run_id]
        report = await self._run_order(hosted, order, templates)
        if report.status != "unknown_template":
            await hosted.flush()
        return report

    async def _run_order(self, hosted: _HostedRun, order: WireOrder, templates: Mapping[str, bytes]) -> WireResult:
        try:
            loaded = hosted.load(order, templates)
        except TemplateUnknownError:
            return _unknown_template(order)
        except Exception as error:  # noqa: BLE001  the task must be reported, whatever loading raised
            return pack_result(_loading_failure(order, error))
        try:
            return pack_result(await hosted.executor.perform(loaded))
        finally:
            hosted.release(order.instance)

    async def revoke(self, run_id: str, number: int) -> Sequence[str]:
        """Start no more tasks of continuations up to this number. Return the running ones; ended ones are reported."""
        hosted = self._runs.get(run_id)
        if hosted is None:
            return ()
        hosted.revoked = max(hosted.revoked, number)
        running = list(hosted.in_turn)
        await hosted.outbox.flush()
        return running

    async def call(self, run_id: str, function: Callable[[], Awaitable[T]]) -> T:
        """Call user code of a run outside its tasks, with the run's context."""
        hosted = self._runs.get(run_id)
        if hosted is None:
            raise IllegalStateError(f"Run {run_id} has ended")
        return await hosted.runner.call(function)

    def holds(self, run_id: str, instance: str) -> bool:
        return run_id in self._runs and instance in self._runs[run_id].executor.running

    def activities(self) -> Iterator[tuple[float | None, str, str]]:
        """Yield start time, run and instance of unreported tasks; the time is None while a task waits for a slot."""
        for run_id, hosted in self._runs.items():
            for instance, began_at in hosted.executor.activities():
                yield began_at, run_id, instance

    def stop(self, run_id: str, instances: Sequence[str]) -> None:
        if run_id in self._runs:
            self._runs[run_id].executor.stop(instances)

    async def release(self, run_id: str) -> bool:
        """Stop running tasks, for which no caller waits. Return whether none of the run's work is left in this process."""
        hosted = self._runs.pop(run_id, None)
        if hosted is None:
            return True
        await hosted.executor.end()
        await hosted.runner.current_run.close_deps()
        await hosted.journal.close()
        return hosted.executor.left_behind == 0

    def _deliver(self, run_id: str, results: Sequence[TaskResult]) -> None:
        hosted = self._runs.get(run_id)
        if hosted is None:
            return
        for result in results:
            hosted.release(result.instance)
        hosted.outbox.add(*map(pack_result, results))


class _HostedRun(Struct, kw_only=True):
    runner: TaskRunner
    executor: LocalExecutor
    journal: Journal
    flush: Callable[[], Awaitable[None]]
    #: pickled agents of the whole run; one that cannot be loaded fails only its own tasks
    declared: Mapping[str, bytes]
    templates: RefCountedCache[Agent]
    outbox: BatchSender[WireResult]
    revoked: int = 0
    #: unreported tasks of continuations
    in_turn: set[str] = msgspec.field(default_factory=set[str])
    template_of: dict[str, str] = msgspec.field(default_factory=dict[str, str])

    def load(self, order: WireOrder, templates: Mapping[str, bytes]) -> TaskOrder:
        """Raise `TemplateUnknownError` without its agent's template."""
        key = order.agent_key
        if key is None:
            return unpack_order(order)
        body = templates.get(key) or self.declared.get(key)
        if body is not None and key not in self.templates:
            self.templates.put(key, unpack(body, Agent))
            if key in self.declared:
                self.templates.use(key)
        agent = self.templates.get(key)
        if agent is None:
            raise TemplateUnknownError(key)
        if order.agent is not None:
            overrides = cast("Mapping[str, object]", pickle.loads(order.agent))  # noqa: S301  bytes of our own driver
            agent = apply_overrides(agent, overrides)
        loaded = unpack_order(order, agent)
        if order.instance not in self.template_of:
            self.templates.use(key)
            self.template_of[order.instance] = key
        return loaded

    def release(self, instance: str) -> None:
        key = self.template_of.pop(instance, None)
        if key is not None:
            self.templates.release(key)


def _unknown_template(order: WireOrder) -> WireResult:
    return pack_result(make_undone_result(order, None, "unknown_template"))


def _loading_failure(order: WireOrder, error: Exception) -> TaskResult:
    text = (
        f"Task '{order.key}' cannot be loaded in a worker process: {message_of(error)}. "
        "Install the module it comes from on every node, or use runtime='inline'"
    )
    refusal = ValidationError(text)
    refusal.__cause__ = error
    return make_undone_result(order, refusal)


async def send_reports(scheduler: Any, source: str, run_id: str, reports: Sequence[WireResult]) -> None:
    """Never give up: a run whose report is lost never ends, and this process ends with its scheduler."""
    await reach(lambda: scheduler.report.remote(run_id, source, list(reports)), patiently())


class RemoteDriverServices:
    """Implements `DriverServices` in other processes. Notifications arrive in order (S-MET-35)."""

    def __init__(self, hub: Any, run_id: str) -> None:
        self._hub = hub
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._sender: BatchSender[tuple[str, Mapping[str, object]]] = BatchSender(
            lambda batch: note_lost_events(hub.notify.remote(run_id, batch), run_id)
        )

    async def ask(self, name: str, payload: Mapping[str, object]) -> object:
        try:
            body = await self._hub.ask.remote(self._run_id, name, dict(payload))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, IllegalStateError):
                raise cause from None
            text = f"Run {self._run_id}: the event hub cannot be reached, so the driver cannot answer"
            raise IllegalStateError(f"{text}: {last_line(error)}") from None
        answer = pickle.loads(body)  # noqa: S301  our own driver's bytes
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def notify(self, name: str, payload: Mapping[str, object]) -> None:
        """Thread-safe."""
        self._loop.call_soon_threadsafe(self._sender.add, (name, dict(payload)))

    async def flush(self) -> None:
        await asyncio.sleep(0)  # notifications of other threads are added in the loop's next turn
        await self._sender.flush()


class ReportedToolMetrics:
    """Sends counts to the driver's object (S-CONV-33)."""

    def __init__(self, services: RemoteDriverServices) -> None:
        self._services = services

    def increment_success(self, tool_name: str, agent_role: str) -> None:
        self._send("increment_success", tool_name, agent_role)

    def increment_failure(self, tool_name: str, agent_role: str) -> None:
        self._send("increment_failure", tool_name, agent_role)

    def increment_error(self, tool_name: str, agent_role: str) -> None:
        self._send("increment_error", tool_name, agent_role)

    def record_duration(self, tool_name: str, agent_role: str, duration_s: float) -> None:
        self._send("record_duration", tool_name, agent_role, duration_s)

    def increment_counter(self, metric: str, tool_name: str, tags: Mapping[str, str] | None = None) -> None:
        self._send("increment_counter", metric, tool_name, tags)

    def record_value(self, metric: str, tool_name: str, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._send("record_value", metric, tool_name, value, tags)

    def _send(self, method: str, *arguments: object) -> None:
        self._services.notify("tool_metrics", {"method": method, "arguments": arguments})


class RemoteCallables:
    """Calls the run's callables in their host. Without a host, `evaluate` waits until one is started."""

    def __init__(self, host: Any, run_id: str) -> None:
        self._host: Any = host
        self._run_id = run_id
        self._moved = asyncio.Event()

    def move(self, host: Any) -> None:
        """Calls that the lost host did not answer are repeated there."""
        self._host = host
        self._moved.set()
        self._moved = asyncio.Event()

    async def evaluate(self, path: str, argument: object) -> object:
        asked = dumps(argument)
        lost = ""
        if self._host is None:
            await self._until_moved(self._moved, "it has not been started")
        for count in range(_MOST_LOST):
            host: Any = self._host
            moved = self._moved
            try:
                reply: bytes = await host.evaluate.remote(self._run_id, path, asked)
            except ray.exceptions.RayError as error:  # S-CONV-32: no class of Ray, not even as a cause
                lost = last_line(error)
            else:
                value, raised = pickle.loads(reply)  # noqa: S301  bytes of our own cluster
                if raised is not None:
                    raise raised
                return value
            if count + 1 < _MOST_LOST:
                await self._until_moved(moved, lost)
        raise RuntimeError(f"the process of the run's callables died {_MOST_LOST} times when it was called: {lost}")

    @staticmethod
    async def _until_moved(moved: asyncio.Event, why: str) -> None:
        try:
            await asyncio.wait_for(moved.wait(), _MOVE_S)
        except TimeoutError:
            raise RuntimeError(f"the process of the run's callables cannot be reached: {why}") from None
