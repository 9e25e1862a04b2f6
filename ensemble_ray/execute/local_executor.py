"""Run orders in this process, as asyncio tasks under their agents' concurrency limits; and templates of agents.

An inline run has one executor for the whole run, and on Ray each agent actor has one for its tasks.
"""

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
        """Create an executor. If the runner has no peers, all agents of the run are here, and this becomes its peers.

        `deliver` receives results; all results of one turn of the event loop arrive together.
        """
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
        #: when each instance got its slot
        self._began_at: dict[str, float] = {}
        self._stopped: set[str] = set()
        self._finished: list[TaskResult] = []
        #: callers of `perform`, which receive the result of an instance instead of `deliver`
        self._callers: dict[str, list[asyncio.Future[TaskResult]]] = {}
        #: tasks that did not stop within the grace period and may still run
        self.left_behind = 0

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def activities(self) -> Iterator[tuple[str, float | None]]:
        """Yield the instances without a result, and when each started; None: it waits for a slot."""
        return ((instance, self._began_at.get(instance)) for instance in self._tasks)

    def start(self, orders: Sequence[TaskOrder]) -> None:
        loop = asyncio.get_running_loop()
        for order in orders:
            task = loop.create_task(self._run(order))
            self._tasks[order.instance] = (order, task)
            task.add_done_callback(partial(self._on_done, order))

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run one task and return its result; cancelling the caller stops the task.

        If the task runs already, because the caller's process was replaced, return the result of that execution.
        """
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
        """Cancel tasks. A task that does not stop within the grace period is reported as cancelled, too."""
        loop = asyncio.get_running_loop()
        for instance in instances:
            if instance in self._tasks:
                order, task = self._tasks[instance]
                self._stopped.add(instance)
                task.cancel()
                loop.call_later(self._grace_s, self._abandon, order, task)

    async def end(self) -> None:
        """Stop all tasks, and wait for them at most for the grace period."""
        tasks = [task for _, task in self._tasks.values()]
        self.stop(self.running)
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace_s)

    def drop(self, template: str) -> None:
        """Drop the slots of a template that has no tasks; the next task of the template makes new ones."""
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

    def _on_done(self, order: TaskOrder, task: asyncio.Task[None]) -> None:
        """Report tasks without a result of the runner: cancelled ones that had not started, and internal errors."""
        if task.cancelled():
            self._report(order, task, self._empty(order, "cancelled"))
        elif (error := task.exception()) is not None:
            self._report(order, task, self._empty(order, "failed", error))

    def _abandon(self, order: TaskOrder, task: asyncio.Task[None]) -> None:
        if (held := self._tasks.get(order.instance)) is not None and held[1] is task:
            self.left_behind += 1
            _log.warning("Task '%s' did not stop within %.0f s and is left behind", order.key, self._grace_s)
            self._report(order, task, self._empty(order, "cancelled"))

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
        self._finished.append(result)
        if len(self._finished) == 1:
            asyncio.get_running_loop().call_soon(self._deliver_finished)

    def _deliver_finished(self) -> None:
        finished, self._finished = self._finished, []
        if finished:
            self._deliver(finished)


# Templates: agents that differ only in data share one, so that only the data need travel.

#: Unused templates that a cache keeps (S-MR-142).
MOST_TEMPLATES = 64
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
#: Fields that agents of one template have equal; tools, model and runner must be the same objects.
_EQUAL_FIELDS = ("isolation", "replicas", "max_concurrency", "rate_limit", "runner_effect")
_PROCESS_FIELDS = ("num_cpus", "num_gpus", "resources", "labels")
_STANDARD_FIELDS = frozenset((*OVERRIDE_FIELDS, *_EQUAL_FIELDS, *_PROCESS_FIELDS, "tools", "llm", "runner"))

Value = TypeVar("Value")


class RefCountedCache(Generic[Value]):
    """Cache of all values in use, and of the unused values that were used last."""

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
        """Add a value unless the name is present. It stays at least until the next `trim` or `release`."""
        if name not in self._values:
            self._values[name] = value
            self._idle[name] = None

    def get(self, name: str) -> Value | None:
        return self._values.get(name)

    def use(self, name: str) -> Value | None:
        """Return the value, and keep it until `release`; None: not present."""
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
        """Evict the unused values beyond the limit, the least recently used first."""
        while len(self._idle) > self._most:
            name, _ = self._idle.popitem(last=False)
            value = self._values.pop(name)
            if self._on_drop is not None:
                self._on_drop(name, value)


class AgentTemplates:
    """Names of the templates of the agents that a run's factories make; only the most recently used ones are cached."""

    def __init__(self, most: int = MOST_TEMPLATES) -> None:
        self._most = most
        #: common features -> (name, template); features are ids of objects that the template keeps alive
        self._templates: OrderedDict[tuple[object, ...], tuple[str, Agent]] = OrderedDict()
        self._numbers = itertools.count(1)

    def name_of(self, agent: Agent) -> str:
        """Return the name of the agent's template; an evicted template gets a new name."""
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
    """Return the agent that differs from the template in that data; it shares the template's tools and model."""
    return template.rewritten(**overrides) if overrides else template


def requirements_of(agent: Agent) -> ResourceRequirements:
    return ResourceRequirements(
        num_cpus=agent.num_cpus,
        num_gpus=agent.num_gpus,
        resources=tuple(sorted(agent.resources.items())),
        labels=tuple(sorted(agent.labels.items())),
    )


def _features(agent: Agent) -> tuple[object, ...]:
    """Return the features that agents of one template have in common."""
    return (
        type(agent),
        id(agent.llm),
        id(agent.runner),
        tuple(id(entry) for entry in agent.tools),
        # An agent that does not set replicas may get more of them (S-MR-141).
        "replicas" in agent.model_fields_set,
        *(getattr(agent, name) for name in _EQUAL_FIELDS),
        requirements_of(agent),
        # Fields of user classes may contain any object.
        *(id(getattr(agent, name)) for name in type(agent).model_fields if name not in _STANDARD_FIELDS),
    )
