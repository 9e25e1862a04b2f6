"""Runs in SQLite files: what happens when they cannot be written, when a turn does not come, and when they are damaged."""

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import RecordError, RunState
from ensemble_ray.ports import Persistence
from ensemble_ray.record.resume.planned import read_planned
from ensemble_ray.record.resume.reading import read_pages
from ensemble_ray.record.sqlite.file import _copy
from ensemble_ray.record.sqlite.journal import COMMIT_LOCK, CommitLock
from ensemble_ray.record.sqlite.losses import RECORD
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.ensemble_ray.record.sqlite_runs import RUN, fact, output_of, permit, restart

# When it cannot be written.


async def test_error_says_where_and_what_to_do_when_the_home_cannot_be_made(tmp_path: Path) -> None:
    """S-DUR-8: a file in the way: one clear error, with its cause, before the run begins."""
    (tmp_path / "home").write_text("a file")
    store = SqliteStore(tmp_path / "home")
    with pytest.raises(RecordError, match="set ENSEMBLE_RAY_HOME to a directory that can be written") as caught:
        await store.begin(RUN)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.path == str(tmp_path / "home" / "runs")
    with pytest.raises(RecordError, match="Is ENSEMBLE_RAY_HOME the same in all processes"):
        await store.join(RUN, writer="w")


async def test_writer_is_told_when_the_file_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S-DUR-8: by whoever waits, by the next append, by close; and once in the log. Nobody owns the run then."""
    store = SqliteStore(tmp_path)
    directory = tmp_path / "runs" / RUN
    (directory / RECORD).mkdir(parents=True)
    journal = await store.join(RUN, writer="w")
    with caplog.at_level(logging.ERROR), pytest.raises(RecordError, match=rf"{RECORD}: unable to open database file"):
        await journal.append([fact()], until=Persistence.COMMITTED)
    for attempt in (
        lambda: journal.append([fact()]),
        journal.flush,
        lambda: journal.lookup_recorded("a#0"),
        journal.close,
    ):
        with pytest.raises(RecordError, match="Free space or correct the rights there"):
            await attempt()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_writer_is_told_when_its_fact_comes_while_the_failure_is_told(tmp_path: Path) -> None:
    """S-DUR-8: what passed the check just before the failure is refused by the writer's thread; nobody waits for ever."""
    store = SqliteStore(tmp_path)
    (tmp_path / "runs" / RUN / RECORD).mkdir(parents=True)
    journal = await store.join(RUN, writer="w")
    with pytest.raises(RecordError):
        await journal.append([fact()], until=Persistence.COMMITTED)
    async with asyncio.timeout(60):
        with pytest.raises(RecordError, match="Free space or correct the rights there"):
            await journal._push_and_wait([fact()], 0, Persistence.COMMITTED)  # pyright: ignore[reportPrivateUsage]  behind the check, as in that race


@pytest.fixture(scope="module")
def full_disks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What writers left on disks that became full, one after the other in a process, and what each was told."""
    rest = """
async def write(home, until):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run = await SqliteStore(home).begin("run-1")
    await run.journal.append([fact(-1)], until=Persistence.COMMITTED)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    for turn in range(1000):
        try:
            await run.journal.append([fact(turn, text="x" * 500)], until=until)
            if not turn % 50:
                await run.journal.flush()
        except RecordError as error:
            print(until.name, turn, error)
            break
    try:
        await run.close(RunState.FAILED)
    except RecordError:
        print(until.name, "told")

async def main():
    for until in Persistence:
        await write(pathlib.Path(sys.argv[1], until.name), until)
asyncio.run(main())
"""
    home = tmp_path_factory.mktemp("full")
    return home, asyncio.run(output_of(rest, home)).splitlines()


@pytest.mark.program
@pytest.mark.parametrize("until", ["COMMITTED", "SYNCED", "QUEUED"])
async def test_writer_is_told_when_the_disk_is_full(full_disks: tuple[Path, list[str]], until: str) -> None:
    """S-DUR-8: a limit on the size of files stands for a full disk; what was written before stays, and can be resumed."""
    home = full_disks[0] / until
    told, end = (line.split(" ", 1)[1] for line in full_disks[1] if line.startswith(until))
    turn, message = told.split(" ", 1)
    assert end == "told"
    assert message.startswith(f"Cannot write the run's record to {home}/runs/{RUN}/{RECORD}: ")
    store = SqliteStore(home)
    facts = await store.facts(RUN)
    assert [fact.name for fact in facts] == [f"a#0/{number}/model" for number in range(-1, len(facts) - 1)]
    assert len(facts) == int(turn) + 1 or until == "QUEUED"
    found = await store.summary(RUN)
    assert found is not None
    assert found.state is RunState.INTERRUPTED
    taken = await store.claim(RUN)
    await taken.journal.append([fact("a#0/2000/model")], epoch=taken.epoch, until=Persistence.SYNCED)
    await taken.close(RunState.COMPLETED)
    assert len(await store.facts(RUN)) == len(facts) + 1


async def test_record_is_read_when_its_writer_leaves_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-8: its log was there when the copy began, and is gone: all of it is in the file."""
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    log = tmp_path / "runs" / RUN / f"{RECORD}-wal"
    assert log.exists()
    copy, attempts = shutil.copyfile, Counter[str]()

    def close_before_the_log(source: Path, target: Path) -> object:
        attempts[source.name] += 1
        if source == log:
            log.rename(tmp_path / "left")  # as whoever closes the last connection removes it
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", close_before_the_log)
    (tmp_path / "copy").mkdir()
    _copy(tmp_path / "runs" / RUN / RECORD, tmp_path / "copy")
    assert attempts == {RECORD: 2, log.name: 1}
    assert [each.name for each in (tmp_path / "copy").iterdir()] == [RECORD]
    (tmp_path / "left").rename(log)
    await run.close(RunState.COMPLETED)


