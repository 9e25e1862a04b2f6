"""RemotePeers with handles that answer and fail as Ray's do: whom they ask, how often, and what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError

from ensemble_ray import AgentExecutionError, DelegationContext, IllegalStateError, StaleEpochError, Task, TaskOutput
from ensemble_ray.actors.link import reach
from ensemble_ray.actors.link.packing import pack, pack_result, unpack, unpack_order
from ensemble_ray.actors.link.wire import Dispatch, WireOrder, WireResult
from ensemble_ray.actors.worker.peers import RemotePeers
from ensemble_ray.execute.orders import RunContext, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.values.value import utc_now

RUN_CONTEXT = RunContext(run_id="run", workflow="hierarchical", total_tasks=1, delegation=DelegationContext(retries=2))
ORDER = TaskOrder(
    run_id="run",
    key="manager#0/0/call-0/delegate",
    instance="manager#0/0/call-0/delegate#0",
    epoch=0,
    index=0,
    task=Task(description="dig", expected_output="gold"),
    agent_key="digger",
    agent_role="Digger",
    depth=1,
    caller_role="Manager",
    delegation_id="id-1",
)


class Method:
    """A method of an actor, called by `remote`."""

    def __init__(self, does: Callable[..., Awaitable[object]]) -> None:
        self._does = does

    def remote(self, *arguments: Any) -> Awaitable[object]:
        """Call it."""
        return self._does(*arguments)


#: What a worker does with an order.
Answer = Callable[[WireOrder], Awaitable[WireResult]]


class Worker:
    """A worker's process."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.orders: list[WireOrder] = []
        self.stopped: asyncio.Queue[tuple[str, Sequence[str]]] = asyncio.Queue()
        self.perform = Method(self._perform)
        self.stop = Method(self._stop)
        self.holds = Method(self._holds)

    async def _holds(self, run_id: str, instance: str) -> bool:
        return run_id == "run" and any(order.instance == instance for order in self.orders)

    async def _perform(self, body: bytes) -> bytes:
        run_id, (order,), _ = unpack(body, Dispatch)
        assert run_id == "run"
        self.orders.append(order)
        answer = self._answers.pop(0) if self._answers else done
        return pack(await answer(order))

    async def _stop(self, run_id: str, instances: Sequence[str]) -> None:
        self.stopped.put_nowait((run_id, instances))


class Scheduler:
    """Knows where agents live; each answer is for one question, the last one for all further ones."""

    def __init__(self, *answers: Sequence[tuple[str, Worker]] | RayError) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str, str | None]] = []
        self.locate = Method(self._locate)

    async def _locate(self, run_id: str, agent_key: str, lost: str | None) -> Sequence[tuple[str, Worker]]:
        self.asked.append((run_id, agent_key, lost))
        await asyncio.sleep(0)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, RayError):
            raise answer
        return answer


def result_of(order: WireOrder, **fields: object) -> TaskResult:
    """What came of an order."""
    known: dict[str, object] = {"status": "completed", "at": 5.0, "duration_s": 1.0, "epoch": order.epoch, **fields}
    return TaskResult(key=order.key, instance=order.instance, **known)  # type: ignore[arg-type]  # fields of a result


async def done(order: WireOrder) -> WireResult:
    """Give gold."""
    output = TaskOutput(
        raw="gold",
        task_description="dig",
        agent_role="Digger",
        completed_at=utc_now(),
        duration=timedelta(seconds=1),
        tool_call_count=3,
    )
    return pack_result(result_of(order, output=output, total_tokens=7, tool_call_count=3))


def failing(error: BaseException) -> Answer:
    """A call that fails."""

    async def fail(_order: WireOrder) -> WireResult:
        raise error

    return fail


def dying() -> Answer:
    """A call whose process dies."""
    return failing(ActorUnavailableError("gone", None))


async def arrived() -> None:
    """All events have arrived."""


def peers_of(scheduler: Scheduler, context: RunContext = RUN_CONTEXT) -> RemotePeers:
    """The peers of a run."""
    return RemotePeers(scheduler, context, flush=arrived)


async def test_result_comes_as_the_worker_gave_it() -> None:
    """S-DEL-3, S-DEL-12: the order with its depth, asker and id; the result with what the asker counts."""
    worker = Worker()
    result = await peers_of(Scheduler([("w1", worker)])).perform(ORDER)
    assert result.output is not None
    assert (result.instance, result.status, result.output.raw) == (ORDER.instance, "completed", "gold")
    assert (result.total_tokens, result.tool_call_count, result.duration_s) == (7, 3, 1.0)
    (order,) = worker.orders
    assert unpack_order(order) == ORDER


