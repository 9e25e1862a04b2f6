"""ClusterNodes over nodes that come and go as the test says."""

from __future__ import annotations

import asyncio

import pytest

from ensemble_ray.actors.scheduler import cluster_nodes
from ensemble_ray.actors.scheduler.cluster_nodes import ClusterNodes
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.plan.placement import ClusterNode

ONE, TWO = (ClusterNode(node_id=name, resources={"CPU": 2, "memory": 8e9}) for name in "ab")


async def test_runs_hear_of_nodes_that_stay_and_of_those_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CLU-51: at the second look that finds it; while no run goes on nobody looks."""
    looks = iter([[ONE], [ONE, TWO], [ONE, TWO], [ONE, TWO], [ONE], [ONE]])
    heard: list[SessionLimits] = []
    ended = asyncio.Event()
    left = 5

    def is_needed() -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            ended.set()
        return left >= 0

    monkeypatch.setattr(cluster_nodes, "_LOOK_S", 0.0)
    monkeypatch.setattr(cluster_nodes, "_living", lambda: next(looks))
    nodes = ClusterNodes(heard.append, is_needed)
    first = nodes.limits()
    assert (first.nodes, first.spread_over, first.most_replicas, first.max_own) == ((ONE,), (), 2, 4)
    await ended.wait()
    assert [limits.nodes for limits in heard] == [(ONE, TWO), (ONE,)]
    assert (heard[0].spread_over, heard[0].most_replicas, heard[0].max_own) == ((ONE, TWO), 4, 8)
    assert list(looks) == []


async def test_a_node_that_lost_a_process_is_taken_after_the_others() -> None:
    """S-CLU-52: Ray may not know yet that the node itself is lost; where each lost one, all count."""
    pool, nodes = ProcessPool(), [ClusterNode(node_id=name, resources={"CPU": 2.0}, labels={}) for name in ("a", "b")]
    assert pool._list_trusted(nodes) == nodes
    pool._doubt("a")
    assert pool._list_trusted(nodes) == nodes[1:]
    pool._doubt("b")
    assert pool._list_trusted(nodes) == nodes
