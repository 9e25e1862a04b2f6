"""The executor of one process: tasks run as asyncio tasks under their agent's own limit.

Used by the inline runtime for a whole run, and by each agent actor for the tasks it was given. Results are handed on
in batches: all that finish in one turn of the loop go together.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from ensemble_ray.definition.agent import Agent
from ensemble_ray.execute.orders import TaskFailure, TaskResult
from ensemble_ray.execute.scope import Slot
from ensemble_ray.plan.placement import ResourceRequirements
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import SystemClock

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskOrder
    from ensemble_ray.execute.runner import TaskRunner


_log = bounded_logger(__name__)


class LocalExecutor:
    """Runs orders of one run with one runner."""

    def __init__(
        self,
        runner: TaskRunner,
        agents: Mapping[str, Agent],
        deliver: Callable[[Sequence[TaskResult]], None],
        *,
        grace_s: float,
    ) -> None:
        self._runner = runner
        if runner.peers is None:
            runner.peers = self  # all agents of the run live here
        self._deliver = deliver
        self._grace_s = grace_s
        self._slots = {
            key: asyncio.Semaphore(agent.max_concurrency)
            for key, agent in agents.items()
            if agent.max_concurrency is not None
        }
        self._tasks: dict[str, tuple[TaskOrder, asyncio.Task[None]]] = {}
        #: when they got a slot and began
        self._began_at: dict[str, float] = {}
        self._stopped: set[str] = set()
        self._finished: list[TaskResult] = []
        #: who waits for the result of an instance, in place of its delivery
        self._asked: dict[str, list[asyncio.Future[TaskResult]]] = {}
        #: tasks that did not let go when cancelled and may still be at work
        self.left_behind = 0

    @property
    def running(self) -> tuple[str, ...]:
        """Instances that have not been reported."""
        return tuple(self._tasks)

    def activities(self) -> Iterator[tuple[str, float | None]]:
        """Yield the instances that have not been reported, with when each began; None: it waits for a slot."""
        return ((instance, self._began_at.get(instance)) for instance in self._tasks)

    def start(self, orders: Sequence[TaskOrder]) -> None:
        """Run these; never waits."""
        loop = asyncio.get_running_loop()
        for order in orders:
            task = loop.create_task(self._run(order))
            self._tasks[order.instance] = (order, task)
            task.add_done_callback(partial(self._on_end, order))

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run one task and give its result. Fulfils `Peers`.

        A caller that is cancelled stops it. One that asks for what is at work here already, since its own process was
        replaced meanwhile, gets the result of that: nothing is begun twice.
        """
        asked: asyncio.Future[TaskResult] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(order.instance, []).append(asked)
        if order.instance not in self._tasks:
            self.start((order,))
        try:
            return await asked
        except asyncio.CancelledError:
            self.stop((order.instance,))
            raise

    def stop(self, instances: Sequence[str]) -> None:
        """Cancel these; one that does not let go within the grace is reported cancelled all the same."""
        loop = asyncio.get_running_loop()
        for instance in instances:
            if instance in self._tasks:
                order, task = self._tasks[instance]
                self._stopped.add(instance)
                task.cancel()
                loop.call_later(self._grace_s, self._abandon, order, task)

    async def end(self) -> None:
        """Stop what still runs; return when all of it has let go, or is left behind."""
        tasks = [task for _, task in self._tasks.values()]
        self.stop(self.running)
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace_s)

    def forget(self, template: str) -> None:
        """No task of that kind of agents is here, and none is awaited: its slots are made anew when one comes."""
        self._slots.pop(template, None)

    async def _run(self, order: TaskOrder) -> None:
        async with Slot(self._slots_of(order)) as slot:
            self._began_at[order.instance] = SystemClock.now()
            result = await self._runner.run(order, is_stopped=lambda: order.instance in self._stopped, slot=slot)
        self._report(order, asyncio.current_task(), result)

    def _slots_of(self, order: TaskOrder) -> asyncio.Semaphore | None:
        """Return the slots that the task's agent has; those of a kind of agents come with the first task of it."""
        key, agent = order.agent_key or "", order.agent
        if agent is not None and agent.max_concurrency is not None and key not in self._slots:
            self._slots[key] = asyncio.Semaphore(agent.max_concurrency)
        return self._slots.get(key)

    def _on_end(self, order: TaskOrder, task: asyncio.Task[None]) -> None:
        """Report what the runner could not: a task cancelled before it began or in its slot's queue, a defect of ours."""
        if task.cancelled():
            self._report(order, task, self._empty(order, "cancelled"))
        elif (error := task.exception()) is not None:
            self._report(order, task, self._empty(order, "failed", error))

    def _abandon(self, order: TaskOrder, task: asyncio.Task[None]) -> None:
        if self._is_current(order, task):
            self.left_behind += 1
            _log.warning("Task '%s' did not stop within %.0f s and is left behind", order.key, self._grace_s)
            self._report(order, task, self._empty(order, "cancelled"))

    def _is_current(self, order: TaskOrder, task: asyncio.Task[None] | None) -> bool:
        """Whether that is who is at work on it now; what was stopped may have been asked for again since."""
        held = self._tasks.get(order.instance)
        return held is not None and held[1] is task

    def _empty(
        self, order: TaskOrder, status: Literal["cancelled", "failed"], error: BaseException | None = None
    ) -> TaskResult:
        now = self._runner.ports.clock.now()
        return TaskResult(
            key=order.key,
            instance=order.instance,
            epoch=order.epoch,
            status=status,
            at=now,
            failure=None if error is None else TaskFailure(error=error),
        )

    def _report(self, order: TaskOrder, task: asyncio.Task[None] | None, result: TaskResult) -> None:
        if not self._is_current(order, task):
            return
        del self._tasks[order.instance]
        self._began_at.pop(order.instance, None)
        self._stopped.discard(order.instance)
        asked = self._asked.pop(order.instance, None)
        if asked is not None:
            for waiting in asked:
                if not waiting.done():
                    waiting.set_result(result)
            return
        self._finished.append(result)
        if len(self._finished) == 1:
            asyncio.get_running_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        finished, self._finished = self._finished, []
        if finished:
            self._deliver(finished)


