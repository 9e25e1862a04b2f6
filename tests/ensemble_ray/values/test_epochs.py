"""Epochs: an orphan is never taken for its successor, whatever was handed out again above it."""

from __future__ import annotations

from itertools import product

from ensemble_ray.values.ids import MOST_RESENDS, OWNER_STEP, REDISPATCH_STEP, resend_step


def test_epochs_are_never_the_same_when_any_level_hands_out_again() -> None:
    """S-DUR-31, S-DUR-16: owner, scheduler, and delegations as deep as they go by default, each as often as it may."""
    steps = (OWNER_STEP, REDISPATCH_STEP, *map(resend_step, (1, 2, 3)))
    counts = (range(2), range(3), *[range(MOST_RESENDS + 1)] * 3)
    histories = list(product(*counts))
    epochs = [sum(count * step for count, step in zip(history, steps, strict=True)) for history in histories]
    assert len(set(epochs)) == len(epochs)
    assert epochs == sorted(epochs)  # what was handed out again higher up is above all that was below before


def test_delegation_that_is_sent_again_is_above_the_one_before_at_any_depth() -> None:
    """S-DUR-31: also deeper than there are digits."""
    assert [resend_step(depth) for depth in range(1, 7)] == [100, 10, 1, 1, 1, 1]
