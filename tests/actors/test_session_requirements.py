"""RunSession with agents that ask something of nodes, over processes that only take note: who waits, and what happens meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.actors.scheduler import cluster_nodes as requirements
from ensemble_ray.actors.scheduler import process_groups
from ensemble_ray.actors.scheduler.cluster_nodes import check_requirements
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.plan import placement
from ensemble_ray.plan.placement import ClusterNode, ResourceRequirements
from tests.actors.test_session_orders import GPU, NODES, Bench, Handle, orders, template


@pytest.fixture(autouse=True)
def no_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster has what it has; there is none to ask."""
    monkeypatch.setattr(requirements, "_nodes_to_come", list[ClusterNode])


async def turns() -> None:
    """Let everything happen that waits for nothing."""
    for _ in range(20):
        await asyncio.sleep(0)


def work_of(handle: Handle) -> list[str]:
    """The orders that a process was given."""
    return [order.instance for each in handle.dispatches() for order in each.orders]


async def test_work_goes_to_processes_that_have_their_nodes() -> None:
    """S-CLU-46: the second process is started when the first is there; while it waits, the first does all."""
    bench = Bench(template("w", replicas=2, requirements=GPU))
    bench.session.open()
    bench.session.submit(orders("w", "a"))
    await turns()
    (first,) = bench.pool.handles
    assert first.calls == []
    first.placed.set()
    await turns()
    first, second = bench.pool.handles
    bench.session.submit(orders("w", "b", "c"))
    await turns()
    assert (work_of(first), second.calls) == (["a#0", "b#0", "c#0"], [])
    second.placed.set()
    await turns()
    bench.session.submit(orders("w", "d", "e"))
    await turns()
    assert (work_of(first), work_of(second)) == (["a#0", "b#0", "c#0"], ["d#0", "e#0"])
    assert len(bench.pool.handles) == 2


async def test_people_hear_of_a_process_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-44: who, for what, and what there is; no more when it has its node."""
    monkeypatch.setattr(process_groups, "_WAITED_S", 0.0)
    monkeypatch.setattr(process_groups, "_WAITS_S", 0.0)
    bench = Bench(template("w", role="Painter", requirements=GPU))
    bench.session.open()
    await turns()
    assert bench.warnings[0] == (
        "Agent 'Painter': its process waits for a node that has num_gpus=1 free, 0 s so far. "
        "The cluster has 1 x [CPU 2, GPU 2], in use or not"
    )
    bench.pool.handles[0].placed.set()
    await turns()
    told = len(bench.warnings)
    await turns()
    assert len(bench.warnings) == told


async def test_agent_that_comes_and_asks_for_too_much_has_its_tasks_failed() -> None:
    """S-CLU-43: nothing is started for it, and the others go on."""
    bench = Bench()
    greedy = template("g", role="Greedy", requirements=ResourceRequirements(num_gpus=4))
    bench.session.submit([*orders("g", "a"), *orders("w", "b")], templates=[greedy, template("w")])
    await turns()
    (report,) = bench.reports
    assert (report.instance, report.status) == ("a#0", "failed")
    assert report.failure is not None
    assert report.failure.message.startswith(
        "Agent 'Greedy' asks for num_gpus=4, which no node has. The cluster has 1 x"
    )
    (handle,) = bench.pool.handles
    assert work_of(handle) == ["b#0"]


async def test_agent_that_has_its_process_waits_when_its_node_is_lost() -> None:
    """S-CLU-52: what there was at its first task is not asked for again."""
    bench = Bench()
    bench.session.submit(orders("g", "a"), templates=[template("g", role="Painter", requirements=GPU)])
    bench.session.resize(SessionLimits(max_own=4, most_replicas=3))
    bench.session.submit(orders("g", "b"))
    await turns()
    assert (bench.reports, len(bench.pool.handles)) == ([], 1)
    bench.pool.handles[0].placed.set()
    await turns()
    assert work_of(bench.pool.handles[0]) == ["a#0", "b#0"]


async def test_group_grows_onto_nodes_that_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-51: where it has enough to do; one that has not stays as it is."""
    monkeypatch.setattr(placement, "GROWS_AFTER_S", 0.0)
    bench = Bench()
    keys = [f"t{number}" for number in range(90)]
    bench.session.submit(orders("w", *keys), templates=[template("w", replicas=None)])
    bench.session.submit(orders("v", "one"), templates=[template("v", replicas=None)])
    assert len(bench.pool.handles) == 4
    bench.session.resize(SessionLimits(max_own=8, most_replicas=5, nodes=(*NODES, *NODES)))
    assert len(bench.pool.handles) == 6


def test_run_is_refused_when_its_agents_ask_for_too_much_together() -> None:
    """S-CLU-43: with what an autoscaler may add it is not."""
    agents = [template(key, role=key, replicas=2, requirements=GPU) for key in "ab"]
    limits = SessionLimits(max_own=4, most_replicas=3, nodes=NODES)
    check_requirements(agents[:1], limits)
    with pytest.raises(
        ValidationError, match=r"^Agent 'a', Agent 'b': the processes ask for 4 GPU together, and .* have 2"
    ):
        check_requirements(agents, limits)


def test_what_an_autoscaler_may_add_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-43: as often as it may."""
    limits = SessionLimits(max_own=4, most_replicas=3, nodes=NODES)
    agents = [template("a", role="a", replicas=4, requirements=GPU)]
    coming = ClusterNode(resources={"GPU": 1}, labels=None, count=2)
    monkeypatch.setattr(requirements, "_nodes_to_come", lambda: [coming])
    check_requirements(agents, limits)