#: Kinds that are kept beside those in use (S-MR-142).
MOST_TEMPLATES = 64
#: What may differ between agents of one kind: data, and never an object.
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
#: What agents of one kind have equal; tools, model and runner are compared as objects.
_EQUAL_FIELDS = ("isolation", "replicas", "max_concurrency", "rate_limit", "runner_effect")
_PROCESS_FIELDS = ("num_cpus", "num_gpus", "resources", "labels")
_STANDARD_FIELDS = frozenset((*OVERRIDE_FIELDS, *_EQUAL_FIELDS, *_PROCESS_FIELDS, "tools", "llm", "runner"))

Kept = TypeVar("Kept")


class RefCountedCache(Generic[Kept]):
    """Things by name: all that are in use, and of the others those that were used last."""

    def __init__(self, most: int = MOST_TEMPLATES, on_drop: Callable[[str, Kept], None] | None = None) -> None:
        """Make an empty one.

        Args:
            most: How many things that are not in use are kept.
            on_drop: Told of each thing that is kept no longer.
        """
        self._most = most
        self._on_drop = on_drop
        self._things: dict[str, Kept] = {}
        self._uses: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._things

    def __len__(self) -> int:
        return len(self._things)

    def put(self, name: str, thing: Kept) -> None:
        """Keep a thing at least until the next `trim` or `release`; one of that name that is here already stays instead."""
        if name not in self._things:
            self._things[name] = thing
            self._idle[name] = None

    def get(self, name: str) -> Kept | None:
        """Return the thing; None when it is not here."""
        return self._things.get(name)

    def use(self, name: str) -> Kept | None:
        """Return the thing, in use once more until `release`; None when it is not here."""
        if name not in self._things:
            return None
        self._idle.pop(name, None)
        self._uses[name] = self._uses.get(name, 0) + 1
        return self._things[name]

    def release(self, name: str) -> None:
        """One use of it is over."""
        left = self._uses[name] - 1
        if left:
            self._uses[name] = left
        else:
            del self._uses[name]
            self._idle[name] = None
            self.trim()

    def trim(self) -> None:
        """Drop what is neither in use nor among those that were used last."""
        while len(self._idle) > self._most:
            name, _ = self._idle.popitem(last=False)
            thing = self._things.pop(name)
            if self._on_drop is not None:
                self._on_drop(name, thing)


class AgentTemplates:
    """The kinds of the agents that a run's factories make; those that were used last are known again."""

    def __init__(self, most: int = MOST_TEMPLATES) -> None:
        """Make one; `most` kinds are remembered."""
        self._most = most
        #: what agents of a kind have in common -> its name; the template keeps alive what is compared by identity
        self._names: OrderedDict[tuple[object, ...], str] = OrderedDict()
        self._templates: dict[str, Agent] = {}
        self._numbers = itertools.count(1)

    def name_of(self, agent: Agent) -> str:
        """Name of the agent's kind; a kind that was forgotten and comes again has a new one."""
        features = _features(agent)
        name = self._names.get(features)
        if name is not None:
            self._names.move_to_end(features)
            return name
        name = self._names[features] = f"kind-{next(self._numbers)}"
        self._templates[name] = agent
        if len(self._names) > self._most:
            _, forgotten = self._names.popitem(last=False)
            del self._templates[forgotten]
        return name

    def template(self, name: str) -> Agent:
        """Return the agent that the others of its kind are told apart from.

        Raises:
            KeyError: the kind has been forgotten.
        """
        return self._templates[name]

    def overrides(self, agent: Agent, name: str) -> dict[str, object]:
        """Return the data in which an agent differs from its kind's template.

        Raises:
            KeyError: the kind has been forgotten.
        """
        return overrides_of(agent, self._templates[name])


def overrides_of(agent: Agent, template: Agent) -> dict[str, object]:
    """Return the data in which an agent differs from another of its kind."""
    if agent is template:
        return {}
    return {name: value for name in OVERRIDE_FIELDS if (value := getattr(agent, name)) != getattr(template, name)}


def apply_overrides(template: Agent, overrides: Mapping[str, object]) -> Agent:
    """Return the agent that differs from the template in that data; tools and model are the template's own objects."""
    return template.rewritten(**overrides) if overrides else template


def requirements_of(agent: Agent) -> ResourceRequirements:
    """Return what each process of an agent asks of its node."""
    return ResourceRequirements(
        num_cpus=agent.num_cpus,
        num_gpus=agent.num_gpus,
        resources=tuple(sorted(agent.resources.items())),
        labels=tuple(sorted(agent.labels.items())),
    )


def _features(agent: Agent) -> tuple[object, ...]:
    """Return what agents of one kind have in common."""
    return (
        type(agent),
        id(agent.llm),
        id(agent.runner),
        tuple(id(entry) for entry in agent.tools),
        # Who says nothing of replicas may be given more of them (S-MR-141).
        "replicas" in agent.model_fields_set,
        *(getattr(agent, name) for name in _EQUAL_FIELDS),
        requirements_of(agent),
        # Fields of the user's own classes may hold anything.
        *(id(getattr(agent, name)) for name in type(agent).model_fields if name not in _STANDARD_FIELDS),
    )
