"""What is special to records in PostgreSQL: what is missing, the tables, what they keep; passwords."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest
from psycopg import sql

from ensemble_ray import RecordError, RunExistsError, RunState, ValidationError
from ensemble_ray.ports import Persistence
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.postgres.journal import name_of, text_of_name
from ensemble_ray.record.postgres.store import PostgresStore
from ensemble_ray.record.stores import StoreAddress
from tests.postgres_server import PostgresServer

from .postgres_records import RUN, elsewhere, fact, until
from .web_server import closed_port

SECRET = "secret-of-tests"  # noqa: S105  nobody asks for it


# Not there.


def test_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-5: before anything else."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ValidationError, match=re.escape("pip install 'ensemble-ray[postgres]'")):
        store_at(StoreAddress(home="h", url="postgresql://host/db"))


@pytest.mark.parametrize("url", [f"postgresql://me:{SECRET}@[host/db", f"postgresql://me@host/db?passwort={SECRET}"])
def test_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    """S-DUR-5, S-DUR-6: the driver's own text would repeat it."""
    with pytest.raises(ValidationError, match="USER:PASSWORD@HOST:PORT/DATABASE") as caught:
        PostgresStore(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_server_that_is_not_there_is_named_without_the_password() -> None:
    """S-DUR-5, S-DUR-8: host and database, what is wrong and what to do; for every question."""
    with closed_port() as port:
        store = PostgresStore(f"postgresql://me:{SECRET}@127.0.0.1:{port}/records", patience_s=0.1)
        questions = (store.begin(RUN), store.claim(RUN), store.join(RUN, writer="w"), store.facts(RUN), store.runs())
        for question in questions:
            with pytest.raises(
                RecordError, match=rf"postgresql://127\.0\.0\.1:{port}/records: .*refused.* Check that"
            ) as caught:
                await question
            error: BaseException | None = caught.value
            while error is not None:
                assert SECRET not in repr(error)
                error = error.__cause__
    assert SECRET not in repr(StoreAddress(home="h", url=f"postgresql://me:{SECRET}@host/db"))


async def test_database_without_records_is_not_touched_by_readers(
    url: str, store: PostgresStore, postgres: PostgresServer
) -> None:
    """S-DUR-50: looking at runs makes no tables."""
    assert (await store.runs(), await store.facts(RUN), await store.summary(RUN)) == ([], [], None)
    with pytest.raises(ValidationError, match="there are no runs in postgresql:///test_"):
        await store.find("x")
    with postgres.connection(url) as connection:
        assert connection.execute("SELECT to_regnamespace('ensemble_ray')").fetchone() == (None,)


# The tables.


async def test_tables_are_made_once_when_many_come_first(url: str) -> None:
    """S-DUR-5: processes that start together do not trip over each other."""
    stores = [PostgresStore(f"{url}&application_name=p{number}") for number in range(8)]
    owned = await asyncio.gather(*(each.begin(f"run-{number}") for number, each in enumerate(stores)))
    assert len(await stores[0].runs()) == 8
    for each in owned:
        await each.close(RunState.COMPLETED)


async def test_newer_format_is_refused(url: str, store: PostgresStore, postgres: PostgresServer) -> None:
    """S-DUR-9: it is never guessed at."""
    await (await store.begin(RUN)).close(RunState.COMPLETED)
    with postgres.connection(url) as connection:
        connection.execute("UPDATE ensemble_ray.format SET version = 99")
    for question in (store.begin("run-2"), store.claim(RUN), store.facts(RUN)):
        with pytest.raises(RecordError, match="format 99, this version of ensemble-ray knows 3"):
            await question


async def test_database_that_only_reads_is_told(url: str, store: PostgresStore, postgres: PostgresServer) -> None:
    """S-DUR-8: at once, not after the time for lost connections; what is recorded stays readable."""
    owned = await store.begin(RUN)
    await owned.journal.append([fact()], until=Persistence.COMMITTED)
    with postgres.connection(url) as connection:
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(
                sql.Identifier(connection.info.dbname)
            )
        )
    postgres.end_backends(url)
    with pytest.raises(RecordError, match=r"read-only.*use the URL of the primary"):
        await owned.journal.append([fact("facts#0/1/model")], until=Persistence.COMMITTED)
    with pytest.raises(RecordError, match="read-only"):
        await owned.close(RunState.FAILED)
    assert len(await store.facts(RUN)) == 1


async def test_damaged_fact_is_told_with_its_place(url: str, store: PostgresStore, postgres: PostgresServer) -> None:
    """S-DUR-9: a record is never guessed at."""
    owned = await store.begin(RUN)
    await owned.journal.append([fact(), fact("facts#0/1/model")])
    await owned.close(RunState.COMPLETED)
    with postgres.connection(url) as connection:
        connection.execute("UPDATE ensemble_ray.facts SET data = '{' WHERE seq = 2")
    with pytest.raises(RecordError, match="damaged: fact 2 of run 'run-1' in postgresql:///test_"):
        await store.facts(RUN)


