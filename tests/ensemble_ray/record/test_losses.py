"""What a record notices that has lost something: by its notes, by its log, by its numbers. Nothing is told of plain kills."""

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import RecordError, RunState
from ensemble_ray.ports import Persistence
from ensemble_ray.record.sqlite.losses import COUNT, RECORD, CountFile, read_count, scan_log
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.ensemble_ray.record.sqlite_runs import RUN, fact, output_of, permit, restart

LOG = f"{RECORD}-wal"
#: Facts of the record below, and how many of them are in its log's last commit.
FACTS, LAST = 58, 1
FRAME = 24 + 4096


@pytest.fixture(scope="module")
def killed_writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a writer that was killed after 58 commits of one fact each: all of them are in its log."""
    rest = """
async def main():
    run = await store.begin("run-1")
    for turn in range(58):
        await run.journal.append([fact(turn, text="x" * 900)], until=Persistence.COMMITTED)
    os._exit(1)
asyncio.run(main())
"""
    home = tmp_path_factory.mktemp("killed")
    with pytest.raises(subprocess.CalledProcessError):
        asyncio.run(output_of(rest, home))
    return home


@pytest.fixture
def directory(killed_writer: Path, tmp_path: Path) -> Path:
    """The run's directory in a copy of that home."""
    shutil.copytree(killed_writer, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs" / RUN


def flip(path: Path, at: int) -> None:
    """Flip one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _flip_in_the_middle(directory: Path) -> None:
    log = directory / LOG
    flip(log, log.stat().st_size // 3)


def _flip_at_the_end(directory: Path) -> None:
    log = directory / LOG
    flip(log, log.stat().st_size - 100)


def _flip_in_the_header(directory: Path) -> None:
    flip(directory / LOG, 17)


def _cut(directory: Path) -> None:
    log = directory / LOG
    os.truncate(log, log.stat().st_size // 2)


def _empty(directory: Path) -> None:
    os.truncate(directory / LOG, 0)


def _unlink(directory: Path) -> None:
    (directory / LOG).unlink()


DAMAGES = [_flip_in_the_middle, _flip_at_the_end, _flip_in_the_header, _cut, _empty, _unlink]


def contents(directory: Path) -> dict[str, bytes]:
    """The files that tell of a loss."""
    return {name: (directory / name).read_bytes() for name in (RECORD, LOG, COUNT) if (directory / name).exists()}


@pytest.mark.program
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("has_shm", [True, False])
async def test_lost_end_is_told(
    directory: Path, tmp_path: Path, damage: Callable[[Path], None], *, has_shm: bool
) -> None:
    """S-DUR-80, S-DUR-81: by readers and writers, with the file and the facts; nothing is changed by looking or refusing."""
    damage(directory)
    if not has_shm:
        (directory / f"{RECORD}-shm").unlink()
    before = contents(directory)
    store = SqliteStore(tmp_path)
    left = len(await store.facts(RUN, is_partial=True))
    assert left < FACTS
    which = f"fact {FACTS} of {FACTS} is" if left == FACTS - 1 else f"facts {left + 1} to {FACTS} of {FACTS} are"
    pages = store.read(RUN, kinds=("model",))
    for attempt in (store.facts(RUN), store.claim(RUN), store.begin(RUN), anext(pages)):
        with pytest.raises(RecordError) as caught:
            await attempt
        text = str(caught.value)
        assert text.startswith(f"The record is damaged: {which} missing in {directory / RECORD}; ")
        assert ("--allow-loss" in text) is (left > 0)
        assert caught.value.path == str(directory / RECORD)
    journal = await store.join(RUN, writer="w")
    with pytest.raises(RecordError, match=r"are missing|is missing"):
        await journal.append([fact()], until=Persistence.COMMITTED)
    await asyncio.sleep(0)
    assert contents(directory) == before
    assert [run.run_id for run in await store.runs()] == [RUN]


@pytest.mark.program
async def test_place_of_the_damage_is_told(directory: Path, tmp_path: Path) -> None:
    """S-DUR-81: the byte at which the first damaged frame begins, and how much lies behind it."""
    log = directory / LOG
    whole = scan_log(log)
    assert (whole.broken_at, whole.commits_behind, whole.is_damaged) == (None, 0, False)
    at = 32 + 40 * FRAME
    flip(log, at + 1000)
    found = scan_log(log)
    assert (found.broken_at, found.is_damaged) == (at, True)
    # The damaged frame may have ended a commit itself.
    assert found.commits + found.commits_behind in {whole.commits - 1, whole.commits}
    with pytest.raises(
        RecordError, match=f"its log {LOG} is damaged at byte {at}, with {found.commits_behind} commits"
    ):
        await SqliteStore(tmp_path).facts(RUN)


@pytest.mark.program
@pytest.mark.parametrize("damage", [_flip_in_the_middle, _flip_in_the_header])
async def test_record_without_notes_tells_by_its_log(
    directory: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """S-DUR-80: records of earlier versions are read as before, and a damaged log of theirs is noticed by what is behind it."""
    (directory / COUNT).unlink()
    store = SqliteStore(tmp_path)
    assert len(await store.facts(RUN)) == FACTS
    damage(directory)
    with pytest.raises(RecordError, match=r"its log .* is damaged at byte"):
        await store.facts(RUN)


@pytest.mark.program
async def test_loss_of_power_may_take_what_was_not_synchronised(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DUR-84: after another start of the machine it is one WARN line of whoever goes on; nothing has to be allowed."""
    restart(directory)
    _cut(directory)
    store = SqliteStore(tmp_path)
    left = len(await store.facts(RUN))
    assert 0 < left < FACTS
    taken = await store.claim(RUN)
    assert f"facts {left + 1} to {FACTS} had not reached the disk" in caplog.text
    await taken.close(RunState.INTERRUPTED)
    assert read_count(directory) is not None
    assert len(await store.facts(RUN)) == left


@pytest.mark.program
async def test_synchronised_facts_are_missed_after_a_loss_of_power_too(directory: Path, tmp_path: Path) -> None:
    """S-DUR-84: they were promised to be on the disk."""
    count = CountFile(directory)
    count.note_synced(FACTS)
    count.close()
    restart(directory)
    _cut(directory)
    with pytest.raises(RecordError, match=f"to {FACTS} of {FACTS} are missing"):
        await SqliteStore(tmp_path).claim(RUN)


@pytest.mark.program
async def test_gap_is_told(directory: Path, tmp_path: Path) -> None:
    """S-DUR-82: facts are numbered without gaps."""
    connection = sqlite3.connect(directory / RECORD, isolation_level=None)
    connection.execute("DELETE FROM facts WHERE seq IN (3, 4)")
    connection.close()
    store = SqliteStore(tmp_path)
    for attempt in (store.facts(RUN), store.claim(RUN), anext(store.read(RUN, kinds=("model",)))):
        with pytest.raises(RecordError, match=f"2 of the facts up to {FACTS} are missing in "):
            await attempt
    assert await store.accept_loss(RUN)
    assert [fact.kind for fact in await store.facts(RUN)] == ["model"] * (FACTS - 2) + ["loss"]


@pytest.mark.program
@pytest.mark.parametrize("damage", [_flip_in_the_middle, _flip_at_the_end, _cut])
async def test_accepted_loss_is_recorded_once(directory: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """S-DUR-83: what is lost is a fact, what is left of the log is kept, and nobody is asked again."""
    damage(directory)
    store = SqliteStore(tmp_path)
    left = len(await store.facts(RUN, is_partial=True))
    log = (directory / LOG).read_bytes()
    assert await store.accept_loss(RUN)
    assert (directory / f"{LOG}.lost-1").read_bytes() == log
    *_, lost = await store.facts(RUN)
    assert (lost.kind, lost.name, lost.seq) == ("loss", "run", left + 1)
    assert (lost.data.to_data()["last"], lost.data.to_data()["expected"], lost.data.to_data()["kept"]) == (
        left,
        FACTS,
        f"{LOG}.lost-1",
    )
    assert not await store.accept_loss(RUN)
    taken = await store.claim(RUN)
    assert taken.epoch > lost.epoch - 1
    assert {("run", "loss")} <= (await taken.journal.lookup_recorded("a#0")).keys()
    await taken.journal.append([fact("a#0/90/model")], epoch=taken.epoch, until=Persistence.COMMITTED)
    await taken.close(RunState.COMPLETED)
    assert len(await store.facts(RUN)) == left + 2
    restart(directory)
    assert len(await store.facts(RUN)) == left + 2


@pytest.mark.program
async def test_accepted_loss_counts_where_its_process_died_before_it_noted_it(directory: Path, tmp_path: Path) -> None:
    """S-DUR-83: the fact is enough; a later loss is another one."""
    _cut(directory)
    store = SqliteStore(tmp_path)
    notes = (directory / COUNT).read_bytes()
    assert await store.accept_loss(RUN)
    (directory / COUNT).write_bytes(notes)
    left = len(await store.facts(RUN))
    taken = await store.claim(RUN)
    await taken.journal.append([fact(f"a#0/{turn}/model") for turn in range(90, 95)], epoch=taken.epoch)
    await taken.close(RunState.INTERRUPTED)
    connection = sqlite3.connect(directory / RECORD, isolation_level=None)
    connection.execute("DELETE FROM facts WHERE seq > ?", (left,))
    connection.close()
    with pytest.raises(RecordError, match=f"facts {left + 1} to {left + 5} of {left + 5} are missing"):
        await store.facts(RUN)


@pytest.mark.program
async def test_nothing_is_accepted_where_nothing_is_left(directory: Path, tmp_path: Path) -> None:
    """S-DUR-83: such a run is removed and begun anew."""
    _empty(directory)
    store = SqliteStore(tmp_path)
    with pytest.raises(RecordError, match=f"Nothing of it is left.*ensemble-ray delete {RUN}"):
        await store.accept_loss(RUN)
    await store.delete(RUN)
    await (await store.begin(RUN)).close(RunState.INTERRUPTED)


@pytest.mark.parametrize("name", [RECORD, LOG, f"{RECORD}-shm", "", "owner.lock"])
async def test_record_that_is_removed_while_it_is_written_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """S-DUR-85: at the next commit, or at the end; the file is named. Nothing is written to files that nobody finds."""
    monkeypatch.setattr("ensemble_ray.record.sqlite.file.LOOK_S", 0.0)
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    directory = tmp_path / "runs" / RUN
    shutil.rmtree(directory) if not name else (directory / name).unlink()
    if name != "owner.lock":
        with pytest.raises(RecordError, match=f"The run's record was removed: {directory / RECORD}"):
            await run.journal.append([fact("a#0/1/model")], until=Persistence.COMMITTED)
    with pytest.raises(RecordError, match="was removed"):
        await run.close(RunState.COMPLETED)


async def test_record_that_is_removed_behind_the_last_commit_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DUR-85: however short a time ago it was looked at."""
    monkeypatch.setattr("ensemble_ray.record.sqlite.file.LOOK_S", 1000.0)
    run = await SqliteStore(tmp_path).begin(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    (tmp_path / "runs" / RUN / LOG).unlink()
    with pytest.raises(RecordError, match="was removed"):
        await run.close(RunState.COMPLETED)


async def test_removed_record_is_not_made_anew(tmp_path: Path) -> None:
    """S-DUR-85: by a process that comes later: what it wrote would look like the whole record."""
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    (tmp_path / "runs" / RUN / RECORD).unlink()
    journal = await store.join(RUN, writer="w")
    with pytest.raises(RecordError, match="was removed"):
        await journal.append([fact("a#0/1/model")], until=Persistence.COMMITTED)
    with pytest.raises(RecordError, match="was removed"):
        await store.facts(RUN)
    with pytest.raises(RecordError, match="was removed"):
        await run.close(RunState.FAILED)


@pytest.mark.program
async def test_nothing_is_told_of_kills(tmp_path: Path) -> None:
    """S-DUR-80: writers killed at any moment, several to a file, lose nothing that was committed; no alarm is ever given."""
    rest = """
import random, threading
async def main():
    rng = random.Random(int(sys.argv[2]))
    journal = await store.join("run-1", writer="w")
    await journal.append([fact(0)], until=Persistence.COMMITTED)
    threading.Timer(rng.random() * 0.05, lambda: os.kill(os.getpid(), 9)).start()
    while True:
        facts = [fact(turn, text="x" * rng.choice((10, 5000))) for turn in range(rng.randrange(1, 4))]
        await journal.append(facts, until=rng.choice((Persistence.QUEUED, Persistence.COMMITTED, Persistence.SYNCED)))
asyncio.run(main())
"""
    store = SqliteStore(tmp_path)
    await (await store.begin(RUN)).close(RunState.INTERRUPTED)
    rng, seen = random.Random(1), 0  # noqa: S311  repeatable, keeps no secret
    for _ in range(3):
        kills = [output_of(rest, tmp_path, arguments=[str(rng.random())[2:]]) for _ in range(2)]
        ends = await asyncio.gather(*kills, return_exceptions=True)
        assert all(isinstance(end, subprocess.CalledProcessError) and end.returncode == -9 for end in ends), ends
        facts = await store.facts(RUN)
        count = read_count(tmp_path / "runs" / RUN)
        assert seen < len(facts)
        assert count is not None
        assert count.committed <= len(facts)
        seen = len(facts)


@pytest.mark.program
@pytest.mark.parametrize("index", ["whole", "missing", "short", "empty"])
async def test_record_that_cannot_be_written_is_read_and_not_taken(directory: Path, tmp_path: Path, index: str) -> None:
    """S-DUR-8, S-DUR-89: by a user without rights, with a log that a kill left; nothing is changed, and nothing crashes."""
    shm = directory / f"{RECORD}-shm"
    if index == "missing":
        shm.unlink()
    elif index != "whole":
        os.truncate(shm, 100 if index == "short" else 0)
    before = contents(directory)
    permit(tmp_path, 0o555, 0o444)
    rest = """
store = SqliteStore(pathlib.Path())
if not os.getuid():
    os.setuid(65534)
async def main():
    print(len(await store.facts("run-1")), await store.accept_loss("run-1"))
    for attempt in (store.claim("run-1"), store.claim("run-1", by_force=True)):
        try:
            await attempt
        except RecordError as error:
            print(error)
asyncio.run(main())
"""
    try:
        counts, *told = (await output_of(rest, tmp_path, cwd=tmp_path)).splitlines()
    finally:
        permit(tmp_path, 0o700, 0o600)
    assert counts == f"{FACTS} False"
    assert len(told) == 2
    assert all(line.startswith("Cannot write the run's record to runs/run-1/") for line in told)
    assert contents(directory) == before
