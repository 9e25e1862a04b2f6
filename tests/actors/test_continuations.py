"""Continuations in the scheduler: what is dispatched, what is pending, and what happens when a process is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import ray.exceptions
from msgspec.structs import replace

from ensemble_ray.actors.link.wire import WireOrder, WireResult
from ensemble_ray.actors.scheduler import continuations
from ensemble_ray.actors.scheduler.continuations import Continuations
from ensemble_ray.execute.orders import TaskOrder, TaskResult, TaskStatus
from ensemble_ray.values.ids import REDISPATCH_STEP


def order(instance: str) -> WireOrder:
    return TaskOrder(
        run_id="run",
        key=instance,
        instance=instance,
        epoch=0,
        index=1,
        task=b"",
        agent_key="writer",
        agent_role="Writer",
    )


def result(instance: str, status: TaskStatus = "completed", *, at: float = 1.0, epoch: int = 0) -> WireResult:
    return TaskResult(key=instance, instance=instance, epoch=epoch, status=status, at=at)


class FakeProcess:
    """A lease and its handle. `begun` are the tasks that it names when a continuation is revoked."""

    def __init__(self) -> None:
        self.begun: Sequence[str] | BaseException = ()
        self.revoked: list[tuple[str, int]] = []
        self.handle = self.revoke = self

    async def remote(self, run_id: str, number: int) -> Sequence[str]:
        self.revoked.append((run_id, number))
        if isinstance(self.begun, BaseException):
            raise self.begun
        return self.begun


class Bench:
    """Continuations of a run with one process. Implements what they use of `ProcessGroups`."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.dispatched: list[WireOrder] = []
        self.adopted: list[str] = []
        self.deaths: list[str] = []
        self.reported: list[str] = []
        self.is_starting = False
        groups: Any = self
        self.continuations = Continuations("run", groups, self.report)

    def alive(self, _group: str) -> list[FakeProcess]:
        return [self.process]

    def starting(self, _group: str) -> int:
        return int(self.is_starting)

    def lease_of(self, instance: str) -> FakeProcess | None:
        return self.process if instance in [each.instance for each in self.dispatched] else None

    def adopt(self, adopted: WireOrder, _lease: object) -> None:
        self.adopted.append(adopted.instance)

    def count_death(self, instance: str) -> None:
        self.deaths.append(instance)

    def mark_lost(self, _lease: object, _error: BaseException) -> None:
        self.lose()

    async def report(self, reports: Sequence[WireResult]) -> None:
        self.reported += [each.instance for each in reports]

    def begin(self, *instances: str) -> None:
        """Dispatch the first task with the others as its continuation."""
        first, *rest = map(order, instances)
        assert self.continuations.may_begin("group")
        self.start(self.continuations.begin(first, rest))

    def start(self, *orders: WireOrder) -> None:
        self.continuations.dispatch(orders, self.dispatched.extend)

    def accept(self, *reports: WireResult) -> list[str]:
        return [each.instance for each in self.continuations.accept_reports(reports)]

    def lose(self) -> None:
        lease: Any = self.process
        self.continuations.on_death(lease)

    @property
    def sent(self) -> list[tuple[str, int]]:
        return [(each.instance, each.epoch) for each in self.dispatched]


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_tasks_that_a_process_starts_itself_are_not_dispatched(bench: Bench) -> None:
    """S-DUR-156: an early report waits until the source has started its task."""
    bench.begin("a", "b", "c")
    assert not bench.continuations.may_begin("group")
    assert bench.accept(result("a"), result("b")) == ["a"]
    bench.start(order("b"))
    await asyncio.sleep(0)
    assert (bench.sent, bench.adopted, bench.reported) == ([("a", 0)], ["b"], ["b"])
    bench.start(order("c"))
    assert (bench.sent, bench.adopted) == ([("a", 0)], ["b", "c"])
    assert bench.continuations.may_begin("group")


async def test_task_is_dispatched_alone_while_its_process_starts(bench: Bench) -> None:
    """S-DUR-156: nobody would answer a revocation."""
    bench.is_starting = True
    assert not bench.continuations.may_begin("group")


