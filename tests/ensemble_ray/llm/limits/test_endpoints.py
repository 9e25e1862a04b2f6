"""Calls of one process wait for endpoints that fail or ask for fewer calls, and hear of it from other processes."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading

import pytest

from ensemble_ray import CircuitOpenError
from ensemble_ray.llm.limits.endpoints import EndpointCall, EndpointService, EndpointUpdate, process_endpoints
from ensemble_ray.testing import ManualClock
from tests.ensemble_ray.llm.limits.settling import settle

HOME = "http://h/v1 m"


class Process:
    """A service with a clock of its own, and what it sent to others."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.updates: list[EndpointUpdate] = []
        self.endpoints = EndpointService(clock=self.clock, share=self.updates.append)

    def open_call(self, endpoint: str = HOME) -> EndpointCall:
        return self.endpoints.open_call(endpoint)

    def sent(self) -> EndpointCall:
        """A call on its way."""
        call = self.open_call()
        assert call.try_begin()
        return call

    def failing(self, times: int) -> None:
        """So many calls go and fail."""
        for _ in range(times):
            call = self.sent()
            call.record_failure("HTTP 503: busy")
            call.end()

    def is_let_in(self, endpoint: str = HOME) -> bool:
        """Whether a call may go now; it leaves at once."""
        call = self.open_call(endpoint)
        may_go = call.try_begin()
        if may_go:
            call.abandon()
        call.end()
        return may_go

    @property
    def categories(self) -> list[str]:
        """What was told."""
        return [update.category for update in self.updates]


@pytest.fixture
def here() -> Process:
    """One process."""
    return Process()


def test_calls_of_others_wait_when_five_failed_in_a_row(here: Process, caplog: pytest.LogCaptureFixture) -> None:
    """S-DUR-64: of that endpoint, and of no other; it is one WARN line."""
    with caplog.at_level(logging.INFO, "ensemble_ray.llm.limits.endpoints"):
        here.failing(4)
        assert here.is_let_in()
        here.failing(1)
    assert not here.is_let_in()
    assert here.is_let_in("http://h/v1 other")
    assert caplog.messages == [f"Endpoint {HOME} fails for everybody; calls to it wait. Last failure: HTTP 503: busy"]


async def test_one_call_goes_as_a_probe_when_the_breaker_was_open_for_five_seconds(here: Process) -> None:
    """S-DUR-64: its success lets everybody in."""
    here.failing(5)
    calls = [here.open_call() for _ in range(3)]
    waits = [asyncio.create_task(call.wait(120)) for call in calls]
    await settle()
    assert not any(wait.done() for wait in waits)
    here.clock.advance(5)
    await settle()
    assert [wait.done() for wait in waits] == [True, False, False]
    assert not here.is_let_in()
    calls[0].record_answer()
    assert await asyncio.gather(*waits) == [5.0, 5.0, 5.0]
    assert here.is_let_in()


async def test_calls_wait_twice_as_long_when_the_probe_failed(here: Process) -> None:
    """S-DUR-64: and one of them is the next probe, also when the first one was cancelled."""
    here.failing(5)
    first, second, third = (here.open_call() for _ in range(3))
    waits = [asyncio.create_task(call.wait(120)) for call in (first, second, third)]
    await settle()
    here.clock.advance(5)
    await settle()
    first.record_failure("HTTP 500: down")
    here.clock.advance(9.5)
    await settle()
    assert [wait.done() for wait in waits] == [True, False, False]
    here.clock.advance(0.5)
    await settle()
    assert [wait.done() for wait in waits] == [True, True, False]
    second.abandon()
    await settle()
    assert waits[2].done()
    third.record_answer()
    assert here.categories == [*["failed"] * 5, "probing", "probe_failed", "probing", "probing", "answered"]


async def test_a_call_fails_when_its_patience_ends_before_the_breaker_closes(here: Process) -> None:
    """S-DUR-64: after `max_wait`; the error names endpoint and last failure."""
    here.failing(5)
    wait = asyncio.create_task(here.open_call().wait(3))
    await settle()
    here.clock.advance(2.9)
    await settle()
    assert not wait.done()
    here.clock.advance(0.1)
    with pytest.raises(CircuitOpenError) as failed:
        await wait
    assert failed.value.endpoint == HOME
    assert str(failed.value) == (
        f"Endpoint {HOME} fails for everybody and is not asked for now; waited 3 s for it. Last failure: HTTP 503: busy"
    )


