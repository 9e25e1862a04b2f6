"""Reviews, requests and decisions as values."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import (
    OnTimeoutAction,
    Review,
    ReviewDecision,
    ReviewPolicy,
    ReviewRequest,
    ReviewTimeoutError,
    ReviewTiming,
    ValidationError,
)
from ensemble_ray.values.reviews import ReviewAnswer, decision_at_timeout

DECISIONS = [
    ReviewDecision.continue_execution(),
    ReviewDecision.edit("new"),
    ReviewDecision.edit(""),
    ReviewDecision.exit_early(),
    ReviewDecision.exit_early_timeout(),
]


def request(**fields: Any) -> ReviewRequest:
    """A request about a draft."""
    return ReviewRequest(**{"task_description": "Draft", "timing": ReviewTiming.AFTER_EXECUTION, **fields})


def test_defaults_of_a_review() -> None:
    """S-REV-1, S-REV-2, S-REV-4: five minutes, then the run ends early."""
    review = Review.required()
    assert (review.is_required, review.is_skip, review.prompt, review.required_role) == (True, False, None, None)
    assert (review.timeout, review.on_timeout) == (Review.DEFAULT_TIMEOUT, Review.DEFAULT_ON_TIMEOUT)
    assert timedelta(minutes=5) == Review.DEFAULT_TIMEOUT
    assert Review.DEFAULT_ON_TIMEOUT is OnTimeoutAction.EXIT_EARLY


def test_ways_to_make_a_review() -> None:
    """S-REV-2, S-REV-5: by what it is, or by its fields; seconds are a length of time."""
    assert Review.required("Polite?") == Review(prompt="Polite?")
    assert (Review.skip().is_skip, Review.skip().is_required) == (True, False)
    review = Review(prompt="Ok?", timeout=0, on_timeout="fail", required_role="editor")
    assert (review.timeout, review.on_timeout, review.required_role) == (timedelta(), OnTimeoutAction.FAIL, "editor")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"timeout": timedelta(seconds=-1)}, "timeout must not be negative"),
        ({"timeout": -0.5}, "timeout must not be negative"),
        ({"required_role": " "}, "required_role must not be None or blank"),
        ({"required_role": ""}, "required_role must not be None or blank"),
    ],
)
def test_reviews_that_are_refused(fields: dict[str, Any], text: str) -> None:
    """S-REV-3."""
    with pytest.raises(ValidationError) as refused:
        Review(**fields)
    assert str(refused.value) == text


def test_words() -> None:
    """S-REV-6, S-REV-10, S-REV-12: as they are written."""
    assert [*OnTimeoutAction] == ["continue", "exit_early", "fail"]
    assert [*ReviewTiming] == ["before_execution", "during_execution", "after_execution"]
    assert [*ReviewPolicy] == ["never", "after_every_task", "after_last_task"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"task_description": None}, "task_description must not be None"),
        ({"timing": None}, "timing must not be None"),
    ],
)
def test_requests_that_are_refused(fields: dict[str, Any], text: str) -> None:
    """S-REV-20."""
    with pytest.raises(ValidationError) as refused:
        request(**fields)
    assert str(refused.value) == text


def test_a_request_without_an_output_has_an_empty_one() -> None:
    """S-REV-20."""
    assert (request().task_output, request(task_output=None).task_output) == ("", "")


@pytest.mark.parametrize(("timeout", "seconds"), [(None, None), (0, None), (-3, None), (2, 2.0)])
def test_a_request_without_a_limit_waits_for_ever(timeout: float | None, seconds: float | None) -> None:
    """S-REV-5, S-REV-47: none, zero and less than that are no limit."""
    assert request(timeout=timeout).timeout_s == seconds


def test_decisions_are_classes_of_one_type() -> None:
    """S-REV-21, S-SET-5: attributes of their common type, frozen, equal by what they say."""
    go_on, edit, exit_early = ReviewDecision.Continue(), ReviewDecision.Edit("x"), ReviewDecision.ExitEarly()
    assert all(isinstance(each, ReviewDecision) for each in (go_on, edit, exit_early))
    assert (go_on, edit, exit_early) == (
        ReviewDecision.continue_execution(),
        ReviewDecision.edit("x"),
        ReviewDecision.exit_early(),
    )
    assert ReviewDecision.exit_early_timeout() == ReviewDecision.ExitEarly(timed_out=True)
    with pytest.raises(AttributeError):
        edit.revised_output = "y"  # type: ignore[misc]


def test_an_edit_needs_a_text() -> None:
    """S-REV-21: None is refused, an empty text is none."""
    with pytest.raises(ValidationError) as refused:
        ReviewDecision.edit(None)  # type: ignore[arg-type]
    assert str(refused.value) == "revised_output must not be None"
    assert ReviewDecision.edit("") == ReviewDecision.Edit("")


@pytest.mark.parametrize("decision", DECISIONS, ids=repr)
def test_decisions_travel(decision: ReviewDecision) -> None:
    """S-REV-49, S-REV-82: as pickles, and as data of records and driver services."""
    assert pickle.loads(pickle.dumps(decision)) == decision  # noqa: S301  bytes of this test
    answer = ReviewAnswer(decision=decision, by="Ann")
    assert ReviewAnswer.from_data(answer.to_data()) == answer


def test_what_follows_when_nobody_answered() -> None:
    """S-REV-47: by the request's action; the text of the failure is exact."""
    assert decision_at_timeout(request(on_timeout="continue"), 5.0) == ReviewDecision.Continue()
    assert decision_at_timeout(request(on_timeout="exit_early"), 5.0) == ReviewDecision.ExitEarly(timed_out=True)
    with pytest.raises(ReviewTimeoutError) as failed:
        decision_at_timeout(request(on_timeout="fail"), 90.0)
    assert str(failed.value) == "Review gate timed out after 90s (on_timeout=fail)"
