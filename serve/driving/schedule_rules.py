"""Rules of schedules: which times and files start runs, which are skipped, and what waits. No clock, no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray import Schedule

#: Entries of a history.
KEPT_FIRES = 50
#: A time is missed after this time, or when the next time has come too.
ON_TIME = timedelta(seconds=60)
#: Missed times that are counted; older ones are not.
_MOST_COUNTED = 1000
_DIGITS = 10


class Fire(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of a history: a run, or times or a file for which none was started."""

    trigger: Literal["time", "file", "manual"]
    #: the scheduled time; of a file or a manual run: when it was found or asked for
    at: datetime
    decided_at: datetime
    run_id: str | None = None
    #: why no run was started
    reason: str = ""
    #: skipped times; `since` is the first of them
    times: int = 1
    since: datetime | None = None
    file: str | None = None


class ScheduleState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored state of a schedule. The transaction that stores a run replaces it."""

    timing: str
    #: all times up to here have a run, wait, or were skipped
    decided_until: datetime
    is_paused: bool = False
    #: times that wait for their runs, in order
    waiting: tuple[datetime, ...] = ()
    #: runs that may not have ended
    open_runs: tuple[str, ...] = ()
    #: newest first
    history: tuple[Fire, ...] = ()

    def with_run(self, fire: Fire) -> ScheduleState:
        """Return the state after a run was accepted."""
        runs = (*self.open_runs, fire.run_id) if fire.run_id is not None else self.open_runs
        return replace(self, open_runs=runs, history=(fire, *self.history)[:KEPT_FIRES])

    def with_skip(self, skip: Fire) -> ScheduleState:
        """Return the state with an entry without a run. Equal ones in succession become one entry."""
        if not self.history:
            return replace(self, history=(skip,))
        last, *others = self.history
        if (last.run_id, last.reason, last.trigger, last.file) == (None, skip.reason, skip.trigger, skip.file):
            since = last.since or last.at
            skip = replace(skip, times=last.times + skip.times, since=since)
            return replace(self, history=(skip, *others))
        return replace(self, history=(skip, *self.history)[:KEPT_FIRES])

    def without_first(self) -> ScheduleState:
        """Return the state after the first waiting time was decided."""
        return replace(self, waiting=self.waiting[1:])


class Step(Struct, frozen=True, kw_only=True):
    state: ScheduleState
    #: the time whose run can start now
    start: datetime | None = None
    #: runs to cancel, because a later time replaces them
    cancel: tuple[str, ...] = ()


def begin(schedule: Schedule, stored: ScheduleState | None, *, now: datetime, is_added: bool = False) -> ScheduleState:
    """Return the state at the start of a process, or of a schedule that is added later.

    A schedule that is new, was added, or has other times begins now.
    """
    if stored is None:
        return ScheduleState(timing=schedule.timing, decided_until=now)
    if is_added or stored.timing != schedule.timing:
        return replace(stored, timing=schedule.timing, decided_until=now, waiting=())
    return stored


def advance(schedule: Schedule, state: ScheduleState, *, now: datetime, active: Collection[str]) -> Step:
    """Decide about the times up to now. `active` contains the runs that have not ended."""
    state = replace(state, open_runs=tuple(each for each in state.open_runs if each in active))
    if state.is_paused:
        return Step(state=state)
    due = schedule.times_between(state.decided_until, now, most=_MOST_COUNTED)
    if due:
        state = _admit(schedule, replace(state, decided_until=due[-1]), due, now)
    if not state.waiting:
        return Step(state=state)
    if not state.open_runs:
        return Step(state=state, start=state.waiting[0])
    return Step(state=state, cancel=state.open_runs if schedule.overlap == "replace" else ())


def pause(state: ScheduleState) -> ScheduleState:
    return replace(state, is_paused=True)


def resume(state: ScheduleState, *, now: datetime) -> ScheduleState:
    """Return the state of a schedule that continues. The times of the pause are not missed."""
    return replace(state, is_paused=False, decided_until=now) if state.is_paused else state


def _admit(schedule: Schedule, state: ScheduleState, due: Sequence[datetime], now: datetime) -> ScheduleState:
    last_is_missed = now - due[-1] > ON_TIME
    match schedule.missed:
        case "skip":
            count = 0 if last_is_missed else 1
        case "once":
            count = 1
        case "all":
            count = schedule.max_waiting
    first = max(0, len(due) - count)
    skipped, wanted = due[:first], due[first:]
    if skipped:
        state = state.with_skip(_skip(skipped, now, "The endpoint did not run at that time"))
    return _join(schedule, state, wanted, now) if wanted else state


def _join(schedule: Schedule, state: ScheduleState, wanted: Sequence[datetime], now: datetime) -> ScheduleState:
    """Add times to the waiting ones, as `overlap` says."""
    match schedule.overlap:
        case "replace":
            if state.waiting:
                state = state.with_skip(_skip(state.waiting, now, "A later time replaced it"))
            return replace(state, waiting=(wanted[-1],))
        case "queue":
            room = schedule.max_waiting - len(state.waiting)
            kept = wanted[-room:] if room > 0 else ()
            if left := wanted[: len(wanted) - len(kept)]:
                state = state.with_skip(_skip(left, now, f"{len(state.waiting)} times waited already"))
            return replace(state, waiting=(*state.waiting, *kept))
        case "skip" if state.open_runs:
            return state.with_skip(_skip(wanted, now, f"Run {state.open_runs[-1]} was still open"))
        case "skip" if state.waiting:
            return state.with_skip(_skip(wanted, now, "An earlier time still waited for its run"))
        case "skip":
            return replace(state, waiting=(wanted[-1],))


def _skip(times: Sequence[datetime], now: datetime, reason: str) -> Fire:
    since = times[0] if len(times) > 1 else None
    return Fire(trigger="time", at=times[-1], decided_at=now, reason=reason, times=len(times), since=since)


class SeenFile(Struct, frozen=True):
    name: str
    size: int
    mtime_ns: int

    @property
    def stamp(self) -> str:
        return f"{self.size} {self.mtime_ns}"


def ready_files(
    schedule: Schedule, before: Mapping[str, SeenFile], found: Sequence[SeenFile], done: Mapping[str, str]
) -> list[SeenFile]:
    """Return the files whose runs can start, oldest first.

    A file is ready if it is the same in two looks, and `done` does not contain it. `done` contains stamps by name.
    """

    def is_new(file: SeenFile) -> bool:
        stamp = done.get(file.name)
        return stamp is None or (schedule.changed == "run" and stamp != file.stamp)

    ready = [each for each in found if before.get(each.name) == each and is_new(each)]
    return sorted(ready, key=lambda each: (each.mtime_ns, each.name))


def run_id_at(name: str, at: datetime, *, scope: str) -> str:
    """Return the id of the run of a time, which is equal in all processes. `scope` names endpoint and team."""
    moment = at.astimezone(UTC)
    return f"{name}-{moment:%Y%m%dT%H%M%SZ}-{_digest(scope, name, moment.isoformat())}"


def run_id_of(name: str, file: SeenFile, *, scope: str) -> str:
    """Return the id of the run of a file, which is equal in all processes."""
    return f"{name}-{_digest(scope, name, file.name, file.stamp)}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
