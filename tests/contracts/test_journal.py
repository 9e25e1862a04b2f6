"""The contract of the `Journal` port, over the journals in memory and of every store."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import cast

import pytest

from ensemble_ray import EnsembleError, IllegalStateError, RunState, StaleEpochError, TaskOutput
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.facts.runs import whole_output
from ensemble_ray.ports import Journal, Persistence
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import OwnedRun, RunStore, StoreAddress
from ensemble_ray.values.value import utc_of

from .journal_line import line_to
from .record_stores import STORES, address_of

RUN = "run-1"
TOOK = timedelta(seconds=2)
OUTPUT = TaskOutput(raw="text", task_description="Write", agent_role="Writer", completed_at=utc_of(1), duration=TOOK)


class Record:
    """One run's record, and journals on it."""

    def __init__(self, store: RunStore | None, *, line: Callable[[str], Journal] | None = None) -> None:
        self._store = store
        self._line = line
        self._memory = MemoryJournal(RUN)
        self._owned: OwnedRun | None = None
        self._opened: list[Journal] = []

    async def open(self) -> Journal:
        """One more journal; in memory there is only one at a time."""
        if self._store is None:
            if self._memory in self._opened:
                self._memory = MemoryJournal(RUN, self._memory.facts())
            journal: Journal = self._memory
        elif self._owned is None:
            self._owned = await self._store.begin(RUN)
            journal = self._owned.journal if self._line is None else self._line("w0")
        elif self._line is not None:
            journal = self._line(f"w{len(self._opened)}")
        else:
            journal = await self._store.join(RUN, writer=f"w{len(self._opened)}")
        self._opened.append(journal)
        return journal

    async def second(self) -> Journal:
        """A second journal beside the first; in memory it is the same."""
        return self._memory if self._store is None else await self.open()

    async def read(self) -> list[Fact]:
        """All facts, as a reader gets them."""
        return self._memory.facts() if self._store is None else await self._store.facts(RUN)

    async def close(self) -> None:
        """Close everything."""
        for journal in self._opened:
            await journal.close()
        if self._owned is not None:
            await self._owned.close(RunState.COMPLETED)


@pytest.fixture(params=["memory", *STORES, "line"])
async def record(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Record]:
    """An empty record; `line`: as processes on other nodes write to it, through an actor of the cluster (S-DUR-7)."""
    if request.param == "memory":
        opened = Record(None)
    elif request.param == "line":
        request.getfixturevalue("ray_cluster")
        address = StoreAddress(home=str(tmp_path))
        opened = Record(store_at(address), line=lambda writer: line_to(address, RUN, writer))
    else:
        opened = Record(store_at(address_of(request.param, request, tmp_path)))
    yield opened
    await opened.close()


@pytest.fixture
async def journal(record: Record) -> Journal:
    """The first journal on it."""
    return await record.open()


def _fact(name: str = "facts#0/0/model", kind: str = "model", at: float = 1.0, **data: object) -> Fact:
    return read_fact(run=RUN, kind=kind, name=name, at=at, data=data)


async def test_nothing_is_known_at_first(journal: Journal) -> None:
    """A runner that asks first performs its effect."""
    assert await journal.lookup_recorded("facts#0") == {}


@pytest.mark.parametrize("until", Persistence)
async def test_appended_effect_is_known(journal: Journal, until: Persistence) -> None:
    """S-DUR-22: however safe it is already, with its name, kind and data."""
    await journal.append([_fact(text="answer", input_tokens=5)], until=until)
    found = await journal.lookup_recorded("facts#0")
    assert list(found) == [("facts#0/0/model", "model")]
    fact = found["facts#0/0/model", "model"]
    assert (fact.run, fact.kind, fact.name, fact.at, fact.seq) == (RUN, "model", "facts#0/0/model", 1.0, 1)
    assert fact.data.to_data() == {"text": "answer", "input_tokens": 5}


