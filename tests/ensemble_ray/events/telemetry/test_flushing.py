"""What waits is sent by a thread of its own: what fails or never answers there holds nobody up, and nothing stays behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ensemble_ray import Ensemble, OpenTelemetryListener
from ensemble_ray.events.telemetry.listener import Flusher, flush_all
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task

#: Longest time to wait for what must come, s.
PATIENCE_S = 60.0


class Sender:
    """Notes what it is asked for; fails and waits as it is told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failures: list[Exception] = []
        self.is_free = threading.Event()
        self.is_free.set()
        #: set when something is asked of it
        self.is_asked = threading.Event()

    def force_flush(self) -> None:
        """Send."""
        self._do("flush")

    def shutdown(self) -> None:
        """End."""
        self._do("shutdown")

    def _do(self, what: str) -> None:
        self.is_asked.set()
        assert self.is_free.wait(PATIENCE_S)
        self.asked.append(what)
        if self.failures:
            raise self.failures.pop()


@pytest.fixture
def sender() -> Iterator[Sender]:
    """One that holds nobody up behind the test."""
    found = Sender()
    yield found
    found.is_free.set()


def _threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "ensemble-ray-telemetry"}


def test_flush_that_fails_is_told_once_and_the_next_one_works(sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    """S-INT-34: the others are flushed all the same; it is told again when it has worked meanwhile."""
    other = Sender()
    flusher = Flusher([sender, other])
    sent: list[bool] = []
    for fails in (True, True, False, True):
        sender.failures = [ValueError("full")] if fails else []
        sent.append(flusher.wait(flusher.ask(), PATIENCE_S))
    assert sent == [False, False, True, False]
    assert other.asked == ["flush"] * 4
    assert [each.getMessage() for each in caplog.records] == ["Spans or metrics cannot be sent: ValueError: full"] * 2
    assert flusher.close(PATIENCE_S)


def test_close_waits_no_longer_than_it_may(sender: Sender) -> None:
    """S-INT-34: a receiver that never answers; what is left goes on beside the program, and is shut down once."""
    before = _threads()
    flusher = Flusher([sender])
    sender.is_free.clear()
    assert not flusher.wait(flusher.ask(), 0.01)
    assert not flusher.close(0.01)
    sender.is_free.set()
    assert flusher.close(PATIENCE_S)
    assert flusher.close(PATIENCE_S)
    assert sender.asked[-2:] == ["flush", "shutdown"]
    assert sender.asked.count("shutdown") == 1
    assert _threads() <= before


def test_the_end_of_a_process_waits_once_for_all_listeners_and_warns_once(
    sender: Sender, caplog: pytest.LogCaptureFixture
) -> None:
    """S-INT-34: whichever receivers do not answer; those that do have sent by then."""
    good, others = Sender(), [Sender(), Sender()]
    flushers = [Flusher([each]) for each in (sender, good, *others)]
    for each in (sender, *others):
        each.is_free.clear()
    flush_all(flushers, 0.05)
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        "Spans or metrics have not been sent in time"
    ]
    for each in (sender, good, *others):
        assert each.is_asked.wait(PATIENCE_S)
    for each in (sender, *others):
        each.is_free.set()
    assert all(each.close(PATIENCE_S) for each in flushers)
    assert [each.asked for each in (sender, good, *others)] == [["flush", "flush", "shutdown"]] * 4
    assert len(caplog.records) == 1


def test_a_listener_that_has_something_to_send_has_its_thread() -> None:
    """S-INT-34: else a process that ends during a run would send by itself, for as long as that takes."""
    before = _threads()
    kept = InMemorySpanExporter()
    listener = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider())
    first = task("write", agent(ScriptedModel("text")))
    second = task("count", handler=lambda _: str(len(_threads() - before)), context=[first])
    assert Ensemble(tasks=[first, second], listeners=[listener]).run(runtime="inline").raw == "1"
    assert listener.close()


def test_shutdown_that_fails_or_hangs_is_no_error_of_close(sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    """S-INT-34."""
    flusher = Flusher([sender])
    assert flusher.wait(flusher.ask(), PATIENCE_S)
    sender.failures = [ValueError("second"), ValueError("first")]
    assert not flusher.close(PATIENCE_S), "its last flush failed"
    assert sender.asked == ["flush", "flush", "shutdown"]
    assert len(caplog.records) == 1


def test_what_waits_is_sent_where_no_thread_can_begin(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-34: as when the process ends, from Python 3.12 on."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    flusher = Flusher([sender])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert flusher.wait(flusher.ask(), 0.0)
    assert flusher.close(0.0)
    assert sender.asked == ["flush", "flush", "shutdown"]


def test_listener_that_nobody_holds_is_collected_and_its_thread_ends(caplog: pytest.LogCaptureFixture) -> None:
    """S-INT-34: after it has sent what it had."""
    before = _threads()
    kept = InMemorySpanExporter()
    listener = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider())
    Ensemble(tasks=[task("write", agent(ScriptedModel("text")))], listeners=[listener]).run(runtime="inline")
    (thread,) = _threads() - before
    held = weakref.ref(listener)
    del listener
    gc.collect(1)  # what is young; to look through all that a session has loaded takes seconds
    assert held() is None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert len(kept.get_finished_spans()) == 3
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_closed_listener_sends_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """S-INT-34: nor does what it closed complain."""
    kept = InMemorySpanExporter()
    listener = OpenTelemetryListener(span_processor=SimpleSpanProcessor(kept), meter_provider=MeterProvider())
    assert all(name.startswith("_") for name in vars(listener))
    assert listener.flush()
    assert listener.close()
    assert listener.close()
    Ensemble(tasks=[task("write", agent(ScriptedModel("text")))], listeners=[listener]).run(runtime="inline")
    assert not listener.flush()
    assert kept.get_finished_spans() == ()
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
