"""Which records are old enough to go, and their removal."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, RecordError, RunState, Task, ValidationError
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.runs import Retention, age_from, apply_retention, list_runs, prune
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.stores import OwnedRun, RecordedRun, StoreAddress
from ensemble_ray.values.value import utc_now

DAY = timedelta(days=1)
LATER = utc_now() + 40 * DAY


async def _run(store: SqliteStore, run_id: str, state: RunState) -> OwnedRun:
    owned = await store.begin(run_id)
    await owned.journal.append((read_fact(run=run_id, kind="plan", name="run", at=1.0, data={}),))
    if state is RunState.RUNNING:
        await owned.write_state(state)
    else:
        await owned.close(state)
    return owned


async def _store(home: Path, states: Sequence[RunState]) -> SqliteStore:
    store = SqliteStore(home)
    for number, state in enumerate(states):
        await _run(store, f"r{number}", state)
    return store


async def _ids(store: SqliteStore) -> set[str]:
    return {run.run_id for run in await store.runs()}


ALL = [RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.INTERRUPTED]


async def test_ended_runs_go_when_they_are_old(tmp_path: Path) -> None:
    """S-DUR-53: interrupted ones can be resumed, and stay."""
    store = await _store(tmp_path, ALL)
    assert await prune(store, 30 * DAY) == []
    removed = await prune(store, 30 * DAY, now=LATER)
    assert {run.run_id for run in removed} == {"r0", "r1", "r2"}
    assert await _ids(store) == {"r3"}


async def test_nothing_is_removed_when_it_is_only_tried(tmp_path: Path) -> None:
    """S-DUR-53: `--dry-run` names what would go."""
    store = await _store(tmp_path, ALL)
    assert len(await prune(store, DAY, now=LATER, is_dry=True)) == 3
    assert len(await _ids(store)) == 4


async def test_the_newest_stay_when_so_many_are_kept(tmp_path: Path) -> None:
    """S-DUR-53: `--keep`, counted among those that could go."""
    store = await _store(tmp_path, [RunState.COMPLETED, RunState.COMPLETED, RunState.INTERRUPTED, RunState.COMPLETED])
    newest = [run.run_id for run in await store.runs() if run.state is RunState.COMPLETED][:2]
    await prune(store, DAY, keep=2, now=LATER)
    assert await _ids(store) == {*newest, "r2"}


async def test_only_runs_of_a_state_go_when_it_is_named(tmp_path: Path) -> None:
    """S-DUR-53: `--state`, also of interrupted ones."""
    store = await _store(tmp_path, ALL)
    await prune(store, DAY, states=[RunState.FAILED, RunState.INTERRUPTED], now=LATER)
    assert await _ids(store) == {"r0", "r2"}


async def test_running_run_stays_however_old_it_is(tmp_path: Path) -> None:
    """S-DUR-53: also when its state is named."""
    store = SqliteStore(tmp_path)
    owned = await _run(store, "one", RunState.RUNNING)
    assert await prune(store, DAY, states=[RunState.RUNNING], now=LATER) == []
    assert await _ids(store) == {"one"}
    await owned.close(RunState.COMPLETED)


@pytest.mark.parametrize(("text", "age"), [("30d", 30 * DAY), (" 12H ", DAY / 2), ("2 w", 14 * DAY)])
def test_age_is_read_as_people_write_it(text: str, age: timedelta) -> None:
    """S-DUR-53."""
    assert age_from(text) == age


@pytest.mark.parametrize("text", ["", "30", "d", "-3d", "30 years", "99999999999d", "9" * 5000 + "d"])
def test_text_that_is_no_age_is_refused(text: str) -> None:
    """S-DUR-53: the message says how to write one."""
    with pytest.raises(ValidationError, match="age"):
        age_from(text)


async def test_environment_decides_what_goes_at_the_end_of_a_run(tmp_path: Path) -> None:
    """S-DUR-53: nothing by default."""
    store = await _store(tmp_path, ALL)
    assert await apply_retention(store, {}) == ()
    assert await apply_retention(store, {"ENSEMBLE_RAY_RETENTION": "30d"}) == []
    assert len(await apply_retention(store, {"ENSEMBLE_RAY_RETENTION": "0d"})) == 3


async def test_records_are_looked_at_once_a_minute_when_many_runs_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DUR-53: each look reads all of them; those of another store are another matter."""
    monkeypatch.setenv("ENSEMBLE_RAY_RETENTION", "0d")
    retention, address = Retention(), StoreAddress(home=str(tmp_path))
    for at, left in ((0.0, 0), (59.0, 3), (60.0, 0)):
        store = await _store(tmp_path / str(at), ALL)
        await retention.run_ended(address, store, spared="", at=at)
        assert len([run for run in await store.runs() if run.state.is_final]) == left, at
    other = await _store(tmp_path / "other", ALL)
    await retention.run_ended(StoreAddress(home="/other"), other, spared="", at=60.0)
    assert await _ids(other) == {"r3"}


class Broken(SqliteStore):
    """A store that cannot be read."""

    async def runs(self) -> list[RecordedRun]:
        """Fail."""
        raise RecordError("no rights")


@pytest.mark.parametrize(("given", "told"), [("soon", "'soon' is no age"), ("30d", "no rights")])
async def test_end_of_a_run_does_not_fail_when_records_cannot_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str, told: str
) -> None:
    """S-DUR-53: a WARN line; the run is done."""
    with caplog.at_level(logging.WARNING, logger="ensemble_ray"):
        assert await apply_retention(Broken(tmp_path), {"ENSEMBLE_RAY_RETENTION": given}) == ()
    assert told in caplog.text


def test_old_records_go_when_a_run_ends_and_the_environment_says_so(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-53: all but that of the run itself."""
    ensemble = Ensemble(tasks=[Task(name="t", description="d", expected_output="e", handler=lambda _: "done")])
    for run_id in ("first", "second"):
        ensemble.run(runtime="inline", run_id=run_id)
    assert {run.run_id for run in list_runs(Path(home))} == {"first", "second"}
    monkeypatch.setenv("ENSEMBLE_RAY_RETENTION", "0d")
    ensemble.run(runtime="inline", run_id="third")
    assert [run.run_id for run in list_runs(Path(home))] == ["third"]
