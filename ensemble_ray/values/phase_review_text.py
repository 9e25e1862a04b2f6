"""The answer of a phase's review, read: the one place that knows its keywords. Package: values.

Pure, and without a log: the machine of phases reads answers with it, too. Must never happen: an answer that cannot be
read; what is no decision approves (S-PHASE-74).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["DecisionText", "read_decision_text"]

_APPROVE = "APPROVE"
_RETRY = "RETRY"
_RETRY_PREDECESSOR = "RETRY_PREDECESSOR "
_REJECT = "REJECT"


class DecisionText(NamedTuple):
    """The parts of a decision's text."""

    decision: Literal["approve", "retry", "retry_predecessor", "reject"]
    #: feedback or reason; "" of an approval
    text: str = ""
    #: of a retry of a predecessor
    phase_name: str = ""
    #: whether it approves only because it says nothing that is known
    is_unknown: bool = False


def read_decision_text(answer: str | None) -> DecisionText:
    """Return what a review's answer decides (S-PHASE-70 to S-PHASE-74).

    Examples:
        >>> read_decision_text("Retry: issue: too brief").text
        'issue: too brief'
    """
    trimmed = (answer or "").strip()
    if _begins_with(trimmed, _RETRY_PREDECESSOR):
        name, _, feedback = trimmed[len(_RETRY_PREDECESSOR) :].partition(":")
        return DecisionText("retry_predecessor", feedback.strip(), name.strip())
    if _begins_with(trimmed, _RETRY):
        return DecisionText("retry", trimmed.partition(":")[2].strip())
    if _begins_with(trimmed, _REJECT):
        return DecisionText("reject", trimmed.partition(":")[2].strip())
    return DecisionText("approve", is_unknown=trimmed.upper() not in {"", _APPROVE})


def _begins_with(text: str, keyword: str) -> bool:
    return text[: len(keyword)].upper() == keyword
