"""LaterReflections: which outputs of a phase are reflected on when it has accepted them (S-REFL-19).

In: an attempt that was accepted. Out: the orders to reflect on its outputs, and when the last of them is done. What came of
one is in the record and in the store; here nothing follows from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, Never, TypeVar

from ensemble_ray.execute.orders import FailureSummary
from ensemble_ray.plan.plan import PhaseUnit
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.schedule.instructions import Start
from ensemble_ray.values.ids import instance_of, node_key, reflecting_instance

if TYPE_CHECKING:
    from ensemble_ray.coordinator.outputs import OutputStore
    from ensemble_ray.execute.orders import TaskOrder, TaskResult
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.schedule.instructions import ReflectOn

_log = bounded_logger(__name__)
#: How a task, an output and a failure are held: objects inline, bytes in a scheduler actor.
Task = TypeVar("Task")
Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


class LaterReflections(Generic[Task, Output]):
    """The reflections of one run that wait for a phase's verdict.

    Those of one task, as a loop in the phase gives them, are done one after the other: each builds on the one before.
    """

    def __init__(self, plan: Plan) -> None:
        self._by_unit = {unit.key: frozenset(unit.reflecting) for unit in plan.units if isinstance(unit, PhaseUnit)}
        self._keys: frozenset[str] = frozenset().union(*self._by_unit.values())
        #: orders that are out or wait, and what asked for them
        self._open: dict[str, ReflectOn] = {}
        #: by key of the task: orders that wait for the one that is out
        self._waiting: dict[str, deque[TaskOrder[Task, Never, Output]]] = {}

    @property
    def open(self) -> Sequence[str]:
        """The orders that are out, by instance."""
        return tuple(self._open)

    def is_later(self, key: str) -> bool:
        """Whether the outputs of a task wait for a verdict before they are reflected on."""
        return key in self._keys

    def begin(
        self,
        question: ReflectOn,
        completed: Iterable[str],
        make: Callable[[Start], TaskOrder[Task, Never, Output]],
        outputs: OutputStore[Output],
    ) -> list[TaskOrder[Task, Never, Output]]:
        """Return the orders that come first of those to reflect on the outputs of an attempt; none where it has no outputs.

        Args:
            question: Which attempt.
            completed: Instances with an output.
            make: Makes the order of a task.
            outputs: Of the run.
        """
        attempt = instance_of(question.unit, occurrence=question.execution - 1)
        keys = self._by_unit[question.unit]
        orders = [
            replace(
                make(Start(instance=each, context=())),
                instance=reflecting_instance(each),
                reflects_on=outputs.get(each),
            )
            for each in dict.fromkeys(completed)
            if each.startswith(f"{attempt}/") and node_key(each) in keys
        ]
        self._open.update((order.instance, question) for order in orders)
        first: list[TaskOrder[Task, Never, Output]] = []
        for order in orders:
            if order.key in self._waiting:
                self._waiting[order.key].append(order)
            else:
                self._waiting[order.key] = deque()
                first.append(order)
        return first

    def end(
        self, result: TaskResult[Output, Failure]
    ) -> tuple[TaskOrder[Task, Never, Output] | None, ReflectOn | None]:
        """Take note of the end of an order, whatever it was; return the next one, and the question that it was the last of."""
        if result.failure is not None and result.failure.message:
            _log.warning("Task '%s' is not reflected on: %s", result.key, result.failure.message)
        question = self._open.pop(result.instance)
        waiting = self._waiting[result.key]
        if waiting:
            return waiting.popleft(), None
        del self._waiting[result.key]
        return None, None if question in self._open.values() else question

    def __contains__(self, instance: object) -> bool:
        return instance in self._open