@pytest.mark.parametrize("status", ["failed", "exited", "waiting", "cancelled"])
async def test_rest_is_dropped_when_a_task_does_not_complete(bench: Bench, status: TaskStatus) -> None:
    """S-DUR-156: the source decides what follows."""
    bench.begin("a", "b", "c")
    assert bench.accept(result("a"), result("b", status)) == ["a"]
    bench.start(order("b"))
    assert bench.continuations.may_begin("group")
    bench.start(order("c"))
    assert (bench.sent, bench.adopted) == ([("a", 0), ("c", 0)], ["b"])


async def test_rest_is_revoked_before_a_decision_of_the_user(bench: Bench) -> None:
    """S-DUR-156, S-CTL-5: what the process has begun is started by the source first."""
    bench.begin("a", "b", "c")
    bench.process.begun = ("b",)
    suspended = bench.continuations.suspended(None)
    entering = asyncio.ensure_future(suspended.__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not entering.done()
    assert bench.process.revoked == [("run", 1)]
    assert bench.accept(result("a")) == ["a"]
    bench.start(order("b"))
    await entering
    assert not bench.continuations.may_begin("group")
    await suspended.__aexit__(None, None, None)
    assert bench.continuations.may_begin("group")
    bench.start(order("c"))
    assert (bench.sent, bench.adopted) == ([("a", 0), ("c", 0)], ["b"])


async def test_process_that_cannot_be_reached_is_lost(bench: Bench) -> None:
    """S-DUR-156: it may begin its tasks yet, so they get a newer epoch."""
    bench.process.begun = ray.exceptions.ActorUnavailableError("gone", None)
    bench.begin("a", "b")
    async with bench.continuations.suspended(None):
        pass
    assert not bench.continuations.may_begin("group")
    bench.start(order("b"))
    assert bench.sent == [("a", 0), ("b", REDISPATCH_STEP)]


async def test_cancellation_does_not_wait_for_a_silent_process(bench: Bench) -> None:
    """S-DUR-156, S-SET-27."""
    bench.begin("a", "b")
    bench.process.begun = ("b",)
    async with bench.continuations.suspended(0.0):
        assert not bench.continuations.may_begin("group")
    assert bench.continuations.may_begin("group")


@pytest.mark.parametrize(("ended_at", "deaths"), [(5.0, ["b"]), (11.0, [])])
async def test_death_counts_for_the_task_in_which_the_process_died(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ended_at: float, deaths: list[str]
) -> None:
    """S-DUR-31, S-DUR-156: the task before it had ended then, or it had not begun."""
    monkeypatch.setattr(continuations.time, "time", lambda: 10.0)
    bench.begin("a", "b", "c")
    bench.lose()
    assert not bench.continuations.may_begin("group")
    assert bench.accept(result("a", at=ended_at, epoch=REDISPATCH_STEP)) == ["a"]
    bench.start(order("b"))
    assert bench.accept(result("b", at=12.0, epoch=REDISPATCH_STEP)) == ["b"]
    bench.start(order("c"))
    assert bench.sent == [("a", 0), ("b", REDISPATCH_STEP), ("c", REDISPATCH_STEP)]
    assert bench.deaths == deaths


async def test_early_report_counts_though_its_process_died(bench: Bench) -> None:
    """S-DUR-156."""
    bench.begin("a", "b", "c")
    assert bench.accept(result("a"), result("b")) == ["a"]
    bench.lose()
    bench.start(order("b"))
    await asyncio.sleep(0)
    bench.start(order("c"))
    assert (bench.adopted, bench.reported, bench.sent) == (["b"], ["b"], [("a", 0), ("c", REDISPATCH_STEP)])


async def test_order_without_following_tasks_stays_as_it_is(bench: Bench) -> None:
    """S-DUR-156."""
    assert bench.continuations.begin(order("a"), ()) == order("a")
    assert bench.continuations.may_begin("group")


async def test_report_of_an_older_epoch_is_not_stored(bench: Bench) -> None:
    """S-PAR-12."""
    bench.begin("a", "b")
    assert bench.accept(replace(result("b"), epoch=7)) == []
    bench.start(order("b"))
    await asyncio.sleep(0)
    assert bench.reported == []
