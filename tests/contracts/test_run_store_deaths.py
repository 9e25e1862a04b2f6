"""The contract of the `RunStore` port when processes die: what was committed stays, and nobody owns what they owned."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ensemble_ray import RecordError, RunExistsError, RunState
from ensemble_ray.ports import Persistence
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.stores import RunStore, StoreAddress
from ensemble_ray.values.ids import OWNER_STEP

from .owned_runs import ME, RUN, fact, line_of, program_on, state_of, until_left
from .record_stores import STORES, address_of


@pytest.fixture(params=STORES)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    """An empty store, as data that travels."""
    return address_of(request.param, request, tmp_path)


@pytest.fixture
def store(address: StoreAddress) -> RunStore:
    """The store there."""
    return store_at(address)


async def test_committed_facts_survive_a_kill(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-3, S-DUR-15, S-DUR-34: right after `append` returned; nobody owns the run then, and it can be taken."""
    rest = """
for turn in range(20):
    await run.journal.append([fact(f"a#0/{turn}/model", text="x" * 1500)])
await run.journal.append([fact("a#0/20/model")], until=Persistence.COMMITTED)
die()
"""
    with program_on(address, rest) as process:
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
    assert len(await store.facts(RUN)) == 21
    await until_left(store, RUN)
    assert await state_of(store) is RunState.INTERRUPTED
    taken = await store.claim(RUN)
    assert (taken.epoch, len(await store.facts(RUN))) == (OWNER_STEP, 21)
    await taken.close(RunState.COMPLETED)


async def test_state_is_what_the_facts_say_when_the_owner_died_before_it_wrote_it(
    store: RunStore, address: StoreAddress
) -> None:
    """S-DUR-30: nothing but the facts holds truth; a run that went on after its end is interrupted."""
    rest = """
for name, kinds in (("run-a", ["completed"]), ("run-b", ["cancelled"]), ("run-c", ["cancelled", "resume"])):
    other = await store.begin(name)
    await other.write_state(RunState.RUNNING)
    facts = [fact("run", "resume") if kind == "resume" else fact("run", "end", state=kind) for kind in kinds]
    await other.journal.append(facts, until=Persistence.COMMITTED)
die()
"""
    with program_on(address, rest) as process:
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
    await until_left(store, RUN, "run-a", "run-b", "run-c")
    assert {run.run_id: run.state for run in await store.runs()} == {
        "run-a": RunState.COMPLETED,
        "run-b": RunState.CANCELLED,
        "run-c": RunState.INTERRUPTED,
        RUN: RunState.INTERRUPTED,
    }
    with pytest.raises(RunExistsError, match="'run-a' is finished"):
        await store.begin("run-a")


async def test_run_is_owned_as_long_as_its_process_lives(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-15, S-DUR-17: others are told which; when it wakes after its run was taken by force, it is refused."""
    rest = """
await run.journal.append([fact("run", "plan")], until=Persistence.COMMITTED)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
try:
    await run.journal.append([fact("a#0/0/call-0", "tool_intent")], until=Persistence.SYNCED)
except Exception as error:
    print(type(error).__name__, flush=True)
await run.close(RunState.FAILED)
"""
    with program_on(address, rest) as process:
        assert await asyncio.to_thread(line_of, process) == "ready"
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(RunExistsError, match=f"process {process.pid} on "):
            await store.claim(RUN)
        taken = await store.claim(RUN, by_force=True)
        process.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(line_of, process) == "StaleEpochError"
        assert await asyncio.to_thread(process.wait, 60) == 0
    found = await store.summary(RUN)
    assert found is not None
    assert (found.state, found.owner) == (RunState.PENDING, ME)
    await taken.close(RunState.COMPLETED)
    assert [fact.kind for fact in await store.facts(RUN)] == ["plan"]


async def test_run_has_no_owner_when_only_a_forked_child_is_left(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-15: a pool's process that outlives the owner keeps nothing of it."""
    rest = """
await run.journal.append([fact()], until=Persistence.COMMITTED)
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(600)
"""
    with program_on(address, rest) as process:
        # The child's own word, so that it has let go what it inherited before its parent dies.
        child = int(await asyncio.to_thread(line_of, process))
        try:
            process.kill()
            assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
            await until_left(store, RUN)
            assert await state_of(store) is RunState.INTERRUPTED
            await (await store.claim(RUN)).close(RunState.COMPLETED)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_facts_are_committed_without_a_wait(store: RunStore, address: StoreAddress) -> None:
    """S-DUR-2: within the group's time: a process that is killed later has lost nothing."""
    rest = """
await run.journal.append([fact()])
while not await store.facts("run-1"):
    await asyncio.sleep(0.01)
die()
"""
    with program_on(address, rest) as process:
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
    assert len(await store.facts(RUN)) == 1


async def test_run_is_taken_from_an_owner_that_is_frozen_inside_a_commit(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """S-DUR-17, S-DUR-87: it holds the locks of the file, so it is ended; what it was committing is not there."""
    address = address_of("sqlite", request, tmp_path)
    store = store_at(address)
    rest = """
from ensemble_ray.record.sqlite.file import SqliteFile
await run.journal.append([fact()], until=Persistence.COMMITTED)
def frozen(self, rows, bodies, **flags):
    self._connection.execute("BEGIN IMMEDIATE")
    self.add_in_transaction(rows, bodies)
    print("inside", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)  # the signal may stop another thread first
SqliteFile.add = frozen
await run.journal.append([fact("a#0/1/model")], until=Persistence.COMMITTED)
"""
    with program_on(address, rest) as process:
        assert await asyncio.to_thread(line_of, process) == "inside"
        await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(RecordError, match=f"process {process.pid} has held its lock"):
            await SqliteStore(tmp_path, patience_s=0.1).claim(RUN)
        taken = await store.claim(RUN, by_force=True)
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
    await taken.journal.append([fact("a#0/2/model")], epoch=taken.epoch, until=Persistence.SYNCED)
    await taken.close(RunState.COMPLETED)
    assert [fact.name for fact in await store.facts(RUN)] == ["a#0/0/model", "a#0/2/model"]