async def test_known_are_the_newest_facts_of_that_instance_without_stimuli(journal: Journal) -> None:
    """S-DUR-23, S-DUR-24: intents, results, decisions, the end of the task; nothing of others."""
    kinds = ("model", "tool_intent", "tool_result", "decision")
    await journal.append([_fact(f"a/b#0/1/{kind}", kind, text="old") for kind in kinds])
    await journal.append([_fact(f"a/b#0/1/{kind}", kind, text="new") for kind in kinds])
    await journal.append(
        [_fact("a/b#0", "stimulus"), _fact("a/b#0", "output"), _fact("a/b#1/0/model"), _fact("a/b", "output")]
    )
    found = await journal.lookup_recorded("a/b#0")
    assert set(found) == {("a/b#0", "output"), *((f"a/b#0/1/{kind}", kind) for kind in kinds)}
    assert {fact.data.to_data().get("text", "new") for fact in found.values()} == {"new"}


async def test_effects_of_other_writers_are_known(record: Record, journal: Journal) -> None:
    """S-DUR-31: another process goes on with a task from its last recorded step."""
    other = await record.second()
    await other.append([_fact(text="other")], until=Persistence.COMMITTED)
    assert (await journal.lookup_recorded("facts#0"))["facts#0/0/model", "model"].data.to_data() == {"text": "other"}


async def test_data_is_json_data(journal: Journal, record: Record) -> None:
    """S-DUR-6: values are in the form in which any reader gets them."""
    await journal.append([_fact("facts#0", "output", output=OUTPUT, took=TOOK, ones={1})])
    found = (await journal.lookup_recorded("facts#0"))["facts#0", "output"]
    data = found.data.to_data()
    whole = whole_output(cast("Mapping[str, object]", data["output"]))
    assert {**data, "output": whole} == {"output": OUTPUT.model_dump(mode="json"), "took": "PT2S", "ones": [1]}
    assert await record.read() == [found]


@pytest.mark.parametrize("text", ["x" * 1025, "ÄÖ 😀" * 500, "\ud83d" * 2000, "\x00\r\n\u2028" * 500, "y" * 1_000_000])
async def test_long_text_comes_back_unchanged(journal: Journal, record: Record, text: str) -> None:
    """S-DUR-4: with line feeds, with halves of surrogate pairs, in several facts."""
    await journal.append([_fact(text=text, again=[text])], until=Persistence.SYNCED)
    await journal.append([_fact("facts#0/1/model", text=text)], until=Persistence.COMMITTED)
    assert [fact.data.to_data() for fact in await record.read()] == [{"text": text, "again": [text]}, {"text": text}]


async def test_effects_are_known_when_the_record_is_opened_again(journal: Journal, record: Record) -> None:
    """S-DUR-30: what an earlier process did need not be done again."""
    await journal.append([_fact(text="answer" * 1000), _fact("facts#0", "output", raw="x")])
    await journal.close()
    found = await (await record.open()).lookup_recorded("facts#0")
    assert found["facts#0/0/model", "model"].data.to_data() == {"text": "answer" * 1000}
    assert ("facts#0", "output") in found


