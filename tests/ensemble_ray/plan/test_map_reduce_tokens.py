"""How many tokens an output, or the input, is taken to have."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import TaskMetrics, TaskOutput, ValidationError
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.plan.map_reduce_factories import estimate_tokens, input_estimate
from ensemble_ray.values.value import utc_now


def giving(value: object) -> Callable[..., Any]:
    """A callable that gives always that."""
    return lambda *_: value


def made(**fields: Any) -> MapReduceDefinition:
    """An adaptive definition with these estimators."""
    return MapReduceDefinition(
        items=[1],
        map_task=giving(None),
        reduce_task=giving(None),
        target_token_budget=10,
        **fields,
    )


def output(raw: str, counted: int = -1) -> TaskOutput:
    """An output whose provider counted so many tokens."""
    return TaskOutput(
        raw=raw,
        task_description="d",
        agent_role="Writer",
        completed_at=utc_now(),
        duration=timedelta(),
        metrics=TaskMetrics(output_tokens=counted),
    )


def text_of(item: int) -> str:
    """The text of an item."""
    return "x" * 4 * item


def unknown(_: str) -> None:
    """An estimator that cannot tell."""


@pytest.mark.parametrize(
    ("counted", "estimator", "tokens", "is_guessed"),
    [
        (7, len, 7, False),
        (0, len, 0, False),
        (-1, len, 11, False),
        (-1, giving(0), 0, False),
        (-1, unknown, 2, True),
        (-1, None, 2, True),
    ],
)
def test_tokens_are_counted_then_estimated_then_guessed(
    counted: int, estimator: Callable[[str], int | None] | None, tokens: int, *, is_guessed: bool
) -> None:
    """S-MR-60: the provider's count, 0 included; then `token_estimator`; then a quarter of the length, with a WARN."""
    found, warning = estimate_tokens(output("eleven char", counted), made(token_estimator=estimator))
    assert found == tokens
    assert (warning is not None and "'Writer' is taken to have 2 tokens" in warning) is is_guessed


@pytest.mark.parametrize("given", [-1, 1.5, "3", True])
def test_estimate_is_refused_when_it_is_no_count(given: object) -> None:
    """S-MR-60, S-SET-38."""
    with pytest.raises(ValidationError, match=r"^token_estimator must return a number >= 0, or None"):
        estimate_tokens(output("text"), made(token_estimator=giving(given)))


def test_input_is_the_sum_of_what_each_item_has() -> None:
    """S-MR-80, S-MR-84: floor per item; `token_estimator` plays no part."""
    assert input_estimate(made(token_estimator=giving(1000)), ["1234567", "123", "12345678"]) == 3
    assert input_estimate(made(input_estimator=text_of), [1, 2]) == 3


def test_input_is_refused_when_its_estimator_gives_no_text() -> None:
    """S-MR-80: callable(item) -> str."""
    with pytest.raises(ValidationError, match=r"^input_estimator must return a str, got: int$"):
        input_estimate(made(input_estimator=giving(1)), [1])
