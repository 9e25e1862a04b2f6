"""Events on their way to listeners: order, independence, failures, the end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from datetime import timedelta

import pytest

from ensemble_ray import (
    EnsembleCompletedEvent,
    EnsembleListener,
    EnsembleStartedEvent,
    Event,
    ExitReason,
    LogContextFilter,
    TaskStartEvent,
    TokenEvent,
)
from ensemble_ray.events.delivery import Delivery, listeners_of, wanted_by
from ensemble_ray.process.context import current_log_context

#: Longest wait for what must come, s; a test that needs it has failed.
PATIENCE_S = 60.0


def token(text: str) -> TokenEvent:
    """One fragment."""
    return TokenEvent(token=text, agent_role="Writer", task_description="Write")


def begun(index: int = 1) -> TaskStartEvent:
    """A task begins."""
    return TaskStartEvent(task_description="Write", agent_role="Writer", task_index=index, total_tasks=3)


class Keeper(EnsembleListener):
    """Keeps the tokens it hears, and the thread it hears them on."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.threads: set[threading.Thread] = set()

    def on_token(self, event: TokenEvent) -> None:
        self.heard.append(event.token)
        self.threads.add(threading.current_thread())


class Broken(Keeper):
    """Keeps it, then raises."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def on_token(self, event: TokenEvent) -> None:
        super().on_token(event)
        raise self.error


class Waiting(Keeper):
    """Waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def on_token(self, event: TokenEvent) -> None:
        self.release.wait(PATIENCE_S)
        super().on_token(event)


async def delivered(delivery: Delivery, *events: Event) -> None:
    """Emit them and wait until all have arrived."""
    for event in events:
        delivery.emit(event)
    await delivery.close()


async def test_events_come_in_order_on_a_thread_per_listener() -> None:
    """S-SET-32, S-EVT-6: neither on the loop's thread nor on each other's."""
    first, second = Keeper(), Keeper()
    texts = [str(number) for number in range(200)]
    await delivered(Delivery([first, second]), *(token(text) for text in texts))
    assert first.heard == second.heard == texts
    (one,), (other,) = first.threads, second.threads
    assert len({one, other, threading.current_thread()}) == 3
    assert one.daemon


async def test_slow_listener_delays_only_itself() -> None:
    """S-PAR-42, S-SET-32: the other has heard everything while the first one still waits."""
    slow, arrived = Waiting(), threading.Event()

    class Quick(Keeper):
        def on_token(self, event: TokenEvent) -> None:
            super().on_token(event)
            if event.token == "last":  # noqa: S105  a fragment, no secret
                arrived.set()

    quick = Quick()
    delivery = Delivery([slow, quick])
    delivery.emit(token("first"))
    delivery.emit(token("last"))
    assert await asyncio.to_thread(arrived.wait, PATIENCE_S)
    assert (slow.heard, quick.heard) == ([], ["first", "last"])
    slow.release.set()
    await delivery.close()
    assert slow.heard == ["first", "last"]


async def test_close_waits_until_everything_is_delivered() -> None:
    """S-EVT-6, S-PAR-42: without holding the loop, and for all listeners."""
    slow, quick = Waiting(), Keeper()
    delivery = Delivery([quick, slow])
    delivery.emit(token("last"))
    closing = asyncio.ensure_future(delivery.close())
    await asyncio.sleep(0)
    assert not closing.done()
    slow.release.set()
    await closing
    assert slow.heard == quick.heard == ["last"]


def test_listener_goes_on_when_the_loop_that_waited_for_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-EVT-6: nobody waits any more, nothing is raised in any thread."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    slow, before = Waiting(), set(threading.enumerate())

    async def leave() -> None:
        delivery = Delivery([slow])
        delivery.emit(token("last"))
        closing = asyncio.ensure_future(delivery.close())
        await asyncio.sleep(0)
        closing.cancel()

    asyncio.run(leave())
    begun_here = set(threading.enumerate()) - before
    slow.release.set()
    for thread in begun_here:
        thread.join(PATIENCE_S)
    assert (slow.heard, raised) == (["last"], [])
    assert not any(thread.is_alive() for thread in begun_here if thread.name.startswith("ensemble-ray"))