@pytest.mark.program
async def test_run_is_refused_and_its_records_stay_readable_when_the_home_is_read_only(tmp_path: Path) -> None:
    """S-DUR-8: a user without rights reads what there is, and is told when beginning or taking a run."""
    run = await SqliteStore(tmp_path).begin("run-0")
    await run.journal.append([fact()])
    await run.close(RunState.INTERRUPTED)
    while (tmp_path / "runs" / "run-0" / f"{RECORD}-wal").exists():  # noqa: ASYNC110  closing goes on in the background
        await asyncio.sleep(0.01)
    permit(tmp_path, 0o555, 0o444)
    rest = """
store = SqliteStore(pathlib.Path())
if not os.getuid():
    os.setuid(65534)
async def main():
    for attempt in (store.begin("run-1"), store.claim("run-0"), store.ask_cancel("run-0"), store.delete("run-0")):
        try:
            await attempt
        except RecordError as error:
            print(error)
    print(len(await store.facts("run-0")), len(await store.runs()))
asyncio.run(main())
"""
    try:
        *told, counts = (await output_of(rest, tmp_path, cwd=tmp_path)).splitlines()
    finally:
        permit(tmp_path, 0o700, 0o600)
    assert counts == "1 1"
    assert len(told) == 4
    for message in told:
        assert message.startswith("Cannot write the run's record to runs/")
        assert os.strerror(errno.EACCES) in message


# Taking turns.


async def test_holder_is_named_when_the_turn_does_not_come(tmp_path: Path) -> None:
    """S-DUR-8: a process that is stopped in the middle of a commit holds up its run, and no other one."""
    store = SqliteStore(tmp_path, patience_s=0.1)
    run, other = await store.begin(RUN), await store.begin("run-2")
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    lock = CommitLock(tmp_path / "runs" / RUN / COMMIT_LOCK)
    assert lock.acquire()
    try:
        waiting = asyncio.ensure_future(run.journal.append([fact()], until=Persistence.COMMITTED))
        await other.journal.append([fact()], until=Persistence.COMMITTED)
        with pytest.raises(RecordError, match=f"process {os.getpid()} has held its lock for 0 s. Is it stopped?"):
            await waiting
        with pytest.raises(RecordError, match=f"process {os.getpid()} has held its lock"):
            await SqliteStore(tmp_path, patience_s=0.1).claim(RUN, by_force=True)
    finally:
        lock.close()
    with pytest.raises(RecordError):
        await run.close(RunState.FAILED)
    await other.close(RunState.COMPLETED)


async def test_commit_goes_on_when_its_turn_comes(tmp_path: Path) -> None:
    """Longer than the writer waits at a time, shorter than its patience."""
    store = SqliteStore(tmp_path)
    run, other = await store.begin(RUN), await store.begin("run-2")
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    lock = CommitLock(tmp_path / "runs" / RUN / COMMIT_LOCK)
    assert lock.acquire()
    waiting = asyncio.ensure_future(run.journal.append([fact()], until=Persistence.COMMITTED))
    for _ in range(5):
        await other.journal.append([fact()], until=Persistence.COMMITTED)
    assert not waiting.done()
    lock.close()
    await waiting
    assert len(await store.facts(RUN)) == 2
    await run.close(RunState.COMPLETED)
    await other.close(RunState.COMPLETED)


# Damage.


@pytest.fixture(scope="module")
def killed_writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a writer that was killed after 20 groups: its log was never brought into the file."""
    rest = """
async def main():
    run = await store.begin("run-1")
    for group in range(20):
        await run.journal.append([fact(group, text="x" * 900), fact(group + 100)], until=Persistence.COMMITTED)
    os._exit(1)