async def test_a_call_without_patience_fails_at_once_when_the_breaker_is_open(here: Process) -> None:
    """S-DUR-64: `max_wait=0`."""
    here.failing(5)
    with pytest.raises(CircuitOpenError, match="waited 0 s"):
        await here.open_call().wait(0)


def test_the_breaker_stays_closed_when_calls_are_refused_for_now(here: Process) -> None:
    """S-DUR-64: 429 is no failure of the endpoint."""
    for _ in range(10):
        call = here.sent()
        call.record_refusal()
        call.end()
    assert here.is_let_in()


def test_a_refused_probe_closes_the_breaker_when_the_endpoint_is_there(here: Process) -> None:
    """S-DUR-64: a 429 shows that it answers."""
    here.failing(5)
    here.clock.advance(5)
    probe = here.sent()
    assert not here.is_let_in()
    probe.record_refusal()
    assert here.is_let_in()


async def test_the_calls_on_their_way_are_halved_when_one_is_refused(here: Process) -> None:
    """S-DUR-65: further ones wait for a place, first come first served; cancelled ones take none."""
    sent = [here.sent() for _ in range(4)]
    sent[0].record_refusal()
    waiting = [here.open_call() for _ in range(3)]
    assert not waiting[0].try_begin()
    waits = [asyncio.create_task(call.wait(0)) for call in waiting]
    await settle()
    sent[1].record_answer()
    await settle()
    assert not any(wait.done() for wait in waits)
    waits[0].cancel()
    await settle()
    sent[2].abandon()
    await settle()
    assert [wait.done() for wait in waits] == [True, True, False]
    sent[3].record_answer()
    assert await waits[2] == 0.0


async def test_a_place_is_given_on_when_its_call_was_cancelled_before_it_heard(here: Process) -> None:
    """S-DUR-65: no place is kept by a call that left."""
    first, second = here.sent(), here.sent()
    first.record_refusal()
    waiting = [here.open_call(), here.open_call()]
    waits = [asyncio.create_task(call.wait(0)) for call in waiting]
    await settle()
    second.abandon()
    waits[0].cancel()
    await settle()
    assert waits[0].cancelled()
    assert await waits[1] == 0.0


def test_nothing_is_limited_when_enough_calls_were_answered(here: Process) -> None:
    """S-DUR-65: the limit is lifted when it exceeds what is asked for."""
    sent = [here.sent() for _ in range(2)]
    for call in sent:
        call.record_refusal()
    assert here.is_let_in()
    alone = here.sent()
    assert not here.is_let_in()
    for call in sent:
        call.end()
    alone.record_answer()
    alone.end()
    many = [here.sent() for _ in range(50)]
    assert len(many) == 50


def test_others_know_what_happened_when_they_hear_of_it(here: Process) -> None:
    """S-DUR-64, S-DUR-65: breaker and limit are shared by all processes; updates are data."""
    there = Process()
    here.endpoints.share = lambda update: there.endpoints.on_update(pickle.loads(pickle.dumps(update)))  # noqa: S301  our own bytes
    there.failing(2)
    here.failing(3)
    assert not there.is_let_in()
    there.clock.advance(6.1)
    probe = there.sent()
    here.endpoints.on_update(EndpointUpdate(endpoint=HOME, category="probing"))
    probe.record_answer()
    for update in there.updates[-1:]:
        here.endpoints.on_update(update)
    assert here.is_let_in()
    sent = [there.sent() for _ in range(4)]
    here.sent().record_refusal()
    sent[0].abandon()
    sent[1].abandon()
    assert not there.is_let_in()
    sent[2].abandon()
    assert there.is_let_in()


def test_no_probe_goes_here_when_one_goes_elsewhere(here: Process) -> None:
    """S-DUR-64: one call goes as a probe, whichever process sends it; who only heard of the opening waits longer."""
    there = Process()
    here.endpoints.share = there.endpoints.on_update
    here.failing(5)
    there.clock.advance(5)
    assert not there.is_let_in()
    here.clock.advance(5)
    probe = here.sent()
    there.clock.advance(1.1)
    assert not there.is_let_in()
    probe.record_failure("HTTP 503: busy")
    there.clock.advance(10)
    assert not there.is_let_in()
    there.clock.advance(1.1)
    assert there.is_let_in()


