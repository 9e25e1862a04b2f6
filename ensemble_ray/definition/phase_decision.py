"""What the review of a phase decides about an attempt. Package: definition.

A review task answers in words; `to_text` writes them for a handler that decides, `parse` reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.values.phase_review_text import read_decision_text

__all__ = ["PhaseReviewDecision"]

_log = bounded_logger(__name__)


class PhaseReviewDecision(ABC):
    """A decision about an attempt of a phase: one of the four classes that are its attributes.

    Attributes:
        Approve: Accept the attempt.
        Retry: Run the phase again, with this feedback.
        RetryPredecessor: Run a direct predecessor again, with this feedback, and then the phase.
        Reject: Fail the phase, for this reason.

    Examples:
        >>> PhaseReviewDecision.Retry("shorter").to_text()
        'RETRY: shorter'
        >>> PhaseReviewDecision.parse("reject: off topic")
        PhaseReviewDecision.Reject(reason='off topic')
    """

    __slots__ = ()

    Approve: ClassVar[type[Approve]]
    Retry: ClassVar[type[Retry]]
    RetryPredecessor: ClassVar[type[RetryPredecessor]]
    Reject: ClassVar[type[Reject]]

    @abstractmethod
    def to_text(self) -> str:
        """Return the text that `parse` reads as this decision."""

    @staticmethod
    def parse(text: str | None) -> PhaseReviewDecision:
        """Return the decision that a review's answer means; what is no decision approves, with a WARN."""
        read = read_decision_text(text)
        if read.is_unknown:
            _log.warning("Phase review gave no decision, which approves: %s", text or "")
        match read.decision:
            case "approve":
                return Approve()
            case "retry":
                return Retry(read.text)
            case "retry_predecessor":
                return RetryPredecessor(read.phase_name, read.text)
            case "reject":
                return Reject(read.text)

    def _refuse_none(self, **fields: str | None) -> None:
        for name, value in fields.items():
            if value is None:
                raise ValueError(f"{type(self).__qualname__}: {name} must not be None")


@dataclass(frozen=True, slots=True)
class Approve(PhaseReviewDecision):
    """Accept the attempt."""

    __qualname__ = "PhaseReviewDecision.Approve"

    def to_text(self) -> str:
        """Return the keyword."""
        return "APPROVE"


@dataclass(frozen=True, slots=True)
class Retry(PhaseReviewDecision):
    """Run the phase again, with this feedback."""

    __qualname__ = "PhaseReviewDecision.Retry"

    feedback: str

    def __post_init__(self) -> None:
        self._refuse_none(feedback=self.feedback)

    def to_text(self) -> str:
        """Return the keyword and the feedback."""
        return f"RETRY: {self.feedback}"


@dataclass(frozen=True, slots=True)
class RetryPredecessor(PhaseReviewDecision):
    """Run a direct predecessor again, with this feedback, and then the phase."""

    __qualname__ = "PhaseReviewDecision.RetryPredecessor"

    phase_name: str
    feedback: str

    def __post_init__(self) -> None:
        self._refuse_none(phase_name=self.phase_name, feedback=self.feedback)

    def to_text(self) -> str:
        """Return the keyword, the phase and the feedback."""
        return f"RETRY_PREDECESSOR {self.phase_name}: {self.feedback}"


@dataclass(frozen=True, slots=True)
class Reject(PhaseReviewDecision):
    """Fail the phase, for this reason."""

    __qualname__ = "PhaseReviewDecision.Reject"

    reason: str

    def __post_init__(self) -> None:
        self._refuse_none(reason=self.reason)

    def to_text(self) -> str:
        """Return the keyword and the reason."""
        return f"REJECT: {self.reason}"


PhaseReviewDecision.Approve = Approve
PhaseReviewDecision.Retry = Retry
PhaseReviewDecision.RetryPredecessor = RetryPredecessor
PhaseReviewDecision.Reject = Reject
