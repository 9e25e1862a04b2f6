"""Facts as dynamic runs record them; for the tests of what is folded of them and shown."""

from collections.abc import Iterable, Sequence

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import GroupRecorded, ItemsRecorded
from ensemble_ray.record.identity.definition import FINAL, item_digest
from ensemble_ray.values.ids import instance_of

from .facts_of_runs import RUN, fact

DIGESTS = [item_digest(n) for n in range(10)]


def begun(on_item_error: str = "fail", **rules: object) -> Fact:
    """A dynamic run that began."""
    plan = {"workflow": "map_reduce_adaptive", "on_item_error": on_item_error, **rules}
    return fact("plan", "run", 100.0, plan=plan, workflow="map_reduce_adaptive", items={"kind": "list"})


def items_fact(
    run_id: str, at: float, *, indices: Sequence[int], digests: Iterable[str], are_all: bool = False
) -> Fact:
    """Items that were pulled."""
    return Fact(run=run_id, name="run", at=at, data=ItemsRecorded.of(indices, list(digests), are_all=are_all))


def pulled(count: int, first: int = 0) -> Fact:
    """Items that follow each other."""
    return items_fact(RUN, 101.0, indices=range(first, first + count), digests=DIGESTS[first : first + count])


def done(instance: str, text: str = "ok") -> Fact:
    """Work that completed."""
    return fact("output", instance, 105.0, output={"raw": text})


def failed(instance: str) -> Fact:
    """Work that failed."""
    return fact("task_failed", instance, 105.0, error_type="AgentExecutionError", message="no")


def group(key: str, level: int, number: int, *inputs: str) -> Fact:
    """What a reduce gets."""
    data = GroupRecorded(level=level, number=number, inputs=inputs, is_final=key == FINAL)
    return Fact(run=RUN, name=instance_of(key), at=104.0, data=data)


def resumed() -> Fact:
    """Somebody went on with it."""
    return fact("resume", "run", 110.0, is_restart=False)
