"""Records in PostgreSQL when connections are lost, servers go and come back, owners freeze and die."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from ensemble_ray import RecordError, RunExistsError, RunState, StaleEpochError
from ensemble_ray.ports import Persistence
from ensemble_ray.record.postgres.database import Database
from ensemble_ray.record.postgres.journal import Append, BegunRun, commit_group, render
from ensemble_ray.record.postgres.store import PostgresStore
from ensemble_ray.values.ids import OWNER_STEP
from tests.postgres_server import PostgresServer

from .postgres_records import RUN, another_process, elsewhere, fact, until

# Lost connections.


async def test_nothing_is_lost_or_doubled_when_connections_are_ended(
    url: str, store: PostgresStore, postgres: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """S-DUR-1, S-DUR-3: in the middle of appends, again and again; each chain in its order."""
    owned = await store.begin(RUN)
    ended: list[int] = []

    async def chain(key: int) -> None:
        for turn in range(30):
            if not key and turn % 6 == 1:
                ended.append(await asyncio.to_thread(postgres.end_backends, url))
            await owned.journal.append([fact(f"t{key}#0/{turn}/call", "tool_intent")])
            await owned.journal.append([fact(f"t{key}#0/{turn}/model", turn=turn)], until=Persistence.COMMITTED)

    await asyncio.gather(*(chain(key) for key in range(10)))
    await owned.journal.flush()
    facts = await store.facts(RUN)
    assert [fact.seq for fact in facts] == list(range(1, 601))
    for key in range(10):
        mine = [fact.name for fact in facts if fact.name.startswith(f"t{key}#")]
        assert mine == [f"t{key}#0/{turn}/{call}" for turn in range(30) for call in ("call", "model")]
    assert sum(ended) >= 5
    assert caplog.record_tuples[0][1] == logging.WARNING
    await owned.close(RunState.COMPLETED)


async def test_writer_keeps_nothing_of_runs_that_were_closed(store: PostgresStore) -> None:
    """S-DUR-1: a long process writes many; a run that is written to again loses nothing, and nothing is doubled."""
    open_run = await store.begin(RUN)  # so that the writer stays
    writer = store._writer()
    sizes = []
    for number in range(4):
        owned = await store.begin(f"other-{number}")
        await owned.journal.append([fact("a#0/0/model"), fact("a#0/1/model")], until=Persistence.COMMITTED)
        await owned.journal.close()
        again = await store.join(f"other-{number}", writer="w")
        await again.append([fact("a#0/2/model")], until=Persistence.COMMITTED)
        await again.close()
        await owned.close(RunState.COMPLETED)
        names = [each.name for each in await store.facts(f"other-{number}")]
        assert names == ["a#0/0/model", "a#0/1/model", "a#0/2/model"]
        sizes.append(sum(len(kept) for kept in vars(writer).values() if isinstance(kept, dict | list | set)))
    assert len(set(sizes)) == 1
    await open_run.close(RunState.COMPLETED)


async def _target(url: str) -> BegunRun:
    connection = await Database(url, patience_s=1).connect()
    async with connection:
        cursor = await connection.execute("SELECT begun FROM ensemble_ray.runs WHERE run_id = %s", [RUN])
        row = await cursor.fetchone()
    assert row is not None
    return RUN, row[0]


async def test_group_is_there_once_when_its_commit_is_repeated(url: str, store: PostgresStore) -> None:
    """S-DUR-1: a commit whose answer was lost may have been done; a new part of it is still taken."""
    owned = await store.begin(RUN)
    target = await _target(url)
    entries = [
        Append(target=target, facts=(fact(f"facts#0/{n}/model", text="x" * 2000),), epoch=0, first=n + 1)
        for n in range(3)
    ]
    connection, writer = await Database(url, patience_s=1).connect(), uuid.uuid4()
    async with connection:
        for size in (2, 2, 3, 3):
            outcome = await commit_group(connection, render(entries[:size], {}), writer)
            assert (outcome.refused, outcome.missing) == ([], [])
        await commit_group(connection, render(entries[:1], {}), uuid.uuid4())
    assert [fact.name for fact in await store.facts(RUN)] == [f"facts#0/{n}/model" for n in (0, 1, 2, 0)]
    await owned.close(RunState.COMPLETED)


async def test_repeated_commit_still_tells_what_was_refused(url: str, store: PostgresStore) -> None:
    """S-DUR-16: a refusal whose answer was lost is told the second time."""
    owned = await store.begin(RUN)
    await owned.journal.append([fact("a#0", "output")], epoch=2, until=Persistence.COMMITTED)
    target = await _target(url)
    entries = [
        Append(target=target, facts=(fact(name),), epoch=1, first=n)
        for n, name in ((1, "a#0/0/model"), (2, "b#0/0/model"))
    ]
    connection, writer = await Database(url, patience_s=1).connect(), uuid.uuid4()
    async with connection:
        for _ in range(2):
            outcome = await commit_group(connection, render(entries, {}), writer)
            assert [(each.entry, each.instance, each.newest) for each in outcome.refused] == [(entries[0], "a#0", 2)]
    assert [(fact.name, fact.epoch) for fact in await store.facts(RUN)] == [("a#0", 2), ("b#0/0/model", 1)]
    await owned.close(RunState.COMPLETED)


async def test_run_can_be_taken_when_the_server_is_back(postgres: PostgresServer) -> None:
    """S-DUR-8: a server that is gone ends the run with an error; then what was recorded is there, and the run goes on."""
    url = postgres.empty_database()
    store = PostgresStore(url, patience_s=0.3)
    owned = await store.begin(RUN)
    await owned.write_state(RunState.RUNNING)
    await owned.journal.append([fact(text="kept")], until=Persistence.COMMITTED)
    postgres.kill()
    try:
        advice = (
            r"Cannot use the database postgresql:///test_.*ENSEMBLE_RAY_STORE set to the URL of postgresql:///test_"
        )
        with pytest.raises(RecordError, match=advice):
            await owned.journal.append([fact("facts#0/1/model")], until=Persistence.COMMITTED)
        with pytest.raises(RecordError, match="Cannot use the database"):
            await owned.journal.append([fact("facts#0/2/model")])  # it stays so: something before it is missing
        assert not await owned.is_cancel_asked()
        with pytest.raises(RecordError):
            await owned.close(RunState.FAILED)
    finally:
        postgres.start()
    summary = await store.summary(RUN)
    assert summary is not None
    assert summary.state is RunState.INTERRUPTED
    again = await store.claim(RUN)
    assert (again.epoch, [fact.data.to_data() for fact in await store.facts(RUN)]) == (OWNER_STEP, [{"text": "kept"}])
    await again.journal.append([fact("facts#0/1/model")], epoch=again.epoch, until=Persistence.COMMITTED)
    await again.close(RunState.COMPLETED)


async def test_owner_owns_again_when_its_connection_was_ended(
    url: str, store: PostgresStore, postgres: PostgresServer
) -> None:
    """S-DUR-15: the question for a cancellation, asked about once a second, makes the lock again."""
    owned = await store.begin(RUN)
    postgres.end_backends(url)
    while not (found := await store.summary(RUN)) or found.state is not RunState.PENDING:
        await owned.is_cancel_asked()
    with pytest.raises(RunExistsError, match=rf"is running \(process {os.getpid()} on "):
        await elsewhere(url).claim(RUN)
    await store.ask_cancel(RUN)
    assert await owned.is_cancel_asked()
    await owned.close(RunState.CANCELLED)


async def test_run_is_free_when_it_was_let_go_and_the_server_ends_connections_late(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DUR-15: whoever was told of the run's end may go on with it at once; a busy server keeps nobody from it."""
    owned = await store.begin(RUN)
    left: list[psycopg.AsyncConnection[object]] = []

    async def later(connection: psycopg.AsyncConnection[object]) -> None:
        left.append(connection)

    with monkeypatch.context() as patched:
        patched.setattr(psycopg.AsyncConnection, "close", later)
        await owned.close(RunState.INTERRUPTED)
        taken = await store.claim(RUN)
        await taken.close(RunState.COMPLETED)
    for connection in left:
        await connection.close()


