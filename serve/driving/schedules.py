"""Starts the runs of schedules in the process that drives the runs of an endpoint.

A run is stored in one transaction with the state of its schedule, so that a crash neither loses nor repeats it. All methods run on
the library's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from pydantic import JsonValue

from ensemble_ray import RunExistsError, Schedule
from ensemble_ray.access.quotas import Account
from ensemble_ray.definition.schedule import zone_of
from ensemble_ray.errors import EnsembleError
from ensemble_ray.errors.texts import describe
from ensemble_ray.ports import Clock
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve import schemas
from ensemble_ray.serve.driving import schedule_rules as rules
from ensemble_ray.serve.driving.ledger import Document, LedgerLostError, RunLedger
from ensemble_ray.serve.driving.schedule_rules import Fire, ScheduleState, SeenFile
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.attachments import MOST_BYTES, Attachment
from ensemble_ray.values.value import utc_of

_log = bounded_logger(__name__)
#: Kinds of documents: states by TEAM/SCHEDULE, stamps of files by TEAM/SCHEDULE/FILE.
STATES, FILES = "schedule", "schedule_file"
#: The tag with the name of the schedule.
TAG = "schedule"
#: Longest sleep. The computer's clock may be set meanwhile.
_REST = timedelta(seconds=60)
_RETRY = timedelta(seconds=5)
#: How long the loop waits for a list of files, which the next look receives otherwise, and for the content of a file, s.
_LIST_S, _READ_S = 2.0, 30.0
#: Files whose runs are started in one look.
_MOST_FILES = 100
#: Refusals after which the same request may be accepted later.
_TEMPORARY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class EndpointRuns(Protocol):
    """The runs of the endpoint, as schedules need them."""

    async def start_scheduled(
        self, asked: schemas.NewRun, *documents: Document, account: Account | None = None
    ) -> schemas.AcceptedRun:
        """Accept a run, and store documents in the same transaction. Raises `Refusal`."""
        ...

    async def cancel(self, run_id: str) -> schemas.RunDetail: ...

    def is_open(self, run_id: str) -> bool: ...

    async def status_of(self, run_id: str) -> schemas.RunStatus | None: ...


class _Watched(Struct, kw_only=True, eq=False):
    """A schedule and its state in this process."""

    ensemble: str
    name: str
    schedule: Schedule
    state: ScheduleState
    #: stamps of files whose runs were started, by name
    done: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    #: files of the last look, by name
    before: Mapping[str, SeenFile] = msgspec.field(default_factory=dict[str, SeenFile])
    #: the look at a folder that has not answered yet
    looking: asyncio.Task[list[SeenFile]] | None = None
    problem: str | None = None
    wakes_at: datetime
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    @property
    def key(self) -> str:
        return f"{self.ensemble}/{self.name}"

    def document(self, state: ScheduleState) -> Document:
        return Document(kind=STATES, name=self.key, text=msgspec.json.encode(state).decode())

    def request(self, run_id: str, value: JsonValue) -> schemas.NewRun:
        """Return the request of a run, in which the endpoint fills in `value`."""
        own = self.schedule.input
        inputs: dict[str, object] = {**self.schedule.inputs, **({} if own is None else {own: value})}
        tags = {**self.schedule.tags, TAG: self.name}
        return schemas.NewRun.model_validate({
            "ensemble": self.ensemble, "inputs": inputs, "run_id": run_id, "tags": tags
        })  # fmt: skip


class Schedules:
    """The schedules of all teams of an endpoint."""

    def __init__(
        self,
        runs: EndpointRuns,
        ledger: RunLedger,
        clock: Clock,
        *,
        endpoint: str,
        on_lost: Callable[[RunExistsError], object],
    ) -> None:
        """Prepare schedules. `endpoint` distinguishes ids of runs in a record store of several endpoints."""
        self._runs = runs
        self._on_lost = on_lost
        self._ledger = ledger
        self._clock = clock
        self._endpoint = endpoint
        self._watched: dict[str, _Watched] = {}
        #: teams whose schedules were declared in this process
        self._teams: set[str] = set()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def declare(self, ensemble: str, schedules: Mapping[str, Schedule]) -> None:
        """Replace the schedules of a team. Removed schedules keep their state in the ledger, and added ones begin now."""
        for each in [each for each in self._watched.values() if each.ensemble == ensemble]:
            if each.name not in schedules:
                async with each.turn:
                    self._watched.pop(each.key, None)
        for name, schedule in schedules.items():
            earlier = self._watched.get(f"{ensemble}/{name}")
            if earlier is None:
                made = await self._read(ensemble, name, schedule, is_added=ensemble in self._teams)
                self._watched[made.key] = made
                self._woken.set()
            elif earlier.schedule != schedule:
                async with earlier.turn:
                    made = await self._read(ensemble, name, schedule)
                    self._watched[made.key] = made
                self._woken.set()
        self._teams.add(ensemble)
        if self._task is None and self._watched:
            self._task = asyncio.create_task(self._work())

    async def _read(self, ensemble: str, name: str, schedule: Schedule, *, is_added: bool = False) -> _Watched:
        """Return a schedule with its stored state. `is_added`: the team's schedules before had none of this name."""
        key, now = f"{ensemble}/{name}", self._now()
        stored = (await threads.run(partial(self._ledger.documents, STATES, prefix=key))).get(key)
        earlier: ScheduleState | None = None
        if stored is not None:
            try:
                earlier = msgspec.json.decode(stored, type=ScheduleState)
            except msgspec.MsgspecError as error:  # it must not stop the endpoint
                _log.error("The state of the schedule '%s' cannot be read, so it begins now: %s", key, describe(error))
        state = rules.begin(schedule, earlier, now=now, is_added=is_added)
        made = _Watched(ensemble=ensemble, name=name, schedule=schedule, state=state, wakes_at=now)
        if state != earlier:
            await threads.run(self._ledger.put, made.document(state))
        if schedule.folder is not None:
            prefix = f"{key}/"
            files = await threads.run(partial(self._ledger.documents, FILES, prefix=prefix))
            made.done = {each.removeprefix(prefix): stamp for each, stamp in files.items()}
        return made

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def wake(self) -> None:
        """Look at schedules with waiting times now, because a run has ended."""
        for each in self._watched.values():
            if each.state.waiting:
                each.wakes_at = self._now()
                self._woken.set()

    async def infos(self, ensembles: Collection[str] | None) -> list[schemas.ScheduleInfo]:
        """Return the schedules of these teams, sorted by team and name."""
        shown = [each for _, each in sorted(self._watched.items()) if ensembles is None or each.ensemble in ensembles]
        return [await self._info(each) for each in shown]

    async def detail(self, ensemble: str, name: str) -> schemas.ScheduleDetail:
        watched = self._find(ensemble, name)
        history = [await self._entry(each) for each in watched.state.history]
        return schemas.ScheduleDetail(**dict(await self._info(watched)), history=history)

    async def set_paused(self, ensemble: str, name: str, *, is_paused: bool) -> schemas.ScheduleInfo:
        watched = self._find(ensemble, name)
        async with watched.turn:
            state = rules.pause(watched.state) if is_paused else rules.resume(watched.state, now=self._now())
            if state != watched.state:
                await threads.run(self._ledger.put, watched.document(state))
                watched.state = state
                watched.wakes_at = self._now()
                self._woken.set()
        return await self._info(watched)

    async def run_now(
        self, ensemble: str, name: str, run_id: str, *, user: str | None = None, account: Account | None = None
    ) -> schemas.AcceptedRun:
        """Start a run in addition to the scheduled ones, also during a pause. A repeated `run_id` starts none."""
        watched = self._find(ensemble, name)
        if watched.schedule.folder is not None:
            text = f"The schedule '{name}' waits for files. What to do: put a file into {watched.schedule.folder}"
            raise Refusal(HTTPStatus.CONFLICT, "SCHEDULE_NEEDS_FILE", text)
        async with watched.turn:
            now = self._now()
            for earlier in watched.state.history:
                if earlier.run_id == run_id:
                    now = earlier.at  # so that the repeated request is the same
            fire = Fire(trigger="manual", at=now, decided_at=now, run_id=run_id)
            is_new = fire not in watched.state.history
            state = watched.state.with_run(fire) if is_new else watched.state
            asked = watched.request(run_id, _shown_time(watched.schedule, now)).model_copy(update={"user": user})
            return await self._start(watched, asked, state, account=account)

    def _find(self, ensemble: str, name: str) -> _Watched:
        found = self._watched.get(f"{ensemble}/{name}")
        if found is None:
            known = ", ".join(sorted(each.name for each in self._watched.values() if each.ensemble == ensemble))
            text = f"The team '{ensemble[:200]}' has no schedule '{name[:200]}'. There are: [{known}]"
            raise Refusal(HTTPStatus.NOT_FOUND, "SCHEDULE_NOT_FOUND", text)
        return found

    def _now(self) -> datetime:
        return utc_of(self._clock.now())

    async def _work(self) -> None:
        while True:
            self._woken.clear()
            for each in list(self._watched.values()):
                if each.wakes_at <= self._now() and not await self._guard(each):
                    return
            now = self._now()
            wakes_at = min((each.wakes_at for each in self._watched.values()), default=now + _REST)
            delay = min(_REST, wakes_at - now).total_seconds()
            if delay > 0:
                await self._sleep(delay)

    async def _sleep(self, delay_s: float) -> None:
        ways = [asyncio.ensure_future(self._clock.sleep(delay_s)), asyncio.ensure_future(self._woken.wait())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ways:
                each.cancel()

    async def _guard(self, watched: _Watched) -> bool:
        """Advance a schedule. After a failure it is tried again later. False: another process owns the ledger."""
        watched.wakes_at = self._now() + _RETRY
        try:
            async with watched.turn:
                if self._watched.get(watched.key) is watched:
                    await (self._look(watched) if watched.schedule.folder is not None else self._advance(watched))
        except LedgerLostError as error:
            self._on_lost(error)
            return False
        except (EnsembleError, sqlite3.Error, OSError) as error:
            self._report(watched, describe(error))
        except Exception as error:  # noqa: BLE001  a defect of one schedule must not stop the others
            self._report(watched, f"{type(error).__name__}. See the endpoint's log")
            _log.error("Schedule '%s': %s", watched.key, describe(error))
        return True

    def _report(self, watched: _Watched, problem: str | None) -> None:
        if problem is not None and problem != watched.problem:
            _log.warning("Schedule '%s' is tried again: %s", watched.key, problem)
        watched.problem = problem

    async def _advance(self, watched: _Watched) -> None:
        """Start the runs of the times up to now."""
        schedule = watched.schedule
        while True:
            now = self._now()
            active = [each for each in watched.state.open_runs if self._runs.is_open(each)]
            step = rules.advance(schedule, watched.state, now=now, active=active)
            for run_id in step.cancel:
                with contextlib.suppress(Refusal):  # it has just ended
                    await self._runs.cancel(run_id)
            if step.start is None:
                await self._put(watched, step.state)
                if all(self._runs.is_open(each) for each in step.state.open_runs):
                    break
                continue  # a run has ended meanwhile, and `wake` did not know the new state
            try:
                await self._fire(watched, step.state, step.start, now)
            except Refusal as refusal:
                if refusal.status not in _TEMPORARY:
                    skip = Fire(trigger="time", at=step.start, decided_at=now, reason=refusal.message)
                    await self._put(watched, step.state.without_first().with_skip(skip))
                    continue
                await self._put(watched, step.state)
                self._report(watched, refusal.message)
                return  # `wakes_at` is the time of the next try
        self._report(watched, None)
        upcoming = None if watched.state.is_paused else schedule.next_after(max(watched.state.decided_until, now))
        watched.wakes_at = upcoming or now + _REST

    async def _fire(self, watched: _Watched, state: ScheduleState, at: datetime, now: datetime) -> None:
        run_id = rules.run_id_at(watched.name, at, scope=self._scope(watched))
        fire = Fire(trigger="time", at=at, decided_at=now, run_id=run_id)
        asked = watched.request(run_id, _shown_time(watched.schedule, at))
        await self._start(watched, asked, state.without_first().with_run(fire))

    async def _start(
        self,
        watched: _Watched,
        asked: schemas.NewRun,
        state: ScheduleState,
        *documents: Document,
        account: Account | None = None,
    ) -> schemas.AcceptedRun:
        accepted = await self._runs.start_scheduled(asked, watched.document(state), *documents, account=account)
        watched.state = state
        return accepted

    async def _put(self, watched: _Watched, state: ScheduleState) -> None:
        """Store a state. That runs have ended needs no write."""
        if msgspec.structs.replace(state, open_runs=watched.state.open_runs) != watched.state:
            await threads.run(self._ledger.put, watched.document(state))
        watched.state = state

    def _scope(self, watched: _Watched) -> str:
        return f"{self._endpoint}/{watched.ensemble}"

    # Folders.

    async def _look(self, watched: _Watched) -> None:
        """Start the runs of new files. A file that cannot be started now is tried again after the next look."""
        schedule, now = watched.schedule, self._now()
        if watched.state.is_paused:
            watched.wakes_at = now + _REST
            return
        watched.wakes_at = now + timedelta(seconds=schedule.look_s)
        found = await self._list(watched)
        if found is None:
            return
        ready = rules.ready_files(schedule, watched.before, found, watched.done)
        watched.before = {each.name: each for each in found}
        problem: str | None = None
        if len(ready) > _MOST_FILES:
            watched.wakes_at = now  # after a turn of the other schedules
        for file in ready[:_MOST_FILES]:
            try:
                await self._fire_file(watched, file)
            except FileNotFoundError:
                continue  # it was removed since the look
            except OSError as error:
                problem = f"Cannot read '{file.name}': {error.strerror or error}"
            except Refusal as refusal:
                if refusal.status in _TEMPORARY:
                    self._report(watched, refusal.message)
                    return
                await self._skip_file(watched, file, refusal.message)
            except EnsembleError as error:
                await self._skip_file(watched, file, str(error))
        self._report(watched, problem)

    async def _list(self, watched: _Watched) -> list[SeenFile] | None:
        """Return the files of the folder; None: it cannot be listed now. A dead network disk stops no other schedule."""
        if watched.looking is None:
            watched.looking = asyncio.create_task(threads.run(list_files, watched.schedule))
        await asyncio.wait({watched.looking}, timeout=_LIST_S)
        if not watched.looking.done():
            self._report(watched, f"{watched.schedule.folder} does not answer")
            return None
        looked, watched.looking = watched.looking, None
        try:
            return looked.result()
        except OSError as error:
            self._report(watched, f"Cannot list {watched.schedule.folder}: {error.strerror or error}")
            return None

    async def _fire_file(self, watched: _Watched, file: SeenFile) -> None:
        assert watched.schedule.folder is not None  # noqa: S101  the caller looked into it
        path, now = watched.schedule.folder / file.name, self._now()
        value: JsonValue = str(path)
        if watched.schedule.attach:
            async with asyncio.timeout(_READ_S):  # its error is an `OSError`
                value = await threads.run(_content_of, path, file)
        if value is None:
            return
        run_id = rules.run_id_of(watched.name, file, scope=self._scope(watched))
        fire = Fire(trigger="file", at=now, decided_at=now, run_id=run_id, file=file.name)
        asked = watched.request(run_id, value)
        await self._start(watched, asked, watched.state.with_run(fire), self._stamp(watched, file))
        watched.done[file.name] = file.stamp

    async def _skip_file(self, watched: _Watched, file: SeenFile, reason: str) -> None:
        now = self._now()
        skip = Fire(trigger="file", at=now, decided_at=now, reason=reason, file=file.name)
        state = watched.state.with_skip(skip)
        await threads.run(self._ledger.put, watched.document(state), self._stamp(watched, file))
        watched.state = state
        watched.done[file.name] = file.stamp

    def _stamp(self, watched: _Watched, file: SeenFile) -> Document:
        return Document(kind=FILES, name=f"{watched.key}/{file.name}", text=file.stamp)

    # Answers.

    async def _info(self, watched: _Watched) -> schemas.ScheduleInfo:
        schedule, state = watched.schedule, watched.state
        upcoming = None if state.is_paused else schedule.next_after(max(state.decided_until, self._now()))
        return schemas.ScheduleInfo(
            ensemble=watched.ensemble,
            name=watched.name,
            cron=schedule.cron,
            every_s=None if schedule.every is None else schedule.every.total_seconds(),
            folder=None if schedule.folder is None else str(schedule.folder),
            pattern=None if schedule.folder is None else schedule.pattern,
            timezone=schedule.timezone,
            overlap=schedule.overlap,
            missed=schedule.missed,
            is_paused=state.is_paused,
            next_at=upcoming,
            waiting=len(state.waiting),
            last=await self._entry(state.history[0]) if state.history else None,
            problem=watched.problem,
        )

    async def _entry(self, fire: Fire) -> schemas.ScheduleFire:
        status = None if fire.run_id is None else await self._runs.status_of(fire.run_id)
        return schemas.ScheduleFire(**msgspec.structs.asdict(fire), status=status)


def list_files(schedule: Schedule) -> list[SeenFile]:
    """Return the plain files of the folder that match the pattern. Raises `OSError`."""
    found: list[SeenFile] = []
    with os.scandir(schedule.folder) as entries:
        for each in entries:
            is_hidden = each.name.startswith(".") and not schedule.pattern.startswith(".")
            if is_hidden or not fnmatch.fnmatchcase(each.name, schedule.pattern) or whole_text(each.name) != each.name:
                continue
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                # A link could lead to any file of this machine.
                if each.is_file(follow_symlinks=False):
                    about = each.stat(follow_symlinks=False)
                    found.append(SeenFile(each.name, about.st_size, about.st_mtime_ns))
    return found


def _content_of(path: Path, file: SeenFile) -> JsonValue:
    """Return a file as a request contains it; None: it has changed.

    Raises:
        OSError: it cannot be read.
        ValidationError: it is empty or too large.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as opened:
        data = opened.read(MOST_BYTES + 1)
        about = os.fstat(opened.fileno())
    if SeenFile(file.name, about.st_size, about.st_mtime_ns) != file:
        return None
    attached = Attachment.of_bytes(data, name=file.name)
    return {attached.kind: attached.data_url, "name": attached.name}


def _shown_time(schedule: Schedule, at: datetime) -> str:
    return at.astimezone(zone_of(schedule.timezone)).isoformat(timespec="seconds")
