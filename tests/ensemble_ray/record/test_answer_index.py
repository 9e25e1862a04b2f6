"""The index of reusable answers of a home: damage, and forks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ensemble_ray import RecordError, RunState
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.sqlite.answers import FILE
from ensemble_ray.record.sqlite.store import SqliteStore
from tests.forking import call_in_child

CALL = "a#0/0/model"


async def _offered(store: SqliteStore, run_id: str, digest: str) -> None:
    """A completed run whose answer to that request others may reuse."""
    run = await store.begin(run_id)
    fact = read_fact(run=run_id, kind="model", name=CALL, at=10.0, data={"text": run_id, "reuse_digest": digest})
    await run.journal.append([fact], until=Persistence.COMMITTED)
    await run.close(RunState.COMPLETED)
    await store.offer_answers(run_id, [(digest, CALL, 10.0)])


async def _found(store: SqliteStore, digest: str) -> str | None:
    found = await store.find_answer(digest, since=0.0, run_id="new")
    return None if found is None else found.data.text


async def test_damaged_index_says_that_it_can_be_removed(tmp_path: Path) -> None:
    """S-USE-25: and is made again."""
    store = SqliteStore(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(RecordError, match=r"index of reusable answers .*it can be removed"):
        await store.find_answer("one", since=0.0, run_id="new")
    (tmp_path / FILE).unlink()
    await _offered(store, "first", "one")
    assert await _found(store, "one") == "first"


async def test_index_is_private_and_made_by_the_first_offer(tmp_path: Path) -> None:
    """S-USE-51, S-SEC-41: a home without offers has no index."""
    store = SqliteStore(tmp_path)
    assert await _found(store, "one") is None
    assert not (tmp_path / FILE).exists()
    await _offered(store, "first", "one")
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.program
def test_forked_child_has_a_connection_of_its_own(tmp_path: Path) -> None:
    """S-USE-22: each finds what the other offers."""
    store = SqliteStore(tmp_path)
    asyncio.run(_offered(store, "of-parent", "one"))

    def in_child() -> str | None:
        asyncio.run(_offered(store, "of-child", "two"))
        return asyncio.run(_found(store, "one"))

    assert call_in_child(in_child) == "of-parent"
    assert asyncio.run(_found(store, "two")) == "of-child"