async def test_cancelled_wait_loses_nothing(store: PostgresStore) -> None:
    """S-DUR-1: a task that is cancelled while it waits has appended all the same."""
    owned = await store.begin(RUN)
    waits = [asyncio.create_task(owned.journal.append([fact(n=n)], until=Persistence.COMMITTED)) for n in range(3)]
    await asyncio.sleep(0)
    waits[1].cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    await owned.close(RunState.CANCELLED)
    assert [fact.data.to_data()["n"] for fact in await store.facts(RUN)] == [0, 1, 2]


# Other processes.


async def test_facts_of_two_processes_are_numbered_without_gaps(url: str, store: PostgresStore, tmp_path: Path) -> None:
    """S-DUR-1, S-DUR-7: each writes itself; the database gives the order."""
    owned = await store.begin(RUN)
    with another_process(url, "join", tmp_path) as other:
        number = 0
        while other.process.poll() is None or number < 50:
            await owned.journal.append([fact(f"own#0/{number}/model", number=number)], until=Persistence.COMMITTED)
            number += 1
        assert other.process.returncode == 0, other.text
    facts = await store.facts(RUN)
    assert [fact.seq for fact in facts] == list(range(1, number + 51))
    for name in ("own", "join"):
        mine = [fact.data.to_data()["number"] for fact in facts if fact.name.startswith(name)]
        assert mine == list(range(number if name == "own" else 50))
    await owned.close(RunState.COMPLETED)


