"""EventHub as a plain class on an event loop: nobody's events are lost, and whoever asks is answered or told."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from ensemble_ray import IllegalStateError
from ensemble_ray.actors.link import events as event_hub
from ensemble_ray.actors.link.events import KEPT_RUNS, DriverRequest, EventHub, EventPage, HubEventLog

#: Longer than any test; a wait that lasts so long is a wait that nothing ended.
LONG_S = 60.0


def events(*numbers: int) -> list[bytes]:
    """Events of different lengths, so that a wrong offset shows."""
    return [b"%d" % number * (number % 7 + 1) for number in numbers]


def contents(page: EventPage) -> tuple[list[bytes], int, list[DriverRequest]]:
    """Events, next cursor, requests."""
    return list(page.events), page.cursor, list(page.requests)


async def turns(count: int = 10) -> None:
    """Let everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("limit", [1, 4, 100])
def test_all_events_are_read_in_order_when_most_are_on_disk(batch: int, limit: int) -> None:
    """S-PAR-42: memory is bounded, the stream is not; pages cross the border between disk and memory."""
    spool, wanted = HubEventLog(kept_in_memory=3), events(*range(20))
    for start in range(0, 20, batch):
        spool.extend(wanted[start : start + batch])
    assert spool.length == 20
    assert len(spool._recent) == 3
    read: list[bytes] = []
    while page := spool.read(len(read), limit):
        assert len(page) <= limit
        read += page
    assert read == wanted
    assert [spool.read(cursor, 1) for cursor in range(20)] == [[event] for event in wanted]
    spool.close()


def test_events_are_appended_when_older_ones_were_just_read_from_disk() -> None:
    """S-PAR-42: reading moves the file's place; writing is not led astray by it."""
    spool = HubEventLog(kept_in_memory=0)
    spool.extend(events(1, 2, 3))
    assert spool.read(0, 1) == events(1)
    spool.extend(events(4))
    assert spool.read(0, 10) == events(1, 2, 3, 4)
    assert spool.read(4, 10) == []
    spool.close()


async def test_each_reader_goes_on_at_its_own_cursor_when_there_are_several() -> None:
    """S-EVT-2: a page moves nobody else's place, and a late reader gets everything."""
    hub = EventHub()
    await hub.publish("run", events(1, 2, 3))
    first = await hub.poll("run", 0, 0.0, limit=2)
    assert (list(first.events), first.cursor) == (events(1, 2), 2)
    late = await hub.poll("run", 0, 0.0)
    assert (list(late.events), late.cursor) == (events(1, 2, 3), 3)
    rest = await hub.poll("run", first.cursor, 0.0)
    assert (list(rest.events), rest.cursor) == (events(3), 3)
    assert contents(await hub.poll("other run", 0, 0.0)) == ([], 0, [])


async def test_waiting_readers_are_woken_when_an_event_comes() -> None:
    """S-PAR-42: all of them, at once; their waiting times are far from over."""
    hub = EventHub()
    waiting = [asyncio.ensure_future(hub.poll("run", 0, LONG_S)) for _ in range(2)]
    await turns()
    assert not any(each.done() for each in waiting)
    await hub.publish("run", events(7))
    pages = await asyncio.gather(*waiting)
    assert [list(page.events) for page in pages] == [events(7)] * 2


async def test_page_is_empty_when_nothing_comes_in_time() -> None:
    """The reader keeps its cursor."""
    hub = EventHub()
    await hub.publish("run", events(1))
    assert contents(await hub.poll("run", 1, 0.01)) == ([], 1, [])


async def test_requests_go_to_the_attending_reader_only() -> None:
    """S-CONV-33: whoever only watches takes no request away from the driver; the driver gets each once."""
    hub = EventHub()
    asking = asyncio.ensure_future(hub.ask("run", "scripted_model.chat", {"n": 1}))
    await turns()
    await hub.notify("run", [("tool_metrics", {"n": 2})])
    assert list((await hub.poll("run", 0, 0.0)).requests) == []
    asked, told = (await hub.poll("run", 0, LONG_S, is_driver=True)).requests
    assert (asked.name, dict(asked.payload)) == ("scripted_model.chat", {"n": 1})
    assert told == DriverRequest("tool_metrics", {"n": 2}, None)
    assert list((await hub.poll("run", 0, 0.0, is_driver=True)).requests) == []
    assert asked.number is not None
    await hub.answer("run", {asked.number: b"yes", 999: b"nobody asked"})
    assert await asking == b"yes"


