"""InlineSession: does tasks in this process that are made while their run goes on.

In: orders as they are made. Out: their results. What an order brings with it (its agent, its handler, its guardrails) is
held from its start to its result and no longer, since a run may have a hundred thousand of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts, spending_here
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.runs.ownership import GRACE_S

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task
    from ensemble_ray.events import Event
    from ensemble_ray.execute.orders import TaskOrder, TaskResult
    from ensemble_ray.ports import Journal, Services
    from ensemble_ray.runs.ports import Deliver, RunRequest


class InlineSession:
    """Does a run's tasks on the library's loop. Fulfils `ExecutorSession`."""

    def __init__(self, request: RunRequest, services: Services, *, journal: Journal, deliver: Deliver) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: tasks at work whose handlers or guardrails are asked
        self._called: dict[str, Task] = {}
        self._report = deliver
        self._events = request.events
        self.spending = spending_here(request.context.budget, request.context.cost)
        ports = RunnerPorts(
            clock=SystemClock(),
            journal=journal,
            events=request.events,
            callables=LocalCallables(self._called),
            services=services,
            tool_metrics=request.tool_metrics,
            spending=self.spending,
            ask_unknown=None if isinstance(request.on_unknown, OnUnknown) else request.on_unknown,
            reviewer=request.reviewer,
            memory=request.memory,
            reflections=request.reflections,
        )
        self._executor = LocalExecutor(TaskRunner(request.context, ports, {}), {}, self._deliver, grace_s=GRACE_S)

    @property
    def most_processes(self) -> int | None:
        """None: this process is all there is."""
        return None

    def emit(self, event: Event) -> None:
        """Tell listeners; events of tasks come from this process, too."""
        self._events.emit(event)

    def start(self, orders: Sequence[TaskOrder]) -> None:
        """Do these tasks; never waits."""
        for order in orders:
            if order.task.handler is not None or order.input_guardrails or order.output_guardrails:
                self._called[order.key] = order.task
        self._executor.start(orders)

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these tasks."""
        self._executor.stop(instances)

    async def close(self) -> None:
        """Stop what still runs."""
        await self._executor.end()

    def _deliver(self, results: Sequence[TaskResult]) -> None:
        for result in results:
            self._called.pop(result.key, None)
        self._report(results)