def test_calls_go_when_failures_are_told_late_and_answers_came_since(here: Process) -> None:
    """S-DUR-64: an error whose making took a second is as old as its arrival."""
    late = [here.sent() for _ in range(5)]
    here.clock.advance(1)
    here.sent().record_answer()
    here.clock.advance(1)
    for call in late:
        call.record_failure("HTTP 503: busy", ago_s=2.0)
    assert here.is_let_in()


def test_calls_go_when_failures_are_few_among_answers(here: Process) -> None:
    """S-DUR-64: answers that came while all was well are counted too, in whichever process they came."""
    for _ in range(100):
        here.sent().record_answer()
    here.failing(5)
    assert here.is_let_in()
    for _ in range(5):
        here.endpoints.on_update(EndpointUpdate(endpoint=HOME, category="failed", text="HTTP 503: busy"))
    assert not here.is_let_in()


def test_nothing_is_told_when_calls_are_answered(here: Process) -> None:
    """S-DUR-64: an endpoint that is well costs no messages."""
    for _ in range(3):
        call = here.sent()
        call.record_answer()
        call.end()
    here.failing(1)
    recovered = here.sent()
    recovered.record_answer()
    assert here.categories == ["failed", "answered"]


def test_failures_are_not_told_when_the_breaker_is_open_already(here: Process) -> None:
    """S-DUR-64: those of calls that were sent before it opened change nothing."""
    late = [here.sent() for _ in range(3)]
    here.failing(5)
    for call in late:
        call.record_failure("late")
    assert here.categories == ["failed"] * 5


def test_calls_of_several_threads_share_one_breaker_when_they_wait(here: Process) -> None:
    """S-DUR-64: one answer lets callers on other event loops in."""
    here.failing(5)
    began, waited = threading.Barrier(3), []

    def caller() -> None:
        async def call() -> None:
            wait = asyncio.create_task(here.open_call().wait(1000))
            await settle()
            began.wait()
            waited.append(await wait)

        asyncio.run(call())

    callers = [threading.Thread(target=caller) for _ in range(2)]
    for thread in callers:
        thread.start()
    began.wait()
    here.endpoints.on_update(EndpointUpdate(endpoint=HOME, category="answered"))
    for thread in callers:
        thread.join()
    assert waited == [0.0, 0.0]


def test_a_waiter_is_passed_over_when_its_loop_is_gone(here: Process) -> None:
    """S-DUR-65: the place goes to whoever is still there."""
    first, second = here.sent(), here.sent()
    first.record_refusal()
    gone = asyncio.new_event_loop()
    lost = gone.create_task(here.open_call().wait(0))
    gone.run_until_complete(settle())
    gone.close()
    lost._log_destroy_pending = False  # type: ignore[attr-defined]  the point of this test
    second.abandon()
    assert here.is_let_in()


def test_there_is_one_service_when_several_runs_share_a_process() -> None:
    """S-DUR-64: shared by all runs of the inline process."""
    assert process_endpoints() is process_endpoints()


async def test_endpoints_are_described_those_that_make_trouble_first() -> None:
    """S-CLU-101: calm ones too; how long until a probe may go, who waits, and how many may be on their way."""
    process = Process()
    calm = process.open_call("http://calm m")
    assert calm.try_begin()
    process.failing(5)
    waiting = asyncio.create_task(process.open_call().wait(60.0))
    await settle()
    process.clock.advance(2.0)
    bad, good = process.endpoints.describe()
    assert (bad.name, bad.state, bad.probe_in_s, bad.last_failure) == (HOME, "open", 3.0, "HTTP 503: busy")
    assert (bad.waiting, bad.sent, good.name, good.state, good.sent, good.last_failure) == (
        1,
        0,
        "http://calm m",
        "closed",
        1,
        "",
    )
    assert [each.name for each in process.endpoints.describe(most=1)] == [HOME]
    waiting.cancel()
    process.clock.advance(4.0)
    assert process.endpoints.describe()[0].state == "half_open"
    asking = [process.open_call("http://asks m") for _ in range(4)]
    assert all(each.try_begin() for each in asking)
    asking[0].record_refusal()
    assert {each.name: each.limit for each in process.endpoints.describe()}["http://asks m"] == 2
