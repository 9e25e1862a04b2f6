"""Which agents live in which group of processes, and how many processes that takes."""

from __future__ import annotations

import pytest

from ensemble_ray import AgentEntry, Node, Plan
from ensemble_ray.plan.placement import (
    GROWS_AFTER_S,
    NOTHING,
    Placement,
    PlacementRequest,
    ResourceRequirements,
    find_beside_predicates,
    max_own_processes,
    most_replicas,
)
from ensemble_ray.plan.plan import EdgeEntry, ForkEntry, GraphUnit, LoopUnit, StateEntry, Unit

GPU = ResourceRequirements(num_gpus=1)


def asking(key: str, category: str = "x", **fields: object) -> PlacementRequest:
    """What an agent asks for."""
    return PlacementRequest(key=key, category=category, **fields)  # type: ignore[arg-type]  # fields of a request


def made(key: str, **fields: object) -> PlacementRequest:
    """What an agent asks for that is made while its run goes on: a category of its own."""
    return asking(key, key, **{"replicas": None, **fields})


def placed(*requests: PlacementRequest, max_own: int = 8) -> Placement:
    """Agents that were placed together."""
    placement = Placement(max_own=max_own, most_replicas=4)
    placement.place(requests)
    return placement


def groups_of(placement: Placement, keys: str) -> list[str]:
    """Where each of them lives."""
    return [placement.group_of(key) for key in keys]


def needed(placement: Placement) -> dict[str, int]:
    """How many processes each group begins with."""
    return {group: placement.missing(group, alive=0, in_flight=0, in_run=0) for group in placement.groups}


def test_agents_of_a_category_share_a_group_however_few_there_are() -> None:
    """S-SET-41: role and prompts travel with the task; another category has another group."""
    placement = placed(*map(asking, "abcd", "xxyx"))
    assert groups_of(placement, "abcd") == ["shared:0", "shared:0", "shared:1", "shared:0"]
    assert needed(placement) == {"shared:0": 1, "shared:1": 1}


def test_agent_that_wants_isolation_has_its_own_group_beyond_the_cap() -> None:
    """S-SET-41: wherever they stand in the list."""
    placement = placed(asking("a"), asking("b", isolation="process"), asking("c", isolation="process"), max_own=1)
    assert groups_of(placement, "abc") == ["shared:0", "own:b", "own:c"]


def test_agent_that_wants_to_share_does_as_one_that_says_nothing() -> None:
    """S-SET-41."""
    placement = placed(asking("a", isolation="shared"), asking("b"))
    assert groups_of(placement, "ab") == ["shared:0", "shared:0"]


def test_categories_beyond_the_cap_share_groups_in_turn() -> None:
    """No task waits for a process: there are as many shared groups as the cap says, and never more."""
    placement = placed(*(asking(key, key, isolation="shared") for key in "abcde"), max_own=2)
    assert groups_of(placement, "abcde") == ["shared:0", "shared:1", "shared:0", "shared:1", "shared:0"]
    assert set(placement.groups) == {"shared:0", "shared:1"}
    assert placement.members("shared:1") == ("b", "d")


def test_group_has_as_many_processes_as_any_of_its_agents_declares() -> None:
    """S-SET-41: replicas; one that died is replaced."""
    placement = placed(
        asking("a", isolation="shared", replicas=2),
        asking("b", isolation="shared", replicas=4),
        asking("c", isolation="shared"),
        asking("d", replicas=3, isolation="process"),
    )
    assert needed(placement) == {"shared:0": 4, "own:d": 3}
    assert placement.missing("own:d", alive=2, in_flight=1000, in_run=100) == 1


def test_nobody_lives_anywhere_when_there_are_no_agents() -> None:
    """A team of handlers only."""
    assert placed().groups == ()


def test_agents_made_on_the_way_share_groups_when_there_are_many() -> None:
    """S-MR-142: one each while there are few; the next goes where fewest live; an empty group serves the next."""
    placement = Placement(max_own=2, most_replicas=4)
    for key in "abc":
        placement.place([made(key)])
    placement.place([made("a", isolation="process", replicas=3)])  # it has a group
    assert placement.group_of("a") != placement.group_of("b")
    assert placement.group_of("c") == placement.group_of("a")
    home = placement.group_of("b")
    assert placement.release("b") is None
    assert placement.release("b") is None
    placement.place([made("d", isolation="shared", replicas=1)])
    assert placement.group_of("d") == home


