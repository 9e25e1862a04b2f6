"""Where a map-reduce keeps what its tasks gave, and who did it."""

from __future__ import annotations

from ensemble_ray import Agent
from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.coordinator.map_reduce.outputs import output


def agent(role: str) -> Agent:
    """An agent of that role."""
    return Agent(role=role, goal="g", llm=ScriptedModel())


def test_outputs_are_in_level_order() -> None:
    """S-MR-90, S-MR-133, S-SET-20: by level and number, whenever they came."""
    store = MapReduceOutputs()
    for level, number in ((1, 0), (0, 2), (0, 0), (0, 1)):
        store.keep(level, number, output(f"{level}{number}"), "map")
    assert [each.raw for each in store.outputs] == ["00", "01", "02", "10"]
    assert store.last == (1, 0)


def test_agents_are_told_once_each_also_those_of_the_record() -> None:
    """S-MR-92: an agent is known by its identity, one of another process by what it says."""
    store = MapReduceOutputs()
    first, second = agent("a"), agent("a")
    assert [each.role for each in store.meet([first, second, first])] == ["a", "a"]
    again = MapReduceOutputs()
    again.keep_recorded_agents(list(store.agents)[:1])
    assert [each.role for each in again.meet([first, agent("b")])] == ["b"]
    assert [each.role for each in again.agents] == ["a", "b"]
