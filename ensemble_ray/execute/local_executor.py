"""Run orders as asyncio tasks under their agents' concurrency limits; and templates of agents."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, Literal, TypeVar

from ensemble_ray.definition.agent import Agent
from ensemble_ray.execute.orders import TaskFailure, TaskOrder, TaskResult
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import Slot
from ensemble_ray.plan.placement import ResourceRequirements
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.process.context import bounded_logger

_log = bounded_logger(__name__)


class LocalExecutor:
    """Runs orders of one run with one runner. Implements `Peers`."""

    def __init__(
        self,
        runner: TaskRunner,
        agents: Mapping[str, Agent],
        deliver: Callable[[Sequence[TaskResult]], None],
        *,
        grace_s: float,
    ) -> None:
        """A runner without peers gets this as its peers. `deliver` receives all results of one turn of the loop."""
        self._runner = runner
        if runner.peers is None:
            runner.peers = self
        self._deliver = deliver
        self._grace_s = grace_s
        self._slots = {
            key: asyncio.Semaphore(agent.max_concurrency)
            for key, agent in agents.items()
            if agent.max_concurrency is not None
        }
        self._tasks: dict[str, tuple[TaskOrder, asyncio.Task[None]]] = {}
        self._began_at: dict[str, float] = {}  # start of each instance in its slot
        self._stopped: set[str] = set()
        self._finished: list[TaskResult] = []
        self._callers: dict[str, list[asyncio.Future[TaskResult]]] = {}  # results go here, not to `deliver`
        self.left_behind = 0  # tasks that still run after the grace period

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def activities(self) -> Iterator[tuple[str, float | None]]:
        """Yield instances without a result, and their start; None: waits for a slot."""
        return ((instance, self._began_at.get(instance)) for instance in self._tasks)

    def start(self, orders: Sequence[TaskOrder]) -> None:
        def on_done(order: TaskOrder, task: asyncio.Task[None]) -> None:
            if task.cancelled():  # before it had started
                self._report(order, task, self._empty(order, "cancelled"))
            elif (error := task.exception()) is not None:  # an internal error
                self._report(order, task, self._empty(order, "failed", error))

        loop = asyncio.get_running_loop()
        for order in orders:
            task = loop.create_task(self._run(order))
            self._tasks[order.instance] = (order, task)
            task.add_done_callback(partial(on_done, order))

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run one task, or join its running execution; cancelling the caller stops it."""
        result: asyncio.Future[TaskResult] = asyncio.get_running_loop().create_future()
        self._callers.setdefault(order.instance, []).append(result)
        if order.instance not in self._tasks:
            self.start((order,))
        try:
            return await result
        except asyncio.CancelledError:
            self.stop((order.instance,))
            raise

    def stop(self, instances: Sequence[str]) -> None:
        """Cancel tasks. After the grace period, a task is reported as cancelled anyway."""

        def abandon(order: TaskOrder, task: asyncio.Task[None]) -> None:
            if (held := self._tasks.get(order.instance)) is not None and held[1] is task:
                self.left_behind += 1
                _log.warning("Task '%s' did not stop within %.0f s and is left behind", order.key, self._grace_s)
                self._report(order, task, self._empty(order, "cancelled"))

        loop = asyncio.get_running_loop()
        for instance in instances:
            if instance in self._tasks:
                order, task = self._tasks[instance]
                self._stopped.add(instance)
                task.cancel()
                loop.call_later(self._grace_s, abandon, order, task)

    async def end(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        self.stop(self.running)
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace_s)

    def drop(self, template: str) -> None:
        """Drop the slots of a template without tasks."""
        self._slots.pop(template, None)

    async def _run(self, order: TaskOrder) -> None:
        key, agent = order.agent_key or "", order.agent
        if agent is not None and agent.max_concurrency is not None and key not in self._slots:
            self._slots[key] = asyncio.Semaphore(agent.max_concurrency)  # the first task of its template
        slots = self._slots.get(key)
        slot = Slot(slots)
        if slots is not None:
            await slot.acquire()
        try:
            self._began_at[order.instance] = SystemClock.now()
            result = await self._runner.run(order, is_stopped=lambda: order.instance in self._stopped, slot=slot)
        finally:
            slot.release()
        self._report(order, asyncio.current_task(), result)

    def _empty(
        self, order: TaskOrder, status: Literal["cancelled", "failed"], error: BaseException | None = None
    ) -> TaskResult:
        failure = None if error is None else TaskFailure(error=error)
        return order.result(status, self._runner.ports.clock.now(), failure=failure)

    def _report(self, order: TaskOrder, task: asyncio.Task[None] | None, result: TaskResult) -> None:
        held = self._tasks.get(order.instance)
        if held is None or held[1] is not task:  # a stopped order may have been started again
            return
        del self._tasks[order.instance]
        self._began_at.pop(order.instance, None)
        self._stopped.discard(order.instance)
        if (callers := self._callers.pop(order.instance, None)) is not None:
            for caller in callers:
                if not caller.done():
                    caller.set_result(result)
            return

        def deliver_finished() -> None:
            finished, self._finished = self._finished, []
            if finished:
                self._deliver(finished)

        self._finished.append(result)
        if len(self._finished) == 1:
            asyncio.get_running_loop().call_soon(deliver_finished)


