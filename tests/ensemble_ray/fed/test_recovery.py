"""What the record gives to a fed run that goes on, or had ended."""

from __future__ import annotations

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.fed.bodies import FedBodies
from ensemble_ray.fed.recovery import RecoveredRun
from ensemble_ray.record.identity.map_reduce import item_digest
from tests.ensemble_ray.fed.outputs import output
from tests.ensemble_ray.record.facts_of_fed_runs import items_fact


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
    bodies = FedBodies()
    record = RecoveredRun(bodies)
    record.take([ended(1), failed(2)])
    assert len(bodies.outputs) == 0
    record.take([ended(0), items_fact("r", 1.0, indices=range(3), digests=map(item_digest, range(3)), are_all=True)])
    assert [each.raw for each in bodies.outputs] == ["m0", "m1"]
    assert list(record.failed) == [(0, 2)]