async def test_facts_are_read_in_the_order_of_appending(journal: Journal, record: Record) -> None:
    """S-DUR-1: numbered from 1, also where their times are equal or go back."""
    for number in range(300):
        await journal.append([_fact(f"t{number}#0", "stimulus", at=300 - number // 2, key=f"t{number}")])
    await journal.flush()
    facts = await record.read()
    assert [fact.data.to_data()["key"] for fact in facts] == [f"t{number}" for number in range(300)]
    assert [fact.seq for fact in facts] == list(range(1, 301))


async def test_facts_of_all_writers_stand_in_the_order_of_their_commits(journal: Journal, record: Record) -> None:
    """S-DUR-1: one order for every reader."""
    other = await record.second()
    for number in range(6):
        writer = journal if number % 2 else other
        await writer.append([_fact(f"facts#0/{number}/model", number=number)], until=Persistence.COMMITTED)
    assert [fact.data.to_data()["number"] for fact in await record.read()] == list(range(6))


@pytest.mark.parametrize("until", [Persistence.COMMITTED, Persistence.SYNCED])
async def test_everything_before_is_committed_when_the_last_is(
    journal: Journal, record: Record, until: Persistence
) -> None:
    """S-DUR-2: one wait covers what this writer only handed over before."""
    for number in range(100):
        await journal.append([_fact(f"facts#0/{number}/model")])
    await journal.append([_fact("facts#0", "output")], until=until)
    assert len(await record.read()) == 101


async def test_nothing_appended_is_a_wait_for_what_was(journal: Journal, record: Record) -> None:
    """S-DUR-2: also where there is nothing new."""
    await journal.append([], until=Persistence.SYNCED)
    await journal.append([_fact()])
    await journal.append([], until=Persistence.COMMITTED)
    assert len(await record.read()) == 1


@pytest.mark.parametrize("content", [b"text", bytes(range(256)), b"\xff" * 3_000_000])
async def test_content_is_stored_once_under_its_hash(journal: Journal, record: Record, content: bytes) -> None:
    """S-ATT-31, S-ATT-33: for every writer of the run, committed when the call returns; memory stores none."""
    digest = sha256(content).hexdigest()
    is_stored = await journal.store_content(content)
    other = await record.second()
    assert await other.store_content(content) is is_stored
    assert is_stored is not isinstance(journal, MemoryJournal)
    assert await other.read_content(digest) == (content if is_stored else None)
    assert await other.read_content("0" * 64) is None
    assert await record.read() == []


async def test_content_may_be_the_long_text_of_a_fact(journal: Journal, record: Record) -> None:
    """S-ATT-31, S-DUR-4: the record contains both once."""
    text = "Ä" * 5_000
    await journal.append([_fact(text=text)], until=Persistence.COMMITTED)
    is_stored = await journal.store_content(text.encode())
    found = await journal.read_content(sha256(text.encode()).hexdigest())
    assert found == (text.encode() if is_stored else None)
    await journal.append([_fact(text=text)], until=Persistence.COMMITTED)
    assert [fact.data.to_data()["text"] for fact in await record.read()] == [text, text]


async def test_many_tasks_lose_nothing(journal: Journal, record: Record) -> None:
    """S-DUR-1: from many tasks at the same time, in the order of each."""

    async def work(task: int) -> None:
        for turn in range(20):
            await journal.append([_fact(f"t{task}#0/{turn}/model", turn=turn)], until=Persistence((turn + task) % 3))

    await asyncio.gather(*(work(task) for task in range(50)))
    await journal.flush()
    turns: dict[str, list[object]] = {}
    for fact in await record.read():
        turns.setdefault(fact.name.split("#", maxsplit=1)[0], []).append(fact.data.to_data()["turn"])
    assert turns == {f"t{task}": list(range(20)) for task in range(50)}


# Epochs.


async def test_older_epoch_of_an_instance_is_refused(journal: Journal, record: Record) -> None:
    """S-DUR-16: a frozen process that comes back learns that it was replaced; other instances go on."""
    await journal.append([_fact("a#0/0/model")], epoch=2)
    with pytest.raises(StaleEpochError) as caught:
        await journal.append([_fact("a#0/1/call-0", "tool_intent")], epoch=1)
    assert (caught.value.run, caught.value.name, caught.value.epoch, caught.value.newest) == (RUN, "a#0", 1, 2)
    await journal.append([_fact("b#0/0/model")], epoch=1)
    await journal.append([_fact("a#0/2/model")], epoch=2)
    await journal.flush()
    assert [(fact.name, fact.epoch) for fact in await record.read()] == [
        ("a#0/0/model", 2),
        ("b#0/0/model", 1),
        ("a#0/2/model", 2),
    ]


@pytest.mark.parametrize("until", [Persistence.COMMITTED, Persistence.SYNCED])
async def test_writer_is_refused_when_another_has_a_newer_epoch(
    journal: Journal, record: Record, until: Persistence
) -> None:
    """S-DUR-16: at its commit, without having seen the other before; what it does elsewhere goes on."""
    other = await record.second()
    await journal.append([_fact("a#0/0/model")], until=until)
    await other.append([_fact("a#0/0/model", text="again")], epoch=1, until=until)
    with pytest.raises(StaleEpochError) as caught:
        await journal.append([_fact("a#0/1/call-0", "tool_intent")], until=until)
    assert (caught.value.name, caught.value.epoch, caught.value.newest) == ("a#0", 0, 1)
    await journal.append([_fact("b#0/0/model")], until=until)
    await journal.append([_fact("a#0/1/model")], epoch=1, until=until)
    names = [(fact.name, fact.epoch) for fact in await record.read()]
    assert names == [("a#0/0/model", 0), ("a#0/0/model", 1), ("b#0/0/model", 0), ("a#0/1/model", 1)]


async def test_next_append_tells_when_what_was_only_taken_was_refused(journal: Journal, record: Record) -> None:
    """S-DUR-16: nothing refused is passed over in silence."""
    other = await record.second()
    await other.append([_fact("a#0/0/model")], epoch=3, until=Persistence.COMMITTED)

    async def work() -> None:
        await journal.append([_fact("a#0/1/model")])
        await journal.flush()
        await journal.append([_fact("a#0/2/model")])

    with pytest.raises(StaleEpochError, match="'a#0' is written by epoch 3, epoch 0 must stop"):
        await work()
    assert [fact.name for fact in await record.read()] == ["a#0/0/model"]


async def test_everybody_else_in_a_commit_goes_on_when_one_is_refused(journal: Journal, record: Record) -> None:
    """S-DUR-16: tasks that write at the same time stand and fall for themselves."""
    other = await record.second()
    await other.append([_fact("t3#0/0/model"), _fact("t5#0/0/model")], epoch=1, until=Persistence.COMMITTED)

    async def work(task: int) -> bool:
        try:
            await journal.append([_fact(f"t{task}#0/0/model", text=f"{task}" * 2000)], until=Persistence.COMMITTED)
        except StaleEpochError:
            return False
        return True

    done = await asyncio.gather(*(work(task) for task in range(8)))
    assert [task for task, is_done in enumerate(done) if not is_done] == [3, 5]
    assert {fact.name for fact in await record.read() if fact.epoch == 0} == {
        f"t{n}#0/0/model" for n in (0, 1, 2, 4, 6, 7)
    }


async def test_older_epoch_is_refused_everywhere_when_the_run_has_a_newer_one(journal: Journal, record: Record) -> None:
    """S-DUR-16: resuming raises the run's epoch: every writer of before must stop."""
    other = await record.second()
    await other.append([_fact("run", "resume")], epoch=1, until=Persistence.COMMITTED)
    with pytest.raises(StaleEpochError):
        await journal.append([_fact("a#0/0/model")], until=Persistence.COMMITTED)
    with pytest.raises(StaleEpochError):
        await journal.append([_fact("b#0/0/model")], until=Persistence.COMMITTED)


async def test_group_is_refused_as_a_whole(journal: Journal, record: Record) -> None:
    """S-DUR-16: none of its facts is kept, and none of its instances goes on under that epoch."""
    other = await record.second()
    await other.append([_fact("a#0/0/model")], epoch=3, until=Persistence.COMMITTED)
    with pytest.raises(StaleEpochError):
        await journal.append([_fact("b#0/0/model"), _fact("a#0/1/model")], epoch=2, until=Persistence.COMMITTED)
    assert await journal.lookup_recorded("b#0") == {}
    assert len(await record.read()) == 1


async def test_epochs_are_known_when_the_record_is_opened_again(journal: Journal, record: Record) -> None:
    """S-DUR-16: the newest one is in the record."""
    await journal.append([_fact("a#0", "output")], epoch=4)
    await journal.close()
    again = await record.open()
    with pytest.raises(StaleEpochError):
        await again.append([_fact("a#0/0/model")], epoch=3, until=Persistence.COMMITTED)


async def test_refusal_is_an_ensemble_error() -> None:
    """S-ERR-37: whoever catches the library's errors catches it."""
    assert issubclass(StaleEpochError, EnsembleError)


async def test_task_key_may_hold_anything(journal: Journal) -> None:
    """Its instance is found from the end of an effect's name."""
    await journal.append([_fact("a/b#c#0/0/model")], epoch=2)
    with pytest.raises(StaleEpochError, match="'a/b#c#0'"):
        await journal.append([_fact("a/b#c#0", "output")], epoch=1)


# Closing.


async def test_closing_writes_everything(journal: Journal, record: Record) -> None:
    """And closing twice is fine."""
    await journal.append([_fact(text="last")])
    await journal.close()
    await journal.close()
    assert [fact.data.to_data() for fact in await record.read()] == [{"text": "last"}]


async def test_append_is_refused_when_closed(journal: Journal) -> None:
    """Nothing is lost in silence."""
    await journal.close()
    with pytest.raises(IllegalStateError, match="closed"):
        await journal.append([_fact()])


async def test_flush_returns_when_there_is_nothing(journal: Journal) -> None:
    """Nobody waits for nothing."""
    await journal.flush()
    await journal.append([])
    await journal.flush()


# Work that a task hands on.

CALL = "a#0/1/call-2"
WORKER = f"{CALL}/delegate#0"
DEEPER = f"{WORKER}/0/call-0/delegate#0"


async def test_facts_of_delegated_work_are_its_own(journal: Journal) -> None:
    """S-DUR-70, S-DUR-72: decisions belong to who asks, everything behind them to who is asked, at every depth."""
    of_asker = [_fact("a#0/1/model"), _fact(CALL, "delegation", worker="b"), _fact(CALL, "tool_result")]
    of_worker = [_fact(f"{WORKER}/0/model"), _fact(f"{WORKER}/0/call-0", "delegation"), _fact(WORKER, "output")]
    of_deeper = [_fact(f"{DEEPER}/0/model"), _fact(DEEPER, "task_failed")]
    await journal.append([*of_asker, *of_worker, *of_deeper], until=Persistence.COMMITTED)
    for instance, facts in (("a#0", of_asker), (WORKER, of_worker), (DEEPER, of_deeper)):
        assert set(await journal.lookup_recorded(instance)) == {(fact.name, fact.kind) for fact in facts}
    assert (await journal.lookup_recorded("a#0"))[CALL, "delegation"].data.to_data() == {"worker": "b"}


async def test_delegated_work_is_fenced_for_itself(journal: Journal, record: Record) -> None:
    """S-DUR-72, S-DUR-16: a worker that was sent again is refused, neither who asks nor whom it asked is."""
    other = await record.second()
    await other.append([_fact(f"{WORKER}/0/model")], epoch=5, until=Persistence.COMMITTED)
    with pytest.raises(StaleEpochError) as caught:
        await journal.append([_fact(WORKER, "output")], epoch=4, until=Persistence.COMMITTED)
    assert (caught.value.name, caught.value.newest) == (WORKER, 5)
    await journal.append([_fact(CALL, "tool_result")], epoch=4, until=Persistence.COMMITTED)
    await journal.append([_fact(f"{DEEPER}/0/model")], epoch=4, until=Persistence.COMMITTED)
    await other.append([_fact(CALL, "delegation")], epoch=6, until=Persistence.COMMITTED)
    with pytest.raises(StaleEpochError) as caught:
        await journal.append([_fact("a#0/2/call-0", "delegation")], epoch=5, until=Persistence.COMMITTED)
    assert caught.value.name == "a#0"
