"""Reflections that wait for a phase's verdict."""

from __future__ import annotations

from msgspec.structs import replace

from ensemble_ray import Plan
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.plan.plan import PhaseUnit
from ensemble_ray.runs.outputs import InMemoryOutputs
from ensemble_ray.runs.planned_tasks import DeferredReflections
from ensemble_ray.schedule.instructions import ReflectOn, Start
from ensemble_ray.values.ids import node_key, reflected_instance, reflecting_instance

UNIT = PhaseUnit(key="phase:p", name="p", members=("a", "b", "loop:l"), review="check", reflecting=("a", "c"))
PLAN = Plan(workflow="sequential", nodes=(), units=(UNIT,))
SECOND = ReflectOn(unit="phase:p", execution=2)


def order(start: Start) -> TaskOrder[str, object, str]:
    """The order for a task."""
    key = node_key(start.instance)
    return TaskOrder(
        run_id="run", key=key, instance=start.instance, epoch=0, index=1, task="", agent_key="w", agent_role="W"
    )


def ended(instance: str) -> TaskResult[str, object]:  # type: ignore[type-var]  it has no failure
    """The end of an order."""
    return TaskResult(key=node_key(reflected_instance(instance)), instance=instance, status="completed", at=1.0)


def test_only_the_accepted_attempt_is_reflected_on() -> None:
    """S-REFL-19: those of its tasks that say so, each once; its loops' iterations one after the other."""
    later: DeferredReflections = DeferredReflections(PLAN)
    completed = [
        *("phase:p#0/a#0", "phase:p#1/a#0", "phase:p#1/b#0", "phase:p#1/loop:l#0/c#0", "phase:p#1/loop:l#1/c#0"),
        *("phase:p#1/check#0", "phase:p#11/a#0", "phase:p#1/a#0"),
    ]
    outputs: InMemoryOutputs[str] = InMemoryOutputs(lambda _, body: body.decode())
    for each in completed:
        outputs.put(each, f"text of {each}")
    orders = later.begin(SECOND, completed, order, outputs)  # type: ignore[arg-type]  orders of texts
    assert [each.instance for each in orders] == ["phase:p#1/reflect:a#0", "phase:p#1/loop:l#0/reflect:c#0"]
    assert orders[0].reflects_on == "text of phase:p#1/a#0"
    assert (later.is_later("a"), later.is_later("c"), later.is_later("b")) == (True, True, False)
    assert later.end(ended("phase:p#1/loop:l#0/reflect:c#0"))[1] is None  # type: ignore[arg-type]  without a failure
    following = "phase:p#1/loop:l#1/reflect:c#0"
    assert following in later
    assert later.end(ended("phase:p#1/reflect:a#0")) == (None, None)  # type: ignore[arg-type]  as above
    assert later.end(ended(following)) == (None, SECOND)  # type: ignore[arg-type]  as above
    assert later.open == ()


def test_the_next_one_of_a_task_follows_the_first() -> None:
    """S-REFL-19: each builds on the one before."""
    later: DeferredReflections = DeferredReflections(PLAN)
    outputs: InMemoryOutputs[str] = InMemoryOutputs(lambda _, body: body.decode())
    completed = [f"phase:p#1/loop:l#{number}/c#0" for number in range(3)]
    for each in completed:
        outputs.put(each, "x")
    (first,) = later.begin(SECOND, completed, order, outputs)  # type: ignore[arg-type]  orders of texts
    second, question = later.end(ended(first.instance))  # type: ignore[arg-type]  without a failure
    assert second is not None
    assert (second.instance, question) == ("phase:p#1/loop:l#1/reflect:c#0", None)


def test_an_attempt_without_outputs_needs_no_orders() -> None:
    """S-REFL-19: as where the run was ending."""
    later: DeferredReflections = DeferredReflections(PLAN)
    assert later.begin(SECOND, (), order, InMemoryOutputs(lambda _, body: body.decode())) == []  # type: ignore[arg-type]  as above


def test_instances_of_reflections_lead_back() -> None:
    """S-REFL-34: to whose output they are about."""
    for instance in ("a#0", "phase:p#1/loop:l#2/a#0"):
        assert reflected_instance(reflecting_instance(instance)) == instance
        assert reflected_instance(instance) == instance
    assert replace(SECOND, execution=1) != SECOND
