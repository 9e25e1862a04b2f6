"""Carrying out an accepted run: from its beginning, or from where its record stands.

In: a run, and whether this process has it from a ledger that another one left. Out: what became of it, always; what goes wrong in a
run is its outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ensemble_ray import Ensemble, EnsembleError, IllegalStateError, RunExistsError, RunState
from ensemble_ray.errors.texts import describe
from ensemble_ray.plan.unit_plans import task_keys
from ensemble_ray.process.context import bounded_logger, use_traceparent
from ensemble_ray.process.forks import SystemClock, threads
from ensemble_ray.record.opening import store_at
from ensemble_ray.recovery.resuming import begin_again
from ensemble_ray.serve.driving.changed_team import change_team
from ensemble_ray.serve.driving.limits import EndpointLimits, items_of, options_of
from ensemble_ray.serve.driving.outcomes import (
    Outcome,
    open_reviews,
    outcome_of_defect,
    outcome_of_error,
    outcome_of_output,
    recorded_outcome,
)
from ensemble_ray.serve.failures import describe_refusal, is_refusal
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_schemas import ItemsDataset, RunStatus
from ensemble_ray.values.trace import parse_traceparent

if TYPE_CHECKING:
    from ensemble_ray import Runtime
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.serve.datasets import DatasetCatalog
    from ensemble_ray.serve.driving.active import ActiveRun
    from ensemble_ray.teamfile import Runnable
    from ensemble_ray.values.task_output import OutputType

_log = bounded_logger(__name__)
#: How often a run is looked at that goes on without its driver, s.
_LOOK_S = 1.0
#: How many looks a scheduler has to go on with a run by itself, before this process does; it looks once a second, too.
_GRACE_LOOKS = 10


class RunsTeam:
    """Runs teams on one runtime."""

    def __init__(
        self, runtime: Runtime, limits: EndpointLimits, tools: Mapping[str, object], datasets: DatasetCatalog
    ) -> None:
        """Make it.

        Args:
            runtime: Where runs live.
            limits: What is allowed.
            tools: Those that tasks of requests can name.
            datasets: Those that requests may map.
        """
        self._runtime = runtime
        self._datasets = datasets
        self._limits = limits
        self._tools = tools

    @property
    def _store(self) -> RunStore:
        return store_at(self._runtime.store_address)

    async def carry_out(self, active: ActiveRun, *, is_recovered: bool) -> Outcome:
        """Run it, and return what became of it; raise nothing of the run's.

        Args:
            active: The run.
            is_recovered: Whether it may have begun in another process.
        """
        run_id = active.entry.run_id
        try:
            while is_recovered:
                if (outcome := await self._find_recorded(active)) is not None:
                    return outcome
                try:
                    return await self._run(active, is_recovered=True)
                except RunExistsError:  # the cluster's scheduler was first to go on with it
                    await asyncio.sleep(_LOOK_S)
            return await self._run(active, is_recovered=False)
        except Refusal as refusal:  # the operator has made the limits narrower meanwhile
            return Outcome(status=RunStatus.REJECTED, error=describe_refusal(refusal))
        except (EnsembleError, IllegalStateError) as error:
            if not is_refusal(error):
                _log.warning("Run %s failed: %s", run_id, describe(error))
            return outcome_of_error(error, run_id)
        except Exception as error:  # noqa: BLE001  code of the team raises what it likes; the endpoint goes on
            _log.warning("Run %s failed: %s", run_id, describe(error))
            return outcome_of_defect(error, run_id)

    def find_output_type(self, active: ActiveRun, key: str) -> OutputType | None:
        """Return the declared type of the output of a task of a run; None: it has none, or its tasks are made of its items."""
        definition = change_team(active.team.definition, active.asked, self._tools)
        if not isinstance(definition, Ensemble):
            return None
        tasks = definition.all_tasks
        return dict(zip(task_keys(tasks), (task.output_type for task in tasks), strict=True)).get(key)

    async def wait_for_decision(self, active: ActiveRun) -> None:
        """Return when a run that waits for people goes on, or can go on, or is to end."""
        run_id = active.entry.run_id
        while not active.is_cancelled and not active.decided.is_set() and await self._is_waiting(run_id):
            with contextlib.suppress(TimeoutError):  # the record is one that other processes write, too
                await asyncio.wait_for(active.decided.wait(), _LOOK_S)

    async def _is_waiting(self, run_id: str) -> bool:
        """Return whether a run waits for people, of whom somebody can still decide."""
        summary = await self._store.summary(run_id)
        if summary is None or summary.state is not RunState.WAITING:
            return False
        now = datetime.fromtimestamp(SystemClock().now(), UTC)
        return any(each.expires_at is None or each.expires_at > now for each in await open_reviews(self._store, run_id))

    async def _is_taken_up(self, run_id: str) -> bool:
        """Return whether the cluster's scheduler goes on with a run whose gates are decided; where there is none, nobody does."""
        if self._runtime.name == "inline":
            return False
        for _ in range(_GRACE_LOOKS):
            summary = await self._store.summary(run_id)
            if summary is None or summary.state is not RunState.WAITING:
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    async def end_waiting(self, active: ActiveRun) -> Outcome:
        """End a run that was cancelled while it waited for people, and return what it has done."""
        return await self.carry_out(active, is_recovered=True)

    async def _run(self, active: ActiveRun, *, is_recovered: bool) -> Outcome:
        active.run = run = await self._begin(active, is_recovered=is_recovered)
        if active.is_cancelled:
            await run.acancel()
        output = await run.aresult()
        active.decided.clear()  # what was decided meanwhile, the run has seen
        return outcome_of_output(run.state, output)

    async def _begin(self, active: ActiveRun, *, is_recovered: bool) -> Run:
        definition = await threads.run(self._definition, active)
        entry, asked = active.entry, active.asked
        if is_recovered and await self._is_recorded(entry.run_id):
            return await begin_again(entry.run_id, definition, runtime=self._runtime, has_caller=False)
        span = parse_traceparent(asked.traceparent or "")  # again: earlier releases accepted runs with any text
        with use_traceparent("" if span is None else str(span)):  # S-INT-38
            return definition.begin(
                asked.inputs,
                runtime=self._runtime,
                run_id=entry.run_id,
                options=options_of(asked, active.team.definition, self._limits),
                is_watched=False,
            )

    def _definition(self, active: ActiveRun) -> Runnable:
        """Return the team with the items or the tasks of the request, and with who listens to its models."""
        items: object = items_of(active.asked, self._limits, self._datasets)
        if isinstance(items, ItemsDataset):
            items = self._datasets.open(items.dataset)
        team = active.team
        definition = (
            change_team(team.definition, active.asked, self._tools) if items is None else team.with_items(items)
        )
        if not active.team.is_streaming:
            return definition
        return definition.model_copy(update={"listeners": (*definition.listeners, active.live)})

    async def _is_recorded(self, run_id: str) -> bool:
        """Return whether anything of a run is recorded with which it can go on."""
        async for page in self._store.read(run_id):
            return bool(page)
        return False

    async def _find_recorded(self, active: ActiveRun) -> Outcome | None:
        """Return what the record knows of the end of a run, when nobody works on it any more; None: it is to be gone on with."""
        run_id = active.entry.run_id
        while (summary := await self._store.summary(run_id)) is not None:
            if summary.state.is_going_on:
                if active.is_cancelled:
                    await self._store.ask_cancel(run_id)
                await asyncio.sleep(_LOOK_S)
            elif summary.state is not RunState.WAITING or active.is_cancelled:
                break
            elif active.decided.is_set():  # it need not wait for the cluster's scheduler to see that
                active.decided.clear()
                return None
            elif await self._is_waiting(run_id):
                return Outcome(status=RunStatus.WAITING)
            elif not await self._is_taken_up(run_id):
                return None
        if not await self._is_recorded(run_id):
            return Outcome(status=RunStatus.CANCELLED) if active.is_cancelled else None
        return await recorded_outcome(self._store, run_id)