async def test_closing_again_is_fine() -> None:
    """S-EVT-6: a run that fails while it begins closes more than once."""
    delivery = Delivery([Keeper()])
    await delivery.close()
    await delivery.close()


async def test_nothing_is_waited_for_when_there_are_no_listeners() -> None:
    """No thread, no interest."""
    delivery = Delivery([])
    assert delivery.interest == frozenset()
    await delivered(delivery, token("unheard"))


async def test_raising_listener_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """S-EVT-3: logged as a warning with the method; it and the others hear what follows."""
    broken, keeper = Broken(ValueError("no")), Keeper()
    with caplog.at_level(logging.WARNING, logger="ensemble_ray"):
        await delivered(Delivery([broken, keeper]), token("a"), token("b"))
    assert broken.heard == keeper.heard == ["a", "b"]
    assert [record.getMessage() for record in caplog.records] == ["Listener Broken.on_token raised"] * 2
    assert all(record.levelno == logging.WARNING and record.exc_info for record in caplog.records)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(3)])
async def test_interrupt_is_reported_and_the_others_go_on(
    stop: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """S-EVT-4, S-SET-27: it passes, to whoever ends the run; everything queued is delivered all the same."""
    reported: list[BaseException] = []
    broken, keeper = Broken(stop), Keeper()
    await delivered(Delivery([broken, keeper], on_interrupt=reported.append), token("a"), token("b"))
    assert reported == [stop, stop]
    assert broken.heard == keeper.heard == ["a", "b"]
    assert not caplog.records


async def test_interrupt_is_nobodys_when_nobody_asked() -> None:
    """S-SET-27: the listener's thread lives on."""
    broken = Broken(KeyboardInterrupt())
    await delivered(Delivery([broken]), token("a"), token("b"))
    assert broken.heard == ["a", "b"]


async def test_async_methods_are_awaited_in_order_on_one_loop() -> None:
    """S-SET-33, S-CONV-16: the listener's own loop, not that of the run."""
    heard: list[tuple[str, asyncio.AbstractEventLoop]] = []

    class Slow:
        async def on_token(self, event: TokenEvent) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            heard.append((event.token, asyncio.get_running_loop()))

    await delivered(Delivery([Slow()]), token("a"), token("b"))
    assert [text for text, _ in heard] == ["a", "b"]
    (loop,) = {loop for _, loop in heard}
    assert loop is not asyncio.get_running_loop()
    assert loop.is_closed()


@pytest.mark.parametrize(("error", "interrupts"), [(ValueError("no"), 0), (KeyboardInterrupt(), 1)])
async def test_async_failure_is_as_a_sync_one(
    error: BaseException, interrupts: int, caplog: pytest.LogCaptureFixture
) -> None:
    """S-EVT-3, S-EVT-4: the next event is heard."""
    reported: list[BaseException] = []
    heard: list[str] = []

    class Failing:
        async def on_token(self, event: TokenEvent) -> None:
            await asyncio.sleep(0)
            heard.append(event.token)
            if event.token == "a":  # noqa: S105  a fragment, no secret
                raise error

    await delivered(Delivery([Failing()], on_interrupt=reported.append), token("a"), token("b"))
    assert heard == ["a", "b"]
    assert len(reported) == interrupts
    assert len(caplog.records) == 1 - interrupts


async def test_only_wanted_types_are_asked_for() -> None:
    """S-EVT-1: what no listener overrides need not be built; a listener need not inherit anything."""

    class Duck:
        def on_task_start(self, event: TaskStartEvent) -> None: ...

    delivery = Delivery([EnsembleListener(), Keeper(), Duck()])
    assert delivery.interest == {"on_token", "on_task_start"}
    assert delivery.wants(TokenEvent)
    assert not delivery.wants(EnsembleStartedEvent)
    await delivered(delivery, EnsembleStartedEvent(ensemble_id="run", workflow="parallel", total_tasks=1))


async def test_run_events_are_given_as_arguments() -> None:
    """S-EVT-30, S-EVT-31: the listener's signatures."""
    heard: list[tuple[object, ...]] = []

    class Both(EnsembleListener):
        def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> None:
            heard.append((ensemble_id, workflow, total_tasks))

        def on_ensemble_completed(self, ensemble_id: str, total_duration: object, exit_reason: object) -> None:
            heard.append((ensemble_id, total_duration, exit_reason))

    took = timedelta(seconds=2)
    await delivered(
        Delivery([Both()]),
        EnsembleStartedEvent(ensemble_id="run", workflow="parallel", total_tasks=3),
        EnsembleCompletedEvent(ensemble_id="run", total_duration=took, exit_reason=ExitReason.COMPLETED),
    )
    assert heard == [("run", "parallel", 3), ("run", took, ExitReason.COMPLETED)]


async def test_log_fields_hold_on_the_listeners_thread() -> None:
    """S-PAR-16, S-ENG-21: what a listener logs says of which run it speaks."""
    seen: list[Mapping[str, str]] = []

    class Asking:
        def on_token(self, event: TokenEvent) -> None:
            record = logging.makeLogRecord({})
            LogContextFilter().filter(record)
            seen.extend((current_log_context(), record.ensemble_context))  # type: ignore[attr-defined]  the filter's

    await delivered(Delivery([Asking()], fields={"ensemble.id": "run"}), token("a"))
    assert seen == [{"ensemble.id": "run"}] * 2


async def test_callables_are_listeners_behind_the_objects() -> None:
    """S-EVT-2: all are kept, each with a queue of its own."""
    heard: list[str] = []
    keeper = Keeper()

    def broken(_: TokenEvent) -> None:
        raise ValueError("no")

    found = listeners_of(
        [keeper],
        {"on_task_start": (lambda event: heard.append(f"task {event.task_index}"),), "on_token": (broken, print)},
    )
    assert found[0] is keeper
    assert [Delivery([each]).interest for each in found] == [
        {"on_token"},
        {"on_task_start"},
        {"on_token"},
        {"on_token"},
    ]
    await delivered(Delivery(found), begun(2), token("a"))
    assert (heard, keeper.heard) == (["task 2"], ["a"])


async def test_one_callable_hears_all_its_events_in_order_when_it_is_registered_for_several() -> None:
    """S-EVT-22: one listener with one queue; the same kind registered twice is told twice."""
    keeper = Keeper()
    heard: list[str] = []

    def tell(event: TaskStartEvent | TokenEvent) -> None:
        heard.append(f"task {event.task_index}" if isinstance(event, TaskStartEvent) else event.token)

    found = listeners_of(
        [], {"on_task_start": (tell, keeper.on_token), "on_token": (tell, keeper.on_token, keeper.on_token)}
    )
    assert [wanted_by(each) for each in found] == [
        {"on_task_start", "on_token"},
        {"on_task_start", "on_token"},
        {"on_token"},
    ]
    await delivered(Delivery(found[:1]), begun(1), token("a"), begun(2), token("b"), begun(3))
    assert heard == ["task 1", "a", "task 2", "b", "task 3"]


class Ending(Keeper):
    """Keeps the end of the run, too."""

    def on_run_ended(self, run_id: str, exit_reason: ExitReason) -> None:
        self.heard.append(f"{run_id} {exit_reason}")


class BrokenEnding(Ending):
    """Raises at the end."""

    def on_run_ended(self, run_id: str, exit_reason: ExitReason) -> None:
        raise ValueError(run_id + exit_reason)


async def test_the_end_of_a_run_is_told_behind_its_events(caplog: pytest.LogCaptureFixture) -> None:
    """S-EVT-23: to those who take it, on their own threads, also where the run failed; what they raise is logged."""
    ending, plain, broken = Ending(), Keeper(), BrokenEnding()
    delivery = Delivery([ending, plain, broken])
    delivery.emit(token("a"))
    delivery.end("run", ExitReason.ERROR)
    await delivery.close()
    assert (ending.heard, plain.heard, broken.heard) == (["a", "run error"], ["a"], ["a"])
    assert len(ending.threads) == 1
    assert "Listener BrokenEnding.on_run_ended raised" in caplog.text