async def test_epochs_of_other_processes_are_seen_at_the_commit(url: str, store: PostgresStore) -> None:
    """S-DUR-16: only the database knows of both; the other instances of the group go on."""
    owned = await store.begin(RUN)
    journal, other = owned.journal, await elsewhere(url).join(RUN, writer="other")
    await other.append([fact("a#0/0/model")], epoch=2, until=Persistence.COMMITTED)
    outcomes = await asyncio.gather(
        journal.append([fact("a#0/1/model")], epoch=1, until=Persistence.COMMITTED),
        journal.append([fact("b#0/0/model")], epoch=1, until=Persistence.COMMITTED),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], StaleEpochError)
    assert (outcomes[0].name, outcomes[0].epoch, outcomes[0].newest, outcomes[1]) == ("a#0", 1, 2, None)
    await other.append([fact("run", "resume")], epoch=3, until=Persistence.COMMITTED)
    with pytest.raises(StaleEpochError):
        await journal.append([fact("b#0/1/model")], epoch=2, until=Persistence.COMMITTED)
    await other.append([fact("b#0/1/model")], epoch=3, until=Persistence.COMMITTED)
    found = [(fact.name, fact.epoch) for fact in await store.facts(RUN)]
    assert found == [("a#0/0/model", 2), ("b#0/0/model", 1), ("run", 3), ("b#0/1/model", 3)]
    await other.close()
    await owned.close(RunState.COMPLETED)