# What is kept, and how.


async def test_text_is_kept_once_whoever_writes_it(url: str, store: PostgresStore, postgres: PostgresServer) -> None:
    """S-DUR-4: by the hash of its content, per run."""
    owned = await store.begin(RUN)
    other = await elsewhere(url).join(RUN, writer="other")
    for number, journal in enumerate((owned.journal, owned.journal, other)):
        await journal.append([fact(f"facts#0/{number}/model", text="long " * 1000)], until=Persistence.COMMITTED)
    await other.close()
    await owned.close(RunState.COMPLETED)
    with postgres.connection(url) as connection:
        assert connection.execute("SELECT count(*) FROM ensemble_ray.bodies").fetchone() == (1,)
        assert connection.execute("SELECT max(length(data)) < 200 FROM ensemble_ray.facts").fetchone() == (True,)
    assert {fact.data.to_data()["text"] for fact in await store.facts(RUN)} == {"long " * 1000}


async def test_more_than_one_group_is_written_in_order(store: PostgresStore) -> None:
    """S-DUR-1: what does not fit one commit comes with the next."""
    owned = await store.begin(RUN)
    for number in range(4500):
        await owned.journal.append([fact(f"facts#0/{number}/model", number=number)])
    await owned.close(RunState.COMPLETED)
    assert [fact.data.to_data()["number"] for fact in await store.facts(RUN)] == list(range(4500))


async def test_facts_are_committed_soon_when_nobody_waits(store: PostgresStore) -> None:
    """S-DUR-2: durability `run` writes in groups, without being asked."""
    owned = await store.begin(RUN, is_buffered=True)
    await owned.journal.append([fact()], until=Persistence.SYNCED)

    async def is_committed() -> bool:
        return bool(await store.facts(RUN))

    await until(is_committed)
    await owned.close(RunState.COMPLETED)


@pytest.mark.parametrize("name", ["a\0b", "a\\b\\u0000", "half \ud83d", "plain ÄÖ 😀"])
async def test_name_may_hold_what_a_database_cannot(store: PostgresStore, name: str) -> None:
    """S-DUR-6: it comes back as it was, and is found by it."""
    assert name_of(text_of_name(name)) == name
    owned = await store.begin(RUN)
    await owned.journal.append([fact(f"{name}#0/0/model", text="x")], until=Persistence.COMMITTED)
    assert list(await owned.journal.lookup_recorded(f"{name}#0")) == [(f"{name}#0/0/model", "model")]
    await owned.close(RunState.COMPLETED)


async def test_connections_are_closed_with_the_last_journal(
    url: str, store: PostgresStore, postgres: PostgresServer
) -> None:
    """S-DUR-7: one that writes for all journals of a process, one for each owned run, and none when all is closed."""
    owned = await store.begin(RUN)
    journals = [await PostgresStore(url).join(RUN, writer=f"w{n}") for n in range(3)]
    for journal in journals:
        await journal.append([fact()], until=Persistence.COMMITTED)

    async def count() -> int:
        query = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE application_name = 'ensemble_ray' AND datname = current_database()"
        )
        with postgres.connection(url) as connection:
            found = connection.execute(query).fetchone()
            return 0 if found is None else int(found[0])

    async def are_closed() -> bool:
        return not await count()

    assert await count() == 2
    for journal in journals:
        await journal.close()
    await owned.close(RunState.COMPLETED)
    await until(are_closed)


async def test_what_began_and_recorded_nothing_is_taken_over(url: str, store: PostgresStore) -> None:
    """S-DUR-15, S-DUR-16: whoever left it may be cut off and live; it writes no more to what is another run now."""
    left = await store.begin(RUN, origin="old.yaml")
    late = await elsewhere(url).join(RUN, writer="late")
    await left.close(RunState.INTERRUPTED)
    owned = await store.begin(RUN, origin="new.yaml")
    with pytest.raises(RecordError, match="was deleted"):
        await late.append([fact()], until=Persistence.COMMITTED)
    with pytest.raises(RecordError, match="was deleted"):
        await late.close()
    await left.write_state(RunState.FAILED)
    await owned.journal.append([fact()], until=Persistence.COMMITTED)
    assert owned.epoch == 0
    assert (await store.find(RUN)).state is RunState.PENDING
    assert (await store.find("latest")).origin == "new.yaml"
    await owned.close(RunState.COMPLETED)
    with pytest.raises(RunExistsError, match="'run-1' is finished: choose another run_id"):
        await store.begin(RUN)


async def test_owner_that_died_before_it_wrote_the_state_has_ended_its_run(
    url: str, store: PostgresStore, postgres: PostgresServer
) -> None:
    """S-DUR-30: facts are the truth."""
    owned = await store.begin(RUN)
    await owned.journal.append([fact("run", "end", state="completed")], until=Persistence.COMMITTED)
    await owned.journal.close()
    postgres.end_backends(url)
    found = await store.find("run")
    assert (found.state, found.owner) == (RunState.COMPLETED, "")
    await owned.close(RunState.COMPLETED)
