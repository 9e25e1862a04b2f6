"""Reviews as they stand in a task's trace, under `metadata.reviews`. Package: execute. Pure.

In: what is recorded of a gate. Out: JSON data. An edit keeps the text that it changed, so that a view can show the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested

__all__ = ["review_entry"]


def review_entry(
    asked: ReviewRequested, asked_at: float, decided: ReviewDecided | None, decided_at: float
) -> Mapping[str, object]:
    """Return a gate for a trace.

    Args:
        asked: What was asked.
        asked_at: When, Unix time, s.
        decided: What was decided; None: nothing yet.
        decided_at: When.
    """
    entry: dict[str, object] = {"review_id": asked.review_id, "timing": asked.timing.value}
    if asked.prompt is not None:
        entry["prompt"] = asked.prompt
    if asked.timing == "during_execution":
        entry["question"] = asked.task_description
    entry["asked_at"] = utc_of(asked_at).isoformat()
    if decided is None:
        return {**entry, "verdict": "waiting"}
    entry |= {"verdict": decided.verdict, "by": decided.by, "decided_at": utc_of(decided_at).isoformat()}
    if decided.timed_out:
        entry["timed_out"] = True
    if decided.comment:
        entry["comment"] = decided.comment
    if decided.text is not None:
        entry |= {"original": asked.task_output, "text": decided.text}
    return entry
