"""The executor of one process: tasks run as asyncio tasks under their agent's own limit. Package: execute.

Used by the inline runtime for a whole run, and by each agent actor for the tasks it was given. Results are handed on
in batches: all that finish in one turn of the loop go together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from ensemble_ray.execute.orders import TaskFailure, TaskResult
from ensemble_ray.execute.slots import Slot
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.clock import SystemClock

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.execute.orders import TaskOrder
    from ensemble_ray.execute.runner import TaskRunner

__all__ = ["LocalExecutor"]

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