async def test_driver_is_woken_when_somebody_asks() -> None:
    """A model call must not wait for the end of a poll."""
    hub = EventHub()
    polling = asyncio.ensure_future(hub.poll("run", 0, LONG_S, is_driver=True))
    await turns()
    asking = asyncio.ensure_future(hub.ask("run", "name", {}))
    page = await polling
    assert [request.name for request in page.requests] == ["name"]
    asking.cancel()


async def test_answers_find_their_askers_when_they_come_in_another_order() -> None:
    """S-SET-38: one script, many calls at once."""
    hub = EventHub()
    asking = [asyncio.ensure_future(hub.ask("run", str(n), {})) for n in range(3)]
    await turns()
    requests = (await hub.poll("run", 0, 0.0, is_driver=True)).requests
    for request in reversed(requests):
        assert request.number is not None
        await hub.answer("run", {request.number: request.name.encode()})
    assert await asyncio.gather(*asking) == [b"0", b"1", b"2"]


async def test_late_answer_is_dropped_when_the_asker_has_left() -> None:
    """A cancelled task's question does no harm."""
    hub = EventHub()
    asking = asyncio.ensure_future(hub.ask("run", "name", {}))
    await turns()
    (request,) = (await hub.poll("run", 0, 0.0, is_driver=True)).requests
    asking.cancel()
    await turns()
    assert asking.cancelled()
    assert request.number is not None
    await hub.answer("run", {request.number: b"late"})


async def test_askers_get_an_error_when_the_driver_leaves() -> None:
    """S-PAR-34: whoever waits for a driver that is gone does not hang, now or later."""
    hub = EventHub()
    asking = asyncio.ensure_future(hub.ask("run", "name", {}))
    await turns()
    await hub.mark_driver_gone("run")
    gone = pickle.loads(await asking)  # noqa: S301  our own
    assert isinstance(gone, IllegalStateError)
    assert "run" in str(gone)
    with pytest.raises(IllegalStateError, match="its driver is gone and cannot answer 'name'"):
        await hub.ask("run", "name", {})


async def test_run_that_begins_anew_is_not_concerned_when_somebody_still_asks_in_the_old_one() -> None:
    """S-DUR-33, S-DUR-34: who asked a driver that was killed hears that it is gone; the new driver is there."""
    hub = EventHub()
    asking = asyncio.ensure_future(hub.ask("run", "name", {}))
    await turns()
    await hub.begin("run")
    assert isinstance(pickle.loads(await asking), IllegalStateError)  # noqa: S301  our own
    again = asyncio.ensure_future(hub.ask("run", "name", {}))
    await turns()
    (request,) = (await hub.poll("run", 0, 0.0, is_driver=True)).requests
    assert request.number is not None
    await hub.answer("run", {request.number: b"yes"})
    assert await again == b"yes"


async def test_runs_are_forgotten_when_their_drivers_were_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-DUR-33: a driver that was killed leaves no word, and its run's events are not kept for ever."""
    hub = EventHub()
    for n in range(KEPT_RUNS + 5):
        await hub.publish(f"killed {n}", events(n))
    monkeypatch.setattr(event_hub, "MOST_SILENT_S", -1.0)
    await hub.publish("one more", events(1))
    assert list(hub._runs) == [*(f"killed {n}" for n in range(6, KEPT_RUNS + 5)), "one more"]


async def test_only_deserted_runs_are_forgotten_when_there_are_many() -> None:
    """S-PAR-42: runs that somebody attends keep their events, however many there are; of the others the newest."""
    hub = EventHub()
    for n in range(KEPT_RUNS + 5):
        await hub.publish(f"attended {n}", events(n))
    for n in range(KEPT_RUNS + 5):
        await hub.publish(f"deserted {n}", events(n))
        await hub.mark_driver_gone(f"deserted {n}")
    await hub.publish("one more", events(1))
    for n in range(KEPT_RUNS + 5):
        assert list((await hub.poll(f"attended {n}", 0, 0.0)).events) == events(n)
    kept = [name for name in hub._runs if name.startswith("deserted")]
    assert kept == [f"deserted {n}" for n in range(5, KEPT_RUNS + 5)]


async def test_memory_of_a_run_is_bounded_when_it_has_many_events() -> None:
    """S-PAR-42: more than the bound is published, and all of it can be read."""
    hub, count = EventHub(), event_hub.KEPT_IN_MEMORY + 100
    wanted = events(*range(count))
    await hub.publish("run", wanted)
    assert len(hub._runs["run"].log._recent) == event_hub.KEPT_IN_MEMORY
    read: list[bytes] = []
    while page := (await hub.poll("run", len(read), 0.0)).events:
        read += page
    assert read == wanted
