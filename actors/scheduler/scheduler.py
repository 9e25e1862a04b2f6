"""SchedulerActor: one per cluster, or several that share its runs; a run is an id in it. What the cluster's other processes call.

It makes every other actor of a run, passes bytes on without loading them, and runs no user code. The rules are in
`ensemble_ray.schedule` and `ensemble_ray.plan`. When its process dies, Ray starts it again; it then goes on with the runs
whose submissions are kept, from their records (S-DUR-32).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.events import begin_events
from ensemble_ray.actors.link.futures import refuse
from ensemble_ray.actors.link.log_lines import LineService
from ensemble_ray.actors.link.packing import load_submission, pack_end, pack_recorded
from ensemble_ray.actors.link.quiet_gc import freeze_modules
from ensemble_ray.actors.link.reach import patiently, reach
from ensemble_ray.actors.link.wire import SessionOpening, Submission, WireOutcome, WireResult
from ensemble_ray.actors.scheduler.cluster_nodes import ClusterNodes
from ensemble_ray.actors.scheduler.describing import ProcessSurvey
from ensemble_ray.actors.scheduler.dynamic_run import DynamicRun
from ensemble_ray.actors.scheduler.loading import load_everywhere
from ensemble_ray.actors.scheduler.planned_run import PlannedRun
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.requirements import check_requirements
from ensemble_ray.actors.scheduler.run_end import RunEndBuffer
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.actors.scheduler.session_service import SessionService
from ensemble_ray.actors.scheduler.submission_store import SubmissionStore
from ensemble_ray.actors.scheduler.waiting_runs import WaitingRuns
from ensemble_ray.actors.shared.describing import describe_this_process
from ensemble_ray.actors.shared.event_hub import EventHub
from ensemble_ray.coordinator.outputs import SpooledOutputs
from ensemble_ray.errors import RunExistsError, message_of
from ensemble_ray.limits.endpoints import EndpointUpdate
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.config import package_version
from ensemble_ray.record.head import head_facts
from ensemble_ray.record.opening import store_at
from ensemble_ray.runs.claimed import claim_planned
from ensemble_ray.runs.ownership import release_run
from ensemble_ray.runs.submission import SubmissionReason
from ensemble_ray.values.descriptions import ActorDescription, dump_actor
from ensemble_ray.values.directives import RunDirective
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.outputs import RunState

__all__ = ["SchedulerActor", "start_recovery"]

_log = bounded_logger(__name__)
#: Ended runs whose results nobody has fetched yet.
KEPT_RESULTS = 64
#: For how long a description is good for others who ask, s.
_FRESH_S = 0.5


async def _has_ended(submission: Submission) -> bool:
    """Return whether the record of a kept run says that it has ended."""
    if submission.store is None:
        return False
    found = await store_at(submission.store).summary(submission.run_id)
    return found is not None and found.state.is_final


def start_recovery(actor: Any) -> None:
    """Call an actor's `wait_until_recovered` until it returns.

    The first calls may fail: the cluster may still list the actor as restarting, and its store may be out of reach.
    """
    asyncio.run(reach(actor.wait_until_recovered.remote, patiently(), retry_on=ray.exceptions.RayError))


class SchedulerActor(LineService, SessionService):
    """Holds the runs of a cluster."""

    def __init__(self, name: str = spawn.SCHEDULER) -> None:
        """Make it; runs of an earlier process of this actor go on.

        Args:
            name: Its name, which tells it from the others of its cluster.
        """
        LineService.__init__(self)
        self._nodes = ClusterNodes(self._resize, lambda: bool(self._planned or self._dynamic))
        SessionService.__init__(self, ProcessPool(name), self._nodes.limits, self.add_lines)
        freeze_modules()
        self._name = name
        self._store = SubmissionStore(scheduler=name)
        self._planned: dict[str, PlannedRun] = {}
        self._ends: dict[str, RunEndBuffer] = {}
        self._waiting = WaitingRuns(self._go_on, self._store.drop)
        self._survey = ProcessSurvey(self._pool)
        self._describing: asyncio.Task[bytes] | None = None
        self._described_at = 0.0
        self._recovering: asyncio.Task[None] | None = None
        # A constructor runs before the loop does, so that the first call of the loop comes from a thread.
        actor = cast("Any", ray.get_runtime_context().current_actor)
        threading.Thread(target=start_recovery, args=(actor,), name="recovery", daemon=True).start()

    async def version(self) -> str:
        """Version of the package that this process runs."""
        return package_version()

    async def wait_until_recovered(self) -> None:
        """Return when the runs of an earlier process of this actor go on."""
        if self._recovering is None:
            self._recovering = asyncio.get_running_loop().create_task(self._recover())
        recovering = self._recovering
        try:
            await asyncio.shield(recovering)
        except Exception:
            if self._recovering is recovering:
                self._recovering = None  # the store could not be reached: the next caller tries again
            raise

    async def submit(self, body: bytes) -> Any:
        """Begin a run, or go on with one; return the handle of the hub that has its events, None when nobody listens.

        Args:
            body: Of `dump_submission`.

        Raises:
            RunExistsError: a run of that id is running.
            RecordError: its record cannot be written, or is damaged.
            ValidationError: an agent asks for what the cluster can never give it (S-CLU-43).
        """
        await self.wait_until_recovered()
        submission = load_submission(body)
        run_id = submission.run_id
        if await self.is_running(run_id):
            raise RunExistsError(f"Run '{run_id}' is running: wait for its end, or choose another run_id")
        if any(template.requirements for template in submission.templates):
            check_requirements(submission.templates, self._nodes.limits())
        hub = spawn.event_hub(EventHub) if submission.is_connected else None
        run = await self._begin(submission, hub)
        if hub is not None:
            await begin_events(hub, run_id)
        await run.begin()
        return hub

    async def check_loading(self, payloads: Mapping[str, bytes]) -> None:
        """Have every node load these, but not this process (S-SET-56)."""
        await load_everywhere(payloads)

    async def knows(self, run_id: str) -> bool:
        """Return whether a run is known here: it runs, or its result waits to be fetched."""
        await self.wait_until_recovered()
        return run_id in self._ends

    async def is_running(self, run_id: str) -> bool:
        """Return whether a run of that id goes on here."""
        await self.wait_until_recovered()
        begun = self._ends.get(run_id)
        return (begun is not None and not begun.result.done()) or run_id in self._dynamic

    async def report(self, run_id: str, source: str, reports: Sequence[WireResult]) -> None:  # noqa: ARG002  named in traces of calls
        """Take results of tasks, in the batches in which a process sends them."""
        run = self._planned.get(run_id) or self._dynamic.get(run_id)
        if run is not None:
            await run.report(reports)

    async def locate(self, run_id: str, agent_key: str, lost: str | None = None) -> list[tuple[str, Any]]:
        """Return names and handles of the processes of an agent, for another one that hands work to it.

        Args:
            run_id: The run's id.
            agent_key: Who is looked for.
            lost: Name of a process that failed a call; it is given up.
        """
        run = self._planned.get(run_id)
        return [] if run is None else run.locate(agent_key, lost)

    async def update_endpoint(self, source: str, update: EndpointUpdate) -> None:
        """Let all other processes of the cluster know what one knows of an endpoint (S-DUR-64, S-DUR-65)."""
        await self.on_endpoint_update(source, update)
        for name, other in spawn.existing_schedulers(spawn.namespace_of(self._name)).items():
            if name != self._name:
                other.on_endpoint_update.remote(source, update)

    async def on_endpoint_update(self, source: str, update: EndpointUpdate) -> None:
        """Let the processes of this scheduler know; another one had it from one of its own."""
        self._pool.broadcast(update, source=source)

    async def wait(self, run_id: str, cursor: int = 0, end_id: str = "") -> bytes | None:
        """Wait until a run has ended and return a page of how, as `pack_end` does.

        None where that end is not known, since this process was started anew. With the last page come the lines that were said
        last, if the driver waits for lines meanwhile: its call for them ends now, and it need not make another.

        Args:
            run_id: The run's id.
            cursor: How many entries the driver has.
            end_id: Which end they are of; empty: it has none.
        """
        await self.wait_until_recovered()
        ended = self._ends.get(run_id)
        if ended is None or end_id not in {"", ended.id}:
            return None
        page = await ended.page(cursor)
        if page.is_last and self.is_listening(run_id):
            page = replace(page, lines=await self.drain_lines(run_id))
        return pack_end(page)

    async def cancel(self, run_id: str) -> None:
        """End a run soon."""
        await self.wait_until_recovered()
        run = self._planned.get(run_id)
        if run is not None:
            await run.cancel()

    async def inject(self, run_id: str, directive: RunDirective) -> bool:
        """Tell the tasks of a run that start from now on; False: it has ended."""
        await self.wait_until_recovered()
        run = self._planned.get(run_id)
        return run is not None and await run.inject(directive)

    async def forget(self, run_id: str, end_id: str) -> None:
        """Drop a result that was fetched; that of a later run of the same id was not."""
        ended = self._ends.get(run_id)
        if ended is not None and ended.id == end_id:
            del self._ends[run_id]

    async def states(self) -> dict[str, str]:
        """Return the runs that have not ended."""
        return dict.fromkeys((*self._planned, *self._dynamic), RunState.RUNNING.value)

    async def describe(self) -> bytes:
        """Return the processes of its runs and what they are at, as `dump_actor` does; those who ask often get what others got."""
        loop = asyncio.get_running_loop()
        if self._describing is None or (self._describing.done() and loop.time() - self._described_at > _FRESH_S):
            self._describing, self._described_at = loop.create_task(self._describe()), loop.time()
        return await asyncio.shield(self._describing)

    async def _describe(self) -> bytes:
        processes, more = await self._survey.describe()
        runs: list[PlannedRun | DynamicRun] = [*self._planned.values(), *self._dynamic.values()]
        waiting = sum(run.waiting for run in runs)
        note = f"runs: {len(runs)}, ensemble-ray {package_version()}"
        process = describe_this_process("scheduler", self._name, note=note, queue=waiting)
        return dump_actor(ActorDescription(process=process, processes=tuple(processes), more_processes=more))

    async def evict_idle(self) -> None:
        """End the processes that are kept for the next run."""
        self._pool.evict_idle()

    async def open_session(self, opening: SessionOpening) -> Any:
        """Be ready for the tasks of a dynamic run; return the handle of its hub, None when nobody listens.

        Raises:
            RunExistsError: a run of that id is running.
        """
        await self.wait_until_recovered()
        if opening.run_id in self._planned:
            raise RunExistsError(f"Run '{opening.run_id}' is running: wait for its end, or choose another run_id")
        return await super().open_session(opening)

    def _resize(self, limits: SessionLimits) -> None:
        for planned in self._planned.values():
            planned.resize(limits)
        for dynamic in self._dynamic.values():
            dynamic.resize(limits)

    # Planned runs.

    async def _recover(self) -> None:
        for submission in await self._store.load_unfinished():
            if submission.run_id in self._planned:
                continue  # it went on before the store was out of reach
            again = replace(submission, reason=SubmissionReason.RESTARTED)
            try:
                if await _has_ended(submission):  # it waited for a review here, and went on elsewhere
                    await self._store.drop(submission.run_id)
                    continue
                await self._go_on(again)
            except Exception as error:  # noqa: BLE001  one run that cannot go on must not keep the others from it
                _log.error("Run %s cannot go on after the scheduler's death: %s", again.run_id, message_of(error))
                # Its driver, if there is one, submits it again and hears why; no later scheduler is to begin it.
                await self._store.drop(again.run_id)

    async def _go_on(self, submission: Submission) -> None:
        """Go on with a run that no driver has submitted now."""
        run = await self._begin(submission, spawn.event_hub(EventHub) if submission.is_connected else None)
        await run.begin()

    async def _begin(self, submission: Submission, hub: Any) -> PlannedRun:
        """Own the run's record and know the run from now on; `begin` of it starts its tasks."""
        run_id, before = submission.run_id, self._ends.get(submission.run_id)
        self._waiting.forget(run_id)
        ended = self._ends[run_id] = RunEndBuffer()
        owned, outputs, tasks = None, SpooledOutputs(), submission.tasks
        try:
            if submission.store is not None and submission.reason is SubmissionReason.RESUBMITTED:
                is_recorded = bool(await head_facts(store_at(submission.store), run_id))
                submission = replace(submission, reason=submission.reason.resolve(is_recorded=is_recorded))
            claimed = await claim_planned(
                submission.store,
                submission.context,
                submission.header,
                submission=submission.reason,
                preliminary=submission.preamble,
                # Outputs stay data, since their types are the user's.
                keep=lambda instance, given: outputs.keep_recorded(
                    instance, pack_recorded(given.output_data(), tasks.get(node_key(instance), b""))
                ),
            )
            owned = claimed.owned
            run = PlannedRun(
                submission,
                self._pool,
                hub=hub,
                limits=self._nodes.limits(),
                claimed=claimed,
                outputs=outputs,
                store=self._store,
                say=partial(self.add_lines, run_id),
                finished=ended.result,
            )
        except BaseException as error:
            del self._ends[run_id]
            if before is not None:
                self._ends[run_id] = before  # nobody has fetched it yet
            refuse(ended.result, error)
            await release_run(owned)
            raise
        self._planned[run_id] = run
        ended.result.add_done_callback(lambda done: self._forget(submission, done))
        return run

    def _forget(self, submission: Submission, done: asyncio.Future[WireOutcome]) -> None:
        self._planned.pop(submission.run_id, None)
        outcome = None if done.cancelled() or done.exception() is not None else done.result()
        if submission.goes_on_alone and outcome is not None and outcome.state is RunState.WAITING:
            self._waiting.add(submission, [review.gate_id for review in outcome.open_reviews])
        ended = [name for name, end in self._ends.items() if end.result.done() and not end.is_read]
        for name in ended[: max(0, len(ended) - KEPT_RESULTS)]:
            del self._ends[name]
