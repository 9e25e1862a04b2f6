"""Every construct that a record knows is told as messages, from the beginning and from any cursor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ensemble_ray.events.messages import Cursor, WireEvent
from ensemble_ray.record.following import RunFollower
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.golden.cases import RUNTIMES, Case, cases_of
from tests.golden.records import restore_sqlite
from tests.golden.store import load

_CASES = [case for runtime in RUNTIMES for case in cases_of(runtime)]


def _id(case: Case) -> str:
    return f"{case.runtime}/{case.name}"


async def follow(home: Path, run_id: str, after: Cursor | None = None) -> list[WireEvent]:
    """All messages about a run, to the end."""
    follower = RunFollower(SqliteStore(home), run_id, after=after)
    found: list[WireEvent] = []
    while not follower.is_over:
        found += await follower.read(5)
    return found


@pytest.mark.parametrize("case", _CASES, ids=_id)
async def test_a_recorded_run_is_told_from_its_beginning_to_its_end(case: Case, tmp_path: Path) -> None:
    """S-SRV-31, S-SRV-33, S-WEB-33: each task starts once and ends once at most; the end is last, whatever it was."""
    record = load(case)
    restore_sqlite(record, tmp_path)
    told = await follow(tmp_path, record.run_id)
    types = [each.type for each in told]
    assert types[0] == "ensemble_started"
    assert types.index("ensemble_completed") == len(types) - 1
    starts = Counter(each.data["instance"] for each in told if each.type == "task_started")
    ends = Counter(each.data["instance"] for each in told if each.type in {"task_completed", "task_failed"})
    assert set(starts.values()) <= {1}
    assert set(ends.values()) <= {1}
    assert set(ends) <= set(starts)
    recorded = {fact[2] for fact in record.facts if fact[1] == "output" and "/delegate#" not in fact[2]}
    assert recorded <= set(ends)
    cursors = [each.cursor for each in told if each.cursor is not None]
    assert cursors == sorted(set(cursors))


@pytest.mark.parametrize("case", _CASES[:6], ids=_id)
async def test_a_reader_that_comes_back_has_what_it_missed_and_nothing_twice(case: Case, tmp_path: Path) -> None:
    """S-SRV-32: behind every cursor."""
    record = load(case)
    restore_sqlite(record, tmp_path)
    told = await follow(tmp_path, record.run_id)
    for position, each in enumerate(told[:-1]):
        assert await follow(tmp_path, record.run_id, each.cursor) == told[position + 1 :]
