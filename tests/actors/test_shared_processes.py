"""Runs of one program share processes: which ones, what becomes of the others when one is stuck or a process dies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.wire import AgentTemplate, RecordLocation, SessionOpening, WireResult
from ensemble_ray.actors.scheduler import process_groups, processes, session
from ensemble_ray.actors.scheduler.processes import Lease, ProcessPool
from ensemble_ray.actors.scheduler.session import RunSession, SessionLimits
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.plan.placement import ResourceRequirements
from ensemble_ray.record.stores import StoreAddress
from tests.actors.test_session_orders import Handle, orders, template

#: What a run of program "p" claims a process with that it shares as soon as there is one.
SHARING: Any = {"program": "p", "share_from": 1}


class Watched(Handle):
    """A process that lives until it is killed, and lets runs go as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.killed = asyncio.Event()
        #: what it says when a run lets it go
        self.is_clean = True
        #: whether its loop is blocked
        self.is_blocked = False

    def __getattr__(self, name: str) -> Any:
        return WatchedCall(self, name)


class WatchedCall:
    """A method of such a process."""

    def __init__(self, handle: Watched, name: str) -> None:
        self._handle = handle
        self._name = name

    async def remote(self, *arguments: Any, **_: Any) -> object:
        """Take note, and answer."""
        handle = self._handle
        if self._name == "watch":
            await handle.killed.wait()
            raise RuntimeError("killed")
        handle.calls.append((self._name, arguments))
        if self._name in {"perform", "accept"} or (handle.is_blocked and self._name in {"answer", "release"}):
            await asyncio.Event().wait()
        return handle.is_clean if self._name == "release" else None


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """All processes that are started, in order."""
    started: list[Watched] = []

    def start(*_: object, **__: object) -> Watched:
        started.append(Watched())
        return started[-1]

    monkeypatch.setattr(spawn, "disposable", start)
    monkeypatch.setattr(spawn, "existing", lambda _: None)
    monkeypatch.setattr(spawn, "existing_journals", list[object])
    monkeypatch.setattr("ray.kill", lambda handle: handle.killed.set())
    return started


class Run:
    """A recorded run, and what it hears."""

    def __init__(self, run_id: str, pool: ProcessPool, *agents: AgentTemplate, program: str = "p") -> None:
        self.reports: list[WireResult] = []
        context = RunContext(run_id=run_id, workflow="sequential", total_tasks=1)
        opening = SessionOpening(
            run_id=run_id,
            context=context,
            templates=agents or (template("w"),),
            location=RecordLocation(StoreAddress(home="/nowhere"), "node"),
            program=program,
        )
        limits = SessionLimits(max_own=1, most_replicas=1)
        self.session = RunSession(opening, pool, self, hub=None, limits=limits)
        self.session.open()
        self.session.submit(orders("w", "a"))

    async def receive(self, reports: object) -> None:
        """Keep them."""
        self.reports.extend(reports)  # type: ignore[arg-type]  # a sequence of results

    def return_order(self, instance: str) -> None:
        """Everything was sent."""
        raise KeyError(instance)

    @property
    def process(self) -> Lease:
        """That of its agent."""
        (lease,) = self.session._groups.alive(self.session.group_of(*orders("w", "a")))
        return lease


async def turns() -> None:
    """Let everything happen that waits for nothing."""
    for _ in range(30):
        await asyncio.sleep(0)


async def test_runs_of_a_program_share_processes_when_they_begin_at_the_same_time(handles: list[Watched]) -> None:
    """S-CLU-70, S-CLU-71: two hundred take as many as one run may have; those of another program, none of these."""
    pool = ProcessPool()
    leases = [pool.claim(f"r{number}", program="p", share_from=2) for number in range(100)]
    assert len(handles) == 2
    assert {len(lease.process.leases) for lease in leases} == {50}
    stranger = pool.claim("s", program="q", share_from=2)
    alone = pool.claim("t")
    assert len({lease.process.name for lease in (leases[0], stranger, alone)}) == 3
    assert pool.claim("u", program="", share_from=2).process is not alone.process
    host = pool.claim("r0", "callables", **SHARING)
    assert host.process.leases == [host]
    greedy = pool.claim("v", **SHARING, requirements=ResourceRequirements(num_cpus=1))
    assert greedy.process.leases == [greedy]
    assert pool.claim("w", **SHARING, requirements=ResourceRequirements(num_cpus=1)).process is not greedy.process


async def test_process_serves_the_others_when_one_run_lets_it_go(handles: list[Watched]) -> None:
    """S-CLU-72: the last one decides whether it is kept; one that something is stuck in gets no more runs, and ends with them."""
    pool = ProcessPool()
    first, second = pool.claim("1", **SHARING), pool.claim("2", **SHARING)
    pool.put_back(first, keep=None)
    assert second.is_alive
    pool.put_back(second, keep="warm")
    third, fourth = pool.claim("3", **SHARING), pool.claim("4", **SHARING)
    assert [third.process, fourth.process] == [first.process] * 2
    pool.put_back(third, keep="warm", is_clean=False)
    assert fourth.is_alive
    assert pool.claim("5", **SHARING).process is not fourth.process
    pool.put_back(fourth, keep="warm")
    assert (fourth.is_alive, handles[0].killed.is_set()) == (False, True)