async def test_run_has_no_owner_when_its_process_was_killed(url: str, store: PostgresStore, tmp_path: Path) -> None:
    """S-DUR-15: a lock of the server's, not a process id in a table; of forked children the stores' contract tells."""
    with another_process(url, "own", tmp_path) as other:
        other.until(lambda: "ready" in other.text, "the run")
        with pytest.raises(RunExistsError, match=rf"is running \(process {other.process.pid} on "):
            await store.claim(RUN)
        with pytest.raises(RunExistsError, match=rf"is running \(process {other.process.pid} on "):
            await store.begin(RUN)
        with pytest.raises(RunExistsError):
            await store.delete(RUN)
        os.kill(other.process.pid, signal.SIGKILL)
        other.process.wait()

        async def is_interrupted() -> bool:
            found = await store.summary(RUN)
            return found is not None and (found.state, found.owner) == (RunState.INTERRUPTED, "")

        await until(is_interrupted)
    owned = await store.claim(RUN)
    assert owned.epoch == OWNER_STEP
    assert [fact.data.to_data()["number"] for fact in await store.facts(RUN)][:50] == list(range(50))
    await owned.close(RunState.COMPLETED)


async def test_frozen_owner_is_refused_when_it_wakes(url: str, store: PostgresStore, tmp_path: Path) -> None:
    """S-DUR-16, S-DUR-17: it holds its lock, the run is taken all the same, and its next fact is not recorded."""
    with another_process(url, "own", tmp_path) as other:
        other.until(lambda: "ready" in other.text, "the run")
        os.kill(other.process.pid, signal.SIGSTOP)
        with pytest.raises(RunExistsError):
            await store.claim(RUN)
        owned = await store.claim(RUN, by_force=True)
        assert owned.epoch == OWNER_STEP
        recorded = await store.facts(RUN)
        os.kill(other.process.pid, signal.SIGCONT)
        assert other.process.wait(timeout=90) == 0
        assert (
            f"StaleEpochError Run 'run-1' was taken over: 'own#0' is written by epoch {OWNER_STEP}, epoch 0 must stop"
            in other.text
        )
    await owned.close(RunState.COMPLETED)
    assert await store.facts(RUN) == recorded


async def test_run_is_taken_from_an_owner_that_froze_inside_a_transaction(
    url: str, store: PostgresStore, postgres: PostgresServer
) -> None:
    """S-DUR-17: the locks that it holds are in nobody's way for long."""
    owned = await store.begin(RUN)
    with postgres.connection(url) as frozen:
        frozen.execute("BEGIN")
        frozen.execute("SELECT FROM ensemble_ray.runs FOR UPDATE")
        again = await elsewhere(url).claim(RUN, by_force=True)
        with pytest.raises(psycopg.OperationalError):
            frozen.execute("COMMIT")
    await owned.write_state(RunState.FAILED)  # not for the old owner to say any more
    found = await store.summary(RUN)
    assert found is not None
    assert found.state is RunState.PENDING
    with pytest.raises(StaleEpochError):
        await owned.journal.append([fact()], until=Persistence.COMMITTED)
    await owned.close(RunState.FAILED)
    await again.close(RunState.COMPLETED)


async def test_writer_is_told_when_the_run_was_never_there_or_is_deleted(
    url: str, store: PostgresStore, postgres: PostgresServer
) -> None:
    """S-DUR-8: a fact is never lost in silence."""
    with pytest.raises(RecordError, match=r"there is no run 'run-1' in .* ENSEMBLE_RAY_STORE"):
        await store.join(RUN, writer="w")
    await (await store.begin(RUN)).close(RunState.INTERRUPTED)
    journal = await store.join(RUN, writer="w")
    await journal.append([fact(text="x" * 2000)], until=Persistence.COMMITTED)
    await elsewhere(url).delete(RUN)
    with pytest.raises(RecordError, match="'run-1' was deleted from"):
        await journal.append([fact(text="y" * 2000)], until=Persistence.COMMITTED)
    with pytest.raises(RecordError, match="'run-1' was deleted from"):
        await journal.close()
    with postgres.connection(url) as connection:
        for table in ("facts", "bodies", "epochs", "writers", "runs"):
            assert (
                connection.execute(sql.SQL("SELECT FROM {}").format(sql.Identifier("ensemble_ray", table))).fetchall()
                == []
            )
    await (await store.begin(RUN)).close(RunState.COMPLETED)
