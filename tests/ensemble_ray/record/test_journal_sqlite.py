"""Runs in SQLite files: which files there are, and what the writer's thread does."""

import asyncio
import contextlib
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from ensemble_ray import RunExistsError, RunState
from ensemble_ray.ports import Persistence
from ensemble_ray.record.sqlite.journal import COMMIT_LOCK, CommitLock
from ensemble_ray.record.sqlite.losses import COUNT, RECORD
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.ensemble_ray.record.sqlite_runs import RUN, fact, output_of, rows


class Watched:
    """A value that notes who renders it."""

    def __init__(self, seen: list[threading.Thread]) -> None:
        self._seen = seen

    def __str__(self) -> str:
        self._seen.append(threading.current_thread())
        return "watched"


async def test_record_of_a_run_has_its_files(tmp_path: Path) -> None:
    """S-DUR-5: one SQLite file, its count, two locks, and what lists need; for their owner only."""
    run = await SqliteStore(tmp_path).begin(RUN, origin="team.yaml")
    await run.journal.append([fact(text="x" * 2000)], until=Persistence.COMMITTED)
    directory = tmp_path / "runs" / RUN
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    wal = {f"{RECORD}-wal", f"{RECORD}-shm"}
    assert files.keys() == {RECORD, COUNT, COMMIT_LOCK, "meta.json", "owner.lock", *wal}
    assert set(files.values()) == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    await run.close(RunState.COMPLETED)
    assert rows(tmp_path, "PRAGMA user_version") == [(5,)]
    assert rows(tmp_path, "PRAGMA journal_mode") == [("wal",)]
    assert rows(tmp_path, "PRAGMA integrity_check") == [("ok",)]


async def test_record_of_the_earlier_format_is_read_and_raised_when_it_is_continued(tmp_path: Path) -> None:
    """S-DUR-4: reading changes nothing; earlier versions of the package refuse a record that a later one continued."""
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    await run.close(RunState.FAILED)
    with contextlib.closing(sqlite3.connect(tmp_path / "runs" / RUN / RECORD)) as connection:
        connection.execute("ALTER TABLE facts DROP COLUMN crc")
        connection.execute("PRAGMA user_version=2")
    await store.facts(RUN)
    assert rows(tmp_path, "PRAGMA user_version") == [(2,)]
    joined = await store.join(RUN, writer="b")
    await joined.append([fact()], until=Persistence.COMMITTED)
    await joined.close()
    assert rows(tmp_path, "PRAGMA user_version") == [(5,)]


async def test_long_text_is_kept_once_per_run(tmp_path: Path) -> None:
    """S-DUR-4: however many facts and writers hold it; short ones stay in their facts."""
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    other = await store.join(RUN, writer="b")
    for journal in (run.journal, other):
        for turn in range(3):
            text = "x" * 2000
            await journal.append([fact(f"t#0/{turn}/model", text=text, again=[text], short="y" * 1024)])
        await journal.close()
    assert rows(tmp_path, "SELECT count(*), max(length(body)) FROM bodies") == [(1, 2000)]
    assert {fact.data.to_data()["text"] for fact in await store.facts(RUN)} == {"x" * 2000}
    await run.close(RunState.COMPLETED)


async def test_record_holds_readable_text(tmp_path: Path) -> None:
    """S-DUR-6: JSON data that the sqlite3 command shows."""
    run = await SqliteStore(tmp_path).begin(RUN)
    await run.journal.append([fact("a#0/0/model", at=2.5, text="ä")], epoch=3)
    await run.close(RunState.COMPLETED)
    assert rows(tmp_path, "SELECT seq, kind, name, instance, at, epoch, data FROM facts") == [
        (1, "model", "a#0/0/model", "a#0", 2.5, 3, '{"text":"ä"}')
    ]
    assert rows(tmp_path, "SELECT * FROM epochs") == [("a#0", 3)]


async def test_appending_touches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts are rendered and written in the writer's thread, unless commits are short; here they are only queued."""
    monkeypatch.setattr("ensemble_ray.record.sqlite.journal.SHORT_S", 0.0)
    seen: list[threading.Thread] = []
    run = await SqliteStore(tmp_path).begin(RUN)
    await run.journal.append([fact(value=Watched(seen))], until=Persistence.COMMITTED)
    assert [thread.name for thread in seen] == ["ensemble-ray-record"]
    await run.close(RunState.COMPLETED)


async def test_runs_share_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are; here no commit is short enough for the loop's thread."""
    monkeypatch.setattr("ensemble_ray.record.sqlite.journal.SHORT_S", 0.0)
    seen: list[threading.Thread] = []
    runs = [await SqliteStore(tmp_path).begin(f"run-{number}") for number in range(20)]
    await asyncio.gather(
        *(run.journal.append([fact(value=Watched(seen))], until=Persistence.COMMITTED) for run in runs)
    )
    assert (len(seen), len(set(seen))) == (20, 1)
    assert seen[0] is not threading.current_thread()
    for run in runs:
        await run.close(RunState.COMPLETED)


async def test_commit_runs_on_the_loop_when_one_caller_waits_and_commits_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for the writer's thread would take longer. Further callers share one commit there."""
    monkeypatch.setattr("ensemble_ray.record.sqlite.journal.SHORT_S", 60.0)
    seen: list[threading.Thread] = []
    run = await SqliteStore(tmp_path).begin(RUN)
    while threading.current_thread() not in seen:  # the thread opens the file, and may not have finished its round
        await run.journal.append([fact(f"b#{len(seen)}/0/model", value=Watched(seen))], until=Persistence.COMMITTED)
    assert len(await SqliteStore(tmp_path).facts(RUN)) == len(seen)

    seen.clear()
    await asyncio.gather(
        *(
            run.journal.append([fact(f"c#{n}/0/model", value=Watched(seen))], until=Persistence.COMMITTED)
            for n in range(5)
        )
    )
    assert [each is threading.current_thread() for each in seen] == [True, False, False, False, False]

    seen.clear()
    await run.journal.append([fact("d#0/0/model", value=Watched(seen))], until=Persistence.SYNCED)
    assert seen[0] is not threading.current_thread()
    await run.close(RunState.COMPLETED)


