"""The actor that owns the cluster's runs. It starts all other actors of a run and runs no user code.

When its process dies, Ray restarts it, and it resumes the runs whose submissions are stored (S-DUR-32).
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
import ray.exceptions
from msgspec import Struct, structs

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.events import EventHub, begin_events
from ensemble_ray.actors.link.packing import pack, pack_recorded, unpack
from ensemble_ray.actors.link.reach import BackgroundTasks, living_nodes, patiently, reach, refuse
from ensemble_ray.actors.link.wire import LineService, SessionOpening, Submission, WireOutcome, WireResult
from ensemble_ray.actors.scheduler.cluster_nodes import ClusterNodes, check_requirements
from ensemble_ray.actors.scheduler.dynamic_run import DynamicRun, SessionService
from ensemble_ray.actors.scheduler.planned_run import PlannedRun, RunEndBuffer
from ensemble_ray.actors.scheduler.processes import AgentProcess, ProcessPool
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.actors.scheduler.submission_store import SubmissionStore
from ensemble_ray.actors.shared.journal import describe_this_process
from ensemble_ray.errors import EnsembleError, RecordError, RunExistsError, ValidationError, message_of
from ensemble_ray.llm.limits.endpoints import EndpointUpdate
from ensemble_ray.process.concurrency import USER_ERRORS
from ensemble_ray.process.config import package_version
from ensemble_ray.process.context import bounded_logger, freeze_modules
from ensemble_ray.record.head import head_facts
from ensemble_ray.record.open_reviews import fold_gates, obstacle_at
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress, resume_advice
from ensemble_ray.runs.outputs import SpooledOutputs
from ensemble_ray.runs.planned import claim_planned
from ensemble_ray.runs.ports import SubmissionReason, release_run
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import (
    MOST_PROCESSES,
    MOST_TASKS,
    ActorDescription,
    ActorState,
    ProcessDescription,
    dump_actor,
    load_actor,
)
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.reviews import RunDirective

_ANSWER_S = 1.5
_MOST_RUNS = 64
_log = bounded_logger(__name__)
_LOOK_S = 1.0
#: A slower node is skipped when payloads are loaded, s.
_PATIENCE_S = 60.0
_proven: set[tuple[str, str]] = set()
_MOST_PROVEN = 10_000
KEPT_RESULTS = 64
_FRESH_S = 0.5


class SchedulerActor(LineService, SessionService):
    """Runs planned runs and hosts the sessions of dynamic ones. Several may share the runs of a cluster."""

    def __init__(self, name: str = spawn.SCHEDULER) -> None:
        LineService.__init__(self)
        self._nodes = ClusterNodes(self._resize, lambda: bool(self._planned or self._dynamic))
        SessionService.__init__(self, ProcessPool(name), self._nodes.limits, self.add_lines)
        freeze_modules()
        self._name = name
        self._store = SubmissionStore(scheduler=name)
        self._planned: dict[str, PlannedRun] = {}
        self._ends: dict[str, RunEndBuffer] = {}
        self._waiting = WaitingRuns(self._resume, self._store.drop)
        self._survey = ProcessSurvey(self._pool)
        self._describing: asyncio.Task[bytes] | None = None
        self._described_at = 0.0
        self._recovering: asyncio.Task[None] | None = None
        # A constructor runs before the loop, so a thread makes the first call to the loop.
        actor = cast("Any", ray.get_runtime_context().current_actor)
        threading.Thread(target=start_recovery, args=(actor,), name="recovery", daemon=True).start()

    async def version(self) -> str:
        return package_version()

    async def wait_until_recovered(self) -> None:
        """Return when the runs of an earlier process of this actor are resumed."""
        if self._recovering is None:
            self._recovering = asyncio.get_running_loop().create_task(self._recover())
        recovering = self._recovering
        try:
            await asyncio.shield(recovering)
        except Exception:
            if self._recovering is recovering:
                self._recovering = None  # the store was unreachable: the next caller tries again
            raise

    async def submit(self, body: bytes) -> Any:
        """Start or resume a packed `Submission`. Return the handle of its event hub, or None when it has no listener."""
        await self.wait_until_recovered()
        submission = unpack(body, Submission)
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
        await load_everywhere(payloads)

    async def knows(self, run_id: str) -> bool:
        """Whether a run is running here, or its result is still to be fetched."""
        await self.wait_until_recovered()
        return run_id in self._ends

    async def is_running(self, run_id: str) -> bool:
        await self.wait_until_recovered()
        begun = self._ends.get(run_id)
        return (begun is not None and not begun.result.done()) or run_id in self._dynamic

    async def report(self, run_id: str, source: str, reports: Sequence[WireResult]) -> None:  # noqa: ARG002  named in traces of calls
        run = self._planned.get(run_id) or self._dynamic.get(run_id)
        if run is not None:
            await run.report(reports)

    async def locate(self, run_id: str, agent_key: str, lost: str | None = None) -> list[tuple[str, Any]]:
        run = self._planned.get(run_id)
        return [] if run is None else run.locate(agent_key, lost)

    async def update_endpoint(self, source: str, update: EndpointUpdate) -> None:
        """Send what one process learned about an endpoint to all others (S-DUR-64, S-DUR-65)."""
        await self.on_endpoint_update(source, update)
        for name, other in spawn.existing_schedulers(spawn.namespace_of(self._name)).items():
            if name != self._name:
                other.on_endpoint_update.remote(source, update)

    async def on_endpoint_update(self, source: str, update: EndpointUpdate) -> None:
        self._pool.broadcast(update, source=source)

    async def wait(self, run_id: str, cursor: int = 0, end_id: str = "") -> bytes | None:
        """Return a page of a run's end; None if a restart lost the end. The last page may contain the last log lines."""
        await self.wait_until_recovered()
        ended = self._ends.get(run_id)
        if ended is None or end_id not in {"", ended.id}:
            return None
        page = await ended.page(cursor)
        if page.is_last and self.is_listening(run_id):
            page = structs.replace(page, lines=await self.drain_lines(run_id))
        return pack(page)

    async def cancel(self, run_id: str) -> None:
        await self.wait_until_recovered()
        run = self._planned.get(run_id)
        if run is not None:
            await run.cancel()

    async def inject(self, run_id: str, directive: RunDirective) -> bool:
        """Return False if the run has ended."""
        await self.wait_until_recovered()
        run = self._planned.get(run_id)
        return run is not None and await run.inject(directive)

    async def drop(self, run_id: str, end_id: str) -> None:
        """Drop a fetched result, but not the result of a later run with the same id."""
        ended = self._ends.get(run_id)
        if ended is not None and ended.id == end_id:
            del self._ends[run_id]

    async def states(self) -> dict[str, str]:
        return dict.fromkeys((*self._planned, *self._dynamic), RunState.RUNNING.value)

    async def describe(self) -> bytes:
        """Frequent callers share one answer, packed by `dump_actor`."""
        loop = asyncio.get_running_loop()
        if self._describing is None or (self._describing.done() and loop.time() - self._described_at > _FRESH_S):
            self._describing, self._described_at = loop.create_task(self._describe()), loop.time()
        return await asyncio.shield(self._describing)

    async def _describe(self) -> bytes:
        processes, more = await self._survey.describe()
        runs = self._runs()
        waiting = sum(run.waiting for run in runs)
        note = f"runs: {len(runs)}, ensemble-ray {package_version()}"
        process = describe_this_process("scheduler", self._name, note=note, queue=waiting)
        return dump_actor(ActorDescription(process=process, processes=tuple(processes), more_processes=more))

    async def evict_idle(self) -> None:
        self._pool.evict_idle()

    async def open_session(self, opening: SessionOpening) -> Any:
        await self.wait_until_recovered()
        if opening.run_id in self._planned:
            raise RunExistsError(f"Run '{opening.run_id}' is running: wait for its end, or choose another run_id")
        return await super().open_session(opening)

    def _resize(self, limits: SessionLimits) -> None:
        for run in self._runs():
            run.resize(limits)

    def _runs(self) -> list[PlannedRun | DynamicRun]:
        return [*self._planned.values(), *self._dynamic.values()]

    # Planned runs.

    async def _recover(self) -> None:
        for submission in await self._store.load_unfinished():
            if submission.run_id in self._planned:
                continue  # resumed before the store became unreachable
            restarted = structs.replace(submission, reason=SubmissionReason.RESTARTED)
            try:
                store, run_id = submission.store, submission.run_id
                summary = None if store is None else await store_at(store).summary(run_id)
                if summary is not None and summary.state.is_final:  # it was suspended here and resumed elsewhere
                    await self._store.drop(submission.run_id)
                    continue
                await self._resume(restarted)
            except Exception as error:  # noqa: BLE001  one such run must not stop the others
                _log.error("Run %s cannot resume after the scheduler's death: %s", submission.run_id, message_of(error))
                # A driver that still waits submits it again and receives the error. No later scheduler may start it.
                await self._store.drop(submission.run_id)

    async def _resume(self, submission: Submission) -> None:
        run = await self._begin(submission, spawn.event_hub(EventHub) if submission.is_connected else None)
        await run.begin()

    async def _begin(self, submission: Submission, hub: Any) -> PlannedRun:
        """Acquire the run's record and register the run. Its `begin` starts the tasks."""
        run_id, before = submission.run_id, self._ends.get(submission.run_id)
        self._waiting.remove(run_id)
        ended = self._ends[run_id] = RunEndBuffer()
        owned, outputs, tasks = None, SpooledOutputs(), submission.tasks
        try:
            if submission.store is not None and submission.reason is SubmissionReason.RESUBMITTED:
                is_recorded = bool(await head_facts(store_at(submission.store), run_id))
                submission = structs.replace(submission, reason=submission.reason.resolve(is_recorded=is_recorded))
            claimed = await claim_planned(
                submission.store,
                submission.context,
                submission.header,
                submission=submission.reason,
                preliminary=submission.preamble,
                # Outputs stay data, since their types are the user's.
                keep=lambda instance, given: outputs.stage(
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
                add_lines=partial(self.add_lines, run_id),
                finished=ended.result,
            )
        except BaseException as error:
            del self._ends[run_id]
            if before is not None:
                self._ends[run_id] = before  # not fetched yet
            refuse(ended.result, error)
            await release_run(owned)
            raise
        self._planned[run_id] = run
        ended.result.add_done_callback(lambda done: self._on_end(submission, done))
        return run

    def _on_end(self, submission: Submission, done: asyncio.Future[WireOutcome]) -> None:
        self._planned.pop(submission.run_id, None)
        outcome = None if done.cancelled() or done.exception() is not None else done.result()
        if submission.goes_on_alone and outcome is not None and outcome.state is RunState.WAITING:
            self._waiting.add(submission, [review.gate_id for review in outcome.open_reviews])
        ended = [name for name, end in self._ends.items() if end.result.done() and not end.is_read]
        for name in ended[: max(0, len(ended) - KEPT_RESULTS)]:
            del self._ends[name]


class ProcessSurvey:
    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self._asked: dict[str, asyncio.Task[ProcessDescription | None]] = {}

    async def describe(self) -> tuple[list[ProcessDescription], int]:
        """Return the busiest processes, and the number of those left out."""
        living = sorted(self._pool.living, key=lambda each: (-each.count_tasks(), each.name))
        chosen = living[:MOST_PROCESSES]
        answers = await self._ask([each for each in chosen if _has_begun(each)])
        described = [self._merge(each, answers) for each in chosen if each.is_alive]
        return described, len(living) - len(chosen)

    async def _ask(self, processes: Sequence[AgentProcess]) -> Mapping[str, ProcessDescription]:
        names = {each.name for each in processes}
        self._asked = {name: asked for name, asked in self._asked.items() if name in names}
        for process in processes:
            if process.name not in self._asked:
                self._asked[process.name] = asyncio.get_running_loop().create_task(_describe_process(process))
        asked = dict(self._asked)
        if asked:
            await asyncio.wait(asked.values(), timeout=_ANSWER_S)
        answered = {name: each.result() for name, each in asked.items() if each.done()}
        for name in answered:
            self._asked.pop(name, None)
        return {name: answer for name, answer in answered.items() if answer is not None}

    def _merge(self, process: AgentProcess, answers: Mapping[str, ProcessDescription]) -> ProcessDescription:
        leases = [lease.describe() for lease in process.leases if lease.describe is not None]
        answer = answers.get(process.name)
        state: ActorState = "ready"
        if process.is_retired:
            state = "retiring"
        elif self._pool.is_idle(process):
            state = "kept"
        elif not _has_begun(process):
            state = "starting"
        elif answer is None:
            state = "silent"
        known = ProcessDescription(
            name=process.name,
            kind=process.type,
            state=state,
            node_id=process.node_id,
            reserved=str(process.requirements) if process.requirements else "",
            runs=tuple(each.run for each in leases[:_MOST_RUNS]),
            more_runs=max(0, len(leases) - _MOST_RUNS),
            tasks=tuple(task for each in leases for task in each.tasks)[:MOST_TASKS],
        )
        return merge_description(known, answer, handed=process.count_tasks())


def merge_description(
    known: ProcessDescription, answer: ProcessDescription | None, *, handed: int
) -> ProcessDescription:
    """Merge the scheduler's knowledge of a process with the process's answer.

    A dispatched task that is missing in the answer is on its way. A task that only the answer lists was delegated.
    """
    if answer is None:
        return replace(known, queue=handed, more_tasks=max(0, handed - len(known.tasks)))
    deaths = {(each.run_id, each.instance): each.deaths for each in known.tasks}
    begun = [replace(each, deaths=deaths.pop((each.run_id, each.instance), 0)) for each in answer.tasks]
    told = len(answer.tasks) + answer.more_tasks
    # If the answer left tasks out, the tasks on their way are unknown.
    coming = [each for each in known.tasks if (each.run_id, each.instance) in deaths] if not answer.more_tasks else []
    shown = (*begun, *coming)[:MOST_TASKS]
    whole = max(told + len(coming), handed)
    return replace(
        known,
        node_id=answer.node_id,
        host=answer.host,
        pid=answer.pid,
        memory_bytes=answer.memory_bytes,
        endpoints=answer.endpoints,
        tasks=shown,
        more_tasks=whole - len(shown),
        queue=answer.queue + whole - told,
    )


def _has_begun(process: AgentProcess) -> bool:
    # A process without runs has answered before.
    return not process.leases or any(lease.is_ready for lease in process.leases)


async def _describe_process(process: AgentProcess) -> ProcessDescription | None:
    try:
        return load_actor(await process.handle.describe.remote()).process
    except Exception:  # noqa: BLE001  shown as a process that does not answer; the pool notices a death itself
        return None


class _Waiting(Struct, frozen=True, eq=False):
    submission: Submission
    store: StoreAddress
    #: that were open when the run was suspended
    gates: frozenset[str]


class WaitingRuns:
    """Watches the records of suspended runs and resumes a run when one of its gates is decided."""

    def __init__(self, begin: Callable[[Submission], Awaitable[None]], drop: Callable[[str], Awaitable[None]]) -> None:
        self._begin = begin
        self._drop = drop
        self._runs: dict[str, _Waiting] = {}
        self._background = BackgroundTasks()

    def add(self, submission: Submission, gates: Collection[str]) -> None:
        if submission.store is not None:
            waiting = self._runs[submission.run_id] = _Waiting(submission, submission.store, frozenset(gates))
            self._background.start(self._watch(waiting))

    def remove(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    async def _watch(self, waiting: _Waiting) -> None:
        """A slow or unreachable store does not delay the other runs."""
        run_id = waiting.submission.run_id
        while self._runs.get(run_id) is waiting:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look_at(waiting)
            except RecordError as error:  # such as an unreachable database: try again
                _log.warning("Run %s: cannot read its gates: %s", run_id, message_of(error))

    async def _look_at(self, waiting: _Waiting) -> None:
        run_id = waiting.submission.run_id
        found = await store_at(waiting.store).summary(run_id)
        is_left = found is None or found.state is not RunState.WAITING
        is_ready = False
        if not is_left:
            now = time.time()
            gates = fold_gates(await store_at(waiting.store).gates_of(run_id))
            obstacles = (obstacle_at(each, at=now, is_owned=False) for each in gates if each.gate_id in waiting.gates)
            is_ready = any(each is not None for each in obstacles)
        if self._runs.get(run_id) is not waiting:  # it was resumed here meanwhile
            return
        if is_left:  # it was resumed elsewhere, cancelled or removed
            self.remove(run_id)
            await self._drop(run_id)
        elif is_ready:
            try:
                await self._begin(structs.replace(waiting.submission, reason=SubmissionReason.RESUMED))
            except EnsembleError as error:
                self.remove(run_id)
                _log.error(
                    "Run %s cannot resume by itself: %s. Resume it: %s",
                    run_id, message_of(error), resume_advice(run_id, waiting.submission.header.origin or ""),
                )  # fmt: skip
                await self._drop(run_id)


async def load_everywhere(payloads: Mapping[str, bytes]) -> None:
    """Load these on every node, but not in the scheduler's own process.

    Raises:
        ValidationError: one cannot be loaded on some node.
    """
    digest = hashlib.sha256(repr(sorted(payloads.items())).encode()).hexdigest()
    nodes = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in living_nodes()}
    asked = [node for node in nodes if (node, digest) not in _proven]
    answers = await asyncio.gather(*(_load_on(node, payloads) for node in asked))
    failures = {node: found for node, found in zip(asked, answers, strict=True) if found}
    if len(_proven) > _MOST_PROVEN:
        _proven.clear()
    _proven.update((node, digest) for node, found in zip(asked, answers, strict=True) if found == [])
    if failures:
        node, ((what, why), *_) = next(iter(failures.items()))
        more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise ValidationError(
            f"{what} cannot be loaded on node {nodes[node]}{more}: {why}. Nothing was asked of any model. The cluster's "
            "processes do not see the modules of your directory: send it along, as `ray job submit --working-dir . -- "
            "ensemble-ray run ...` does, install the module on every node, or use runtime='inline'"
        )


async def _load_on(node: str, payloads: Mapping[str, bytes]) -> list[tuple[str, str]] | None:
    try:
        asked: Any = spawn.on_node(load_all, node).remote(payloads)
        return cast("list[tuple[str, str]]", await asyncio.wait_for(asked, _PATIENCE_S))
    except (ray.exceptions.RayError, TimeoutError) as error:
        _log.warning("Node %s cannot load a run in advance: %s", node, one_line(message_of(error)))
        return None


def load_all(payloads: Mapping[str, bytes]) -> list[tuple[str, str]]:
    """Return the names of payloads that cannot be loaded here, and why."""
    failed: list[tuple[str, str]] = []
    for name, body in payloads.items():
        try:
            pickle.loads(body)  # noqa: S301  bytes of our own driver
        except USER_ERRORS as error:
            failed.append((name, str(one_line(message_of(error)))))
    return failed


def start_recovery(actor: Any) -> None:
    """The first calls may fail: the cluster may still list the actor as restarting, or its store may be out of reach."""
    asyncio.run(reach(actor.wait_until_recovered.remote, patiently(), retry_on=ray.exceptions.RayError))