asyncio.run(main())
"""
    home = tmp_path_factory.mktemp("killed")
    with pytest.raises(subprocess.CalledProcessError):
        asyncio.run(output_of(rest, home))
    return home


@pytest.fixture
def recorded(killed_writer: Path, tmp_path: Path) -> Path:
    """The record that it left, in a copy of its home."""
    shutil.copytree(killed_writer, tmp_path, dirs_exist_ok=True)
    return tmp_path / "runs" / RUN / RECORD


@pytest.mark.program
@pytest.mark.parametrize("has_shm", [True, False])
async def test_last_group_is_missing_when_it_was_torn(recorded: Path, tmp_path: Path, *, has_shm: bool) -> None:
    """S-DUR-9: as by a loss of power: the others are read, and the run goes on after them."""
    path = recorded
    restart(path.parent)
    log = path.with_name(f"{RECORD}-wal")
    os.truncate(log, log.stat().st_size - 1000)
    if not has_shm:
        path.with_name(f"{RECORD}-shm").unlink()
    store = SqliteStore(tmp_path)
    names = [f"a#0/{number}/model" for group in range(19) for number in (group, group + 100)]
    taken = await store.claim(RUN)
    assert [fact.name for fact in await store.facts(RUN)] == names
    await taken.journal.append([fact("b#0/0/model")], epoch=taken.epoch, until=Persistence.COMMITTED)
    await taken.close(RunState.COMPLETED)
    assert [fact.name for fact in await store.facts(RUN)] == [*names, "b#0/0/model"]


def _garbage(path: Path) -> None:
    path.write_bytes(b"garbage " * 1000)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=6")
    connection.close()


def _no_data(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE facts SET data = '[1]', crc = NULL WHERE seq = 3")
    connection.close()


@pytest.mark.program
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_garbage, "The record is damaged: {path} cannot be read (file is not a database)"),
        (_cut, "The record is damaged: {path} cannot be read (database disk image is malformed)"),
        (_empty, "The record is damaged: {path} cannot be read (it holds no record)"),
        (_newer, "The record {path} is of format 6, this version reads up to 5: update ensemble-ray"),
        (_no_data, "The record is damaged: fact 3 in {path} cannot be read (the data of a fact is an object)"),
    ],
)
async def test_damaged_record_is_told(
    recorded: Path, tmp_path: Path, damage: Callable[[Path], None], text: str
) -> None:
    """S-DUR-9: by name, to readers and to whoever wants to go on; never guessed at. Lists show the run all the same."""
    path = recorded
    connection = sqlite3.connect(path)  # the last one to close brings the log into the file
    connection.execute("SELECT count(*) FROM facts").fetchone()
    connection.close()
    damage(path)
    store = SqliteStore(tmp_path)

    async def go_on(run_id: str) -> None:
        """Take the run, and read what is recorded of it; what is found then may be damaged too."""
        owned = await store.claim(run_id)
        try:
            await read_planned(store, run_id, lambda *_: None)
        finally:
            await owned.close(RunState.INTERRUPTED)

    for attempt in (store.facts, go_on, store.begin):
        with pytest.raises(RecordError) as caught:
            await attempt(RUN)
        assert str(caught.value) == text.format(path=path)
        assert caught.value.path == str(path)
    assert [(run.run_id, run.state) for run in await store.runs()] == [(RUN, RunState.INTERRUPTED)]
    journal = await store.join(RUN, writer="w")
    if damage is not _no_data:
        with pytest.raises(RecordError):
            await journal.append([fact()], until=Persistence.COMMITTED)


@pytest.mark.parametrize("statement", ["DELETE FROM bodies", "UPDATE bodies SET body = 'another'"])
async def test_missing_body_is_told_in_its_place(tmp_path: Path, statement: str) -> None:
    """S-DUR-9, S-DUR-82: a record without one of its bodies still shows the rest; nobody goes on with what is not there."""
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    await run.journal.append([fact(text="x" * 2000)])
    await run.close(RunState.COMPLETED)
    connection = sqlite3.connect(tmp_path / "runs" / RUN / RECORD, isolation_level=None)
    connection.execute(statement)
    connection.close()
    with pytest.raises(RecordError, match=r"fact 1 in .* cannot be read .its text [0-9a-f]+ is (missing|not what)"):
        await store.facts(RUN)
    with pytest.raises(RecordError, match=r"fact 1 in .* cannot be read .its text [0-9a-f]+ is (missing|not what)"):
        await read_pages(store, RUN, None)
    (found,) = await store.facts(RUN, is_partial=True)
    assert str(found.data.to_data()["text"]).endswith("is missing from the record]")
