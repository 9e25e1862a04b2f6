"""Records in PostgreSQL of which rows are gone or altered: told, and gone on with only when that is chosen."""

from __future__ import annotations

import psycopg
import pytest

from ensemble_ray import RecordError, RunState
from ensemble_ray.ports import Persistence
from ensemble_ray.record.postgres.store import PostgresStore

from .postgres_records import RUN, fact


async def change(url: str, statement: bytes) -> None:
    """Change the rows behind everybody's back."""
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute(statement)


async def test_gap_is_told_and_may_be_accepted(url: str, store: PostgresStore) -> None:
    """S-DUR-82, S-DUR-83: by every reader; what is accepted is a fact, and is not asked for again."""
    owned = await store.begin(RUN)
    await owned.journal.append([fact(f"a#0/{turn}/model") for turn in range(5)], until=Persistence.COMMITTED)
    await owned.close(RunState.INTERRUPTED)
    assert not await store.accept_loss(RUN)
    await change(url, b"DELETE FROM ensemble_ray.facts WHERE seq IN (2, 3)")
    for attempt in (store.facts(RUN), anext(store.read(RUN, kinds=("model",)))):
        with pytest.raises(RecordError, match=r"2 of the facts up to 5 are missing.*--allow-loss"):
            await attempt
    assert len(await store.facts(RUN, is_partial=True)) == 3
    assert await store.accept_loss(RUN)
    assert not await store.accept_loss(RUN)
    assert [found.kind for found in await store.facts(RUN)] == ["model", "model", "model", "loss"]
    taken = await store.claim(RUN)
    assert ("run", "loss") in await taken.journal.lookup_recorded("b#0")
    await taken.close(RunState.INTERRUPTED)


async def test_run_that_is_removed_while_it_is_written_to_is_told(url: str, store: PostgresStore) -> None:
    """S-DUR-85: at its next commit."""
    owned = await store.begin(RUN)
    await owned.journal.append([fact()], until=Persistence.COMMITTED)
    await change(url, b"DELETE FROM ensemble_ray.runs")
    with pytest.raises(RecordError, match="run-1"):
        await owned.journal.append([fact("a#0/1/model")], until=Persistence.COMMITTED)
    with pytest.raises(RecordError):
        await owned.close(RunState.FAILED)


async def test_altered_row_is_told(url: str, store: PostgresStore) -> None:
    """S-DUR-90: with the fact and the database; lists show the run all the same."""
    owned = await store.begin(RUN)
    await owned.journal.append([fact(text="x")], until=Persistence.COMMITTED)
    await owned.close(RunState.COMPLETED)
    await change(url, b"""UPDATE ensemble_ray.facts SET data = '{"text": {"a": 1}}'""")
    await change(url, b"UPDATE ensemble_ray.runs SET state = 'odd'")
    with pytest.raises(RecordError, match=r"fact 1 of run 'run-1' in .* cannot be read \(its text is not a text\)"):
        await store.facts(RUN)
    assert [run.state for run in await store.runs()] == [RunState.INTERRUPTED]
