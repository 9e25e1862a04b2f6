"""The contract of the `RunStore` port, over every store: who owns a run, how it stands, and what a death leaves."""

import asyncio
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import RecordError, RunExistsError, RunState, StaleEpochError, ValidationError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import PAGE, RunStore, StoreAddress
from ensemble_ray.values.ids import OWNER_STEP

from .owned_runs import ME, RUN, begun, fact, state_of
from .record_stores import STORES, address_of

ENDED = (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)


@pytest.fixture(params=STORES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    """An empty store, as data that travels."""
    return address_of(request.param, request, tmp_path)


@pytest.fixture
def store(address: StoreAddress) -> RunStore:
    """The store there."""
    return store_at(address)


# Beginning and ending.


async def test_new_run_is_pending_and_owned(store: RunStore) -> None:
    """S-DUR-15, S-SET-14: by this process, under epoch 0, without facts."""
    run = await store.begin(RUN, origin="team.yaml")
    assert (run.epoch, await store.facts(RUN)) == (0, [])
    found = await store.summary(RUN)
    assert found is not None
    assert (found.run_id, found.origin, found.state, found.owner) == (RUN, "team.yaml", RunState.PENDING, ME)
    await run.write_state(RunState.RUNNING)
    assert await state_of(store) is RunState.RUNNING
    await run.close(RunState.COMPLETED)


@pytest.mark.parametrize("state", ENDED)
async def test_run_stands_as_its_owner_said_at_its_end(store: RunStore, state: RunState) -> None:
    """S-SET-14: and nobody owns it any more."""
    run = await begun(store)
    await run.close(state)
    found = await store.summary(RUN)
    assert found is not None
    assert (found.state, found.owner) == (state, "")
    assert RUN in found.location or "://" in found.location


async def test_second_owner_is_told_who_has_the_run(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-15: by process id and host; whether it begins the run or takes it."""
    run = await begun(store)
    for attempt in (store_at(address).begin, store_at(address).claim):
        with pytest.raises(RunExistsError, match=rf"Run '{RUN}' is running.*process {os.getpid()} on "):
            await attempt(RUN)
    await run.close(RunState.COMPLETED)


@pytest.mark.parametrize("state", [*ENDED, RunState.INTERRUPTED])
async def test_recorded_run_is_not_begun_again(store: RunStore, state: RunState) -> None:
    """S-SET-39: the message says how it stands; what is recorded stays."""
    run = await begun(store)
    await run.close(state)
    word = {RunState.COMPLETED: "finished", RunState.FAILED: "failed"}.get(state, state.value)
    with pytest.raises(RunExistsError, match=rf"Run '{RUN}' (is|was|has) {word}"):
        await store.begin(RUN)
    assert len(await store.facts(RUN)) == 1
    assert await state_of(store) is state


async def test_run_that_recorded_nothing_is_begun_again(store: RunStore) -> None:
    """S-SET-39: it was stopped before its first fact, even after somebody else had taken it."""
    await (await store.begin(RUN, origin="first")).close(RunState.INTERRUPTED)
    await (await store.claim(RUN)).close(RunState.INTERRUPTED)
    run = await store.begin(RUN, origin="second")
    await run.journal.append([fact()], epoch=run.epoch, until=Persistence.COMMITTED)
    found = await store.summary(RUN)
    assert found is not None
    assert (run.epoch, found.origin) == (0, "second")
    await run.close(RunState.COMPLETED)


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x", "a/b", "a b", ".hidden", "-x", "x" * 129, "a\nb"])
async def test_id_is_refused_when_it_cannot_name_a_record(store: RunStore, run_id: str) -> None:
    """S-SET-39: a chosen id never leads out of the home."""
    with pytest.raises(ValidationError, match="cannot name a record"):
        await store.begin(run_id)


async def test_buffered_journal_waits_at_its_end_only(store: RunStore) -> None:
    """S-DUR-2: durability `run`: everything is there at the run's end."""
    run = await store.begin(RUN, is_buffered=True)
    for number in range(50):
        await run.journal.append([fact(f"a#0/{number}/model")], until=Persistence.SYNCED)
    await run.close(RunState.COMPLETED)
    assert len(await store.facts(RUN)) == 50


# Taking over.


async def test_run_is_taken_with_its_facts_under_a_higher_epoch(store: RunStore) -> None:
    """S-DUR-16: higher each time; it stands as begun again until its owner says more."""
    run = await begun(store, facts=[fact("run", "plan"), fact(text="x" * 2000)])
    await run.journal.append([fact("a#0/1/model")], epoch=4)
    await run.close(RunState.INTERRUPTED)
    taken = await store.claim(RUN)
    assert taken.epoch == 4 + OWNER_STEP
    assert [(fact.seq, fact.data.to_data().get("text", "")) for fact in await store.facts(RUN)] == [
        (1, ""),
        (2, "x" * 2000),
        (3, ""),
    ]
    assert await state_of(store) is RunState.PENDING
    await taken.journal.append([fact("run", "resume")], epoch=taken.epoch, until=Persistence.COMMITTED)
    await taken.close(RunState.CANCELLED)
    again = await store.claim(RUN)
    assert (again.epoch, len(await store.facts(RUN))) == (4 + 2 * OWNER_STEP, 4)
    await again.close(RunState.CANCELLED)
    found = await store.summary(RUN)
    assert found is not None
    assert (found.origin, found.state) == ("team.yaml", RunState.CANCELLED)


async def test_unknown_run_is_not_taken(store: RunStore) -> None:
    """And nothing is made by asking."""
    with pytest.raises(ValidationError, match=f"Unknown run '{RUN}'"):
        await store.claim(RUN)
    assert await store.runs() == []


async def test_one_wins_when_two_take_a_run_at_the_same_time(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-15: the other one is told."""
    await (await begun(store)).close(RunState.INTERRUPTED)
    outcomes = await asyncio.gather(*(store_at(address).claim(RUN) for _ in range(4)), return_exceptions=True)
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    assert [type(error) for error in errors] == [RunExistsError] * 3
    for each in outcomes:
        if not isinstance(each, BaseException):
            await each.close(RunState.COMPLETED)


async def test_old_owner_is_refused_when_its_run_was_taken_by_force(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-16, S-DUR-17: it can neither record nor say how the run stands; its end does not free the run."""
    old = await begun(store)
    await old.journal.append([fact("a#0/0/model")], until=Persistence.COMMITTED)
    new = await store_at(address).claim(RUN, by_force=True)
    await new.write_state(RunState.RUNNING)
    assert (new.epoch, len(await store.facts(RUN))) == (OWNER_STEP, 2)
    with pytest.raises(StaleEpochError):
        await old.journal.append([fact("a#0/1/call-0", "tool_intent")], until=Persistence.SYNCED)
    await old.write_state(RunState.WAITING)
    await old.close(RunState.FAILED)
    assert await state_of(store) is RunState.RUNNING
    with pytest.raises(RunExistsError):
        await store.claim(RUN)
    await new.journal.append([fact("a#0/1/model")], epoch=new.epoch, until=Persistence.COMMITTED)
    await new.close(RunState.COMPLETED)
    assert [fact.name for fact in await store.facts(RUN)] == ["run", "a#0/0/model", "a#0/1/model"]
    assert await state_of(store) is RunState.COMPLETED


async def test_agents_of_the_old_owner_are_refused_when_its_run_was_taken(store: RunStore) -> None:
    """S-DUR-16: whoever had joined the run before writes nothing more."""
    old = await begun(store)
    agent = await store.join(RUN, writer="agent")
    await agent.append([fact("a#0/0/model")], until=Persistence.COMMITTED)
    new = await store.claim(RUN, by_force=True)
    with pytest.raises(StaleEpochError):
        await agent.append([fact("a#0/1/model")], until=Persistence.COMMITTED)
    await agent.append([fact("a#0/1/model")], epoch=new.epoch, until=Persistence.COMMITTED)
    await agent.close()
    await old.close(RunState.FAILED)
    await new.close(RunState.COMPLETED)


# Cancelling and deleting.


async def test_owner_learns_that_its_end_is_asked_for(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-52: from any process; the next owner begins without it."""
    run = await begun(store)
    assert not await run.is_cancel_asked()
    await store_at(address).ask_cancel(RUN)
    assert await run.is_cancel_asked()
    await run.close(RunState.CANCELLED)
    again = await store.claim(RUN)
    assert not await again.is_cancel_asked()
    await again.close(RunState.CANCELLED)
    with pytest.raises(ValidationError, match="Unknown run 'other'"):
        await store.ask_cancel("other")


async def test_owned_run_is_not_deleted(store: RunStore) -> None:
    """S-DUR-53: its owner writes to it."""
    run = await begun(store)
    with pytest.raises(RunExistsError, match=f"Run '{RUN}' is running"):
        await store.delete(RUN)
    await run.journal.append([fact()], until=Persistence.COMMITTED)
    await run.close(RunState.COMPLETED)
    assert len(await store.facts(RUN)) == 2


async def test_deleted_run_is_gone(store: RunStore) -> None:
    """S-DUR-53: and its id is free."""
    await (await begun(store)).close(RunState.FAILED)
    await store.delete(RUN)
    assert await store.runs() == []
    assert await store.summary(RUN) is None
    assert await store.facts(RUN) == []
    with pytest.raises(ValidationError, match=f"Unknown run '{RUN}'"):
        await store.delete(RUN)
    await (await begun(store)).close(RunState.COMPLETED)


async def test_contents_are_deleted_with_their_run(store: RunStore) -> None:
    """S-ATT-31: a reader finds those of a run in its own record alone."""
    run = await begun(store)
    await run.journal.store_content(b"content")
    digest = sha256(b"content").hexdigest()
    assert await store.read_content(RUN, digest) == b"content"
    assert await store.read_content("another", digest) is None
    await run.close(RunState.COMPLETED)
    await store.delete(RUN)
    await (await begun(store)).close(RunState.COMPLETED)
    assert await store.read_content(RUN, digest) is None


# Looking.


async def test_nothing_is_there_at_first(store: RunStore) -> None:
    """Nor made by looking."""
    assert await store.runs() == []
    assert await store.summary(RUN) is None
    assert await store.facts(RUN) == []
    with pytest.raises(ValidationError, match=f"Unknown run '{RUN}'"):
        await store.find(RUN)


async def test_runs_are_listed_newest_first(store: RunStore) -> None:
    """S-DUR-50: with their states."""
    for name in ("old", "mid", "new"):
        await (await begun(store, name)).close(RunState.COMPLETED)
    assert [(run.run_id, run.state) for run in await store.runs()] == [
        (name, RunState.COMPLETED) for name in ("new", "mid", "old")
    ]


async def test_run_is_found_by_the_beginning_of_its_id(store: RunStore) -> None:
    """If it is the only one; an exact id wins over longer ones; `latest` is the newest."""
    for name in ("3f2a", "3f2a-long", "7777"):
        await (await begun(store, name)).close(RunState.COMPLETED)
    assert (await store.find("77")).run_id == "7777"
    assert (await store.find("3f2a")).run_id == "3f2a"
    assert (await store.find("latest")).run_id == "7777"
    for asked, text in (
        ("3f", "Several runs begin with '3f': [3f2a, 3f2a-long]"),
        ("3f2b", "Nearest: [3f2a"),
        ("zzzzzz", "Newest: [7777, 3f2a-long, 3f2a]"),
        ("", "Newest: [7777, 3f2a-long, 3f2a]"),
    ):
        with pytest.raises(ValidationError, match=re.escape(text)):
            await store.find(asked)


# Reading page by page.


async def _read(store: RunStore, **how: Any) -> list[list[Fact]]:
    """The pages of the run."""
    return [list(page) async for page in store.read(RUN, **how)]


async def test_large_record_is_read_page_by_page(store: RunStore) -> None:
    """S-MR-161: in order, everything once, as whole reading gives it, long texts too; no page is larger than `PAGE`."""
    run = await begun(store)
    facts = [fact(f"a#0/{turn}/model", text="x" * (1025 if turn % 400 == 0 else 1)) for turn in range(2 * PAGE + 7)]
    await run.journal.append(facts, until=Persistence.COMMITTED)
    await run.close(RunState.COMPLETED)
    read = await _read(store)
    assert [len(page) for page in read] == [PAGE, PAGE, 8]
    assert [each for page in read for each in page] == await store.facts(RUN)


async def test_reading_begins_behind_a_position(store: RunStore) -> None:
    """S-SRV-32: a reader that comes back reads nothing twice; where there is nothing behind it, there are no pages."""
    run = await begun(store)
    await run.journal.append([fact(f"a#{number}", "output") for number in range(5)], until=Persistence.COMMITTED)
    whole = await store.facts(RUN)
    pages = [page async for page in store.read(RUN, after=3)]
    assert [each for page in pages for each in page] == whole[3:]
    assert [page async for page in store.read(RUN, after=whole[-1].seq)] == []
    await run.close(RunState.COMPLETED)


async def test_only_asked_kinds_are_read(store: RunStore) -> None:
    """S-MR-161: and without their data where only their names are of interest."""
    run = await begun(store)
    await run.journal.append([fact(), fact("a#0", "output", output={"raw": "x" * 2000}), fact("b#0", "output")])
    await run.close(RunState.COMPLETED)
    (found,) = await _read(store, kinds={"plan", "output"})
    assert [(each.seq, each.kind, each.name) for each in found] == [
        (1, "plan", "run"), (3, "output", "a#0"), (4, "output", "b#0"),
    ]  # fmt: skip
    assert found[1].data.to_data() == {"output": {"raw": "x" * 2000}}
    (named,) = await _read(store, kinds=["output"], has_data=False)
    assert [(each.name, each.data.to_data()) for each in named] == [("a#0", {}), ("b#0", {})]
    assert await _read(store, kinds=["group"]) == []
    (head,) = await _read(store, kinds=["plan", "end", "resume"])  # of the run itself only
    assert [each.kind for each in head] == ["plan"]


async def test_one_instance_is_read_alone(store: RunStore) -> None:
    """S-STU-20: what is recorded of it in order; nothing of others, no stimuli, nothing of an unknown run."""
    run = await store.begin(RUN)
    names = ("a#0/0/model", "b#0/0/model", "a#0/1/model", "a#0/1/call-0/delegate#0/0/model")
    await run.journal.append([fact(name, at=float(at)) for at, name in enumerate(names)])
    await run.close(RunState.COMPLETED)
    found = await store.facts_of(RUN, "a#0")
    assert [each.name for each in found] == ["a#0/0/model", "a#0/1/model"]
    assert [each.seq for each in found] == [1, 3]
    assert await store.facts_of("unknown", "a#0") == []


async def test_lists_tell_of_a_run_that_goes_on_again(store: RunStore) -> None:
    """S-SET-14, S-STU-4: a run that had ended when it was listed is listed as it stands now."""
    run = await begun(store)
    await run.close(RunState.CANCELLED)
    assert [each.state for each in await store.runs()] == [RunState.CANCELLED]
    assert [each.state for each in await store.runs()] == [RunState.CANCELLED]
    again = await store.claim(RUN)
    await again.write_state(RunState.RUNNING)
    assert [each.state for each in await store.runs()] == [RunState.RUNNING]
    await again.close(RunState.COMPLETED)
    assert [each.state for each in await store.runs()] == [RunState.COMPLETED]


async def test_reading_ends_where_the_record_ended_when_it_began(store: RunStore) -> None:
    """S-MR-161: a run that goes on cannot hold its reader for ever."""
    run = await begun(store, facts=[fact(f"a#0/{turn}/model") for turn in range(PAGE + 1)])
    seen = 0
    async for page in store.read(RUN):
        seen += len(page)
        await run.journal.append([fact(f"a#0/{seen}/model")], until=Persistence.COMMITTED)
    assert seen == PAGE + 1
    await run.close(RunState.COMPLETED)


async def test_nothing_is_read_of_an_unknown_run(store: RunStore) -> None:
    """And nothing is made by asking."""
    assert await _read(store) == []
    assert await store.runs() == []


async def test_reader_is_told_when_the_record_is_removed_meanwhile(store: RunStore) -> None:
    """S-MR-161: what was read so far is not taken for the whole."""
    await (await begun(store, facts=[fact(f"a#0/{turn}/model") for turn in range(PAGE + 1)])).close(RunState.FAILED)
    read = store.read(RUN)
    await anext(read)
    await store.delete(RUN)
    with pytest.raises(RecordError, match=f"'{RUN}' was removed while it was read"):
        await anext(read)
