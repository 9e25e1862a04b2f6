"""Which agents live in which process."""

from __future__ import annotations

from ensemble_ray.plan.housing import Lodger, assign_houses


def test_every_agent_has_a_house_of_its_own_when_there_are_few() -> None:
    """S-SET-41: nothing declared."""
    lodgers = [Lodger(key=key, kind="same") for key in ("a", "b")]
    plan = assign_houses(lodgers, max_own=8)
    assert plan.house_of == {"a": "own:a", "b": "own:b"}
    assert plan.replicas == {"own:a": 1, "own:b": 1}


def test_agents_of_a_kind_share_a_house_when_there_are_many() -> None:
    """S-SET-41: those beyond the number of own houses; role and prompts travel with the task."""
    lodgers = [Lodger(key=key, kind=kind) for key, kind in zip("abcd", "xyyz", strict=True)]
    plan = assign_houses(lodgers, max_own=1)
    assert plan.house_of["a"] == "own:a"
    assert plan.house_of["b"] == plan.house_of["c"]


def test_agent_that_wants_isolation_has_its_own_house_beyond_the_cap() -> None:
    """S-SET-41: those that ask for it come first, wherever they stand in the list."""
    lodgers = [
        Lodger(key="a", kind="x"),
        Lodger(key="b", kind="x", isolation="process"),
        Lodger(key="c", kind="x", isolation="process"),
    ]
    plan = assign_houses(lodgers, max_own=1)
    assert plan.house_of == {"a": "kind:0", "b": "own:b", "c": "own:c"}


def test_agents_that_share_live_by_kind_while_there_is_room() -> None:
    """S-SET-41: declared shared, or made for a task that named none."""
    lodgers = [
        Lodger(key="a", kind="x", isolation="shared"),
        Lodger(key="b", kind="x", is_synthesized=True),
        Lodger(key="c", kind="y", is_synthesized=True),
        Lodger(key="d", kind="x"),
    ]
    plan = assign_houses(lodgers, max_own=8)
    assert plan.house_of == {"a": "kind:0", "b": "kind:0", "c": "kind:1", "d": "own:d"}


def test_synthesized_agent_that_wants_isolation_gets_it() -> None:
    """S-SET-41: what is declared counts more than where the agent came from."""
    lodger = Lodger(key="a", kind="x", isolation="process", is_synthesized=True)
    assert assign_houses([lodger], max_own=1).house_of == {"a": "own:a"}


def test_kinds_beyond_the_cap_share_houses_in_turn() -> None:
    """No task waits for a house: there are as many shared ones as own ones, and never more."""
    lodgers = [Lodger(key=str(number), kind=str(number), isolation="shared") for number in range(5)]
    plan = assign_houses(lodgers, max_own=2)
    assert [plan.house_of[str(number)] for number in range(5)] == ["kind:0", "kind:1", "kind:0", "kind:1", "kind:0"]
    assert set(plan.replicas) == {"kind:0", "kind:1"}


def test_house_has_as_many_processes_as_any_of_its_agents_declares() -> None:
    """S-SET-41: replicas."""
    lodgers = [
        Lodger(key="a", kind="x", isolation="shared", replicas=2),
        Lodger(key="b", kind="x", isolation="shared", replicas=4),
        Lodger(key="c", kind="x", isolation="shared"),
        Lodger(key="d", kind="x", replicas=3),
    ]
    assert assign_houses(lodgers, max_own=8).replicas == {"kind:0": 4, "own:d": 3}


def test_nobody_lives_anywhere_when_there_are_no_agents() -> None:
    """A team of handlers only."""
    plan = assign_houses([], max_own=8)
    assert (plan.house_of, plan.replicas) == ({}, {})