def test_group_of_an_isolated_agent_goes_with_it() -> None:
    """S-MR-142: however many there are; another may be declared in its place."""
    placement = placed(made("a", isolation="process"), made("b", isolation="process"), max_own=1)
    home = placement.group_of("a")
    assert home != placement.group_of("b")
    assert placement.release("a") == home
    assert placement.groups == ("own:b",)
    assert placement.release("b") == "own:b"
    placement.place([asking("c", isolation="process")])
    assert placement.group_of("c") == "own:c"


@pytest.mark.parametrize(
    ("in_flight", "alive", "in_run", "missing"),
    [
        (64, 0, 0, 2),
        (65, 0, 0, 4),
        (65, 2, 2, 2),
        (65, 2, 7, 1),
        (65, 2, 8, 0),
        (65, 1, 8, 1),
        (65, 4, 4, 0),
        (65, 0, 20, 2),
    ],
)
def test_group_grows_when_its_agents_say_nothing_and_much_is_in_flight(
    in_flight: int, alive: int, in_run: int, missing: int
) -> None:
    """S-MR-141: above 64, within what the run may have; what is asked for it must have."""
    placement = placed(asking("a", replicas=2, isolation="shared"), asking("b", isolation="shared", replicas=None))
    found = placement.missing("shared:0", alive=alive, in_flight=in_flight, in_run=in_run, busy_s=GROWS_AFTER_S)
    assert found == missing


def test_group_does_not_grow_for_work_that_may_soon_be_done() -> None:
    """S-MR-141: the start of a process would cost more than it saves."""
    placement = placed(asking("a", replicas=None))
    assert placement.missing("shared:0", alive=1, in_flight=1000, in_run=1, busy_s=GROWS_AFTER_S - 0.1) == 0


def test_group_keeps_its_size_when_its_agents_say_how_many() -> None:
    """S-MR-141."""
    placement = placed(asking("a", replicas=2))
    assert placement.missing("shared:0", alive=0, in_flight=1000, in_run=0, busy_s=GROWS_AFTER_S) == 2


def test_most_replicas_are_the_clusters_cpus_and_at_most_eight() -> None:
    """S-MR-141: one where it has none."""
    assert [most_replicas(each) for each in ({"CPU": 2.0}, {"CPU": 64.0}, {"CPU": 0.0}, {})] == [2, 8, 1, 1]


@pytest.mark.parametrize(
    ("cluster", "most"),
    [
        ({"CPU": 1.0}, 2),
        ({"CPU": 1.0, "memory": 8e9}, 4),
        ({"CPU": 16.0, "memory": 64e9}, 32),
        ({"CPU": 16.0, "memory": 2e9}, 10),
        ({"CPU": 16.0, "memory": 1e8}, 1),
        ({"memory": 8e9}, 6),
        ({}, 6),
    ],
)
def test_own_processes_are_bounded_by_cpus_and_memory(cluster: dict[str, float], most: int) -> None:
    """S-SET-41: twice the CPUs, at least four where memory is known, one per 200 MB."""
    assert max_own_processes(cluster, cpus_here=3) == most


def test_agents_that_ask_something_of_nodes_share_with_their_like_alone() -> None:
    """S-CLU-45: same tools, same model, other requirements; also where no group is left for a category."""
    asking_gpu = asking("b", requirements=GPU)
    placement = placed(asking("a"), asking_gpu, asking("c"), asking("d", "y", requirements=GPU), max_own=0)
    a, b, c, d = groups_of(placement, "abcd")
    assert a == c != b == d
    assert (placement.requirements_of(a), placement.requirements_of(b)) == (NOTHING, GPU)
    placement.place([asking("e", "z", requirements=ResourceRequirements(num_gpus=2))])
    assert placement.group_of("e") not in {a, b}


def test_group_of_its_own_has_what_its_agent_asks_for() -> None:
    """S-CLU-45: and is gone with it."""
    placement = placed(asking("a", requirements=GPU, replicas=2, isolation="process"))
    group = placement.group_of("a")
    assert (placement.requirements_of(group), placement.begins_with(group)) == (GPU, 2)
    assert placement.release("a") == group


def test_processes_that_may_wait_for_a_node_start_one_after_the_other() -> None:
    """S-CLU-46: the next one when the last has started, so that no work lies with one that waits."""
    placement = placed(asking("a", requirements=GPU, replicas=3))
    group = placement.group_of("a")

    def missing(alive: int, starting: int) -> int:
        return placement.missing(group, alive=alive, starting=starting, in_flight=0, in_run=alive)

    assert [missing(0, 0), missing(1, 1), missing(1, 0), missing(2, 1), missing(3, 0)] == [1, 0, 1, 0, 0]


