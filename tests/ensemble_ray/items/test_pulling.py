"""Sources are advanced by no more than was asked for, beside the loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from ensemble_ray.items import pulling
from ensemble_ray.items.pulling import AsyncReader, ThreadReader, number_items
from ensemble_ray.items.sources import source_of
from tests.ensemble_ray.items.reading import entries_of, read_all


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is let go is waited for as long as it takes: these sources come to their end, on a busy machine late."""
    monkeypatch.setattr(pulling, "_CLOSE_S", 60.0)


class Steps:
    """An iterator that knows how far it was advanced, and by whom."""

    def __init__(self, count: int = 100) -> None:
        self.count = count
        self.taken = 0
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.taken == self.count:
            raise StopIteration
        self.threads.add(threading.current_thread().name)
        self.taken += 1
        return self.taken


async def test_source_is_advanced_as_far_as_was_asked() -> None:
    """S-MR-121: never a step more, however long nobody asks; always in one thread that is not the loop's."""
    steps = Steps()
    reader = source_of(steps).open()
    assert steps.taken == 0
    for asked in (1, 3, 7):
        before, found = steps.taken, 0
        while found < asked:
            found += len((await reader.next(asked - found)).items)
        assert steps.taken == before + asked
    await reader.close()
    assert len(steps.threads) == 1
    assert threading.current_thread().name not in steps.threads


async def test_two_steps_are_never_made_at_once_when_a_pull_is_cancelled() -> None:
    """S-MR-121: what a cancelled pull had begun is finished first, and given to the next one."""
    may_go, inside = threading.Event(), asyncio.Event()
    begun: list[int] = []
    loop = asyncio.get_running_loop()

    def source() -> Iterator[int]:
        for number in range(3):
            begun.append(number)
            loop.call_soon_threadsafe(inside.set)
            may_go.wait()
            yield number

    reader = source_of(source()).open()
    pull = asyncio.ensure_future(reader.next(1))
    await inside.wait()
    pull.cancel()
    await asyncio.wait({pull})
    second = asyncio.ensure_future(reader.next(3))
    assert begun == [0]
    may_go.set()
    assert [*(await second).items, *await read_all(reader)] == [(0, 0), (1, 1), (2, 2)]


async def test_what_is_there_is_given_when_a_source_is_slow() -> None:
    """S-MR-121: items that came do not wait for one that takes long."""
    may_go = threading.Event()

    def source() -> Iterator[str]:
        yield "a"
        yield "b"
        may_go.wait()
        yield "c"

    reader = source_of(source()).open()
    first = (await reader.next(3)).items
    assert first[0] == (0, "a")
    rest = asyncio.ensure_future(read_all(reader))
    may_go.set()
    assert [*first, *await rest] == [(0, "a"), (1, "b"), (2, "c")]


async def test_pull_goes_on_waiting_when_it_is_woken_for_an_item_that_another_took() -> None:
    """S-MR-121: word of an item that an earlier pull took is no item."""
    may_go, inside = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def source() -> Iterator[str]:
        loop.call_soon_threadsafe(inside.set)
        may_go.wait()
        yield "a"

    reader = ThreadReader(lambda: number_items(source()))
    pull = asyncio.ensure_future(reader.next(1))
    await inside.wait()
    reader._wake()  # as a thread does that was held up between giving an item and telling of it
    late = asyncio.ensure_future(asyncio.sleep(3 * pulling._GATHER_S))
    done, _ = await asyncio.wait({pull, late}, return_when=asyncio.FIRST_COMPLETED)
    assert done == {late}
    may_go.set()
    assert (await pull).items == [(0, "a")]
    await reader.close()


async def test_items_come_before_the_error_when_a_source_fails() -> None:
    """S-MR-123: what came is given, then the error itself, unchanged."""
    failure = KeyError("gone")

    def source() -> Iterator[int]:
        yield 1
        raise failure

    async def later() -> AsyncIterator[int]:
        yield 1
        raise failure

    for failing in (source(), later()):
        reader = source_of(failing).open()
        assert (await reader.next(5)).items == [(0, 1)]
        with pytest.raises(KeyError) as raised:
            await reader.next(5)
        assert raised.value is failure
        await reader.close()


async def test_async_source_is_advanced_in_one_task_when_pulled_often() -> None:
    """S-MR-121: a scope that it opened is left in the task in which it was entered, also when it is let go half-way."""
    tasks: list[asyncio.Task[object] | None] = []
    taken: list[int] = []

    async def source() -> AsyncIterator[int]:
        tasks.append(asyncio.current_task())
        try:
            async with asyncio.timeout(None):
                for number in range(10):
                    taken.append(number)
                    yield number
        finally:
            tasks.append(asyncio.current_task())

    reader = source_of(source()).open()
    assert [*(await reader.next(1)).items, *(await reader.next(2)).items] == [(0, 0), (1, 1), (2, 2)]
    assert taken == [0, 1, 2]
    await reader.close()
    assert len(tasks) == 2
    assert tasks[0] is tasks[1]


async def test_async_source_is_interrupted_when_let_go() -> None:
    """S-MR-123: a run that ends does not wait for an item that may never come."""
    ends: list[str] = []
    inside = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        try:
            inside.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            ends.append("closed")

    reader = AsyncReader(source())
    pull = asyncio.ensure_future(reader.next(1))
    await inside.wait()
    pull.cancel()
    await reader.close()
    assert ends == ["closed"]


async def test_generator_is_closed_when_a_run_ends_before_it_does() -> None:
    """S-MR-123: its own clean-up runs, in its thread."""
    closed: list[str] = []

    def source() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(threading.current_thread().name)

    reader = source_of(source()).open()
    await reader.next(2)
    await reader.close()
    assert len(closed) == 1
    assert closed[0] != threading.current_thread().name


async def test_failure_is_told_when_it_happens_in_the_clean_up(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-123: nobody waits for a source that is let go; what it raises then is a WARN line."""

    def source() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise OSError("no way back")

    reader = ThreadReader(lambda: number_items(source()))
    await reader.next(1)
    await reader.close()
    assert "The source of items failed as it was closed: OSError: no way back" in caplog.text


@pytest.mark.parametrize("count", [1, 4, 1000])
async def test_every_item_comes_once_when_pulled_in_any_numbers(count: int) -> None:
    """S-MR-121: in order, without gaps."""
    expected = [(place, place + 1) for place in range(20)]
    assert await entries_of(Steps(20), count) == expected
    assert await entries_of(list(range(1, 21)), count) == expected
