"""A task of a detached run that is put down at an open gate. Package: execute. Control flow, within one process.

It is raised where somebody would be asked, passes user code as every early exit does, and becomes the task's result: `waiting`,
with the gates that are open. Nothing of the task is lost: what it did is recorded, and taken from there when it is picked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.errors import ExitEarlyError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.values.reviews import OpenReview

__all__ = ["ReviewOpenError"]


class ReviewOpenError(ExitEarlyError):
    """Puts a task down, since somebody has to decide at these gates first (S-REV-115)."""

    def __init__(self, reviews: Sequence[OpenReview]) -> None:
        super().__init__("A review is open")
        self.reviews = tuple(reviews)