async def test_events_of_the_asker_arrive_before_the_worker_begins() -> None:
    """S-EVT-10: so that a delegation that started is told before what its worker does."""
    steps: list[str] = []

    async def flush() -> None:
        await asyncio.sleep(0)
        steps.append("flushed")

    async def work(order: WireOrder) -> WireResult:
        steps.append("work")
        return await done(order)

    await RemotePeers(Scheduler([("w1", Worker(work))]), RUN_CONTEXT, flush=flush).perform(ORDER)
    assert steps == ["flushed", "work"]


async def test_scheduler_is_asked_once_and_replicas_in_turn_when_many_ask() -> None:
    """S-SET-41: several at the same time, too."""
    first, second = Worker(), Worker()
    scheduler = Scheduler([("w1", first), ("w2", second)])
    peers = peers_of(scheduler)
    await asyncio.gather(*(peers.perform(ORDER) for _ in range(4)))
    await peers.perform(replace(ORDER, agent_key="other"))
    assert (len(first.orders), len(second.orders)) == (3, 2)
    assert scheduler.asked == [("run", "digger", None), ("run", "other", None)]


async def test_replica_that_is_at_work_on_it_is_asked_when_its_asker_was_replaced() -> None:
    """S-DUR-31, S-DUR-16: one beside it would do the same again, calls of tools among it; one that is gone holds nothing."""
    workers = [Worker(), Worker(), Worker()]
    workers[0].holds = Method(failing_holds)
    places = [(f"w{number}", worker) for number, worker in enumerate(workers)]
    first = peers_of(Scheduler(places))
    other, third = [replace(ORDER, instance=f"manager#0/{turn}/call-0/delegate#0") for turn in (1, 2)]
    for order in (other, ORDER, third):
        await first.perform(order)
    later = peers_of(Scheduler(places))
    await later.perform(replace(third, epoch=1000))
    await later.perform(replace(ORDER, epoch=1000))
    assert [[order.epoch for order in worker.orders] for worker in workers] == [[0], [0, 1000], [0, 1000]]


async def failing_holds(run_id: str, instance: str) -> bool:
    """Fail as a process that is gone."""
    raise ActorDiedError


async def test_scheduler_is_asked_again_when_it_is_out_of_reach_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-32: as often as it takes."""
    monkeypatch.setattr(reach, "_PATIENT_PAUSES_S", (0.0, 0.0))
    unreachable = [ActorUnavailableError("out of reach", None)] * 10
    scheduler = Scheduler(*unreachable, [("w1", Worker())])
    assert (await peers_of(scheduler).perform(ORDER)).status == "completed"
    assert len(scheduler.asked) == 11


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
async def test_delegation_is_sent_again_under_a_higher_epoch_when_the_process_died(depth: int) -> None:
    """S-DUR-31: to where the scheduler says then, which hears of the loss; as often as the ensemble says."""
    workers = [Worker(dying()), Worker(dying()), Worker()]
    scheduler = Scheduler(*([(f"w{n}", worker)] for n, worker in enumerate(workers)))
    result = await peers_of(scheduler).perform(replace(ORDER, depth=depth, epoch=5000))
    step = {1: 100, 2: 10}.get(depth, 1)
    assert [order.epoch for worker in workers for order in worker.orders] == [5000, 5000 + step, 5000 + 2 * step]
    assert (result.status, result.epoch) == ("completed", 5000 + 2 * step)
    assert [lost for _, _, lost in scheduler.asked] == [None, "w0", "w1"]


async def test_dead_process_is_forgotten_for_all_who_lived_in_it() -> None:
    """S-DUR-31: another agent of the same process is looked for anew before it is asked."""
    dead, fresh = Worker(done, dying()), Worker()
    scheduler = Scheduler([("w1", dead)], [("w1", dead)], [("w2", fresh)])
    peers = peers_of(scheduler)
    await peers.perform(replace(ORDER, agent_key="other"))
    await peers.perform(ORDER)
    await peers.perform(replace(ORDER, agent_key="other"))
    assert (len(dead.orders), len(fresh.orders)) == (2, 2)
    assert scheduler.asked[2:] == [("run", "digger", "w1"), ("run", "other", "w1")]


@pytest.mark.parametrize("fields", [{"durability": "off"}, {"delegation": DelegationContext(retries=0)}])
async def test_asker_is_told_when_a_process_died_for_good(fields: dict[str, Any]) -> None:
    """S-DUR-31, S-DEL-5, S-CONV-32: the next delegation looks for another process."""
    dead, fresh = Worker(dying()), Worker()
    scheduler = Scheduler([("w1", dead)], [("w2", fresh)])
    peers = peers_of(scheduler, replace(RUN_CONTEXT, **fields))
    result = await peers.perform(ORDER)
    assert (result.status, result.instance) == ("failed", ORDER.instance)
    assert isinstance(result.error, AgentExecutionError)
    assert str(result.error).startswith("Agent 'Digger': its process died (")
    assert (result.error.agent_role, result.error.task_description) == ("Digger", "dig")
    assert (await peers.perform(ORDER)).status == "completed"
    assert [lost for _, _, lost in scheduler.asked] == [None, "w1"]


async def test_error_of_the_workers_task_comes_as_itself() -> None:
    """S-DEL-5, S-CONV-32: with its class, which decides whether it is turned into text."""

    async def fail(order: WireOrder) -> WireResult:
        return pack_result(
            result_of(order, status="failed", failure=TaskFailure(error=IllegalStateError("set up wrongly")))
        )

    result = await peers_of(Scheduler([("w1", Worker(fail))])).perform(ORDER)
    assert isinstance(result.error, IllegalStateError)
    assert (result.status, str(result.error)) == ("failed", "set up wrongly")


async def test_error_of_a_workers_process_is_the_failure_when_its_agent_cannot_be_loaded() -> None:
    """S-CONV-32, S-CONV-34: the cause behind Ray's wrapper."""
    told: Any = RayTaskError  # it carries no types
    error = told("perform", "a traceback", ValueError("no module of that name")).as_instanceof_cause()
    worker = Worker(failing(error), failing(RayError("odd\nthe end")))
    peers = peers_of(Scheduler([("w1", worker)]))
    first, second = [await peers.perform(ORDER) for _ in range(2)]
    assert (first.status, str(first.error)) == ("failed", "no module of that name")
    assert type(first.error) is ValueError
    assert str(second.error) == "Agent 'Digger': the end"


