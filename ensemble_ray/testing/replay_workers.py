"""Work that a replayed task hands on: done again on its own record.

In: the order of a worker's task. Out: what it gives today, or what is recorded of it where its record ends in a failure.
Never: a difference in a worker's work that its asker does not hear of: it is the asker's too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from ensemble_ray.errors import AgentExecutionError
from ensemble_ray.execute.orders import TaskFailure
from ensemble_ray.execute.scope import exit_of
from ensemble_ray.facts.effects import ToolReturned
from ensemble_ray.facts.ends import ExitRecorded, FailureRecorded, OutputRecorded
from ensemble_ray.testing.replay_ports import Difference, cut_to_difference, place_of
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import delegating_call

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskOrder, TaskResult, TaskStatus
    from ensemble_ray.execute.runner import TaskRunner
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.testing.replay_ports import ReplayJournal

_STATUS = {OutputRecorded.KIND: "completed", FailureRecorded.KIND: "failed"}


class ReplayedWorkers:
    """Fulfils `Peers` for a replay."""

    def __init__(self, journal: ReplayJournal, runner: TaskRunner) -> None:
        self._journal = journal
        self._runner = runner

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Do a worker's task again on its record.

        Raises:
            AgentExecutionError: something differs, or is not recorded; it is noted for the asking task.
        """
        with self._journal.at(order.instance):
            result = await self._runner.run(order, is_stopped=lambda: False)
        call = delegating_call(order.instance) or order.instance
        end = self._journal.end_of(order.instance)
        found = self._journal.find_difference(order.instance)
        if found is not None:
            if self._journal.is_at_end(order.instance) and not self._journal.has_output(order.instance):
                return self._recorded_end(order, call, result, end, found)
            self._report(order, call, found)
        self._compare(order, call, result, end)
        told = self._journal.find_recorded(call, ToolReturned)
        if told is not None and not told.is_success and self._journal.has_output(order.instance):
            return _make_stopped(result, told)  # it was done when it was stopped, or when its process was lost
        return result

    def stop(self, instances: Sequence[str]) -> None:
        """Nothing: what a replay asks for is there at once, so that no time runs out."""

    def _recorded_end(
        self, order: TaskOrder, call: str, result: TaskResult, end: Fact | None, found: Difference
    ) -> TaskResult:
        """Return what is recorded of a worker that gave no output: today it comes as far as its record goes."""
        if end is not None and isinstance(end.data, ExitRecorded):
            return _make_end(result, "exited", exit_of(end.data.reason))
        if end is not None and isinstance(end.data, FailureRecorded):
            return _make_end(result, "failed", error_from(end.data.error_data))
        recorded_result = self._journal.find_recorded(call, ToolReturned)
        if recorded_result is None:  # the run died while it was at work
            self._report(order, call, found, is_at_end=True)
        return _make_stopped(result, recorded_result)  # or its process was lost

    def _compare(self, order: TaskOrder, call: str, result: TaskResult, end: Fact | None) -> None:
        """How what the worker gave differs from what is recorded."""
        if end is None:
            return
        recorded = end.data.read().raw if isinstance(end.data, OutputRecorded) else None
        current = None if result.output is None else result.output.raw
        what = "the output"
        if current is None or recorded is None:
            what, recorded = "the end", _STATUS.get(end.kind, "exited")
            current = result.status
        if recorded != current:
            old, new = cut_to_difference(recorded, current)
            self._report(order, call, Difference(where="its end", what=what, recorded=old, current=new))

    def _report(self, order: TaskOrder, call: str, found: Difference, *, is_at_end: bool = False) -> NoReturn:
        where = f"{place_of(call)} ({order.agent_role}), {found.where}"
        asking = call.rsplit("/", 2)[0]
        self._journal.report(replace(found, where=where), instance=asking, is_at_end=is_at_end)


def _make_stopped(result: TaskResult, told: ToolReturned) -> TaskResult:
    return replace(_make_end(result, "failed", AgentExecutionError(told.text.removeprefix("Error: "))), output=None)


def _make_end(result: TaskResult, status: TaskStatus, error: BaseException) -> TaskResult:
    return replace(result, status=status, failure=TaskFailure(error=error, trace=result.trace))
