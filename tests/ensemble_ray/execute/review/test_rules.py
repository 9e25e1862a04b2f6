"""Which gates of a task fire."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ensemble_ray import Review, ReviewPolicy, Task
from ensemble_ray.execute.orders import RunContext, TaskOrder
from ensemble_ray.execute.review.gates import review_after, review_before
from ensemble_ray.plan.plan import HierarchyRules

REQUIRED, SKIP = Review.required("Polite?"), Review.skip()


def context(policy: str | None, **fields: Any) -> RunContext:
    """A run of three tasks."""
    chosen = None if policy is None else ReviewPolicy(policy)
    return RunContext(
        **{"run_id": "run", "workflow": "sequential", "total_tasks": 3, "review_policy": chosen, **fields}
    )


def order(index: int = 3, *, instance: str = "draft#0", **fields: Any) -> TaskOrder:
    """An order for the task at that place."""
    task = Task(description="Draft", expected_output="Prose", handler=lambda _: "", **fields)
    return TaskOrder(
        run_id="run", key="draft", instance=instance, epoch=0, index=index, task=task, agent_key=None, agent_role=""
    )


@pytest.mark.parametrize(
    ("policy", "review", "index", "fires"),
    [
        ("never", None, 1, False),
        ("never", None, 3, False),
        ("never", REQUIRED, 1, True),
        ("after_every_task", None, 1, True),
        ("after_every_task", SKIP, 1, False),
        ("after_last_task", None, 1, False),
        ("after_last_task", None, 3, True),
        ("after_last_task", SKIP, 3, False),
        ("after_last_task", REQUIRED, 1, True),
    ],
)
def test_when_the_gate_behind_a_task_fires(policy: str, review: Review | None, index: int, *, fires: bool) -> None:
    """S-REV-12, S-REV-13: the table."""
    assert (review_after(order(index, review=review), context(policy)) is not None) is fires


def test_without_a_handler_no_gate_fires() -> None:
    """S-REV-13, S-REV-15: whatever the task says."""
    asked = order(review=REQUIRED, before_review=REQUIRED)
    assert (review_after(asked, context(None)), review_before(asked, context(None))) == (None, None)


@pytest.mark.parametrize(("review", "fires"), [(None, False), (SKIP, False), (REQUIRED, True)])
@pytest.mark.parametrize("policy", ["never", "after_every_task"])
def test_when_the_gate_before_a_task_fires(review: Review | None, policy: str, *, fires: bool) -> None:
    """S-REV-12, S-REV-14: the policy has nothing to do with it."""
    assert (review_before(order(before_review=review), context(policy)) is not None) is fires


def test_gates_have_the_values_of_their_review() -> None:
    """S-REV-16: a gate of the policy has the defaults."""
    assert review_after(order(review=REQUIRED), context("never")) == REQUIRED
    assert review_after(order(), context("after_every_task")) == Review()


def test_parallel_tasks_have_no_last_one() -> None:
    """S-REV-17, S-REV-18, S-PAR-32: their own gates fire, before and behind."""
    parallel = context("after_last_task", workflow="parallel")
    assert review_after(order(), parallel) is None
    assert review_after(order(review=REQUIRED), parallel) == REQUIRED
    assert review_before(order(before_review=REQUIRED), parallel) == REQUIRED


def test_tasks_of_units_are_never_the_last_one() -> None:
    """S-REV-80: an iteration of a loop has no last task of the run; every other gate fires there."""
    inside = order(instance="loop:refine#2/draft#0")
    assert review_after(inside, context("after_last_task")) is None
    assert review_after(inside, context("after_every_task")) == Review()


def test_work_of_managers_and_peers_has_no_gates() -> None:
    """S-REV-18: only the questions of their tools."""
    managed = context("after_every_task", hierarchy=HierarchyRules())
    assert review_after(order(review=REQUIRED), managed) is None
    assert review_before(order(before_review=REQUIRED), managed) is None
    delegated = replace(order(review=REQUIRED), depth=1)
    assert review_after(delegated, context("after_every_task")) is None
