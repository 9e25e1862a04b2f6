"""Lines of agents' processes on their way to the driver."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence

import pytest

from ensemble_ray.actors.driver.driver_connection import LineListener, show_line
from ensemble_ray.actors.link.wire import LineBudget, LineService, LogLine
from ensemble_ray.actors.worker.log_forwarding import LineForwarder
from ensemble_ray.process.context import log_context


class _Method:
    def __init__(self, method: object) -> None:
        self.remote = method


class Scheduler:
    """The scheduler's handle, with the service of this process behind it."""

    def __init__(self) -> None:
        self.service = LineService()
        for name in ("put_lines", "collect_lines", "drain_lines"):
            setattr(self, name, _Method(getattr(self.service, name)))


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    """What a forwarder listens to in this process is as before after the test."""
    kept, handlers = (sys.stdout, sys.stderr), list(logging.getLogger().handlers)
    yield
    sys.stdout, sys.stderr = kept
    for handler in set(logging.getLogger().handlers) - set(handlers):
        logging.getLogger().removeHandler(handler)


def test_a_second_has_room_for_so_many_lines() -> None:
    """S-SET-57: those beyond are counted, and told once."""
    budget = LineBudget(2)
    assert [budget.admit(at) for at in (0.0, 0.1, 0.2, 0.9, 1.0)] == [True, True, False, False, True]
    assert (budget.reset_left_out(), budget.reset_left_out()) == (2, 0)


async def _said(run_id: str, scheduler: Scheduler) -> Sequence[LogLine]:
    return await scheduler.service.drain_lines(run_id)


async def test_prints_and_warnings_are_forwarded_with_their_role(capsys: pytest.CaptureFixture[str]) -> None:
    """S-SET-57: of this run alone; the process's own streams have them too."""
    scheduler = Scheduler()
    forwarder = LineForwarder(scheduler)
    forwarder.open("run")
    with log_context({"ensemble.id": "run", "agent.role": "Writer"}):
        print("half ", end="")  # noqa: T201  as user code does
        print("line\nred \x1b[31m")  # noqa: T201  as user code does
        print("to error", file=sys.stderr)  # noqa: T201  as user code does
        logging.getLogger("mine").warning("careful: %s", "x" * 5000)
        logging.getLogger("mine").info("unheard")
        logging.getLogger("ray.core").warning("not ours")
    with log_context({"ensemble.id": "other", "agent.role": "Writer"}):
        print("elsewhere")  # noqa: T201  as user code does
    await forwarder.flush()
    first, *others = await _said("run", scheduler)
    assert first == LogLine(text="half line", agent_role="Writer")
    assert [each.text for each in others][:2] == ["red \\x1b[31m", "to error"]
    (logged,) = others[2:]
    assert (logged.logger, logged.level, logged.template) == ("mine", logging.WARNING, "careful: %s")
    assert len(logged.text) < 1100
    assert await _said("other", scheduler) == ()
    streams = capsys.readouterr()
    assert "half line\n" in streams.out
    assert "careful" in streams.err


async def test_a_flood_is_cut_with_a_word_about_it() -> None:
    """S-SET-57: twenty lines of a second, and how many there were besides."""
    scheduler = Scheduler()
    forwarder = LineForwarder(scheduler, clock=lambda: 5.0)
    forwarder.open("run")
    for number in range(100):
        print(number)  # noqa: T201  as user code does
    await asyncio.sleep(0)
    await forwarder.flush()
    texts = [each.text for each in await _said("run", scheduler)]
    assert texts[:20] == [str(number) for number in range(20)]
    assert texts[20:] == ["80 more lines were left out; the logs of Ray have all"]


async def test_nothing_is_forwarded_when_the_run_is_over() -> None:
    """S-SET-57: a process that is kept for the next run is heard by nobody."""
    scheduler = Scheduler()
    forwarder = LineForwarder(scheduler)
    forwarder.open("run")
    forwarder.close("run")
    print("late")  # noqa: T201  as user code does
    await forwarder.flush()
    assert await _said("run", scheduler) == ()


