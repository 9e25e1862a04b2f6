"""When an endpoint that fails is asked again (S-DUR-64)."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ensemble_ray.llm.limits.breaker import FAILURES_TO_OPEN, FIRST_OPEN_S, LONGEST_OPEN_S, Breaker, CallAdmission


def opened(at: float = 0.0) -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.record_failure(at, "HTTP 500")
    return breaker


def test_calls_go_when_fewer_than_five_failed_in_a_row() -> None:
    """S-DUR-64: a success between them counts the failures anew."""
    breaker = Breaker()
    for _ in range(4):
        breaker.record_failure(0.0, "HTTP 500")
    breaker.record_answer()
    for _ in range(4):
        breaker.record_failure(0.0, "HTTP 500")
    assert breaker.enter(0.0) is CallAdmission.GO
    assert not breaker.is_calm
    breaker.record_answer()
    assert breaker.is_calm


def test_calls_go_when_failures_are_few_among_answers() -> None:
    """S-DUR-64: five in a row are not enough; half of the last twenty are."""
    breaker = Breaker()
    breaker.record_answer(0.0, count=1000)
    for _ in range(9):
        breaker.record_failure(1.0, "HTTP 500")
        assert not breaker.is_open
    breaker.record_failure(1.0, "HTTP 500")
    assert breaker.is_open


def test_failures_that_arrived_before_the_last_answer_are_no_row() -> None:
    """S-DUR-64: the order of arrival counts, not that in which calls say what came."""
    breaker = Breaker()
    breaker.record_answer(5.0)
    for at in (1.0, 2.0, 3.0, 4.0, 4.9, 5.1, 5.2, 5.3, 5.4):
        breaker.record_failure(at, "HTTP 500")
    assert not breaker.is_open
    breaker.record_failure(5.5, "HTTP 500")
    assert breaker.is_open


def test_calls_wait_until_a_probe_may_go_when_five_failed_in_a_row() -> None:
    """S-DUR-64: after 5 s one call goes, the others wait for what comes of it."""
    breaker = opened(at=100.0)
    assert breaker.is_open
    assert breaker.last_failure == "HTTP 500"
    assert breaker.wakes_at() == 105.0
    assert [breaker.enter(at) for at in (100.0, 104.9, 105.0, 200.0)] == [
        CallAdmission.WAIT, CallAdmission.WAIT, CallAdmission.PROBE, CallAdmission.WAIT,
    ]  # fmt: skip
    assert breaker.wakes_at() is None


def test_the_breaker_closes_when_its_probe_is_answered() -> None:
    """S-DUR-64: and the next opening begins with 5 s again."""
    breaker = opened()
    assert breaker.enter(5.0) is CallAdmission.PROBE
    breaker.record_failure(6.0, "HTTP 500", is_probe=True)
    assert breaker.enter(16.0) is CallAdmission.PROBE
    breaker.record_answer()
    assert breaker.is_calm
    assert breaker.enter(16.0) is CallAdmission.GO
    for _ in range(FAILURES_TO_OPEN):
        breaker.record_failure(20.0, "HTTP 500")
    assert breaker.wakes_at() == 25.0


def test_the_wait_doubles_up_to_a_minute_when_probes_fail() -> None:
    """S-DUR-64: 5 s, doubling to 60 s."""
    breaker, at, waits = opened(), 0.0, []
    for _ in range(6):
        wakes_at = breaker.wakes_at()
        assert wakes_at is not None
        waits.append(wakes_at - at)
        at = wakes_at
        assert breaker.enter(at) is CallAdmission.PROBE
        breaker.record_failure(at, "HTTP 502", is_probe=True)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert breaker.last_failure == "HTTP 502"


def test_the_next_call_probes_when_a_cancel_probe_without_an_answer() -> None:
    """S-DUR-64: as when it was cancelled."""
    breaker = opened()
    assert breaker.enter(5.0) is CallAdmission.PROBE
    breaker.cancel_probe()
    assert breaker.enter(5.0) is CallAdmission.PROBE


def test_an_answer_closes_the_breaker_when_its_call_was_sent_before_it_opened() -> None:
    """S-DUR-64: the endpoint is there; a late failure, though, tells nothing new."""
    breaker = opened()
    breaker.record_failure(4.0, "late")
    assert breaker.wakes_at() == 5.0
    breaker.record_answer()
    assert breaker.enter(4.0) is CallAdmission.GO


def test_no_probe_goes_when_another_process_has_sent_one() -> None:
    """S-DUR-64: for a minute at most, should that process be dead."""
    breaker = opened()
    breaker.record_remote_probe(5.0)
    assert breaker.enter(64.9) is CallAdmission.WAIT
    assert breaker.enter(65.0) is CallAdmission.PROBE


def test_nothing_waits_when_another_process_probes_an_endpoint_that_is_well_here() -> None:
    """S-DUR-64: news of a breaker that closed meanwhile."""
    breaker = Breaker()
    breaker.record_remote_probe(5.0)
    assert breaker.enter(5.0) is CallAdmission.GO


def test_the_one_that_told_probes_first_when_others_heard_of_the_opening() -> None:
    """S-DUR-64: who heard waits longer."""
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.record_failure(0.0, "HTTP 500", extra_s=0.5)
    assert breaker.wakes_at() == FIRST_OPEN_S + 0.5


class AnyLife(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.at = 0.0
        self.probes = 0

    @rule(by_s=st.floats(0, 100))
    def time_passes(self, by_s: float) -> None:
        self.at += by_s

    @rule()
    def a_call_wants_to_go(self) -> None:
        was_open = self.breaker.is_open
        entry = self.breaker.enter(self.at)
        assert (entry is CallAdmission.GO) != was_open
        self.probes += entry is CallAdmission.PROBE

    @rule(extra_s=st.floats(0, 1))
    def a_call_fails(self, extra_s: float) -> None:
        self.breaker.record_failure(self.at, "HTTP 500", extra_s=extra_s)

    @rule()
    def the_probe_fails(self) -> None:
        if self.probes:
            self.probes = 0
            self.breaker.record_failure(self.at, "HTTP 500", is_probe=True)

    @rule()
    def the_probe_leaves(self) -> None:
        if self.probes:
            self.probes = 0
            self.breaker.cancel_probe()

    @rule()
    def a_call_is_answered(self) -> None:
        self.probes = 0
        self.breaker.record_answer()
        assert self.breaker.is_calm

    @rule()
    def a_probe_goes_elsewhere(self) -> None:
        self.breaker.record_remote_probe(self.at)

    @invariant()
    def at_most_one_probe_goes(self) -> None:
        assert self.probes <= 1

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        wakes_at = self.breaker.wakes_at()
        if self.breaker.is_open and wakes_at is not None:
            assert wakes_at - self.at <= LONGEST_OPEN_S + 1


TestAnyLife = pytest.mark.heavy(AnyLife.TestCase)
