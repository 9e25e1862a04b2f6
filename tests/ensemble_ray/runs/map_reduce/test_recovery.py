"""What the record gives to a map-reduce that goes on, or had ended."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from pydantic import BaseModel

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.identity.definition import item_digest
from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint
from tests.ensemble_ray.coordinator.map_reduce.outputs import output
from tests.ensemble_ray.record.facts_of_dynamic_runs import items_fact


class Fruit(BaseModel):
    """What a task of today's definition may declare."""

    name: str


class Trap(BaseModel):
    """A class that the program has loaded, and that no task declares."""

    name: str

    def __init__(self, **data: object) -> None:
        raise AssertionError("it was used")


def ended(index: int) -> Fact:
    """The end of a map."""
    told = output(f"m{index}").model_dump(mode="json")
    return read_fact(run="r", kind="output", name=f"map-{index}#0", at=1.0, data={"output": told})


def failed(index: int) -> Fact:
    """The failure of a map."""
    data = {"error_type": "ValueError", "message": "no", "trace": None}
    return read_fact(run="r", kind="task_failed", name=f"map-{index}#0", at=1.0, data=data)


def test_an_end_counts_that_was_recorded_before_its_item() -> None:
    """S-MR-161, S-SET-39: a task's process commits its end without the driver, which commits the item."""
    bodies = MapReduceOutputs()
    record = MapReduceResumePoint(bodies)
    record.apply([ended(1), failed(2)])
    assert len(bodies.outputs) == 0
    record.apply([ended(0), items_fact("r", 1.0, indices=range(3), digests=map(item_digest, range(3)), are_all=True)])
    assert [each.raw for each in bodies.outputs] == ["m0", "m1"]
    assert list(record.failed) == [(0, 2)]


def typed(kind: str) -> Fact:
    """The end of the first map, whose record names a class."""
    told = output("m0").model_dump(mode="json") | {"output_type": kind, "parsed_output": {"name": "fig"}}
    return read_fact(run="r", kind="output", name="map-0#0", at=1.0, data={"output": told})


ITEM = items_fact("r", 1.0, indices=range(1), digests=map(item_digest, range(1)), are_all=True)


def test_output_has_its_type_where_the_definition_declares_it() -> None:
    """S-MR-161: the record's name chooses among the types of today's definition."""
    bodies = MapReduceOutputs()
    MapReduceResumePoint(bodies, {"fruits.Fruit": Fruit}).apply([ITEM, typed("fruits.Fruit")])

    assert bodies.output(0, 0).parsed_output == Fruit(name="fig")
    assert bodies.output(0, 0).output_type is Fruit


@pytest.mark.parametrize("kind", [f"{__name__}.Trap", "trap_module.Trap", "subprocess.Popen", "antigravity.geohash"])
def test_class_that_a_record_names_is_neither_imported_nor_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """S-DUR-6: a record is data; whoever can write to it chooses no class, loaded or not. One line says so (S-LLM-56)."""
    loaded = ModuleType("trap_module")
    loaded.Trap = Trap  # type: ignore[attr-defined]  as a module of the program has it
    monkeypatch.setitem(sys.modules, "trap_module", loaded)
    before, bodies = set(sys.modules), MapReduceOutputs()
    MapReduceResumePoint(bodies, {f"{__name__}.Fruit": Fruit}).apply([ITEM, typed(kind)])

    found = bodies.output(0, 0)
    assert (found.parsed_output, found.output_type) == ({"name": "fig"}, None)
    (line,) = caplog.messages
    assert line.startswith(f"Recorded outputs of type {kind} stay JSON data")
    assert set(sys.modules) == before