async def test_the_listener_shows_all_lines_when_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-57: those that were told before it left, each once and in order."""
    scheduler = Scheduler()
    listener = LineListener(scheduler, "run")
    for number in range(5):
        await scheduler.service.put_lines("run", [LogLine(text=str(number), agent_role="A")])
        await asyncio.sleep(0)
    await listener.detach(is_gone=False)
    assert [each.getMessage() for each in caplog.records] == [f"A: {number}" for number in range(5)]


async def test_a_listener_that_has_the_last_lines_does_not_ask_for_them(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-57: they come with the run's end, which ends the call that waits for lines; it is not made again."""
    scheduler = Scheduler()
    assert not scheduler.service.is_listening("run")
    listener = LineListener(scheduler, "run")
    await asyncio.sleep(0)
    assert scheduler.service.is_listening("run")
    await scheduler.service.put_lines("run", [LogLine(text="last", agent_role="A")])
    last = await scheduler.service.drain_lines("run")
    scheduler.drain_lines = scheduler.collect_lines = None  # type: ignore[attr-defined]  # a call of either would fail
    listener.keep_last(last)
    await listener.detach(is_gone=False)
    assert [each.getMessage() for each in caplog.records] == ["A: last"]


def test_a_record_keeps_its_logger_and_level(caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-57: and the traceback of user code."""
    show_line(LogLine(text="no", agent_role="A", logger="mine", level=logging.ERROR, traceback='File "team.py"'))
    (record,) = caplog.records
    assert (record.name, record.levelname, record.getMessage()) == ("mine", "ERROR", "A: no")
    assert record.exc_text == 'File "team.py"'


async def test_lines_of_runs_that_nobody_hears_do_not_pile_up() -> None:
    """S-SET-57: a thousand lines of a run, and sixty-four runs."""
    scheduler = LineService()
    for number in range(100):
        await scheduler.put_lines(str(number), [LogLine(text=str(each), agent_role="") for each in range(1500)])
    assert await scheduler.drain_lines("0") == ()
    assert len(await scheduler.drain_lines("99")) == 1000
    assert len(scheduler._boxes) <= 64


async def test_lines_are_kept_for_all_drivers_that_listen_however_many() -> None:
    """S-SET-57, S-CLU-70: hundreds of runs at once; of those that nobody asks for, the newest are kept."""
    service = LineService()
    listening = [asyncio.ensure_future(service.collect_lines(f"run-{number}", 60.0)) for number in range(200)]
    await asyncio.sleep(0)
    for number in range(100):
        await service.put_lines(f"left-{number}", [LogLine(text="x", agent_role="")])
    assert not any(each.done() for each in listening)
    await service.put_lines("run-0", [LogLine(text="heard", agent_role="")])
    assert [each.text for each in await listening[0] or ()] == ["heard"]
    kept = [number for number in range(100) if await service.drain_lines(f"left-{number}")]
    assert kept == list(range(100 - len(kept), 100))
    assert len(kept) in {63, 64}
    for number in range(1, 200):
        await service.drain_lines(f"run-{number}")
    assert await asyncio.gather(*listening[1:]) == [None] * 199


async def test_what_no_run_says_in_particular_is_told_once_when_several_share_a_process() -> None:
    """S-SET-57, S-CLU-71: they are of one program, whose log it comes to; those of one run come to that run."""
    scheduler = Scheduler()
    forwarder = LineForwarder(scheduler)
    for run_id in ("first", "second"):
        forwarder.open(run_id)
    print("a thread")  # noqa: T201  as user code does
    with log_context({"ensemble.id": "second", "agent.role": "Writer"}):
        print("a task")  # noqa: T201  as user code does
    await forwarder.flush()
    assert [[each.text for each in await _said(run_id, scheduler)] for run_id in ("first", "second")] == [
        ["a thread"],
        ["a task"],
    ]
