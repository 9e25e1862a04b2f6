"""DrivenRuns: the `RunService` of one process, which drives all runs of an endpoint.

In: requests. Out: runs of the teams, on the runtime that it is given, and what is known of them. Rules: what was accepted is in the ledger
before the client hears of it, and is run after a restart, from where its record stands; a client that goes away ends nothing; what
happened in a run is read from its record. On the library's loop, whatever loop asks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import RecordError
from ensemble_ray.errors.texts import describe
from ensemble_ray.events.messages import LAST_TYPE, Cursor, WireEvent
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import SystemClock, bridge, threads
from ensemble_ray.record.following import RunFollower, SharedEnds
from ensemble_ray.record.opening import store_at
from ensemble_ray.serve.catalog import DatasetCatalog, ToolCatalog
from ensemble_ray.serve.driving.active import (
    ActiveRun,
    Outcome,
    Turns,
    detail_of,
    open_reviews,
    outcome_of_defect,
    recorded_outcome,
    status_of_state,
    summary_of,
)
from ensemble_ray.serve.driving.ledger import LedgerLostError
from ensemble_ray.serve.driving.requests import (
    EndpointLimits,
    answer_accepted,
    answer_repetition,
    checked_entry,
    team_of,
)
from ensemble_ray.serve.driving.run_driver import (
    KeptEnds,
    RunsTeam,
    decide_gate,
    inject_directive,
    open_gates,
    switch_run_model,
)
from ensemble_ray.serve.metrics import RunTally, Sample
from ensemble_ray.serve.run_service import DEFAULT_PAGE, LARGEST_PAGE
from ensemble_ray.serve.schemas import (
    AcceptedRun,
    Capabilities,
    EnsembleInfo,
    ModelInfo,
    NewRun,
    Refusal,
    RunDetail,
    RunEvent,
    RunFilter,
    RunPage,
    RunStatus,
    ToolCallBody,
    ToolReply,
)

if TYPE_CHECKING:
    from ensemble_ray import ChatModel, RunExistsError, Runtime
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.serve.driving.ledger import LedgerEntry
    from ensemble_ray.serve.driving.requests import RunLedger
    from ensemble_ray.serve.schemas import (
        DecidedReview,
        NewDecision,
        NewDirective,
        NewModel,
        ReviewConflict,
        ReviewOfEnsemble,
    )
    from ensemble_ray.serve.team import ServedTeam
    from ensemble_ray.values.task_output import OutputType


_EXIT_REASONS = {RunStatus.FAILED: "error", RunStatus.REJECTED: "error"}


def open_follower(
    followed: SharedEnds,
    run_id: str,
    after: str | None,
    *,
    active: ActiveRun | None,
    status: Callable[[], Awaitable[RunStatus]],
) -> RunFollower:
    """Return a reader of a run's events.

    Args:
        followed: The records that are read by several.
        run_id: The run's id.
        after: What the client has had; None: nothing.
        active: The run, where it is not over.
        status: Returns how it stands.

    Raises:
        Refusal: the cursor is none.
    """
    try:
        cursor = None if after is None else Cursor.parse(after)
    except ValueError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, "INVALID_CURSOR", str(error), run_id=run_id) from None

    async def outcome() -> str | None:
        found = await status()
        return _EXIT_REASONS.get(found, found.value) if found.is_final else None

    live = None if active is None else active.live
    return RunFollower(followed, run_id, after=cursor, live=live, outcome=outcome)


def wire_event(event: WireEvent) -> RunEvent:
    """Return an event as routes give it on."""
    cursor = None if event.cursor is None else str(event.cursor)
    return RunEvent.model_validate({"type": event.type, "data": dict(event.data), "cursor": cursor})


#: How often a run that somebody waits for is looked at, whether it waits for a person, s.
_LOOK_S = 1.0


class DrivenRunViews:
    """The runs of one process as clients see them."""

    def __init__(self, ledger: RunLedger, active: Mapping[str, ActiveRun], store: Callable[[], RunStore]) -> None:
        """Make it.

        Args:
            ledger: What was accepted.
            active: Runs that are not over, from before they are in the ledger until their outcome is there.
            store: Returns the store of their records.
        """
        self._ledger = ledger
        self._active = active
        self._store = store

    async def entry(self, run_id: str) -> LedgerEntry:
        """Return a run as it was accepted, with its outcome when it has ended.

        Raises:
            Refusal: there is no such run.
        """
        active = self._active.get(run_id)
        if active is not None and active.is_kept:
            return active.entry
        found = await threads.run(self._ledger.find, run_id)
        if found is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND, "RUN_NOT_FOUND", f"There is no run '{run_id[:200]}'", run_id=run_id[:200]
            )
        return found

    async def detail(self, run_id: str) -> RunDetail:
        """Return a run as it stands.

        Raises:
            Refusal: there is no such run.
        """
        active = self._active.get(run_id)
        entry = await self.entry(run_id)
        ended = entry.outcome if active is None else active.ended
        if ended is not None:
            return ended
        active = self._active.get(run_id)
        if active is None:
            return detail_of(entry, status=RunStatus.INTERRUPTED)
        if not active.has_begun:
            return detail_of(entry, status=RunStatus.ACCEPTED)
        summary = await self._store().summary(run_id)
        status = RunStatus.RUNNING if summary is None else status_of_state(summary.state)
        if status is not RunStatus.WAITING:
            status = RunStatus.RUNNING  # its end is not kept yet
        return detail_of(entry, status=status, reviews=await open_reviews(self._store(), run_id))

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        """Return a run when it ended, waits for a person, or the time is up.

        Raises:
            Refusal: there is no such run.
        """
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

    async def page(self, wanted: RunFilter, cursor: str | None, size: int) -> RunPage:
        """Return runs, newest first.

        Raises:
            Refusal: the cursor is none that a page gave.
        """
        if cursor is not None and not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):  # noqa: PLR2004  as SQLite counts
            raise Refusal(HTTPStatus.BAD_REQUEST, "INVALID_CURSOR", "The cursor is none that a list gave")
        size = min(size, LARGEST_PAGE)
        before = None if cursor is None else int(cursor)
        there = set(self._active)  # before the look: one that ends meanwhile has its outcome at the next one
        entries = await self._entries(wanted, before, size + 1)
        shown = [await self._read_again(each, there) for each in entries[:size]]
        more = str(shown[-1].seq) if len(entries) > size else None
        return RunPage(
            runs=[summary_of(each, is_active=each.run_id in self._active) for each in shown], next_cursor=more
        )

    async def _entries(self, wanted: RunFilter, before: int | None, size: int) -> Sequence[LedgerEntry]:
        """Return entries, newest first; a run whose end the ledger does not have yet is one that ended."""
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

    async def _read_again(self, entry: LedgerEntry, there: set[str]) -> LedgerEntry:
        """Return an entry with the outcome that came since it was read."""
        if entry.status.is_final or entry.run_id in self._active or entry.run_id not in there:
            return entry
        return await threads.run(self._ledger.find, entry.run_id) or entry


_log = bounded_logger(__name__)
#: After how long a client that was refused for want of room may ask again, s.
_RETRY_S = 5
#: For how long the end of a run is not told because it is not kept yet, s.
_KEEPING_S = 20.0
#: How long a reader of events waits in one go, s.
_READ_S = 10.0


class DrivenRuns:
    """The runs of all teams of an endpoint."""

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
        on_lost: Callable[[RunExistsError], object] | None = None,
    ) -> None:
        """Make it; `recover` begins what was left.

        Args:
            teams: By the names that clients know them by.
            runtime: Where runs live.
            ledger: What was accepted.
            limits: What is allowed; None: the defaults.
            tools: Those that clients may call, and tasks of requests may name; None: there are none.
            models: Those that runs of all teams can be told to ask, by name, beside the teams' own.
            datasets: Those that requests may map; None: there are none.
            tally: Counts what happens; None: one of its own.
            on_lost: Called on the library's loop when another process has the ledger, and drives the runs from then on.
        """
        self._teams: dict[str, ServedTeam] = {}
        self._models = models or {}
        self._ledger = ledger
        self._tools = tools or ToolCatalog()
        self._limits = limits or EndpointLimits()
        self._datasets = datasets or DatasetCatalog()
        self._runs_team = RunsTeam(runtime, self._limits, self._tools.entries, self._datasets)
        self._runtime = runtime
        self._tally = tally or RunTally()
        self._active: dict[str, ActiveRun] = {}
        self._turns: dict[str, Turns] = {}
        self._accepting = asyncio.Lock()
        self._on_lost = on_lost
        self._ends = KeptEnds(ledger, kept=self._limits.kept_runs, on_lost=self._lose)
        self._followed = SharedEnds(self._store)
        self._views = DrivenRunViews(ledger, self._active, lambda: self._store)
        for name, team in teams.items():
            self.serve(name, team)

    def serve(self, name: str, team: ServedTeam) -> None:
        """Let requests run a team from now on; runs of another one of that name are not concerned."""
        self._teams[name] = team.with_models(self._models)
        self._turns.setdefault(name, Turns(self._limits.max_running, partial(self._tally.stand, name)))

    @property
    def _store(self) -> RunStore:
        return store_at(self._runtime.store_address)

    # The port. Each call goes to the library's loop.

    async def ensembles(self) -> Sequence[EnsembleInfo]:
        """Return the teams, by name."""
        return [self._teams[name].info for name in sorted(self._teams)]

    async def metrics(self) -> Sequence[Sample]:
        """Return what runs did and cost; see `RunService.metrics`."""
        return self._tally.samples()

    async def start(self, asked: NewRun, *, idempotency_key: str | None = None) -> AcceptedRun:
        """Take a run; see `RunService.start`."""
        return await bridge(self._start(asked, idempotency_key))

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        """Return the run when it ended or the time is up; see `RunService.wait`."""
        return await bridge(self._views.wait(run_id, timeout_s))

    async def get(self, run_id: str) -> RunDetail:
        """Return the run as it stands; see `RunService.get`."""
        return await bridge(self._views.detail(run_id))

    async def list(self, wanted: RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE) -> RunPage:
        """Return a page of runs; see `RunService.list`."""
        return await bridge(self._views.page(wanted, cursor, size))

    async def events(self, run_id: str, after: str | None = None) -> AsyncGenerator[RunEvent]:
        """Return what happens in a run; see `RunService.events`."""
        follower = await self.follow(run_id, after)
        while not follower.is_over:
            for each in await self.read(follower, _READ_S):
                yield wire_event(each)

    async def cancel(self, run_id: str) -> RunDetail:
        """Ask the run to end; see `RunService.cancel`."""
        return await bridge(self._cancel(run_id))

    async def inject(self, run_id: str, directive: NewDirective, *, by: str = "") -> RunDetail:
        """Tell the tasks of a run that start from now on; see `RunService.inject`."""
        return await bridge(self._inject(run_id, directive, by))

    async def switch_model(self, run_id: str, model: NewModel, *, by: str = "") -> RunDetail:
        """Let the tasks of a run ask another model; see `RunService.switch_model`."""
        return await bridge(self._switch_model(run_id, model, by))

    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[ReviewOfEnsemble]:
        """Return the gates at which runs wait; see `RunService.reviews`."""
        return await bridge(open_gates(self._store, self._active, ensembles))

    async def decide(
        self, run_id: str, gate_id: str, decision: NewDecision, *, by: str = ""
    ) -> DecidedReview | ReviewConflict:
        """Decide at a gate; see `RunService.decide`."""
        return await bridge(self._decide(run_id, gate_id, decision, by))

    async def capabilities(self) -> Capabilities:
        """Return what is there; see `RunService.capabilities`."""
        teams = sorted(self._teams.items())
        tasks = [task for _, team in teams for task in team.tasks]
        models = [
            ModelInfo(ensemble=name, name=each) for name, team in teams for each in sorted(team.definition.models)
        ]
        return Capabilities(tools=self._tools.infos, models=models, tasks=tasks)

    async def invoke_tool(self, name: str, body: ToolCallBody) -> ToolReply:
        """Call a tool once; see `RunService.invoke_tool`."""
        return await bridge(self._tools.invoke(name, body.arguments))

    # What a process elsewhere reads events with.

    async def follow(self, run_id: str, after: str | None) -> RunFollower:
        """Return a reader of a run's events.

        Raises:
            Refusal: there is no such run, or the cursor is none.
        """
        return await bridge(self._follow(run_id, after))

    async def read(self, follower: RunFollower, timeout_s: float) -> Sequence[WireEvent]:
        """Return the next events of a reader; when the last one is among them, the run's outcome is kept."""
        return await bridge(self._read(follower, timeout_s))

    async def recover(self) -> int:
        """Go on with everything that was accepted and has not ended; return how many runs that are."""
        return await bridge(self._recover())

    async def close(self) -> None:
        """Let go of the ledger; runs that have not ended are gone on with after the next start."""
        await bridge(self._close())

    # On the library's loop.

    async def _start(self, asked: NewRun, key: str | None) -> AcceptedRun:
        team = team_of(asked.ensemble, self._teams)
        wanted, unknown = await threads.run(
            checked_entry, asked, team, self._limits, key, tools=self._tools.entries, datasets=self._datasets
        )
        async with self._accepting:
            found = None if key is None else await threads.run(self._ledger.find_key, key)
            found = found or await threads.run(self._ledger.find, wanted.run_id)
            if found is not None:
                return answer_repetition(found, wanted)
            if unknown is not None:
                raise unknown
            turns = self._turns[team.info.name]
            if turns.running + turns.queued >= self._limits.max_running + self._limits.max_queued:
                text = f"The team '{team.info.name}' has {turns.running} runs and {turns.queued} that wait: ask again later"
                raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "QUEUE_FULL", text, retry_after_s=_RETRY_S)
            self._active[wanted.run_id] = active = self._activate(wanted)
            try:
                await threads.run(self._ledger.add, wanted)
            except BaseException:
                del self._active[wanted.run_id]
                raise
            self._begin(active, is_recovered=False)
        return answer_accepted(wanted)

    def _activate(self, entry: LedgerEntry) -> ActiveRun:
        team = self._teams[entry.ensemble]
        return ActiveRun(entry=entry, team=team, asked=entry.request or NewRun())

    def _begin(self, active: ActiveRun, *, is_recovered: bool) -> None:
        """Have a run done that is in the ledger."""
        active.is_kept = True
        active.has_begun = active.entry.status is not RunStatus.ACCEPTED
        self._active[active.entry.run_id] = active
        active.task = asyncio.create_task(self._drive(active, is_recovered=is_recovered))

    async def _drive(self, active: ActiveRun, *, is_recovered: bool) -> None:
        """Run it when its turn comes, and keep what became of it."""
        run_id = active.entry.run_id
        try:
            outcome = await self._take_turn(active, is_recovered=is_recovered)
            while outcome.status is RunStatus.WAITING:  # for people, and so without a place among the runs of its team
                await threads.run(self._ledger.note, run_id, RunStatus.WAITING)
                with self._turns[active.entry.ensemble].aside(active):
                    await self._runs_team.wait_for_decision(active)
                outcome = await self._take_turn(active, is_recovered=True)
        except LedgerLostError as error:  # what becomes of it is its new driver's business
            self._lose(error)
            return
        except Exception as error:  # noqa: BLE001  whatever fails here, whoever waits for the run is told
            _log.error("Run %s cannot be driven: %s", run_id, describe(error))
            outcome = outcome_of_defect(error, run_id)
        self._tally.end(active.entry.ensemble, outcome)
        ended = detail_of(
            active.entry,
            status=outcome.status,
            ended_at=datetime.fromtimestamp(SystemClock().now(), UTC),
            outcome=outcome,
        )
        await self._keep_end(active, ended)

    async def _keep_end(self, active: ActiveRun, ended: RunDetail) -> None:
        """Keep how a run ended, and tell whoever waits for it: as soon as it is kept, or when that takes long."""
        run_id = active.entry.run_id
        keeping = asyncio.create_task(self._ends.keep(run_id, ended))
        try:
            kept, _ = await asyncio.wait({keeping}, timeout=_KEEPING_S)
            if kept and keeping.result():
                del self._active[run_id]  # else it is told from here, as the ledger knows no better
            active.ended = ended
            self._followed.forget(run_id)
            active.live.close()
            active.done.set()
            if not kept and await keeping:
                del self._active[run_id]
        finally:
            keeping.cancel()

    def _lose(self, error: RunExistsError) -> None:
        """Take notice that another process drives the runs from now on."""
        _log.error("The runs of this endpoint are driven elsewhere now: %s", describe(error))
        if self._on_lost is not None:
            self._on_lost(error)

    async def _take_turn(self, active: ActiveRun, *, is_recovered: bool) -> Outcome:
        """Carry a run out when it is its turn."""
        turns = self._turns[active.entry.ensemble]
        if not await turns.acquire(active):
            return await self._runs_team.end_waiting(active) if is_recovered else Outcome(status=RunStatus.CANCELLED)
        active.has_begun = True
        try:
            await threads.run(self._ledger.note, active.entry.run_id, RunStatus.RUNNING)
            return await self._runs_team.carry_out(active, is_recovered=is_recovered)
        finally:
            turns.release()

    async def _recover(self) -> int:
        entries = await threads.run(self._ledger.list_unfinished)
        known = [each for each in entries if each.ensemble in self._teams]
        for entry in known:
            self._begin(self._activate(entry), is_recovered=True)
        if left := [each for each in entries if each.ensemble not in self._teams]:
            _log.warning("%d runs of teams that are served no more are left as they stand", len(left))
            for entry in left:
                await self._keep_recorded_end(entry)
        return len(known)

    async def _keep_recorded_end(self, entry: LedgerEntry) -> None:
        """Keep the end of a run that ended while the ledger could not keep it, or nobody drove it: its record says how."""
        with contextlib.suppress(RecordError):  # what is damaged is left as it stands
            outcome = await recorded_outcome(self._store, entry.run_id)
            if outcome is not None:
                now = datetime.fromtimestamp(SystemClock().now(), UTC)
                ended = detail_of(entry, status=outcome.status, ended_at=now, outcome=outcome)
                await self._ends.keep(entry.run_id, ended)

    async def _close(self) -> None:
        tasks = [active.task for active in self._active.values() if active.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await threads.run(self._ledger.close)

    async def _going_on(self, run_id: str) -> ActiveRun:
        """Return a run that is not over.

        Raises:
            Refusal: there is no such run, or it is over.
        """
        active = self._active.get(run_id)
        if active is None or active.ended is not None:
            text = f"Run '{run_id}' is over: {(await self._views.detail(run_id)).status}"
            raise Refusal(HTTPStatus.CONFLICT, "RUN_OVER", text, run_id=run_id)
        return active

    async def _cancel(self, run_id: str) -> RunDetail:
        active = await self._going_on(run_id)
        self._turns[active.entry.ensemble].cancel(active)
        if active.run is not None:
            await active.run.acancel()
        return await self._views.detail(run_id)

    async def _inject(self, run_id: str, directive: NewDirective, by: str) -> RunDetail:
        await inject_directive(await self._going_on(run_id), directive, by)
        return await self._views.detail(run_id)

    async def _switch_model(self, run_id: str, model: NewModel, by: str) -> RunDetail:
        await switch_run_model(await self._going_on(run_id), model, by)
        return await self._views.detail(run_id)

    async def _decide(
        self, run_id: str, gate_id: str, decision: NewDecision, by: str
    ) -> DecidedReview | ReviewConflict:
        await self._views.entry(run_id)
        active = self._active.get(run_id)

        def find_type(key: str) -> OutputType | None:
            return None if active is None else self._runs_team.find_output_type(active, key)

        decided = await decide_gate(self._store, run_id, gate_id, decision, by, find_type=find_type)
        if active is not None and active.run is not None:  # else its team may be another one than that which began it
            active.decided.set()
        return decided

    async def _follow(self, run_id: str, after: str | None) -> RunFollower:
        await self._views.entry(run_id)

        async def status() -> RunStatus:
            active = self._active.get(run_id)
            is_going_on = active is not None and active.ended is None
            return RunStatus.RUNNING if is_going_on else (await self._views.detail(run_id)).status

        return open_follower(self._followed, run_id, after, active=self._active.get(run_id), status=status)

    async def _read(self, follower: RunFollower, timeout_s: float) -> Sequence[WireEvent]:
        messages = await follower.read(timeout_s)
        active = self._active.get(follower.run_id)
        if active is not None and messages and messages[-1].type == LAST_TYPE:
            await active.done.wait()  # whoever asks for the run next has its result
        return messages
