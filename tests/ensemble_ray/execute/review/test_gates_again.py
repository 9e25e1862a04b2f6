"""Gates of a task that another process began: nobody is asked twice, and timeouts are instants."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ensemble_ray import (
    ExitReason,
    Review,
    ReviewDecision,
)
from ensemble_ray.execute.review.gates import review_id_of
from ensemble_ray.facts.runs import ReviewDecided, ReviewRequested
from tests.ensemble_ray.execute.review.gating import AFTER, Deciding, bench_of, facts_until


@pytest.mark.parametrize(
    ("decision", "status", "raw"),
    [
        (ReviewDecision.continue_execution(), "completed", "first"),
        (ReviewDecision.edit("New"), "completed", "New"),
        (ReviewDecision.exit_early(), "exited", "first"),
    ],
)
async def test_nobody_is_asked_twice(decision: ReviewDecision, status: str, raw: str) -> None:
    """S-REV-83: a process that died behind the decision; whoever takes its place decides as was decided."""
    first = bench_of(Deciding(decision))
    await first.run()
    again = bench_of(Deciding(), known=facts_until(first, ReviewDecided))
    again.clock.advance(3600.0)
    result = await again.run(epoch=1)
    assert (result.status, result.output and result.output.raw) == (status, raw)
    assert [fact.data for fact in again.journal.facts() if isinstance(fact.data, ReviewDecided)] == [
        ReviewDecided(verdict=result.output.trace.metadata["reviews"][0]["verdict"], by="Deciding",  # type: ignore[union-attr]
                      text="New" if raw == "New" else None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("decision", "status"), [(ReviewDecision.exit_early(), "exited"), (ReviewDecision.edit("New"), "completed")]
)
async def test_a_recorded_end_keeps_what_the_gate_decided(decision: ReviewDecision, status: str) -> None:
    """S-REV-83, S-DUR-31: a process that died between the record of the output and its report."""
    first = bench_of(Deciding(decision))
    before = await first.run()
    again = bench_of(Deciding(), known=first.journal.facts())
    result = await again.run(epoch=1)
    assert (result.status, result.exit_reason) == (status, before.exit_reason)
    assert result.output is not None
    assert before.output is not None
    assert result.output.raw == before.output.raw


async def test_a_task_that_must_not_begin_does_not_begin_later() -> None:
    """S-REV-30, S-REV-83: whoever takes the place of the process that died tells of no start."""
    first = bench_of(Deciding(ReviewDecision.exit_early()), reviews={"before_review": Review()})
    await first.run()
    for known in (facts_until(first, ReviewDecided), first.journal.facts()):
        again = bench_of(Deciding(), known=known, reviews={"before_review": Review()})
        result = await again.run(epoch=1)
        assert (result.status, result.exit_reason) == ("exited", ExitReason.USER_EXIT_EARLY)
        assert again.sink.events == ()


async def test_an_open_gate_is_asked_again_for_the_time_that_is_left() -> None:
    """S-REV-84: its timeout is an instant; the id is the same."""
    review = Review(timeout=60, prompt="Polite?")
    first = bench_of(Deciding(RuntimeError("power")), reviews={"review": review})
    await first.run()
    handler = Deciding(ReviewDecision.edit("New"))
    again = bench_of(handler, known=facts_until(first, ReviewRequested), reviews={"review": review})
    again.clock.advance(45.0)
    result = await again.run(epoch=1)
    assert result.output is not None
    assert result.output.raw == "New"
    assert [(each.timeout, each.review_id) for each in handler.asked] == [
        (timedelta(seconds=15), review_id_of("run", AFTER))
    ]
    assert [fact.name for fact in again.journal.facts() if isinstance(fact.data, ReviewRequested)] == [AFTER]


@pytest.mark.parametrize(
    ("action", "status", "reason"),
    [
        ("continue", "completed", ExitReason.USER_EXIT_EARLY),
        ("exit_early", "exited", ExitReason.TIMEOUT),
        ("fail", "failed", ExitReason.USER_EXIT_EARLY),
    ],
)
async def test_a_timeout_that_passed_meanwhile_is_applied(action: str, status: str, reason: ExitReason) -> None:
    """S-REV-84: when the run comes back, without asking anybody."""
    review = Review(timeout=60, on_timeout=action)
    first = bench_of(Deciding(RuntimeError("power")), reviews={"review": review})
    await first.run()
    handler = Deciding()
    again = bench_of(handler, known=facts_until(first, ReviewRequested), reviews={"review": review})
    again.clock.advance(61.0)
    result = await again.run(epoch=1)
    assert (result.status, result.exit_reason, handler.asked) == (status, reason, [])
    assert status != "failed" or str(result.error) == "Review gate timed out after 60s (on_timeout=fail)"
    decided = [fact.data.by for fact in again.journal.facts() if isinstance(fact.data, ReviewDecided)]
    assert decided == ([] if status == "failed" else ["(timeout)"])


async def test_a_gate_without_a_limit_waits_for_ever() -> None:
    """S-REV-5, S-REV-84: also across restarts."""
    review = Review(timeout=0)
    first = bench_of(Deciding(RuntimeError("power")), reviews={"review": review})
    await first.run()
    handler = Deciding(ReviewDecision.continue_execution())
    again = bench_of(handler, known=facts_until(first, ReviewRequested), reviews={"review": review})
    again.clock.advance(10**6)
    result = await again.run(epoch=1)
    assert (result.status, [each.timeout_s for each in handler.asked]) == ("completed", [None])
