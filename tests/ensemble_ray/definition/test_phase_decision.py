"""Decisions of a phase's review, and the texts that they are written as."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import PhaseReviewDecision

Approve, Reject = PhaseReviewDecision.Approve, PhaseReviewDecision.Reject
Retry, RetryPredecessor = PhaseReviewDecision.Retry, PhaseReviewDecision.RetryPredecessor
#: Names are read up to the first colon.
_NAMES = st.text(alphabet=st.characters(exclude_characters=":"), max_size=20).map(str.strip)
_TEXTS = st.text(max_size=60).map(str.strip)


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Approve(), "APPROVE"),
        (Retry("too brief"), "RETRY: too brief"),
        (RetryPredecessor("research", "more sources"), "RETRY_PREDECESSOR research: more sources"),
        (Reject("off topic"), "REJECT: off topic"),
    ],
)
def test_each_decision_is_written_with_its_keyword(decision: PhaseReviewDecision, text: str) -> None:
    """S-PHASE-75: and read as what was written; all have one type (S-SET-5)."""
    assert decision.to_text() == text
    assert PhaseReviewDecision.parse(text) == decision
    assert isinstance(decision, PhaseReviewDecision)


@pytest.mark.heavy
@given(
    st.just(Approve())
    | st.builds(Retry, _TEXTS)
    | st.builds(RetryPredecessor, _NAMES, _TEXTS)
    | st.builds(Reject, _TEXTS)
)
def test_every_decision_of_trimmed_texts_is_read_as_it_was_written(decision: PhaseReviewDecision) -> None:
    """S-PHASE-75: whatever the texts hold."""
    assert PhaseReviewDecision.parse(decision.to_text()) == decision


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("  retry:  Say more.\n\nAnd say IT twice. \n", Retry("Say more.\n\nAnd say IT twice.")),
        ("Retry_Predecessor Research:  MORE ", RetryPredecessor("Research", "MORE")),
        ("\treject: No", Reject("No")),
        ("approve", Approve()),
    ],
)
def test_case_of_keywords_and_white_space_around_do_not_count(text: str, decision: PhaseReviewDecision) -> None:
    """S-PHASE-70: the feedback keeps its case and its line breaks."""
    assert PhaseReviewDecision.parse(text) == decision


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("RETRY_PREDECESSOR: research", Retry("research")),  # without the blank it is a retry
        ("RETRY_PREDECESSOR", Retry("")),
        ("RETRYING: it", Retry("it")),
        ("REJECTED: no", Reject("no")),
    ],
)
def test_prefixes_are_tried_in_order(text: str, decision: PhaseReviewDecision) -> None:
    """S-PHASE-71: predecessor with its blank, retry, reject."""
    assert PhaseReviewDecision.parse(text) == decision


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("RETRY: issue: too brief", Retry("issue: too brief")),
        ("RETRY_PREDECESSOR research: a: b", RetryPredecessor("research", "a: b")),
        ("REJECT: a: b", Reject("a: b")),
    ],
)
def test_text_is_split_at_the_first_colon(text: str, decision: PhaseReviewDecision) -> None:
    """S-PHASE-72."""
    assert PhaseReviewDecision.parse(text) == decision


@pytest.mark.parametrize(
    ("text", "decision"),
    [
        ("RETRY", Retry("")),
        ("RETRY it", Retry("")),
        ("REJECT", Reject("")),
        ("RETRY_PREDECESSOR research", RetryPredecessor("research", "")),
    ],
)
def test_without_a_colon_there_is_no_feedback(text: str, decision: PhaseReviewDecision) -> None:
    """S-PHASE-73."""
    assert PhaseReviewDecision.parse(text) == decision


@pytest.mark.parametrize("text", [None, "", " \n", "APPROVE", " approve "])
def test_no_text_and_the_keyword_approve_in_silence(text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """S-PHASE-74."""
    assert PhaseReviewDecision.parse(text) == Approve()
    assert caplog.records == []


@pytest.mark.parametrize("text", ["I approve", "Looks fine", "Please RETRY: x", "APPROVE it\nnow"])
def test_unknown_text_approves_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """S-PHASE-74: one line, whatever the text holds (S-SEC-58)."""
    assert PhaseReviewDecision.parse(text) == Approve()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert text.splitlines()[0] in record.getMessage()
    assert "\n" not in record.getMessage()


ABSENT: str = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Retry(ABSENT), "PhaseReviewDecision.Retry: feedback must not be None"),
        (lambda: Reject(ABSENT), "PhaseReviewDecision.Reject: reason must not be None"),
        (lambda: RetryPredecessor(ABSENT, "x"), "PhaseReviewDecision.RetryPredecessor: phase_name must not be None"),
        (lambda: RetryPredecessor("x", ABSENT), "PhaseReviewDecision.RetryPredecessor: feedback must not be None"),
    ],
)
def test_none_is_refused_by_each_field(make: Callable[[], PhaseReviewDecision], text: str) -> None:
    """S-SET-5: the text names the kind of decision and its field."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make()


def test_decisions_are_values() -> None:
    """S-SET-5: frozen, compared by what they say, and they travel between processes."""
    decision = RetryPredecessor("research", "more")
    assert pickle.loads(pickle.dumps(decision)) == decision  # noqa: S301  our own bytes
    assert hash(decision) == hash(RetryPredecessor("research", "more"))
    assert repr(decision) == "PhaseReviewDecision.RetryPredecessor(phase_name='research', feedback='more')"
    with pytest.raises(AttributeError):
        decision.feedback = "less"  # type: ignore[misc]
    with pytest.raises(TypeError):
        PhaseReviewDecision()  # type: ignore[abstract]
