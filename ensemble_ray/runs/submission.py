"""Why a run is handed to whoever coordinates it. Pure.

| Reason | The record | What is made of it |
|---|---|---|
| `FIRST` | must not be there | the run begins |
| `RESUMED` | is there, without an owner | a person wants the run to go on: cancellations and a spent budget are forgotten |
| `TAKEN_OVER` | is there, and its owner may hang | as `RESUMED`, and the owner can write no more (S-DUR-17) |
| `RESUBMITTED` | may be there | the driver lost the answer to its submission: `RESTARTED` where a record began, else `FIRST` |
| `RESTARTED` | is there, and its owner's process died | the same run by another process: a cancellation stands (S-DUR-32) |
"""

from __future__ import annotations

from enum import Enum


class SubmissionReason(Enum):
    """Why a run is submitted; see the table of this module."""

    FIRST = "first"
    RESUMED = "resumed"
    TAKEN_OVER = "taken_over"
    RESUBMITTED = "resubmitted"
    RESTARTED = "restarted"

    @classmethod
    def of_resume(cls, *, takes_over: bool) -> SubmissionReason:
        """Return the submission of a run that a person wants to go on."""
        return cls.TAKEN_OVER if takes_over else cls.RESUMED

    @property
    def is_recorded(self) -> bool:
        """Whether the run goes on from its record."""
        return self in {SubmissionReason.RESUMED, SubmissionReason.TAKEN_OVER, SubmissionReason.RESTARTED}

    @property
    def takes_over(self) -> bool:
        """Whether the run is taken from an owner that still holds it."""
        return self is SubmissionReason.TAKEN_OVER

    @property
    def is_restart(self) -> bool:
        """Whether only its owner's process was replaced; nobody wished it to go on, so a cancellation stands."""
        return self is SubmissionReason.RESTARTED

    def without_answer(self) -> SubmissionReason:
        """Return what to submit when nobody knows whether this submission arrived."""
        return self if self.is_recorded else SubmissionReason.RESUBMITTED

    def resolve(self, *, is_recorded: bool) -> SubmissionReason:
        """Return what it comes to, now that the record was looked at."""
        if self is not SubmissionReason.RESUBMITTED:
            return self
        return SubmissionReason.RESTARTED if is_recorded else SubmissionReason.FIRST
