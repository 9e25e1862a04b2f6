"""Ray's errors become ours: one table."""

from __future__ import annotations

from typing import Any, cast

import pytest
import ray.exceptions

from ensemble_ray import EnsembleError, IllegalStateError, RunExistsError, ValidationError
from ensemble_ray.actors.link.reach import ours


def task_error(cause: Exception) -> BaseException:
    """What awaiting a call raises when the actor's method raised that."""
    wrapped = cast("Any", ray.exceptions.RayTaskError)("submit", "Traceback ...\n" + str(cause), cause)
    return cast("BaseException", wrapped.as_instanceof_cause())


@pytest.mark.parametrize("cause", [RunExistsError("it runs"), ValidationError("bad"), IllegalStateError("not now")])
def test_our_error_arrives_as_it_was_raised(cause: Exception) -> None:
    """S-CONV-32: the documented class itself, not one of Ray's around it."""
    found = ours(task_error(cause), "run", "")
    assert found is cause
    assert type(found) is type(cause)


def test_death_of_the_scheduler_is_told_with_the_way_to_the_record() -> None:
    """S-CONV-32, S-SET-26, S-DUR-34, S-DUR-154: no Ray class, one line, the run's id, what can be done."""
    found = ours(
        ray.exceptions.RayActorError(error_msg="The actor died.\nfirst line of a long stack\nsecond"), "run-7", ""
    )
    assert type(found) is EnsembleError
    assert found.run_id == "run-7"
    assert str(found).endswith("ensemble_ray.resume('run-7', ensemble), in the program that began it")
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (task_error(OSError("disk full")), "Run r: the cluster failed: disk full"),
        (ray.exceptions.GetTimeoutError("too slow\nstack"), "Run r: the cluster failed: too slow"),
        (ray.exceptions.ObjectStoreFullError(), "Run r: the cluster failed: "),
    ],
)
def test_other_errors_of_the_cluster_become_one_of_ours(error: BaseException, text: str) -> None:
    """S-CONV-32: the text of what happened there is kept."""
    found = ours(error, "r", "")
    assert type(found) is EnsembleError
    assert found.run_id == "r"
    assert str(found).startswith(text)


def test_error_that_is_not_rays_is_left_alone() -> None:
    """A bug of ours is not dressed up as a failure of the cluster."""
    error = KeyError("x")
    assert ours(error, "r", "") is error