async def test_process_is_kept_briefly_for_the_next_run_of_its_program_alone(
    handles: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-CLU-75: no other program gets it, but takes its place; one that reserves something, or serves no program, ends."""
    pool = ProcessPool()
    first = pool.claim("1", program="p")
    pool.put_back(first, keep="briefly")
    second, other = pool.claim("2", **SHARING), pool.claim("3", program="q")
    assert [second.process is first.process, other.process is first.process] == [True, False]
    pool.put_back(second, keep="briefly")
    assert first.process.is_alive
    assert pool.claim("4", program="q").process is not first.process
    assert (first.process.is_alive, handles[0].killed.is_set()) == (False, True)
    greedy = pool.claim("5", program="p", requirements=ResourceRequirements(num_cpus=1))
    greedy.is_ready = True
    nobodys = pool.claim("6")
    for lease in (greedy, nobodys):
        pool.put_back(lease, keep="briefly")
    assert [greedy.is_alive, nobodys.is_alive] == [False, False]
    monkeypatch.setitem(processes.KEPT_S, "briefly", 0.0)  # type: ignore[misc]  # a mapping that nothing else changes
    pool.put_back(other, keep="briefly")
    await turns()
    assert not other.is_alive


async def test_isolated_agents_and_unrecorded_runs_share_with_nobody(handles: list[Watched]) -> None:
    """S-CLU-71: `isolation="process"` asks for it; what an unrecorded run has done could not go on elsewhere."""
    pool = ProcessPool()
    for number in range(2):
        Run(f"r{number}", pool, template("w", isolation="process"))
    assert len(handles) == 2
    Run("s1", pool)
    Run("s2", pool)
    assert len(handles) == 3
    opening = SessionOpening(
        run_id="t",
        context=RunContext(run_id="t", workflow="sequential", total_tasks=1),
        templates=(template("w"),),
        program="p",
    )
    RunSession(opening, pool, Run("s3", pool), hub=None, limits=SessionLimits(max_own=2, most_replicas=1)).open()
    assert len(handles) == 4


async def test_all_runs_go_on_elsewhere_each_alone_when_their_process_dies(handles: list[Watched]) -> None:
    """S-CLU-73, S-DUR-31: what killed it is of one of them, and is not to kill the others again."""
    pool = ProcessPool()
    runs = [Run(f"r{number}", pool) for number in range(3)]
    await turns()
    assert len(handles) == 1
    pool.mark_lost(runs[0].process.process, RuntimeError("killed"))
    await turns()
    assert len(handles) == 4
    assert [len(run.process.process.leases) for run in runs] == [1, 1, 1]
    again = [order for handle in handles[1:] for each in handle.dispatches() for order in each.orders]
    assert {(order.instance, order.epoch > 0) for order in again} == {("a#0", True)}
    assert [run.reports for run in runs] == [[], [], []]


async def test_other_runs_go_on_when_one_is_cancelled_that_does_not_stop(
    handles: list[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-CLU-72: its task is reported as cancelled in its process's place; the process ends when the others have left."""
    monkeypatch.setattr(session, "GRACE_S", -1.0)
    pool = ProcessPool()
    stuck, other = Run("r1", pool), Run("r2", pool)
    await turns()
    stuck.session.stop(["a#0"])
    await asyncio.sleep(0.01)
    await turns()
    assert [(report.instance, report.status) for report in stuck.reports] == [("a#0", "cancelled")]
    assert other.process.is_alive
    assert other.reports == []
    Run("r3", pool)
    assert len(handles) == 2
    handles[0].is_clean = False
    await stuck.session.close(keep="warm")
    assert not handles[0].killed.is_set()
    handles[0].is_clean = True
    await other.session.close(keep="warm")
    assert handles[0].killed.is_set()


async def test_process_ends_when_a_run_blocks_its_loop(handles: list[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-72: then nobody's tasks go on there; those of other runs are handed out again."""
    monkeypatch.setattr(session, "GRACE_S", -1.0)
    monkeypatch.setattr(process_groups, "_ANSWER_S", 0.0)
    pool = ProcessPool()
    stuck, other = Run("r1", pool), Run("r2", pool)
    await turns()
    handles[0].is_blocked = True
    stuck.session.stop(["a#0"])
    await asyncio.wait_for(handles[0].killed.wait(), 10)
    await turns()
    assert [report.status for report in stuck.reports] == ["cancelled"]
    assert (other.process.handle, other.reports) == (handles[1], [])


async def test_runs_share_when_there_are_as_many_processes_as_there_may_be(handles: list[Watched]) -> None:
    """S-CLU-70: until then each gets a new one."""
    pool = ProcessPool()
    leases = [pool.claim(f"r{number}", program="p", share_from=2) for number in range(4)]
    assert len(handles) == 2
    assert [len(each.process.leases) for each in leases] == [2, 2, 2, 2]
