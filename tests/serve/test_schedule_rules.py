"""Which times and files start runs: the rules alone, without a clock, a ledger or a run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import Schedule
from ensemble_ray.serve.driving import schedule_rules as rules
from ensemble_ray.serve.driving.schedule_rules import Fire, ScheduleState, SeenFile

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def minutes(count: float) -> datetime:
    """So many minutes after noon."""
    return NOON + timedelta(minutes=count)


class Played:
    """A schedule that is advanced by hand; each run gets a number."""

    def __init__(self, schedule: Schedule, *, at: datetime = NOON) -> None:
        self.schedule = schedule
        self.state = rules.begin(schedule, None, now=at)
        self.active: set[str] = set()
        self.started: list[datetime] = []
        self.cancelled: list[str] = []

    def at(self, now: datetime) -> None:
        """Decide about all times up to now, and start what may start."""
        while True:
            step = rules.advance(self.schedule, self.state, now=now, active=self.active)
            self.state = step.state
            self.cancelled += step.cancel
            if step.start is None:
                return
            run_id = str(len(self.started))
            self.started.append(step.start)
            self.active.add(run_id)
            fire = Fire(trigger="time", at=step.start, decided_at=now, run_id=run_id)
            self.state = self.state.without_first().with_run(fire)

    def end(self, run: int) -> None:
        """The run of that number ends."""
        self.active.remove(str(run))

    @property
    def minutes(self) -> list[float]:
        """Times whose runs were started, in minutes after noon."""
        return [(each - NOON) / timedelta(minutes=1) for each in self.started]

    @property
    def skips(self) -> list[tuple[str, int]]:
        """Reasons and numbers of skipped times, newest first."""
        return [(each.reason, each.times) for each in self.state.history if each.run_id is None]


def hourly(**fields: Any) -> Schedule:
    """A schedule whose times are full hours."""
    return Schedule(every="1h", **fields)


def test_a_new_schedule_begins_now_and_starts_a_run_at_each_time() -> None:
    """S-SCH-20, S-SCH-22: earlier times are not missed."""
    played = Played(hourly(), at=minutes(-30))
    played.at(minutes(-30))
    assert played.started == []
    for hour in range(3):
        played.at(minutes(60 * hour))
        played.at(minutes(60 * hour + 1))
        played.end(hour)
    assert played.minutes == [0, 60, 120]


def test_a_schedule_with_other_times_begins_now() -> None:
    """S-SCH-22: what waited for the earlier times is dropped; pause and history stay."""
    earlier = ScheduleState(
        timing=hourly().timing,
        decided_until=minutes(-6000),
        is_paused=True,
        waiting=(minutes(-6000),),
        history=(Fire(trigger="time", at=NOON, decided_at=NOON, run_id="a"),),
    )
    begun = rules.begin(Schedule(every="2h"), earlier, now=NOON)
    assert (begun.decided_until, begun.waiting, begun.is_paused) == (NOON, (), True)
    assert begun.history == earlier.history
    assert rules.begin(hourly(), earlier, now=NOON) is earlier


@pytest.mark.parametrize(
    ("missed", "now", "started"),
    [
        ("skip", 200, []),
        ("skip", 180.5, [180]),
        ("once", 200, [180]),
        ("once", 180.5, [180]),
        ("all", 200, [60, 120, 180]),
    ],
)
def test_times_of_a_pause_of_the_endpoint_are_made_up_for_as_declared(
    missed: Any, now: float, started: list[float]
) -> None:
    """S-SCH-23: a time is on time for a minute, unless the next one has come."""
    played = Played(hourly(missed=missed, overlap="queue"), at=minutes(1))
    played.at(minutes(now))
    for run in range(len(started)):
        played.end(run)
        played.at(minutes(now))
    assert played.minutes == started
    left = 3 - len(started)
    assert played.skips == ([("The endpoint did not run at that time", left)] if left else [])


def test_only_the_newest_missed_times_are_made_up_for() -> None:
    """S-SCH-23: at most `max_waiting`, oldest first."""
    played = Played(hourly(missed="all", overlap="queue", max_waiting=2), at=minutes(1))
    played.at(minutes(601))
    played.end(0)
    played.at(minutes(602))
    assert played.minutes == [540, 600]
    assert played.skips == [("The endpoint did not run at that time", 8)]


def test_a_time_is_skipped_when_an_earlier_run_is_open() -> None:
    """S-SCH-24, S-SCH-29: skips in succession are one entry with a number."""
    played = Played(hourly(), at=minutes(-1))
    for hour in range(4):
        played.at(minutes(60 * hour))
    played.end(0)
    played.at(minutes(240))
    assert played.minutes == [0, 240]
    (skip,) = [each for each in played.state.history if each.run_id is None]
    assert (skip.reason, skip.times, skip.since, skip.at) == ("Run 0 was still open", 3, minutes(60), minutes(180))


def test_times_wait_for_an_earlier_run_up_to_a_number() -> None:
    """S-SCH-24: one run at a time, in order."""
    played = Played(hourly(overlap="queue", max_waiting=2), at=minutes(-1))
    for hour in range(5):
        played.at(minutes(60 * hour))
    assert played.minutes == [0]
    for run in range(3):
        played.end(run)
        played.at(minutes(241 + run))
    assert played.minutes == [0, 60, 120]
    assert played.skips == [("2 times waited already", 2)]


def test_a_later_time_replaces_the_open_run_and_starts_at_its_end() -> None:
    """S-SCH-24: a time that waits is replaced, too."""
    played = Played(hourly(overlap="replace"), at=minutes(-1))
    for hour in range(3):
        played.at(minutes(60 * hour))
    assert (played.minutes, set(played.cancelled)) == ([0], {"0"})
    played.end(0)
    played.at(minutes(121))
    assert (played.minutes, played.skips) == ([0, 120], [("A later time replaced it", 1)])


def test_times_of_a_pause_are_not_missed() -> None:
    """S-SCH-27: what waited before the pause starts after it."""
    played = Played(hourly(overlap="queue"), at=minutes(-1))
    played.at(minutes(0))
    played.at(minutes(60))
    played.state = rules.pause(played.state)
    played.end(0)
    played.at(minutes(300))
    assert played.minutes == [0]
    played.state = rules.resume(played.state, now=minutes(310))
    played.at(minutes(310))
    assert (played.minutes, played.skips) == ([0, 60], [])
    assert rules.resume(played.state, now=minutes(400)) is played.state


def test_a_history_has_an_end() -> None:
    """S-SCH-29: the newest 50 entries, and the runs that are open in any case."""
    played = Played(hourly(), at=minutes(-1))
    played.at(minutes(0))
    for number in range(60):
        skip = Fire(trigger="time", at=minutes(number), decided_at=NOON, reason=str(number))
        played.state = played.state.with_skip(skip)
    assert [each.reason for each in played.state.history] == [str(number) for number in range(59, 9, -1)]
    played.at(minutes(60))
    assert played.minutes == [0]


_MOVES = st.lists(
    st.one_of(
        st.integers(1, 400).map(lambda passed: ("pass", passed)),
        st.sampled_from([("end", 0), ("restart", 0), ("pause", 0), ("resume", 0)]),
    ),
    max_size=40,
)


@given(st.sampled_from(["skip", "queue", "replace"]), st.sampled_from(["skip", "once", "all"]), _MOVES)
def test_no_time_starts_two_runs_and_no_two_runs_are_open(
    overlap: Any, missed: Any, moves: Sequence[tuple[str, int]]
) -> None:
    """S-SCH-21, S-SCH-24: also after restarts, which read the stored state."""
    if missed == "all":
        overlap = "queue"
    played = Played(hourly(overlap=overlap, missed=missed, max_waiting=3))
    now = NOON
    for move, amount in moves:
        match move:
            case "pass":
                now += timedelta(minutes=amount)
            case "end" if played.active:
                played.active.pop()
            case "restart":
                text = msgspec.json.encode(played.state)
                stored = msgspec.json.decode(text, type=ScheduleState)
                assert stored == played.state
                played.state = rules.begin(played.schedule, stored, now=now)
            case "pause":
                played.state = rules.pause(played.state)
            case _:
                played.state = rules.resume(played.state, now=now)
        played.at(now)
        assert len(played.active) <= 1
        assert len(played.state.waiting) <= 3
        assert list(played.state.waiting) == sorted(set(played.state.waiting))
    assert played.started == sorted(set(played.started))
    assert set(played.started).isdisjoint(played.state.waiting)
    assert all(NOON < each <= now for each in played.started)


def inbox(**fields: Any) -> Schedule:
    """A schedule of a folder."""
    return Schedule(folder="/srv/inbox", input="file", **fields)


def test_a_file_is_ready_when_it_is_the_same_in_two_looks() -> None:
    """S-SCH-40: one that grows or was written to is not; the oldest is first."""
    old, young = SeenFile("old", 1, 10), SeenFile("young", 1, 20)
    grown, touched = SeenFile("grown", 2, 5), SeenFile("touched", 1, 6)
    before = {each.name: each for each in (young, old, SeenFile("grown", 1, 5), SeenFile("touched", 1, 5))}
    assert rules.ready_files(inbox(), before, [young, grown, touched, old], {}) == [old, young]
    assert rules.ready_files(inbox(), {}, [young, old], {}) == []


def test_a_changed_file_is_new_only_when_the_schedule_says_so() -> None:
    """S-SCH-41."""
    file = SeenFile("a", 2, 20)
    before, earlier = {"a": file}, {"a": SeenFile("a", 1, 10).stamp}
    assert rules.ready_files(inbox(), before, [file], earlier) == []
    assert rules.ready_files(inbox(changed="run"), before, [file], earlier) == [file]
    assert rules.ready_files(inbox(changed="run"), before, [file], {"a": file.stamp}) == []


def test_ids_of_runs_are_equal_in_all_processes_and_differ_between_teams() -> None:
    """S-SCH-20: made of the name, the time or the file, and the scope."""
    first = rules.run_id_at("nightly", NOON, scope="shop/letters")
    assert first == "nightly-20260101T120000Z-2ea00cdfd3"
    assert rules.run_id_at("nightly", NOON, scope="shop/orders") != first
    file = SeenFile("\udcffreport.pdf", 1, 1)
    assert rules.run_id_of("inbox", file, scope="a") == rules.run_id_of("inbox", file, scope="a")
    assert rules.run_id_of("inbox", file, scope="a") != rules.run_id_of("inbox", SeenFile(file.name, 2, 1), scope="a")
