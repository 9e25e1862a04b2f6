"""What of review gates belongs to a definition."""

from collections.abc import Callable
from typing import cast

from ensemble_ray import Ensemble, Review, ReviewHandler, Task
from ensemble_ray.definition import EnsembleDefinition
from ensemble_ray.plan.planner import plan_run, resolve_tasks
from ensemble_ray.record.identity.definition import definition_data, differences
from tests.builders import task


def _write(_context: object) -> str:
    return "text"


def _task(**gates: Review) -> Task:
    return task("Write", None, name="write", handler=_write, **gates)


def _data(written: Task, **more: object) -> dict[str, object]:
    ensemble = cast("Callable[..., EnsembleDefinition]", Ensemble)(tasks=[written], **more)
    return definition_data(plan_run(ensemble, resolve_tasks(ensemble)), ensemble)


def test_gates_are_part_of_the_definition() -> None:
    """S-REV-111: their settings, as guardrails are."""
    gated = _data(_task(review=Review.required(), before_review=Review.skip()))
    asking = _data(_task(review=Review.required("Polite?")), review_policy="after_every_task")
    assert {line.partition(":")[0] for line in differences(gated, asking)} == {
        "tasks.write.before_review",
        "tasks.write.review.prompt",
        "review_policy",
    }
    assert differences(gated, _data(_task(review=Review(), before_review=Review(is_skip=True)))) == []


def test_nothing_is_added_where_nobody_is_asked_for_anything() -> None:
    """S-REV-111: runs without gates keep their digest; who decides is no part of it."""
    plain = _data(_task())
    assert _data(_task(), review_handler=ReviewHandler.auto_approve(), review_policy="never") == plain
    assert not {"review", "before_review"} & set(cast("dict[str, dict[str, object]]", plain["tasks"])["write"])
