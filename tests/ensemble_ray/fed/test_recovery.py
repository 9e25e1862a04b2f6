"""What the record gives to a map-reduce that goes on, or had ended."""

from __future__ import annotations

from ensemble_ray.coordinator.map_reduce.outputs import MapReduceOutputs
from ensemble_ray.fed.recovery import RecoveredRun
from ensemble_ray.messages import Fact
from ensemble_ray.record.map_reduce_data import item_digest, items_fact
from tests.ensemble_ray.coordinator.map_reduce.outputs import output


def ended(index: int) -> Fact:
    """The end of a map."""
    told = output(f"m{index}").model_dump(mode="json")
    return Fact(run="r", kind="output", name=f"map-{index}#0", at=1.0, data={"output": told})


def failed(index: int) -> Fact:
    """The failure of a map."""
    data = {"error_type": "ValueError", "message": "no", "trace": None}
    return Fact(run="r", kind="task_failed", name=f"map-{index}#0", at=1.0, data=data)


def test_an_end_counts_that_was_recorded_before_its_item() -> None:
    """S-MR-161, S-SET-39: a task's process commits its end without the driver, which commits the item."""
    bodies = MapReduceOutputs()
    record = RecoveredRun(bodies)
    record.take([ended(1), failed(2)])
    assert len(bodies.outputs) == 0
    record.take([ended(0), items_fact("r", 1.0, indices=range(3), digests=map(item_digest, range(3)), are_all=True)])
    assert [each.raw for each in bodies.outputs] == ["m0", "m1"]
    assert list(record.failed) == [(0, 2)]