def test_groups_grow_when_nodes_have_come() -> None:
    """S-CLU-51: as many processes as the cluster allows by now."""
    placement = placed(made("a"))
    group = placement.group_of("a")
    assert placement.missing(group, alive=4, in_flight=100, in_run=4, busy_s=GROWS_AFTER_S) == 0
    placement.resize(max_own=8, most_replicas=6)
    assert placement.missing(group, alive=4, in_flight=100, in_run=4, busy_s=GROWS_AFTER_S) == 2


def test_group_grows_no_further_than_its_nodes_have_room() -> None:
    """S-CLU-46: one more would wait; what its agents ask for themselves, they get in any case."""
    placement = placed(made("a", requirements=GPU), made("b", requirements=GPU, replicas=2))
    a, b = placement.group_of("a"), placement.group_of("b")
    found = [placement.missing(a, alive=n, in_flight=100, in_run=n, busy_s=GROWS_AFTER_S, room=2) for n in range(3)]
    assert found == [1, 1, 0]
    assert placement.missing(b, alive=1, in_flight=100, in_run=1, busy_s=GROWS_AFTER_S, room=1) == 1


LOOP = LoopUnit(key="loop:l", name="l", body=("write", "check"), body_names=("write", "check"), has_until=True)
GRAPH = GraphUnit(
    key="graph:g",
    name="g",
    states=(StateEntry(name="ask", member="write"), StateEntry(name="go", member="check")),
    edges=(
        EdgeEntry(from_state="ask", to_state="go"),
        EdgeEntry(from_state="go", to_state="ask", has_condition=True),
        EdgeEntry(from_state="go", to_state="__END__"),
    ),
    start="ask",
)


def node(key: str, agent: str) -> Node:
    """A task and who does it."""
    return Node(key=key, index=1, description="Do", expected_output="text", agent_role=agent, agent_key=agent)


def plan(unit: Unit, *nodes: Node, workflow: str = "sequential", **entries: dict[str, object]) -> Plan:
    """A plan of a writer, a checker, and what else is there."""
    tasks = (node("write", "w"), node("check", "c"), *nodes)
    agents = tuple(AgentEntry(key=key, role=key, goal="", **entries.get(key, {})) for key in ("w", "c"))  # type: ignore[arg-type]  # fields of an entry
    return Plan(workflow=workflow, nodes=tasks, agents=agents, units=(unit,))


@pytest.mark.parametrize("unit", [LOOP, GRAPH])
def test_agent_lives_beside_predicates_when_they_are_asked_after_its_task(unit: Unit) -> None:
    """S-LOOP-189: the last of a loop's body, and a state that conditions leave."""
    assert find_beside_predicates(plan(unit), [asking("w"), asking("c")]) == {"c"}


@pytest.mark.parametrize(
    "found",
    [
        plan(LOOP, workflow="parallel"),
        plan(LOOP, node("more", "c")),
        plan(LOOP, c={"tool_names": ("search",)}),
        plan(LOOP, w={"allow_delegation": True}),
        plan(LoopUnit(key="loop:l", name="l", body=("write", "check"), body_names=("write", "check"))),
        plan(
            GraphUnit(
                key="graph:g",
                name="g",
                states=GRAPH.states,
                edges=(*GRAPH.edges[1:], ForkEntry(from_state="ask", to_states=("go", "ask"))),
                start="ask",
            )
        ),
    ],
    ids=["side by side", "a task outside", "tools", "delegation", "no predicate", "branches side by side"],
)
def test_agent_lives_apart_from_predicates_when_something_speaks_against_it(found: Plan) -> None:
    """S-LOOP-189: where it has other work or tools, where others may ask it, or where nothing is asked."""
    assert not find_beside_predicates(found, [asking("w"), asking("c")])


@pytest.mark.parametrize(
    "fields",
    [{"isolation": "process"}, {"isolation": "shared"}, {"replicas": 2}, {"requirements": GPU}],
    ids=["isolated", "shared", "replicas", "requirements"],
)
def test_agent_lives_apart_from_predicates_when_it_asks_for_something(fields: dict[str, object]) -> None:
    """S-LOOP-189: its process is what its agent says."""
    assert not find_beside_predicates(plan(LOOP), [asking("w"), asking("c", **fields)])  # type: ignore[arg-type]  # fields of a request