# Templates: agents that differ only in data share one, so only the data travel.

MOST_TEMPLATES = 64  # unused templates of a cache (S-MR-142)
#: Fields in which agents of one template may differ.
OVERRIDE_FIELDS = (
    "role",
    "goal",
    "background",
    "is_streaming",
    "verbose",
    "max_iterations",
    "response_format",
    "on_incomplete",
    "keep_reasoning",
    "allow_delegation",
)
#: Equal within a template; tools, model and runner are the same objects.
_EQUAL_FIELDS = ("isolation", "replicas", "max_concurrency", "rate_limit", "runner_effect")
_PROCESS_FIELDS = ("num_cpus", "num_gpus", "resources", "labels")
_STANDARD_FIELDS = frozenset((*OVERRIDE_FIELDS, *_EQUAL_FIELDS, *_PROCESS_FIELDS, "tools", "llm", "runner"))

Value = TypeVar("Value")


class RefCountedCache(Generic[Value]):
    """Caches all values in use, and the unused values that were used last."""

    def __init__(self, most: int = MOST_TEMPLATES, on_drop: Callable[[str, Value], None] | None = None) -> None:
        """Create an empty cache for `most` unused values; `on_drop` is called with every evicted entry."""
        self._most = most
        self._on_drop = on_drop
        self._values: dict[str, Value] = {}
        self._uses: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __len__(self) -> int:
        return len(self._values)

    def put(self, name: str, value: Value) -> None:
        """Add a missing value. It stays until the next `trim` or `release`."""
        if name not in self._values:
            self._values[name] = value
            self._idle[name] = None

    def get(self, name: str) -> Value | None:
        return self._values.get(name)

    def use(self, name: str) -> Value | None:
        """Return the value, and keep it until `release`."""
        if name not in self._values:
            return None
        self._idle.pop(name, None)
        self._uses[name] = self._uses.get(name, 0) + 1
        return self._values[name]

    def release(self, name: str) -> None:
        self._uses[name] -= 1
        if not self._uses[name]:
            del self._uses[name]
            self._idle[name] = None
            self.trim()

    def trim(self) -> None:
        """Evict the least recently used of the unused values over the limit."""
        while len(self._idle) > self._most:
            name, _ = self._idle.popitem(last=False)
            value = self._values.pop(name)
            if self._on_drop is not None:
                self._on_drop(name, value)


class AgentTemplates:
    """Names of the templates of agents from factories; the most recently used ones are cached."""

    def __init__(self, most: int = MOST_TEMPLATES) -> None:
        self._most = most
        #: common features -> (name, template); features are ids of objects that the template keeps alive
        self._templates: OrderedDict[tuple[object, ...], tuple[str, Agent]] = OrderedDict()
        self._numbers = itertools.count(1)

    def name_of(self, agent: Agent) -> str:
        """Return the name of the agent's template; an evicted one gets a new name."""
        features = _features(agent)
        if (known := self._templates.get(features)) is not None:
            self._templates.move_to_end(features)
            return known[0]
        name = f"kind-{next(self._numbers)}"
        self._templates[features] = (name, agent)
        if len(self._templates) > self._most:
            self._templates.popitem(last=False)
        return name


def overrides_of(agent: Agent, template: Agent) -> dict[str, object]:
    if agent is template:
        return {}
    return {name: value for name in OVERRIDE_FIELDS if (value := getattr(agent, name)) != getattr(template, name)}


def apply_overrides(template: Agent, overrides: Mapping[str, object]) -> Agent:
    """Return the agent with that data; it shares the template's tools and model."""
    return template.rewritten(**overrides) if overrides else template


def requirements_of(agent: Agent) -> ResourceRequirements:
    return ResourceRequirements(
        num_cpus=agent.num_cpus,
        num_gpus=agent.num_gpus,
        resources=tuple(sorted(agent.resources.items())),
        labels=tuple(sorted(agent.labels.items())),
    )


def _features(agent: Agent) -> tuple[object, ...]:
    """Return the common features of a template's agents."""
    return (
        type(agent),
        id(agent.llm),
        id(agent.runner),
        tuple(id(entry) for entry in agent.tools),
        # Agents without own replicas may get more of them (S-MR-141).
        "replicas" in agent.model_fields_set,
        *(getattr(agent, name) for name in _EQUAL_FIELDS),
        requirements_of(agent),
        *(id(getattr(agent, name)) for name in type(agent).model_fields if name not in _STANDARD_FIELDS),
    )
