"""Events for readers who pull them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ensemble_ray import Event, EventStream, TokenEvent
from ensemble_ray.events import EVENT_TYPES
from ensemble_ray.events.delivery import EventLog
from ensemble_ray.process.concurrency import bridge

#: Longest wait for what must come, s; a test that needs it has failed.
PATIENCE_S = 60.0


def token(text: str) -> TokenEvent:
    """One fragment."""
    return TokenEvent(token=text, agent_role="Writer", task_description="Write")


def log_of(*texts: str, is_closed: bool = False) -> EventLog:
    """A log that has these tokens."""
    log = EventLog(is_open=True)
    for text in texts:
        log.emit(token(text))
    if is_closed:
        log.close()
    return log


def text_of(event: Event) -> str:
    """The token it carries."""
    assert isinstance(event, TokenEvent)
    return event.token


async def waiters(log: EventLog, count: int) -> None:
    """Return when so many readers wait."""
    async with asyncio.timeout(PATIENCE_S):
        while len(log._waiters) != count:
            await bridge(asyncio.sleep(0))


class Reader:
    """Reads in a thread; what it has read can be waited for."""

    def __init__(self, stream: EventStream) -> None:
        self.texts: list[str] = []
        self._stream = stream
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for event in self._stream:
            with self._changed:
                self.texts.append(text_of(event))
                self._changed.notify_all()

    def wait_for(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.texts) >= count, PATIENCE_S)
            return list(self.texts)

    def wait_for_end(self) -> list[str]:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.texts


def test_late_reader_gets_what_was_kept() -> None:
    """Also when the run is over; each reader from the oldest event on."""
    log = log_of("a", "b", is_closed=True)
    assert [text_of(event) for event in log.stream()] == ["a", "b"]
    stream = log.stream()
    assert list(stream) == list(stream)


def test_reader_sees_events_as_they_come() -> None:
    """It waits, and ends with the log."""
    log = log_of("a")
    reader = Reader(log.stream())
    assert reader.wait_for(1) == ["a"]
    log.emit(token("b"))
    assert reader.wait_for(2) == ["a", "b"]
    log.close()
    assert reader.wait_for_end() == ["a", "b"]


def test_readers_go_at_their_own_pace() -> None:
    """One that reads takes nothing away from another."""
    log = log_of("a", "b")
    first = Reader(log.stream())
    assert first.wait_for(2) == ["a", "b"]
    slow = iter(log.stream())
    assert text_of(next(slow)) == "a"
    log.emit(token("c"))
    log.close()
    assert first.wait_for_end() == ["a", "b", "c"]
    assert [text_of(event) for event in slow] == ["b", "c"]


async def test_async_reader_sees_events_as_they_come() -> None:
    """On a loop that is not the library's own."""
    log = log_of("a")
    texts: list[str] = []
    async for event in log.stream():
        texts.append(text_of(event))
        if len(texts) < 4:
            log.emit(token("abcd"[len(texts)]))
        else:
            log.close()
    assert texts == ["a", "b", "c", "d"]


async def test_async_reader_is_woken_from_another_thread() -> None:
    """It waits without holding its loop."""
    log = log_of()
    waiting = asyncio.ensure_future(anext(aiter(log.stream())))
    await waiters(log, 1)
    await asyncio.to_thread(log.emit, token("a"))
    assert text_of(await waiting) == "a"


async def test_async_readers_end_when_the_log_is_closed() -> None:
    """Several at the same time, one of them on the library's loop itself."""
    log = log_of("a")

    async def read() -> list[str]:
        return [text_of(event) async for event in log.stream()]

    reading = [asyncio.ensure_future(read()), asyncio.ensure_future(read()), asyncio.ensure_future(bridge(read()))]
    await waiters(log, 3)
    log.emit(token("b"))
    log.close()
    assert await asyncio.gather(*reading) == [["a", "b"]] * 3
    assert not log._waiters


async def test_reader_that_goes_away_leaves_nothing_behind() -> None:
    """A cancelled reader is not woken any more."""
    log = log_of()
    waiting = asyncio.ensure_future(anext(aiter(log.stream())))
    await waiters(log, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await waiters(log, 0)


def test_oldest_events_are_dropped_when_there_are_too_many() -> None:
    """Memory is bounded; a reader that fell behind goes on with the oldest one kept."""
    log = EventLog(is_open=True, kept=3)
    log.emit(token("a"))
    slow = iter(log.stream())
    assert text_of(next(slow)) == "a"
    for text in "bcdef":
        log.emit(token(text))
    log.close()
    assert [text_of(event) for event in slow] == ["d", "e", "f"]
    assert [text_of(event) for event in log.stream()] == ["d", "e", "f"]


def test_nothing_is_kept_when_nobody_will_read() -> None:
    """S-EVT-6: and nothing is built for it."""
    log = EventLog(is_open=False)
    log.emit(token("a"))
    log.close()
    assert (log.interest, log.wants(TokenEvent), list(log.stream())) == (frozenset(), False, [])


def test_every_type_is_wanted_when_somebody_may_read() -> None:
    """The listener methods of all events; the root of events is none of them."""
    log = log_of()
    assert log.interest == set(EVENT_TYPES)
    assert log.wants(TokenEvent)
    assert not log.wants(Event)
