"""The `RunService` of the process that drives all runs of an endpoint.

A run is in the ledger before the client gets its answer, and resumes after a restart. Public methods can be called from any event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from ensemble_ray import ChatModel, RecordError, RunExistsError, Runtime, Schedule
from ensemble_ray.access.quotas import Account, Standing
from ensemble_ray.errors.texts import describe
from ensemble_ray.events.messages import LAST_TYPE, Cursor, WireEvent
from ensemble_ray.ports import Clock
from ensemble_ray.process.concurrency import SystemClock, bridge, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.following import RunFollower, SharedRecordReader
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RunStore
from ensemble_ray.serve import schemas
from ensemble_ray.serve.catalog import DatasetCatalog, ServedTeam, ToolCatalog
from ensemble_ray.serve.driving import requests, run_driver
from ensemble_ray.serve.driving.draining import DrainSwitch
from ensemble_ray.serve.driving.ledger import Document, LedgerEntry, LedgerLostError, RunLedger
from ensemble_ray.serve.driving.queue import RunQueue
from ensemble_ray.serve.driving.requests import EndpointLimits
from ensemble_ray.serve.driving.run_driver import ActiveRun, Outcome, RunsTeam
from ensemble_ray.serve.driving.schedules import Schedules
from ensemble_ray.serve.driving.usage import UsageWriter
from ensemble_ray.serve.driving.versions import WATCH_S, FileWatch, TeamVersions, count_by_version
from ensemble_ray.serve.driving.webhooks import NewDeliveries, WebhookRules, Webhooks
from ensemble_ray.serve.run_service import DEFAULT_PAGE, LARGEST_PAGE, RunTally, Sample
from ensemble_ray.serve.schemas import Refusal, RunStatus
from ensemble_ray.values.ids import new_run_id

M = TypeVar("M", bound=Callable[..., Coroutine[Any, Any, Any]])
_EXIT_REASONS = {RunStatus.FAILED: "error", RunStatus.REJECTED: "error"}
#: Interval of checks for waiting runs, s.
_LOOK_S = 1.0
_log = bounded_logger(__name__)
_RETRY_S = 5
#: How long an end is held back until the ledger has it, s.
_STORING_S = 20.0
_READ_S = 10.0


def _on_library_loop(method: M) -> M:
    async def call(*args: Any, **options: Any) -> Any:
        return await bridge(method(*args, **options))

    return cast("M", call)


def wire_event(event: WireEvent) -> schemas.RunEvent:
    cursor = None if event.cursor is None else str(event.cursor)
    return schemas.RunEvent.model_validate({"type": event.type, "data": dict(event.data), "cursor": cursor})


class DrivenRunViews:
    """Reads the states of runs. `active` contains a run until its end is in the ledger."""

    def __init__(
        self,
        ledger: RunLedger,
        active: Mapping[str, ActiveRun],
        store: Callable[[], RunStore],
        queues: Mapping[str, RunQueue] | None = None,
    ) -> None:
        self._ledger = ledger
        self._active = active
        self._store = store
        self._queues = {} if queues is None else queues

    def place(self, run_id: str) -> schemas.QueuePlace | None:
        active = self._active.get(run_id)
        queue = None if active is None else self._queues.get(active.entry.ensemble)
        return None if active is None or queue is None else queue.place(active)

    async def entry(self, run_id: str) -> LedgerEntry:
        active = self._active.get(run_id)
        if active is not None and active.is_kept:
            return active.entry
        found = await threads.run(self._ledger.find, run_id)
        if found is None:
            name = run_id[:200]
            raise Refusal(HTTPStatus.NOT_FOUND, "RUN_NOT_FOUND", f"There is no run '{name}'", run_id=name)
        return found

    async def detail(self, run_id: str) -> schemas.RunDetail:
        active = self._active.get(run_id)
        entry = await self.entry(run_id)
        ended = entry.outcome if active is None else active.ended
        if ended is not None:
            return ended
        active = self._active.get(run_id)
        if active is None:
            return run_driver.detail_of(entry, RunStatus.INTERRUPTED)
        if not active.has_begun:
            return run_driver.detail_of(entry, RunStatus.ACCEPTED).model_copy(update={"queue": self.place(run_id)})
        summary = await self._store().summary(run_id)
        status = RunStatus.RUNNING if summary is None else run_driver.STATUSES[summary.state]
        if status is not RunStatus.WAITING:
            status = RunStatus.RUNNING  # its end is not in the ledger yet
        return run_driver.detail_of(entry, status, await run_driver.open_reviews(self._store(), run_id))

    async def wait(self, run_id: str, timeout_s: float) -> schemas.RunDetail:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (active := self._active.get(run_id)) is not None and (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(left, _LOOK_S)):
                    await active.done.wait()
            except TimeoutError:
                if active.is_aside and (found := await self.detail(run_id)).status is RunStatus.WAITING:
                    return found
            else:
                if active.ended is not None:
                    return active.ended
        return await self.detail(run_id)

    async def page(self, wanted: schemas.RunFilter, cursor: str | None, size: int) -> schemas.RunPage:
        if cursor is not None and not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):  # noqa: PLR2004  SQLite's limit
            raise Refusal(HTTPStatus.BAD_REQUEST, "INVALID_CURSOR", "The cursor is not from a list of runs")
        size = min(size, LARGEST_PAGE)
        before = None if cursor is None else int(cursor)
        # Before the ledger, so that a run that ends in between is read again.
        before_read = set(self._active)
        entries = await self._entries(wanted, before, size + 1)
        shown: list[LedgerEntry] = []
        for each in entries[:size]:
            is_read = each.status.is_final or each.run_id in self._active or each.run_id not in before_read
            again = None if is_read else await threads.run(self._ledger.find, each.run_id)
            shown.append(again or each)
        runs = [
            run_driver.summary_of(each, is_active=each.run_id in self._active, place=self.place(each.run_id))
            for each in shown
        ]
        return schemas.RunPage(runs=runs, next_cursor=str(shown[-1].seq) if len(entries) > size else None)

    async def _entries(self, wanted: schemas.RunFilter, before: int | None, size: int) -> Sequence[LedgerEntry]:
        """Return entries, newest first, with ends that are not in the ledger yet."""
        if wanted.status is None or all(active.ended is None for active in self._active.values()):
            entries = await threads.run(self._ledger.page, wanted, before=before, size=size)
            return [self._with_end(each) for each in entries]
        found: list[LedgerEntry] = []
        all_states = wanted.model_copy(update={"status": None})
        while len(found) < size:
            some = await threads.run(self._ledger.page, all_states, before=before, size=LARGEST_PAGE)
            found += [each for each in map(self._with_end, some) if each.status is wanted.status]
            if len(some) < LARGEST_PAGE:
                break
            before = some[-1].seq
        return found[:size]

    def _with_end(self, entry: LedgerEntry) -> LedgerEntry:
        active = self._active.get(entry.run_id)
        if active is None or active.ended is None:
            return entry
        return replace(entry, status=active.ended.status, ended_at=active.ended.ended_at, outcome=active.ended)


class DrivenRuns:
    """The runs of all teams of an endpoint. `recover` resumes those of an earlier process."""

    def __init__(
        self,
        teams: Mapping[str, ServedTeam],
        runtime: Runtime,
        ledger: RunLedger,
        limits: EndpointLimits | None = None,
        *,
        tally: RunTally | None = None,
        tools: ToolCatalog | None = None,
        models: Mapping[str, ChatModel] | None = None,
        datasets: DatasetCatalog | None = None,
        webhooks: WebhookRules | None = None,
        on_lost: Callable[[RunExistsError], object] | None = None,
        deployed_at: float = 0.0,
        watch: bool = False,
        endpoint: str = "",
        schedules: Mapping[str, Mapping[str, Schedule]] = MappingProxyType({}),
        clock: Clock | None = None,
    ) -> None:
        """Prepare the runs of an endpoint of that name.

        `on_lost` is called on the library's loop when another process owns the ledger. `deployed_at` is a Unix time, s: a drain and the
        shares of versions of an earlier deployment end. `watch`: load changed team files. `schedules`: the operator's, by team and name.
        """
        self._ledger = ledger
        self._tools = tools or ToolCatalog()
        self._limits = limits or EndpointLimits()
        self._datasets = datasets or DatasetCatalog()
        self._runs_team = RunsTeam(runtime, self._limits, self._tools.entries, self._datasets)
        self._runtime = runtime
        self._tally = tally or RunTally()
        self._active: dict[str, ActiveRun] = {}
        self._queues: dict[str, RunQueue] = {}
        self._accepting = asyncio.Lock()
        self._on_lost = on_lost
        self._usage = UsageWriter(ledger, self._tally.charge, self._limits.quota_zone, lambda: self._store)
        self._ends = run_driver.EndWriter(ledger, self._usage, kept=self._limits.kept_runs, on_lost=self._lose)
        self._followed = SharedRecordReader(self._store)
        self._versions = TeamVersions(ledger, models or {}, deployed_at=deployed_at)
        self._watch = FileWatch() if watch else None
        self._watching: asyncio.Task[None] | None = None
        self._using = asyncio.Lock()
        self._drain = DrainSwitch(ledger, self._count_open, deployed_at=deployed_at, on_change=self._tally.set_draining)
        self._views = DrivenRunViews(ledger, self._active, lambda: self._store, self._queues)
        self._webhooks = Webhooks(
            *(ledger, webhooks or WebhookRules(), lambda: self._store),
            active=self._active,
            tally=self._tally,
            kept=self._limits.kept_runs,
            on_lost=self._lose,
        )
        self._operators_schedules = schedules
        self._schedules = Schedules(self, ledger, clock or SystemClock(), endpoint=endpoint, on_lost=self._lose)
        for name, team in teams.items():
            self.serve(name, team)

    def serve(self, name: str, team: ServedTeam) -> None:
        """Start to serve a team, or replace it for new runs."""
        self._versions.serve(name, team)
        limits, on_change = self._limits, partial(self._tally.set_gauges, name)
        self._queues.setdefault(name, RunQueue(limits.max_running, on_change, step_s=limits.priority_step_s))

    @property
    def _store(self) -> RunStore:
        return store_at(self._runtime.store_address)

    async def ensembles(self) -> Sequence[schemas.EnsembleInfo]:
        return [team.info for _, team in sorted(self._versions.teams.items())]

    async def metrics(self) -> Sequence[Sample]:
        return self._tally.samples()

    async def capabilities(self) -> schemas.Capabilities:
        teams = sorted(self._versions.teams.items())
        tasks = [task for _, team in teams for task in team.tasks]
        models = [
            schemas.ModelInfo(ensemble=name, name=each)
            for name, team in teams
            for each in sorted(team.definition.models)
        ]
        return schemas.Capabilities(tools=self._tools.infos, models=models, tasks=tasks)

    async def events(
        self, run_id: str, after: str | None = None, *, types: frozenset[str] | None = None
    ) -> AsyncGenerator[schemas.RunEvent]:
        follower = await self.follow(run_id, after, types)
        while not follower.is_over:
            for each in await self.read(follower, _READ_S):
                yield wire_event(each)

    @_on_library_loop
    async def wait(self, run_id: str, timeout_s: float) -> schemas.RunDetail:
        return await self._views.wait(run_id, timeout_s)

    @_on_library_loop
    async def get(self, run_id: str) -> schemas.RunDetail:
        return await self._views.detail(run_id)

    @_on_library_loop
    async def list(
        self, wanted: schemas.RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE
    ) -> schemas.RunPage:
        return await self._views.page(wanted, cursor, size)

    @_on_library_loop
    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[schemas.ReviewOfEnsemble]:
        return await run_driver.open_gates(self._store, self._active, ensembles)

    @_on_library_loop
    async def deliveries(self, run_id: str) -> Sequence[schemas.WebhookDelivery]:
        return await self._webhooks.deliveries(run_id)

    @_on_library_loop
    async def redeliver(self, run_id: str, delivery_id: str) -> schemas.WebhookDelivery:
        return await self._webhooks.redeliver(run_id, delivery_id)

    @_on_library_loop
    async def invoke_tool(self, name: str, body: schemas.ToolCallBody) -> schemas.ToolReply:
        return await self._tools.invoke(name, body.arguments)

    @_on_library_loop
    async def start(
        self, asked: schemas.NewRun, *, idempotency_key: str | None = None, account: Account | None = None
    ) -> schemas.AcceptedRun:
        return await self._accept(asked, idempotency_key, account=account)

    async def start_scheduled(
        self, asked: schemas.NewRun, *documents: Document, account: Account | None = None
    ) -> schemas.AcceptedRun:
        """Accept a run of a schedule, and store documents in the same transaction."""
        return await self._accept(asked, None, *documents, account=account)

    async def _accept(
        self, asked: schemas.NewRun, key: str | None, *documents: Document, account: Account | None = None
    ) -> schemas.AcceptedRun:
        name = requests.team_of(asked.ensemble, self._versions.teams).info.name
        try:
            # A repeated request has the same key, or the same id.
            team = self._versions.assign(name, asked.version, key or asked.run_id or new_run_id())
            tools, datasets = self._tools.entries, self._datasets
            wanted, unknown = await threads.run(
                requests.checked_entry, asked, team, self._limits, key, tools=tools, datasets=datasets
            )
        except Refusal:
            # The run was perhaps accepted with another version of the team.
            if (earlier := await self._find_repeated(asked, key)) is not None:
                return earlier
            raise
        async with self._accepting:
            found = await self._find_earlier(wanted.run_id, key)
            if found is not None:
                answer = requests.answer_repetition(found, wanted)
                if documents:  # the answer of an earlier write was lost
                    await threads.run(self._ledger.put, *documents)
                return answer.model_copy(update={"queue": self._views.place(found.run_id)})
            if unknown is not None:
                raise unknown
            self._webhooks.check(asked, team.info.name)
            self._drain.check()
            self._versions.check_loaded(team)
            queue = self._queues[team.info.name]
            if queue.running + queue.queued >= self._limits.max_running + self._limits.max_queued:
                text = f"The team '{team.info.name}' has {queue.running} running and {queue.queued} queued runs: try again later"
                raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "QUEUE_FULL", text, retry_after_s=_RETRY_S)
            if account is not None:
                options = requests.options_of(asked, team.definition, self._limits)
                self._usage.begin(account, wanted.run_id, options, team.definition)
            self._active[wanted.run_id] = active = self._activate(wanted)
            try:
                await self._usage.add(wanted.run_id, partial(self._ledger.add, wanted, *documents))
            except BaseException:
                del self._active[wanted.run_id]
                raise
            self._begin(active, is_recovered=False)
        await asyncio.sleep(0)  # the run enters its queue
        return requests.answer_accepted(wanted).model_copy(update={"queue": queue.place(active)})

    async def _find_earlier(self, run_id: str, key: str | None) -> LedgerEntry | None:
        found = None if key is None else await threads.run(self._ledger.find_key, key)
        return found or await threads.run(self._ledger.find, run_id)

    async def _find_repeated(self, asked: schemas.NewRun, key: str | None) -> schemas.AcceptedRun | None:
        found = await self._find_earlier(asked.run_id or "", key)
        is_same = found is not None and found.digest == requests.digest_of(asked, found.ensemble)
        return requests.answer_accepted(found) if found is not None and is_same else None

    def _activate(self, entry: LedgerEntry) -> ActiveRun:
        team = self._versions.recovered(entry.ensemble, entry.version)
        allowance = self._usage.allowance_of(entry.run_id)
        return ActiveRun(entry=entry, team=team, asked=entry.request or schemas.NewRun(), allowance=allowance)

    def standing(self, account: Account) -> Standing:
        """Return the quotas and the usage of a key. Thread-safe."""
        return self._usage.standing(account)

    def _begin(self, active: ActiveRun, *, is_recovered: bool) -> None:
        active.is_kept = True
        active.has_begun = active.entry.status is not RunStatus.ACCEPTED
        self._active[active.entry.run_id] = active
        active.task = asyncio.create_task(self._drive(active, is_recovered=is_recovered))
        self._webhooks.watch(active)

    async def _drive(self, active: ActiveRun, *, is_recovered: bool) -> None:
        """Run the run when its turn comes, and store its end."""
        run_id = active.entry.run_id
        try:
            outcome = await self._take_turn(active, is_recovered=is_recovered)
            while outcome.status is RunStatus.WAITING:  # for a person, outside of the queue
                await threads.run(self._ledger.note, run_id, RunStatus.WAITING)
                with self._queues[active.entry.ensemble].aside(active):
                    await self._runs_team.wait_for_decision(active)
                outcome = await self._take_turn(active, is_recovered=True)
        except LedgerLostError as error:  # the new owner drives the run
            self._lose(error)
            return
        except Exception as error:  # noqa: BLE001  waiting clients must get an answer after any defect
            _log.error("Run %s cannot be driven: %s", run_id, describe(error))
            outcome = run_driver.outcome_of_defect(error, run_id)
        self._tally.end(active.entry.ensemble, outcome, active.entry.version)
        ended = run_driver.detail_of(active.entry, outcome)
        await self._usage.charge(run_id, active.team.definition, ended)
        await self._store_end(active, ended)

    async def _store_end(self, active: ActiveRun, ended: schemas.RunDetail) -> None:
        """Store the end of a run, and report it when it is stored, or after `_STORING_S`."""
        run_id = active.entry.run_id
        storing = asyncio.create_task(self._write_end(active.entry, ended))
        new: NewDeliveries | None = None
        try:
            stored, _ = await asyncio.wait({storing}, timeout=_STORING_S)
            if stored and (new := storing.result()) is not None:
                del self._active[run_id]  # otherwise `active` reports the end
            active.ended = ended
            self._followed.drop(run_id)
            active.live.close()
            active.done.set()
            self._schedules.wake()
            if not stored and (new := await storing) is not None:
                del self._active[run_id]
        finally:
            storing.cancel()
        if new is not None:  # receivers that look at the run find its end
            self._webhooks.begin(new)

    async def _write_end(self, entry: LedgerEntry, ended: schemas.RunDetail) -> NewDeliveries | None:
        """Store the end of a run, and return its webhooks, which are stored with it; None: the ledger does not accept it."""
        new = await self._webhooks.end_of(entry, entry.request, ended)
        return new if await self._ends.write(entry.run_id, ended, *new.documents) else None

    def _lose(self, error: RunExistsError) -> None:
        _log.error("Another process drives the runs of this endpoint: %s", describe(error))
        if self._on_lost is not None:
            self._on_lost(error)

    async def _take_turn(self, active: ActiveRun, *, is_recovered: bool) -> Outcome:
        queue = self._queues[active.entry.ensemble]
        if not await queue.acquire(active):
            if not is_recovered:
                return Outcome(status=RunStatus.CANCELLED)
            return await self._runs_team.carry_out(active, is_recovered=True)
        active.has_begun = True
        try:
            await threads.run(self._ledger.note, active.entry.run_id, RunStatus.RUNNING)
            return await self._runs_team.carry_out(active, is_recovered=is_recovered)
        finally:
            queue.release(active)

    @_on_library_loop
    async def recover(self) -> int:
        """Resume all accepted runs that have not ended, and open the schedules; return the number of runs."""
        entries = await threads.run(self._ledger.list_unfinished)
        await self._usage.load(each.run_id for each in entries)
        await self._webhooks.recover()
        await self._drain.restore()
        await self._versions.restore(lambda: {(each.ensemble, each.version) for each in entries})
        if self._watch is not None:
            self._watching = asyncio.create_task(self._watch_files(self._watch))
        teams = self._versions.teams
        known = [self._activate(each) for each in entries if each.ensemble in teams]
        # Those that had begun first, and then the others in the order of their queue.
        known.sort(
            key=lambda each: (
                each.entry.status is RunStatus.ACCEPTED,
                self._queues[each.entry.ensemble].rank(each),
                each.entry.seq,
            )
        )
        for active in known:
            self._begin(active, is_recovered=True)
        if left := [each for each in entries if each.ensemble not in teams]:
            _log.warning("%d runs belong to teams that this endpoint no longer serves. They are not resumed", len(left))
            for entry in left:
                with contextlib.suppress(RecordError):  # the ledger may lack an end that the record has
                    outcome = await run_driver.recorded_outcome(self._store, entry.run_id)
                    if outcome is not None:
                        ended = run_driver.detail_of(entry, outcome)
                        await self._usage.charge(entry.run_id, None, ended)
                        new = await self._write_end(entry, ended)
                        self._webhooks.begin(new or NewDeliveries())
        await self._use_versions()
        return len(known)

    @_on_library_loop
    async def close(self) -> None:
        """Release the ledger. The next process resumes the open runs."""
        self._drain.close()
        await self._schedules.close()
        tasks = [active.task for active in self._active.values() if active.task is not None]
        tasks += [] if self._watching is None else [self._watching]
        for task in tasks:
            task.cancel()
        tasks += self._webhooks.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await threads.run(self._ledger.close)

    def _open_runs(self) -> Sequence[ActiveRun]:
        return [active for active in self._active.values() if active.ended is None]

    def _count_open(self) -> schemas.OpenRuns:
        found = self._open_runs()
        waiting = sum(active.is_aside for active in found)
        running = sum(active.has_begun and not active.is_aside for active in found)
        return schemas.OpenRuns(accepted=len(found) - running - waiting, running=running, waiting=waiting)

    @_on_library_loop
    async def drain_info(self) -> schemas.DrainInfo:
        return self._drain.info()

    @_on_library_loop
    async def drain(self, asked: schemas.NewDrain, *, by: str = "") -> schemas.DrainInfo:
        async with self._accepting:  # a run that is being accepted counts as open
            await self._drain.begin(asked.timeout_s, by)
        return self._drain.info()

    @_on_library_loop
    async def end_drain(self) -> schemas.DrainInfo:
        await self._drain.end()
        return self._drain.info()

    def _used_versions(self) -> Sequence[tuple[str, str | None]]:
        return [(active.entry.ensemble, active.entry.version) for active in self._open_runs()]

    def _list_versions(self, ensemble: str) -> schemas.TeamVersionList:
        counts = count_by_version(self._used_versions(), ensemble)
        return schemas.TeamVersionList(ensemble=ensemble, versions=self._versions.infos(ensemble, counts))

    async def _use_versions(self) -> None:
        """Report the shares, and begin the schedules of the operator and of the version of each team that gets most new runs."""
        async with self._using:  # so that the newest shares are the last ones
            for name, shares in self._versions.shares().items():
                self._tally.set_shares(name, shares)
            for name, team in self._versions.teams.items():
                declared = {**team.definition.schedules, **self._operators_schedules.get(name, {})}
                await self._schedules.declare(name, declared)

    @_on_library_loop
    async def versions(self, ensemble: str) -> schemas.TeamVersionList:
        return self._list_versions(ensemble)

    @_on_library_loop
    async def load_version(self, ensemble: str, asked: schemas.NewVersion) -> schemas.TeamVersionList:
        await self._versions.add(ensemble, asked.share, self._used_versions)
        await self._use_versions()
        return self._list_versions(ensemble)

    @_on_library_loop
    async def share_version(self, ensemble: str, version: str, asked: schemas.NewShare) -> schemas.TeamVersionList:
        await self._versions.share(ensemble, version, asked.share, self._used_versions)
        await self._use_versions()
        return self._list_versions(ensemble)

    async def _watch_files(self, watch: FileWatch) -> None:
        while True:
            try:
                await self._versions.load_changed(watch, self._used_versions)
                await self._use_versions()
            except LedgerLostError as error:
                self._lose(error)
                return
            except Exception as error:  # noqa: BLE001  the next look may succeed
                _log.warning("Changed team files cannot be loaded: %s", describe(error))
            await asyncio.sleep(WATCH_S)

    def is_open(self, run_id: str) -> bool:
        active = self._active.get(run_id)
        return active is not None and active.ended is None

    async def status_of(self, run_id: str) -> schemas.RunStatus | None:
        """Return the state of a run as in lists; None: the ledger no longer contains it."""
        active = self._active.get(run_id)
        if active is not None and active.ended is not None:
            return active.ended.status
        entry = await threads.run(self._ledger.find, run_id)
        return None if entry is None else run_driver.summary_of(entry, is_active=active is not None).status

    @_on_library_loop
    async def schedules(self, ensembles: frozenset[str] | None = None) -> Sequence[schemas.ScheduleInfo]:
        return await self._schedules.infos(ensembles)

    @_on_library_loop
    async def schedule(self, ensemble: str, name: str) -> schemas.ScheduleDetail:
        return await self._schedules.detail(ensemble, name)

    @_on_library_loop
    async def pause_schedule(self, ensemble: str, name: str, *, is_paused: bool) -> schemas.ScheduleInfo:
        return await self._schedules.set_paused(ensemble, name, is_paused=is_paused)

    @_on_library_loop
    async def run_schedule(
        self, ensemble: str, name: str, *, run_id: str, user: str | None = None, account: Account | None = None
    ) -> schemas.AcceptedRun:
        return await self._schedules.run_now(ensemble, name, run_id, user=user, account=account)

    async def _get_open_run(self, run_id: str) -> ActiveRun:
        active = self._active.get(run_id)
        if active is None or active.ended is not None:
            text = f"Run '{run_id}' is over: {(await self._views.detail(run_id)).status}"
            raise Refusal(HTTPStatus.CONFLICT, "RUN_OVER", text, run_id=run_id)
        return active

    @_on_library_loop
    async def cancel(self, run_id: str) -> schemas.RunDetail:
        active = await self._get_open_run(run_id)
        self._queues[active.entry.ensemble].cancel(active)
        if active.run is not None:
            await active.run.acancel()
        return await self._views.detail(run_id)

    @_on_library_loop
    async def inject(self, run_id: str, directive: schemas.NewDirective, *, by: str = "") -> schemas.RunDetail:
        await run_driver.inject_directive(await self._get_open_run(run_id), directive, by)
        return await self._views.detail(run_id)

    @_on_library_loop
    async def switch_model(self, run_id: str, model: schemas.NewModel, *, by: str = "") -> schemas.RunDetail:
        await run_driver.switch_run_model(await self._get_open_run(run_id), model, by)
        return await self._views.detail(run_id)

    @_on_library_loop
    async def decide(
        self,
        run_id: str,
        gate_id: str,
        decision: schemas.NewDecision,
        *,
        by: str = "",
        roles: frozenset[str] | None = None,
    ) -> schemas.DecidedReview | schemas.ReviewConflict:
        await self._views.entry(run_id)
        active = self._active.get(run_id)
        decided = await run_driver.decide_gate(
            *(self._store, run_id, gate_id, decision, by),
            roles=roles,
            find_type=lambda key: None if active is None else self._runs_team.find_output_type(active, key),
        )
        # A run that did not start here may be recorded with another team.
        if active is not None and active.run is not None:
            active.decided.set()
        return decided

    @_on_library_loop
    async def follow(self, run_id: str, after: str | None, types: frozenset[str] | None = None) -> RunFollower:
        """Return a reader of events for a client in another process."""
        await self._views.entry(run_id)
        try:
            cursor = None if after is None else Cursor.parse(after)
        except ValueError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, "INVALID_CURSOR", str(error), run_id=run_id) from None

        async def outcome() -> str | None:
            active = self._active.get(run_id)
            if active is not None and active.ended is None:
                return None
            status = (await self._views.detail(run_id)).status
            return _EXIT_REASONS.get(status, status.value) if status.is_final else None

        active = self._active.get(run_id)
        live = None if active is None else active.live
        return RunFollower(self._followed, run_id, after=cursor, live=live, outcome=outcome, types=types)

    @_on_library_loop
    async def read(self, follower: RunFollower, timeout_s: float) -> Sequence[WireEvent]:
        """Return the next events of a reader. With the last event, the run's outcome is stored."""
        messages = await follower.read(timeout_s)
        active = self._active.get(follower.run_id)
        if active is not None and messages and messages[-1].type == LAST_TYPE:
            await active.done.wait()  # later requests must get the result
        return messages
