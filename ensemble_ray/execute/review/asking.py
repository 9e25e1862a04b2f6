"""One review gate: on record before anybody is asked, its decision on record before anything follows. Package: execute.

In: a gate's name and what it asks. Out: what was decided, by whoever decided first. A run that goes on asks nobody twice; a
gate that nobody had answered is asked again, for the time that is left of its timeout, and what follows from a timeout that
passed meanwhile follows at once (S-REV-82 to S-REV-84). In a detached run nobody is asked: the task is put down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Never, cast

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.review.tracing import review_entry
from ensemble_ray.execute.review.waiting import ReviewOpenError
from ensemble_ray.facts.fact import find_fact
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import uuid_of
from ensemble_ray.values.reviews import ReviewAnswer, ReviewDecision, ReviewRequest, decision_at_timeout

if TYPE_CHECKING:
    from ensemble_ray.execute.scope import TaskScope
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.ports import Reviewer

__all__ = ["REVIEW_SERVICE", "TIMEOUT", "answer_review", "decide_at_gate", "review_id_of"]

#: Name of the driver's service that asks.
REVIEW_SERVICE = "review"
#: Who decided where the time was up.
TIMEOUT = "(timeout)"


def review_id_of(run_id: str, name: str) -> str:
    """Return the id of a gate: the same when it is asked again, and unique among the runs of a store."""
    return uuid_of(f"{run_id}/{name}/review")


async def decide_at_gate(scope: TaskScope, name: str, request: ReviewRequest) -> ReviewDecision:
    """Return what is decided at a gate.

    Args:
        scope: The task that it belongs to.
        name: Of the gate, like that of an effect.
        request: What is asked; its ids are filled in.

    Raises:
        ReviewTimeoutError: nobody answered in time, and that fails the task.
        ReviewOpenError: nobody has decided, and the run is detached (S-REV-115).
        BaseException: what the handler raised.
    """
    clock = scope.ports.clock
    request = request.replace(review_id=review_id_of(scope.order.run_id, name), run_id=scope.order.run_id)
    asked, decided = scope.find_recorded(name, ReviewRequested), scope.find_recorded(name, ReviewDecided)
    is_detached = scope.context.is_detached
    question = ReviewRequested.of(request, detached=is_detached) if asked is None else asked.data
    asked_at = clock.now() if asked is None else asked.at
    is_expired = asked is not None and _is_expired(asked, clock.now())
    if decided is None and asked is not None and asked.data.detached:
        if not is_detached:  # from here on nobody else decides
            await scope.note(name, replace(asked.data, detached=False), until=Persistence.COMMITTED, at=asked_at)
        decided = await _decided_meanwhile(scope, name)
        if decided is not None and is_detached:  # what is behind the gate begins now, and not when it is picked up
            await scope.note(name, replace(asked.data, detached=False), until=Persistence.SYNCED, at=asked_at)
    if decided is not None:
        decision, decided_at = decided.data, decided.at
    else:
        if is_expired:
            answer = ReviewAnswer(decision=decision_at_timeout(request, question.timeout_s or 0.0), by=TIMEOUT)
        elif is_detached:
            await _put_down(scope, name, question, asked_at, is_new=asked is None)
        else:
            answer = await _get_answer(scope, name, request, question, asked)
        decision, decided_at = ReviewDecided.of(answer), clock.now()
        # On the disk: a person's decision is asked for once.
        await scope.note(name, decision, until=Persistence.SYNCED)
    scope.effects.reviews.append(review_entry(question, asked_at, decision, decided_at))
    return decision.answer.decision


async def _get_answer(
    scope: TaskScope,
    name: str,
    request: ReviewRequest,
    question: ReviewRequested,
    asked: Fact[ReviewRequested] | None,
) -> ReviewAnswer:
    if asked is None:
        # What the task did so far is committed with it: nobody is shown what a run that goes on would not have.
        await scope.note(name, question, until=Persistence.COMMITTED)
    elif asked.data.timeout_s is not None:
        left_s = asked.at + asked.data.timeout_s - scope.ports.clock.now()
        request = request.replace(timeout=timedelta(seconds=left_s))
    return await _ask(scope, request)


def _is_expired(asked: Fact[ReviewRequested], now: float) -> bool:
    """Whether the timeout of a gate has passed since it was opened."""
    return asked.data.timeout_s is not None and asked.at + asked.data.timeout_s <= now


async def _decided_meanwhile(scope: TaskScope, name: str) -> Fact[ReviewDecided] | None:
    """Return what somebody decided since the task's facts were read; None: nothing.

    Asked when nobody else can decide any more, or the gate is left open: so one decision counts for everybody (S-REV-128).
    """
    known = await scope.ports.journal.lookup_recorded(scope.order.instance)
    return find_fact(known, name, ReviewDecided)


async def _put_down(scope: TaskScope, name: str, question: ReviewRequested, asked_at: float, *, is_new: bool) -> Never:
    """Leave the gate open on record, and the task with it.

    Raises:
        ReviewOpenError: always.
    """
    if is_new or not question.detached:  # one that was asked by a handler keeps its time
        await scope.note(name, replace(question, detached=True), until=Persistence.COMMITTED, at=asked_at)
    scope.effects.reviews.append(review_entry(question, asked_at, None, asked_at))
    raise ReviewOpenError([question.open_since(scope.order.run_id, asked_at)])


async def _ask(scope: TaskScope, request: ReviewRequest) -> ReviewAnswer:
    """Ask where the run was started or resumed."""
    driver = scope.ports.services.driver
    if driver is not None:
        payload = request.model_dump(mode="json")
        return ReviewAnswer.from_data(cast("Mapping[str, object]", await driver.ask(REVIEW_SERVICE, payload)))
    reviewer = scope.ports.reviewer
    if reviewer is None:
        raise IllegalStateError(f"Run {request.run_id} has nobody to ask at its review gates")
    return await reviewer.ask(request)


async def answer_review(reviewer: Reviewer, payload: Mapping[str, object]) -> Mapping[str, object]:
    """Answer a task of another process, in the one that has the reviewer."""
    request = ReviewRequest(**cast("Mapping[str, Any]", payload))
    return (await reviewer.ask(request)).to_data()