async def test_asker_is_told_when_a_result_cannot_be_loaded() -> None:
    """S-CONV-34."""

    async def odd(order: WireOrder) -> WireResult:
        return TaskResult(key=order.key, instance=order.instance, status="completed", at=1.0, output=b"no pickle")

    result = await peers_of(Scheduler([("w1", Worker(odd))])).perform(ORDER)
    assert str(result.error).startswith("The result of agent 'Digger' cannot be loaded by the delegating process: ")


@pytest.mark.parametrize("answer", [[], ActorDiedError()])
async def test_nobody_is_asked_when_the_run_has_ended(answer: Any) -> None:
    """A process that was forgotten gets no answers, and begins nothing; what came of the run, others tell."""
    scheduler = Scheduler(answer)
    peers = peers_of(scheduler)
    results = [await peers.perform(ORDER) for _ in range(2)]
    for result in results:
        assert str(result.error).startswith("Agent 'Digger' cannot be reached: ")


@pytest.mark.parametrize("fails", [False, True])
async def test_worker_is_stopped_when_its_asker_is(caplog: pytest.LogCaptureFixture, *, fails: bool) -> None:
    """S-SET-27: nobody waits for it; that it cannot be told is a line in the log."""
    begun = asyncio.Event()

    async def never(_order: WireOrder) -> WireResult:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def out_of_reach(*_: object) -> None:
        raise ActorUnavailableError("out of reach", None)

    worker = Worker(never)
    if fails:
        worker.stop = Method(out_of_reach)
    peers = peers_of(Scheduler([("w1", worker)]))
    asking = asyncio.ensure_future(peers.perform(ORDER))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.gather(*peers._background)
    if fails:
        assert f"Delegated work '{ORDER.instance}' could not be stopped" in caplog.text
    else:
        assert worker.stopped.get_nowait() == ("run", [ORDER.instance])


@pytest.mark.parametrize("what", ["cancelled", "stale"])
async def test_work_is_asked_for_again_when_an_earlier_dispatch_of_it_was_met_and_ended(what: str) -> None:
    """S-DUR-16: an orphan that was stopped, or refused by the record, says nothing of what its successor asks for."""

    async def orphan(order: WireOrder) -> WireResult:
        error = StaleEpochError("run", order.instance, 0, 1000) if what == "stale" else None
        status = "cancelled" if error is None else "failed"
        return pack_result(result_of(order, status=status, failure=TaskFailure(error=error), epoch=0))

    worker = Worker(orphan)
    result = await peers_of(Scheduler([("w1", worker)])).perform(replace(ORDER, epoch=1000))
    assert (result.status, len(worker.orders)) == ("completed", 2)


async def test_refusal_by_a_new_owner_is_given_on() -> None:
    """S-DUR-16: the run is somebody else's, and the asker must stop as well."""

    async def refused(order: WireOrder) -> WireResult:
        error = StaleEpochError("run", order.instance, 0, 10_000)
        return pack_result(result_of(order, status="failed", failure=TaskFailure(error=error), epoch=0))

    result = await peers_of(Scheduler([("w1", Worker(refused))])).perform(replace(ORDER, epoch=1000))
    assert isinstance(result.error, StaleEpochError)
