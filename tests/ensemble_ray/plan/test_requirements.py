"""What agents ask of nodes, held against what a cluster has."""

from __future__ import annotations

import pytest

from ensemble_ray.execute.local_executor import requirements_of
from ensemble_ray.plan.placement import (
    NOTHING,
    ClusterNode,
    ProcessDemand,
    ResourceRequirements,
    find_obstacle,
    least_used,
    room_for,
    show_nodes,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent

HEAD = ClusterNode(resources={"CPU": 2, "node:__internal_head__": 1}, labels={"ray.io/node-id": "x"})
DESK = ClusterNode(resources={"CPU": 2, "GPU": 1, "desk": 1}, labels={"zone": "a"})


def demand(count: int = 1, who: str = "Agent 'A'", **asked: object) -> ProcessDemand:
    """Processes that ask for that."""
    requirements = ResourceRequirements(**asked)  # type: ignore[arg-type]  # fields of requirements
    return ProcessDemand(who=who, requirements=requirements, count=count)


def test_fields_of_an_agent_are_what_its_processes_ask_for() -> None:
    """S-CLU-40, S-CLU-42: by Ray's names; nothing where it says nothing."""
    asking = agent(ScriptedModel(), num_cpus=1, num_gpus=0.5, resources={"z": 2, "desk": 1}, labels={"zone": "a"})
    asked = requirements_of(asking)
    assert asked.amounts == {"CPU": 1, "GPU": 0.5, "desk": 1, "z": 2}
    assert asked.labels == (("zone", "a"),)
    assert str(asked) == "num_cpus=1, num_gpus=0.5, resources={desk: 1, z: 2}, labels={zone: a}"
    assert requirements_of(agent(ScriptedModel())) == NOTHING
    assert not NOTHING


@pytest.mark.parametrize(
    ("selector", "is_there"),
    [("a", True), ("b", False), ("!a", False), ("!b", True), ("in(a, b)", True), ("in(b)", False), ("!in(b, c)", True)],
)
def test_labels_fit_as_ray_takes_them(selector: str, *, is_there: bool) -> None:
    """S-CLU-42: a value, not a value, one of several, none of several."""
    assert DESK.has(ResourceRequirements(labels=(("zone", selector),))) is is_there


def test_label_that_a_node_lacks_fits_what_must_not_be() -> None:
    """S-CLU-42: as Ray has it."""
    assert HEAD.has(ResourceRequirements(labels=(("zone", "!a"),)))
    assert not HEAD.has(ResourceRequirements(labels=(("zone", "a"),)))


def test_nothing_stands_in_the_way_when_the_nodes_have_what_is_asked() -> None:
    """S-CLU-43: whole and in parts; what asks for nothing counts for nothing."""
    demands = [demand(num_gpus=0.5, count=2), demand(resources=(("desk", 1),)), demand(count=1000)]
    assert find_obstacle(demands, [HEAD, DESK]) is None


def test_tenths_are_added_up_without_a_rest() -> None:
    """S-CLU-43: a sum of fractions is no obstacle by its rounding."""
    assert find_obstacle([demand(num_gpus=0.1, count=10)], [DESK]) is None


def test_message_says_what_no_node_has_and_what_there_is() -> None:
    """S-CLU-43: all of it must be on one node."""
    assert find_obstacle([demand(num_gpus=1, labels=(("zone", "b"),))], [HEAD, HEAD, DESK]) == (
        "Agent 'A' asks for num_gpus=1, labels={zone: b}, which no node has. "
        "The cluster has 2 x [CPU 2, GPU 0]; 1 x [CPU 2, GPU 1, desk 1; zone=a]"
    )
    assert find_obstacle([demand(num_cpus=3)], [HEAD, DESK]) is not None


def test_processes_that_are_there_together_are_counted_together() -> None:
    """S-CLU-43: each of them fits, both do not; the agents are named."""
    demands = [demand(who="Agent 'A'", num_gpus=1), demand(who="Agent 'B'", num_gpus=0.5)]
    found = find_obstacle(demands, [HEAD, DESK])
    assert found is not None
    assert found.startswith("Agent 'A', Agent 'B': the processes ask for 1.5 GPU together, and the nodes have 1. ")
    assert find_obstacle([demand(num_cpus=1, count=5)], [HEAD, DESK]) is not None


def test_nodes_that_may_come_count_as_many_times_as_they_may() -> None:
    """S-CLU-43: an autoscaler's; their labels are not known, so none is missing."""
    coming = ClusterNode(resources={"GPU": 1}, labels=None, count=2)
    assert find_obstacle([demand(num_gpus=1, count=2, labels=(("zone", "x"),))], [HEAD, coming]) is None
    assert find_obstacle([demand(num_gpus=1, count=3)], [HEAD, coming]) is not None


def test_message_stays_short_when_there_are_many_kinds_of_nodes() -> None:
    """S-CLU-43: five kinds, those that are there most first; an empty cluster says so."""
    nodes = [ClusterNode(resources={"CPU": 1}), *(ClusterNode(resources={"CPU": number}) for number in range(1, 9))]
    assert show_nodes(nodes).startswith("The cluster has 2 x [CPU 1, GPU 0]; ")
    assert show_nodes(nodes).endswith(" and 3 other kinds of nodes")
    assert show_nodes([]) == "The cluster has no node"


def test_next_process_is_where_the_fewest_are_for_each_processor() -> None:
    """S-CLU-50: a node that has just come is next, a large one has more, a head without processors none."""
    nodes = [
        ClusterNode(node_id=name, resources={"CPU": cpus}) for name, cpus in (("head", 0), ("a", 2), ("b", 2), ("c", 8))
    ]
    counts: dict[str, int] = {}
    for _ in range(12):
        chosen = least_used(nodes, counts)
        counts[chosen] = counts.get(chosen, 0) + 1
    assert counts == {"a": 2, "b": 2, "c": 8}
    assert least_used([*nodes, ClusterNode(node_id="new", resources={"CPU": 2})], counts) == "new"
    assert least_used(nodes[:1], {}) == "head"


def test_room_is_what_the_nodes_hold_when_nothing_else_is_there() -> None:
    """S-CLU-46: each process on one node; labels alone take no room."""
    nodes = [HEAD, DESK, ClusterNode(resources={"CPU": 8, "GPU": 1.5, "desk": 5}, labels={"zone": "a"})]
    asked = ResourceRequirements(num_gpus=0.5, resources=(("desk", 1),))
    assert room_for(asked, nodes) == 4
    assert room_for(ResourceRequirements(num_gpus=0.1), [DESK]) == 10
    assert room_for(ResourceRequirements(labels=(("zone", "a"),)), nodes) == float("inf")
    assert room_for(ResourceRequirements(labels=(("zone", "b"),)), nodes) == 0
