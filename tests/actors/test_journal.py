"""The way to a record from other nodes: what happens when the actor that writes there dies, or has nothing to write to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray

from ensemble_ray import RecordError, RunState
from ensemble_ray.actors.link import journal
from ensemble_ray.actors.link.journal import RemoteJournal, open_journal
from ensemble_ray.actors.link.wire import RecordLocation
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.sqlite.journal import SqliteJournal
from ensemble_ray.record.stores import StoreAddress
from tests.contracts.journal_line import line_to

RUN = "run-1"


def fact(number: int) -> Fact:
    """The answer of one turn."""
    return read_fact(run=RUN, kind="model", name=f"a#0/{number}/model", at=1.0, data={"number": number})


async def test_facts_arrive_in_order_when_the_journal_actor_was_killed(
    ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-DUR-1, S-DUR-3, S-DUR-7: Ray starts it again; what was not known to have arrived is sent again."""
    del ray_cluster
    monkeypatch.setattr(journal, "RESTART_PAUSES_S", (0.1,) * 900)  # however long this machine takes to start it
    address = StoreAddress(home=str(tmp_path))
    owned = await store_at(address).begin(RUN)
    line = line_to(address, RUN, "elsewhere")
    await line.append([fact(0)], until=Persistence.COMMITTED)
    ray.kill(
        ray.get_actor(f"journal-{ray.get_runtime_context().get_node_id()}", namespace="ensemble_ray"), no_restart=False
    )
    await asyncio.gather(*(line.append([fact(number)], until=Persistence.COMMITTED) for number in range(1, 20)))
    numbers = [each.data.to_data()["number"] for each in await store_at(address).facts(RUN)]
    assert list(dict.fromkeys(numbers)) == list(range(20))
    await line.close()
    await owned.close(RunState.COMPLETED)


async def test_everybody_who_waits_is_told_when_there_is_no_such_record(ray_cluster: str, tmp_path: Path) -> None:
    """S-DUR-8: with the place; nobody waits for ever, and so it goes on."""
    del ray_cluster
    line = line_to(StoreAddress(home=str(tmp_path)), RUN, "elsewhere")
    told = await asyncio.gather(
        *(line.append([fact(number)], until=Persistence.COMMITTED) for number in range(3)), return_exceptions=True
    )
    assert [type(each) for each in told] == [RecordError] * 3
    assert str(tmp_path) in str(told[0])
    with pytest.raises(RecordError):
        await line.append([fact(9)], until=Persistence.COMMITTED)


class OutOfReach:
    """A journal actor that cannot be reached for its first group."""

    def __init__(self) -> None:
        self.numbers: list[object] = []
        self._is_back = False
        self.append = self

    async def remote(self, *arguments: Any) -> list[None]:
        """One group."""
        if not self._is_back:
            self._is_back = True
            raise RecordError("its journal cannot be reached")
        groups = arguments[-1]
        self.numbers += [each.data.to_data()["number"] for facts, *_ in groups for each in facts]
        return [None] * len(groups)


async def test_nothing_is_recorded_behind_facts_that_were_lost() -> None:
    """S-DUR-8, S-DUR-22: an answer that nobody waited for is gone; what follows from it must not stand there alone."""
    actor = OutOfReach()
    line = RemoteJournal(actor, StoreAddress(home="/nowhere"), RUN, writer="elsewhere")
    await line.append([fact(0)])
    for attempt in (line.append([fact(1)], until=Persistence.SYNCED), line.append([fact(2)]), line.flush()):
        with pytest.raises(RecordError, match="cannot be reached"):
            await attempt
    assert actor.numbers == []


async def test_the_way_to_a_record_follows_from_where_it_lies(ray_cluster: str, tmp_path: Path) -> None:
    """S-DUR-7: its own node writes itself, others ask; with durability `off` there is nothing to write to."""
    del ray_cluster
    address = StoreAddress(home=str(tmp_path))
    owned = await store_at(address).begin(RUN)
    line_to(address, RUN, "elsewhere")  # so that the actor lives here, whatever node asks for it
    here = RecordLocation(address, str(ray.get_runtime_context().get_node_id()))
    ways = [
        await open_journal(location, RUN, writer="w", is_buffered=False)
        for location in (here, RecordLocation(address, "a" * len(here.node_id)), None)
    ]
    assert [type(each) for each in ways] == [SqliteJournal, RemoteJournal, MemoryJournal]
    for each in ways:
        await each.close()
    await owned.close(RunState.COMPLETED)


async def test_journals_of_a_writer_are_let_go_when_its_process_died(ray_cluster: str, tmp_path: Path) -> None:
    """S-DUR-7: whoever dies closes nothing; what it wrote stays, the others write on."""
    del ray_cluster
    pool, address = ProcessPool(), StoreAddress(home=str(tmp_path))
    owned = await store_at(address).begin(RUN)
    process = pool.claim(RUN)
    lines = [line_to(address, RUN, writer) for writer in (process.name, "other")]
    for line in lines:
        await line.append([fact(0)], until=Persistence.COMMITTED)
    actor = ray.get_actor(f"journal-{ray.get_runtime_context().get_node_id()}", namespace="ensemble_ray")

    async def writers() -> set[str]:
        held = await actor.__ray_call__.remote(lambda journals: [writer for _, writer in journals._journals])
        return set(held) & {process.name, "other"}

    assert await writers() == {process.name, "other"}
    ray.kill(process.handle)
    await asyncio.gather(*pool._watches)
    async with asyncio.timeout(90):  # the journal is told of it and not waited for
        while await writers() != {"other"}:  # noqa: ASYNC110  the state of another process
            await asyncio.sleep(0.05)
    await lines[1].append([fact(1)], until=Persistence.COMMITTED)
    assert len(await store_at(address).facts(RUN)) == 3
    await lines[1].close()
    await owned.close(RunState.COMPLETED)
