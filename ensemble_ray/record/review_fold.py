"""One review gate's facts as a task's trace shows it. Package: record. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from ensemble_ray.execute.review.tracing import review_entry
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested

__all__ = ["GateFold"]


@dataclass(slots=True, kw_only=True)
class GateFold:
    """What is known of one gate."""

    asked: Fact[ReviewRequested] | None = None
    decided: Fact[ReviewDecided] | None = None

    def apply(self, fact: Fact) -> None:
        """Take the next fact of this gate."""
        if isinstance(fact.data, ReviewRequested):
            self.asked = cast("Fact[ReviewRequested]", fact)
        elif isinstance(fact.data, ReviewDecided):
            self.decided = cast("Fact[ReviewDecided]", fact)

    @property
    def entry(self) -> Mapping[str, object] | None:
        """The gate as it stands in a trace; None where nothing tells what was asked."""
        if self.asked is None:
            return None
        decided = self.decided
        return review_entry(
            self.asked.data,
            self.asked.at,
            None if decided is None else decided.data,
            self.asked.at if decided is None else decided.at,
        )