async def test_commit_is_left_to_the_thread_when_another_process_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop never waits for another process."""
    monkeypatch.setattr("ensemble_ray.record.sqlite.journal.SHORT_S", 60.0)
    run = await SqliteStore(tmp_path).begin(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    lock = CommitLock(tmp_path / "runs" / RUN / COMMIT_LOCK)
    assert lock.acquire(1.0)
    appending = asyncio.create_task(run.journal.append([fact("b#0/0/model")], until=Persistence.COMMITTED))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not appending.done()
    lock.close()
    await asyncio.wait_for(appending, 60)
    await run.close(RunState.COMPLETED)


async def test_appending_waits_when_too_many_facts_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts are counted, and not the calls that brought them, since they are what fills the memory."""
    monkeypatch.setattr("ensemble_ray.record.sqlite.journal._MAX_WAITING", 2)
    run = await SqliteStore(tmp_path).begin(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    lock = CommitLock(tmp_path / "runs" / RUN / COMMIT_LOCK)
    assert lock.acquire(1.0)
    two = run.journal.append([fact(f"a#0/{turn}/model") for turn in range(2)])
    await asyncio.wait_for(two, 60)
    appending = asyncio.create_task(run.journal.append([fact(f"b#0/{turn}/model") for turn in range(3)]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not appending.done()
    lock.close()
    await asyncio.wait_for(appending, 60)
    await run.close(RunState.COMPLETED)


async def test_wait_that_is_given_up_leaves_its_facts(tmp_path: Path) -> None:
    """A cancelled task's fact is appended all the same: what happened has happened."""
    store = SqliteStore(tmp_path)
    run = await store.begin(RUN)
    waiting = asyncio.ensure_future(run.journal.append([fact()], until=Persistence.COMMITTED))
    await asyncio.sleep(0)
    waiting.cancel()
    await run.close(RunState.COMPLETED)
    assert len(await store.facts(RUN)) == 1


@pytest.mark.program
async def test_facts_are_written_when_the_process_just_ends(tmp_path: Path) -> None:
    """S-DUR-2: nobody closed the journal; the interpreter's end writes what is queued."""
    rest = """
async def main():
    run = await store.begin("run-1")
    await run.journal.append([fact(0, text="x")])
asyncio.run(main())
"""
    await output_of(rest, tmp_path)
    assert [fact.data.to_data() for fact in await SqliteStore(tmp_path).facts(RUN)] == [{"text": "x"}]


@pytest.mark.program
async def test_forked_process_writes_nothing_for_its_parent(tmp_path: Path) -> None:
    """S-DUR-1: neither what the parent has queued, a second time, nor anything of its own in the parent's name."""
    rest = """
async def main():
    run = await store.begin("run-1")
    await run.journal.append([fact(0)])
    child = os.fork()
    if not child:
        try:
            await run.journal.append([fact(1)])
        except Exception as error:
            print(type(error).__name__, flush=True)
        await run.journal.close()
        os._exit(0)
    os.waitpid(child, 0)
    await run.close(RunState.COMPLETED)
asyncio.run(main())
"""
    assert await output_of(rest, tmp_path) == "IllegalStateError\n"
    assert [fact.name for fact in await SqliteStore(tmp_path).facts(RUN)] == ["a#0/0/model"]


@pytest.mark.program
async def test_synchronised_facts_are_on_the_disk(tmp_path: Path) -> None:
    """S-DUR-3: the log is synchronised before `append` returns, also where there is a long text, or nothing new."""
    rest = """
import sqlite3
seen = []
class Watched(sqlite3.Connection):
    def execute(self, *args):
        if args[0].startswith(("PRAGMA synchronous", "INSERT", "COMMIT")):
            seen.append(args[0].split("=")[-1] if "PRAGMA" in args[0] else args[0].split(" ")[0])
        return super().execute(*args)
connect = sqlite3.connect
sqlite3.connect = lambda *args, **more: connect(*args, **more, factory=Watched)
async def main():
    run = await store.begin("run-1")
    await run.journal.append([fact(0)], until=Persistence.COMMITTED)
    del seen[:]
    await run.journal.append([fact(1)], until=Persistence.SYNCED)
    await run.journal.append([fact(2, text="x" * 2000)], until=Persistence.SYNCED)
    await run.journal.append([], until=Persistence.SYNCED)
    await run.journal.append([fact(3)], until=Persistence.COMMITTED)
    print(*seen)
asyncio.run(main())
"""
    assert await output_of(rest, tmp_path) == "FULL INSERT INSERT COMMIT COMMIT NORMAL INSERT\n"


@pytest.mark.parametrize("doing", ["begin", "claim"])
async def test_run_has_no_owner_when_nobody_waits_for_its_beginning(tmp_path: Path, doing: str) -> None:
    """S-DUR-15: a caller that was cancelled meanwhile keeps nothing."""
    store = SqliteStore(tmp_path)
    if doing == "claim":
        run = await store.begin(RUN)
        await run.journal.append([fact()])
        await run.close(RunState.INTERRUPTED)
    waiting = asyncio.ensure_future(getattr(store, doing)(RUN))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(60):
        while True:
            try:
                again = await getattr(store, doing)(RUN)
            except RunExistsError:  # as long as the thread is at it
                await asyncio.sleep(0.01)
                continue
            break
    await again.close(RunState.COMPLETED)
