"""A task with a gate, and a handler that decides as a test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ensemble_ray import (
    Review,
    ReviewDecision,
    ReviewPolicy,
    ReviewRequest,
)
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.facts.fact import Fact
from tests.ensemble_ray.execute.running import Bench

CONTEXT = RunContext(run_id="run", workflow="sequential", total_tasks=2, review_policy=ReviewPolicy.NEVER)
AFTER, BEFORE = "draft#0/0/after-review", "draft#0/0/before-review"


class Deciding:
    """A handler that gives these decisions in turn, and keeps what it was asked."""

    def __init__(self, *decisions: ReviewDecision | Exception) -> None:
        self._decisions = list(decisions)
        self.asked: list[ReviewRequest] = []

    def review(self, request: ReviewRequest) -> ReviewDecision:
        """Decide."""
        self.asked.append(request)
        decision = self._decisions.pop(0)
        if isinstance(decision, Exception):
            raise decision
        return decision


def bench_of(
    handler: object, *, known: Sequence[Fact] = (), reviews: Mapping[str, Review] | None = None, **fields: Any
) -> Bench:
    """A task whose handler writes `first`, with a gate behind it unless told otherwise."""
    bench = Bench(
        handlers={"draft": lambda _: "first"},
        context=CONTEXT,
        reviewer=LocalReviewer(handler),
        **({"known": known} if known else {}),
        **fields,
    )
    bench.tasks["draft"] = bench.tasks["draft"].replace(**(reviews or {"review": Review.required("Polite?")}))
    return bench


def facts_until(bench: Bench, kind: type) -> list[Fact]:
    """What was recorded up to the first fact of that kind, itself included."""
    facts = bench.journal.facts()
    end = next(index for index, fact in enumerate(facts) if isinstance(fact.data, kind))
    return list(facts[: end + 1])
