"""RunSession over processes that only take note of what they are asked: which of them gets which order, with which templates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from ensemble_ray.actors.link.packing import unpack
from ensemble_ray.actors.link.wire import AgentTemplate, Binding, Dispatch, Keep, SessionOpening, WireOrder, WireResult
from ensemble_ray.actors.scheduler.cluster_nodes import check_requirements
from ensemble_ray.actors.scheduler.processes import AgentProcess, Lease, ProcessPool, ProcessType
from ensemble_ray.actors.scheduler.session import RunSession, SessionLimits
from ensemble_ray.execute.orders import RunContext, TaskOrder, TaskResult
from ensemble_ray.plan import placement
from ensemble_ray.plan.placement import NOTHING, ClusterNode, ResourceRequirements
from ensemble_ray.values.ids import instance_of

NODES = (ClusterNode(node_id="a", resources={"CPU": 2, "GPU": 2}),)
GPU = ResourceRequirements(num_gpus=1)


class Handle:
    """A process: its calls in order; each task is at work until the test ends."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        #: set when it has its node
        self.placed = asyncio.Event()
        self.placed.set()

    def __getattr__(self, name: str) -> Call:
        return Call(self, name)

    def dispatches(self) -> list[Dispatch]:
        """What each call brought that brought orders."""
        return [unpack(*given, Dispatch) for name, given in self.calls if name in {"perform", "accept"}]

    def templates(self) -> list[Mapping[str, bytes]]:
        """The templates that came with each call that brought orders."""
        return [each.templates for each in self.dispatches()]


class Call:
    """A method of a handle."""

    def __init__(self, handle: Handle, name: str) -> None:
        self._handle = handle
        self._name = name

    async def remote(self, *arguments: Any, **_: Any) -> None:
        """Take note; work never ends."""
        await self._handle.placed.wait()
        self._handle.calls.append((self._name, arguments))
        if self._name == "perform":
            await asyncio.Event().wait()


class Pool:
    """Starts such processes."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def claim(
        self,
        run_id: str,
        process_type: ProcessType = "agent",
        *,
        program: str = "",
        requirements: ResourceRequirements = NOTHING,
        nodes: Sequence[ClusterNode] = (),
        share_from: int | None = None,
    ) -> Lease:
        """Start one more."""
        self.handles.append(Handle())
        if requirements:
            self.handles[-1].placed.clear()
        name = str(len(self.handles))
        process = AgentProcess(handle=self.handles[-1], name=name, type=process_type, requirements=requirements)
        return Lease(process=process, run_id=run_id)

    def put_back(self, lease: Lease, *, keep: Keep | None, is_clean: bool) -> None:
        """Take one back."""


class Bench:
    """A session, and what its coordinator gets."""

    def __init__(self, *declared: AgentTemplate) -> None:
        self.pool, self.reports, self.returned = Pool(), list[WireResult](), list[str]()
        self.warnings: list[str] = []
        context = RunContext(run_id="run", workflow="map", total_tasks=0)
        opening = SessionOpening(run_id="run", context=context, templates=declared)
        self.session = RunSession(
            opening,
            cast("ProcessPool", self.pool),
            self,
            hub=None,
            limits=SessionLimits(max_own=4, most_replicas=3, nodes=NODES),
            check=check_requirements,
            warn=self.warnings.append,
        )

    async def receive(self, reports: Sequence[WireResult]) -> None:
        """Keep them."""
        self.reports.extend(reports)

    def return_order(self, instance: str) -> None:
        """Keep its name."""
        self.returned.append(instance)


def template(key: str, **fields: Any) -> AgentTemplate:
    """An agent that is made while its run goes on."""
    return AgentTemplate(**{"key": key, "body": b"body", "category": key, **fields})


def orders(agent: str | None, *keys: str) -> list[WireOrder]:
    """Orders of those keys for that agent."""
    return [
        TaskOrder(
            run_id="r", key=key, instance=instance_of(key), epoch=0, index=1, task=b"", agent_key=agent, agent_role="W"
        )
        for key in keys
    ]


async def test_agents_that_are_known_come_with_the_binding_and_need_no_template() -> None:
    """S-SET-41: each with its processes, all started at once."""
    bench = Bench(template("w", replicas=2))
    bench.session.open()
    bench.session.submit(orders("w", "a"))
    await asyncio.sleep(0)
    assert len(bench.pool.handles) == 2
    first = bench.pool.handles[0]
    assert [unpack(given[0], Binding).templates for name, given in first.calls if name == "bind"] == [{"w": b"body"}]
    assert first.templates() == [{}]


async def test_template_is_sent_once_to_a_process_and_again_when_that_lost_it() -> None:
    """S-MR-142: the order is handed out again under its epoch, with what was lacking."""
    bench = Bench()
    bench.session.submit(orders("w", "a"), templates=[template("w")])
    bench.session.submit(orders("w", "b"))
    await asyncio.sleep(0)
    (handle,) = bench.pool.handles
    assert handle.templates() == [{"w": b"body"}, {}]
    unknown: WireResult = TaskResult(key="b", status="unknown_template", at=1.0, instance="b#0")
    await bench.session.report([unknown])
    await asyncio.sleep(0)
    assert handle.templates() == [{"w": b"body"}, {}, {"w": b"body"}]
    assert bench.reports == []


async def test_order_is_returned_when_its_template_is_not_known() -> None:
    """S-MR-142: nothing is started for it; one that is at work is nothing new."""
    bench = Bench()
    bench.session.submit(orders("w", "a"))
    assert (bench.returned, bench.pool.handles) == (["a#0"], [])
    bench.session.submit(orders("w", "a", "a"), templates=[template("w")])
    bench.session.submit(orders("w", "a"))
    await asyncio.sleep(0)
    assert (bench.returned, len(bench.pool.handles[0].templates())) == (["a#0"], 1)


async def test_group_grows_when_it_has_had_much_in_flight_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-141: no orders of a short burst start a process."""
    bench = Bench()
    bench.session.submit(orders("w", *(f"a{n}" for n in range(90))), templates=[template("w", replicas=None)])
    bench.session.submit(orders("w", "b"))
    assert len(bench.pool.handles) == 1
    monkeypatch.setattr(placement, "GROWS_AFTER_S", 0.0)
    bench.session.submit(orders("w", "c"))
    assert len(bench.pool.handles) == 3


async def test_group_grows_when_much_is_in_flight_and_each_report_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-141, S-PAR-12: more orders for one process than a few share a message."""
    monkeypatch.setattr(placement, "GROWS_AFTER_S", 0.0)
    bench = Bench()
    keys = [f"t{number}" for number in range(90)]
    bench.session.submit(orders("w", *keys), templates=[template("w", replicas=None)])
    await asyncio.sleep(0)
    shares = [len(each.orders) for handle in bench.pool.handles for each in handle.dispatches()]
    assert shares == [30, 30, 30]
    done: list[WireResult] = [
        TaskResult(key=key, status="completed", at=1.0, instance=instance_of(key)) for key in keys
    ]
    await bench.session.report(done)
    await bench.session.report(done)
    assert len(bench.reports) == 90
