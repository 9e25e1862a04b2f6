"""Studio behind an endpoint, at `/studio` (S-STU-80 to S-STU-83).

A caller with a key sees the runs of its teams. Only the command line resumes and forks runs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from http import HTTPStatus

from fastapi import FastAPI, Request
from msgspec import Struct

from ensemble_ray.access.admission import Right
from ensemble_ray.access.quotas import Account, Standing
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RecordedRun, StoreAddress
from ensemble_ray.serve.callers import ANYBODY, Caller
from ensemble_ray.serve.run_service import LARGEST_PAGE, RunService
from ensemble_ray.serve.schemas import (
    NewDecision,
    Refusal,
    ReviewConflict,
    RunFilter,
    ScheduleDetail,
    TeamVersionInfo,
    Verdict,
)
from ensemble_ray.studio.app import ScheduleAction, Studio, studio_app
from ensemble_ray.studio.http_server import StudioRefusal, Visitor, not_found
from ensemble_ray.studio.processes import Cluster, RunProcesses
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.studio.schemas import (
    ControlledSchedule,
    Decision,
    DeliverySchema,
    EndpointState,
    NewFork,
    ReviewSchema,
    RunPreview,
    ScheduleEntry,
    ScheduleSchema,
    ScheduleTable,
    VersionedTeam,
    VersionRow,
)
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.metrics import ClusterDescription

_LASTING_S = 2.0
#: Entries of the history of a schedule on the page.
_SHOWN_FIRES = 10
#: Interval of complete lists, s, because the endpoint deletes its oldest runs.
_WHOLE_S = 60.0
_NOT_HERE = (
    "Behind an endpoint runs are not resumed, forked or deleted from the page: ensemble-ray resume, ensemble-ray fork, "
    "ensemble-ray delete"
)


def endpoint_studio(service: Callable[[], RunService]) -> FastAPI:
    store = store_at(StoreAddress.of())
    reader = StudioReader(store, can_decide=True)
    studio = Studio(
        reader=reader,
        title="this endpoint",
        guard=_EndpointGuard(service),
        actions=_EndpointActions(service, reader),
        offers=("cancel", "decide"),
        processes=RunProcesses(store, reader, _OwnCluster()),
        deliveries=lambda run_id: _deliveries(service(), run_id),
        endpoint=lambda visitor, has_versions: _endpoint_state(service(), visitor, has_versions=has_versions),
        schedules=_EndpointSchedules(service),
    )
    return studio_app(studio)


async def _deliveries(service: RunService, run_id: str) -> Sequence[DeliverySchema]:
    try:
        found = await service.deliveries(run_id)
    except Refusal as refusal:
        raise _as_studio(refusal) from refusal
    return [
        DeliverySchema(
            event=each.event,
            receiver=each.receiver,
            state=each.state.value,
            attempt_count=each.attempt_count,
            error=each.attempts[-1].error if each.attempts else None,
            next_attempt_at=None if each.next_attempt_at is None else _millis(each.next_attempt_at),
        )
        for each in found
    ]


class _CallerOfEndpoint(Struct, frozen=True):
    name: str | None
    #: None: all recorded runs
    run_ids: frozenset[str] | None
    sees_cluster: bool = True
    #: names of teams; None: all
    ensembles: frozenset[str] | None = None
    roles: frozenset[str] | None = None
    standing: Standing | None = None
    #: for the runs that it starts
    account: Account | None = None

    @property
    def sees_all(self) -> bool:
        return self.run_ids is None

    def may_see(self, run: RecordedRun) -> bool:
        return self.run_ids is None or run.run_id in self.run_ids


async def _endpoint_state(service: RunService, visitor: Visitor, *, has_versions: bool) -> EndpointState:
    """Return the state of the endpoint, and the versions of the teams that a visitor sees."""
    seen = visitor.ensembles if isinstance(visitor, _CallerOfEndpoint) else None
    try:
        drain = await service.drain_info()
        teams: list[VersionedTeam] = []
        for each in await service.ensembles() if has_versions else ():
            if seen is None or each.name in seen:
                listed = [] if each.version is None else (await service.versions(each.name)).versions
                teams.append(VersionedTeam(ensemble=each.name, versions=[_row_of(version) for version in listed]))
    except Refusal as refusal:
        raise _as_studio(refusal) from refusal
    return EndpointState(drain=drain.state, open_runs=drain.open.total if seen is None else None, teams=teams)


def _row_of(version: TeamVersionInfo) -> VersionRow:
    return VersionRow(
        version=version.version,
        share=version.share,
        open_runs=version.open_runs,
        loaded_at=_millis(version.loaded_at),
    )


class _OwnCluster:
    """The cluster of this replica, as `Cluster` and `ClusterList`."""

    async def clusters(self, owners: Sequence[int]) -> Sequence[Cluster]:
        del owners
        return (self,)

    async def describe(self) -> ClusterDescription:
        # It loads Ray.
        from ensemble_ray.actors.driver.cluster import describe_cluster

        return await describe_cluster()


class _EndpointGuard:
    """Identifies callers. `KeyCheck` has checked their keys."""

    def __init__(self, service: Callable[[], RunService]) -> None:
        self._service = service
        #: By teams. A key with changed teams uses another entry.
        #: entry.
        self._accepted: dict[frozenset[str] | None, _AcceptedRuns] = {}

    async def admit(self, request: Request, right: Right, *, is_counted: bool = True) -> _CallerOfEndpoint:
        del is_counted  # `KeyCheck` counts requests
        found: object = getattr(request.state, "caller", ANYBODY)
        caller = found if isinstance(found, Caller) else ANYBODY
        if right not in caller.rights:
            raise StudioRefusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", f"This key lacks the right '{right}'")
        if not caller.name:
            return _CallerOfEndpoint(None, None, roles=caller.roles)
        accepted = self._accepted.get(caller.ensembles)
        if accepted is None:
            self._accepted = {teams: each for teams, each in self._accepted.items() if not each.is_old}
            accepted = self._accepted[caller.ensembles] = _AcceptedRuns(self._service, caller.ensembles)
        sees_cluster = Right.ADMIN in caller.rights
        run_ids = await accepted.run_ids()
        return _CallerOfEndpoint(
            *(caller.name, run_ids, sees_cluster, caller.ensembles),
            roles=caller.roles,
            standing=caller.standing,
            account=caller.account,
        )


class _AcceptedRuns:
    def __init__(self, service: Callable[[], RunService], teams: frozenset[str] | None) -> None:
        self._service = service
        self._teams = teams
        self._found = frozenset[str]()
        self._listed_at = self._whole_at = -math.inf
        self._listing: asyncio.Task[None] | None = None

    @property
    def is_old(self) -> bool:
        return self._listing is None and time.monotonic() - self._listed_at > _WHOLE_S

    async def run_ids(self) -> frozenset[str]:
        """Return ids at most `_LASTING_S` old. Simultaneous calls share one request."""
        if time.monotonic() - self._listed_at > _LASTING_S:
            if self._listing is None:
                self._listing = asyncio.create_task(self._list())
            await asyncio.shield(self._listing)
        return self._found

    async def _list(self) -> None:
        try:
            now = time.monotonic()
            is_whole = now - self._whole_at > _WHOLE_S
            known = frozenset[str]() if is_whole else self._found
            self._found = known | await self._newer_than(known)
            self._listed_at = now
            self._whole_at = now if is_whole else self._whole_at
        finally:
            self._listing = None

    async def _newer_than(self, known: frozenset[str]) -> frozenset[str]:
        found, cursor = frozenset[str](), None
        while True:
            page = await self._service().list(RunFilter(ensembles=self._teams), cursor=cursor, size=LARGEST_PAGE)
            listed = frozenset(run.run_id for run in page.runs)
            found |= listed
            if (cursor := page.next_cursor) is None or not known.isdisjoint(listed):
                return found


class _EndpointActions:
    def __init__(self, service: Callable[[], RunService], reader: StudioReader) -> None:
        self._service = service
        self._reader = reader

    async def cancel(self, run_id: str) -> None:
        try:
            await self._service().cancel(run_id)
        except Refusal as refusal:
            raise _as_studio(refusal) from refusal

    async def delete(self, run_id: str) -> None:
        await self.resume(run_id)

    async def preview_resume(self, run_id: str) -> RunPreview:
        del run_id
        return RunPreview(blocked=_NOT_HERE)

    async def preview_fork(self, run_id: str, from_step: str) -> RunPreview:
        del run_id, from_step
        return RunPreview(blocked=_NOT_HERE)

    async def resume(self, run_id: str) -> str:
        raise StudioRefusal(HTTPStatus.CONFLICT, "NOT_HERE", f"Run '{run_id}': {_NOT_HERE}")

    async def fork(self, run_id: str, asked: NewFork) -> str:
        del asked
        return await self.resume(run_id)

    async def decide(
        self, run_id: str, gate_id: str, decision: Decision, *, by: str | None, roles: frozenset[str] | None
    ) -> ReviewSchema:
        text = decision.text or "" if decision.decision == "edit" else None
        asked = NewDecision(decision=Verdict(decision.decision), text=text, comment=decision.comment)
        try:
            decided = await self._service().decide(run_id, gate_id, asked, by=by or "", roles=roles)
        except Refusal as refusal:
            raise _as_studio(refusal) from refusal
        if isinstance(decided, ReviewConflict):
            raise StudioRefusal(HTTPStatus.CONFLICT, "REVIEW_DECIDED_ERROR", decided.message)
        found = await self._reader.gate(run_id, gate_id)
        if found is None:
            raise not_found("gate", gate_id)
        return found


class _EndpointSchedules:
    def __init__(self, service: Callable[[], RunService]) -> None:
        self._service = service

    async def schedules(self, visitor: Visitor) -> ScheduleTable:
        service = self._service()
        found = await service.schedules(_ensembles_of(visitor))
        return ScheduleTable(
            schedules=[_as_schedule(await service.schedule(each.ensemble, each.name)) for each in found]
        )

    async def control(self, ensemble: str, name: str, action: ScheduleAction, visitor: Visitor) -> ControlledSchedule:
        service, seen = self._service(), _ensembles_of(visitor)
        if seen is not None and ensemble not in seen:
            raise not_found("schedule", f"{ensemble}/{name}")
        try:
            if action == "run":
                account = visitor.account if isinstance(visitor, _CallerOfEndpoint) else None
                user = None if account is None else account.name
                accepted = await service.run_schedule(ensemble, name, run_id=new_run_id(), user=user, account=account)
                return ControlledSchedule(run_id=accepted.run_id)
            await service.pause_schedule(ensemble, name, is_paused=action == "pause")
        except Refusal as refusal:
            raise _as_studio(refusal) from refusal
        return ControlledSchedule()


def _ensembles_of(visitor: Visitor) -> frozenset[str] | None:
    return visitor.ensembles if isinstance(visitor, _CallerOfEndpoint) else None


def _as_schedule(found: ScheduleDetail) -> ScheduleSchema:
    return ScheduleSchema(
        ensemble=found.ensemble,
        name=found.name,
        cron=found.cron,
        every_s=found.every_s,
        folder=found.folder,
        pattern=found.pattern,
        timezone=found.timezone,
        is_paused=found.is_paused,
        next_at=None if found.next_at is None else _millis(found.next_at),
        waiting=found.waiting,
        problem=found.problem,
        history=[
            ScheduleEntry(
                trigger=each.trigger,
                at=_millis(each.at),
                since=None if each.since is None else _millis(each.since),
                times=each.times,
                run_id=each.run_id,
                status=None if each.status is None else each.status.value,
                reason=each.reason,
                file=each.file,
            )
            for each in found.history[:_SHOWN_FIRES]
        ],
    )


def _millis(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _as_studio(refusal: Refusal) -> StudioRefusal:
    return StudioRefusal(refusal.status, refusal.code, refusal.message)
