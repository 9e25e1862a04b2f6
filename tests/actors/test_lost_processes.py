"""RunSession over real processes, without a scheduler: whoever has tasks in a process learns of its death."""

from __future__ import annotations

import asyncio

import ray.exceptions
from msgspec.structs import replace

from ensemble_ray import ChatResponse, Ensemble
from ensemble_ray.actors.link.packing import pack, pack_order, unpack
from ensemble_ray.actors.link.wire import Dispatch, WireOrder, WireResult
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import ScriptedModel
from tests.actors.sessions import Owner, packed
from tests.builders import agent, task
from tests.scenarios.teams import PATIENCE_S


async def out_of_reach() -> None:
    """A call that does not arrive."""
    raise ray.exceptions.ActorUnavailableError("out of reach", None)


async def test_death_is_told_to_the_run_that_has_the_process_when_an_earlier_ones_call_fails(ray_cluster: str) -> None:
    """S-DUR-31, S-PAR-34: the process still started when the first run ended, and serves the next when it has; no hang."""
    del ray_cluster
    pool, submission = ProcessPool(), await packed(Ensemble(tasks=[task("t", agent(ScriptedModel("x")))]))
    first, second = Owner(submission, pool), Owner(submission, pool)
    first.session.open()
    await asyncio.sleep(0)  # its calls are on their way
    await first.session.close(keep="warm")
    (process,) = pool._living
    (lease,) = process.leases
    assert pool._idle == []  # a run of the same id would be bound there, and then be released as the first one
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wait([task for task in first.session._groups._tasks if task is not lease.starting])
    assert pool._idle == [process]
    second.session.open()
    second.start()
    assert list(pool._living) == [process]
    first.session._groups._send(lease, out_of_reach())
    async with asyncio.timeout(PATIENCE_S):
        report = await second.reports.get()
    assert (report.status, report.epoch) == ("failed", 0)
    assert report.failure is not None
    assert "its process died" in report.failure.message
    await second.session.close(keep=None)
    assert pool._living == set()


async def test_nothing_is_started_when_a_process_dies_in_a_run_that_ends(ray_cluster: str) -> None:
    """S-DUR-31: its tasks would be done for nobody, by processes that nobody lets go."""
    del ray_cluster
    pool, submission = ProcessPool(), await packed(Ensemble(tasks=[task("t", handler=str)]))
    owner = Owner(replace(submission, store=StoreAddress(home="/nowhere")), pool)
    owner.session.open()
    owner.start()
    (process,) = pool._living
    closing = asyncio.ensure_future(owner.session.close(keep=None))
    await asyncio.sleep(0)
    pool.mark_lost(process, RuntimeError("lost"))
    await closing
    assert pool._living == set()


async def test_agent_is_found_where_it_lives_and_anew_when_its_process_was_lost(ray_cluster: str) -> None:
    """S-DUR-31, S-SET-41: all its processes; a lost one is given up, also where it still seemed to live; then no more."""
    del ray_cluster
    pool = ProcessPool()
    writer = agent(Helpful(), replicas=2)
    owner = Owner(await packed(Ensemble(tasks=[task("t", writer)])), pool)
    owner.session.open()
    (key,) = (template.key for template in owner.submission.templates)
    both = owner.session.locate(key)
    assert {name for name, _ in both} == {process.name for process in pool._living}
    (first, _), second = both
    assert owner.session.locate(key, lost=first) == [second]
    assert owner.session.locate(key, lost=first) == [second]  # another asker had it too
    ((third, handle),) = owner.session.locate(key, lost=second[0])
    assert third not in {first, second[0]}
    assert [process.name for process in pool._living] == [third]
    asked = pack(Dispatch(owner.submission.run_id, (delegated(key),), {}))
    report = unpack(await asyncio.wait_for(handle.perform.remote(asked), PATIENCE_S), WireResult)
    assert report.status == "completed"
    await owner.session.close(keep=None)
    assert owner.session.locate(key) == []
    assert pool._living == set()


class Helpful:
    """A model that needs no driver."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return ChatResponse(text="help")


def delegated(key: str) -> WireOrder:
    """Work that an agent hands to that one."""
    order = TaskOrder(
        run_id="",
        key="a#0/0/call-0/delegate",
        instance="a#0/0/call-0/delegate#0",
        epoch=0,
        index=0,
        task=task("help"),
        agent_key=key,
        agent_role="Writer",
        depth=1,
    )
    return pack_order(order)


async def test_callables_are_not_hosted_again_and_again_when_that_kills_their_process(ray_cluster: str) -> None:
    """S-DUR-31: as often as a task is handed out."""
    del ray_cluster
    pool, submission = ProcessPool(), await packed(Ensemble(tasks=[task("t", handler=str)]))
    owner, count = Owner(submission, pool), 0
    owner.session.open()
    while pool._living:
        (process,) = pool._living
        pool.mark_lost(process, RuntimeError("lost"))
        count += 1
    assert count == 3
    await owner.session.close(keep=None)
