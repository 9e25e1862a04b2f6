"""Lines that calls log and print: each in the log of its own call, and where they went before."""

# ruff: noqa: T201  what is printed is the subject

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import logging
import sys
import threading
from typing import Any

import pytest

from ensemble_ray.process import context
from ensemble_ray.process.context import CallLog

log = logging.getLogger("tests.call_log")


@pytest.fixture(autouse=True)
def _no_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before may have left calls that never end."""
    monkeypatch.setattr(context, "_output", context._ObservedOutput())
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)


async def test_lines_are_in_the_log_of_their_call_when_calls_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    """S-TOOL-35: in tasks and in threads of the same time; they also go where they went before, in the same order."""
    both_print = threading.Barrier(2)

    def work(name: str) -> None:
        print(f"{name} in ", end="")
        both_print.wait(10)
        print("a thread")

    async def call(name: str) -> tuple[str, ...]:
        with CallLog() as lines:
            print(f"{name} begins")
            await asyncio.sleep(0)
            await asyncio.to_thread(work, name)
            log.warning("%s warns", name)
        print(f"{name} is over")
        return lines.lines

    logs = await asyncio.gather(call("one"), call("two"))
    assert logs == [
        (f"{name} begins", f"{name} in a thread", f"WARNING tests.call_log: {name} warns") for name in ("one", "two")
    ]
    printed = capsys.readouterr().out
    assert printed.startswith("one begins\ntwo begins\n")
    assert printed.endswith("is over\n")
    assert len(printed) == sum(len(f"{name} begins{name} in a thread{name} is over") + 3 for name in ("one", "two"))


def test_a_program_is_as_without_it_when_a_call_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-TOOL-35: the same stream, no handler, Python's output of a logger without handlers; afterwards no trace of it."""
    monkeypatch.setattr(logging.root, "handlers", [])
    stream, factory, attributes = sys.stdout, logging.getLogRecordFactory(), dict(vars(sys.stdout))
    with CallLog() as lines:
        assert sys.stdout is stream
        assert not log.hasHandlers()
        log.warning("to standard error")
        assert sys.stdout.write("four") == 4
        with pytest.raises(TypeError, match="str"):
            stream.write(4)  # type: ignore[arg-type]  the stream's own error
    assert lines.lines == ("WARNING tests.call_log: to standard error", "four")
    assert capsys.readouterr() == ("four", "to standard error\n")
    assert (logging.getLogRecordFactory(), vars(stream)) == (factory, attributes)
    with CallLog() as silent:
        pass
    assert silent.lines == ()


def test_nothing_is_observed_any_more_when_a_call_is_closed_elsewhere() -> None:
    """S-TOOL-35: as the garbage collector closes a call whose loop has ended."""

    async def call() -> None:
        with CallLog():
            await asyncio.sleep(0)

    before, abandoned = context._output.calls, call()
    contextvars.copy_context().run(abandoned.send, None)
    assert context._output.calls == before + 1
    abandoned.close()
    assert context._output.calls == before


def test_a_log_is_bounded_when_a_call_prints_a_lot(capsys: pytest.CaptureFixture[str]) -> None:
    """S-TOOL-35: 25 lines at both ends, of 500 characters, and how many are between them."""
    with CallLog() as lines:
        print("x" * 1000)
        print()
        print("\n".join(f"line {number}" for number in range(2000)))
        log.error("the last")
    assert lines.lines[0] == "x" * 499 + "…"
    assert lines.lines[1:25] == ("", *(f"line {number}" for number in range(23)))
    assert lines.lines[25] == "1,953 more lines"
    assert lines.lines[26:] == (*(f"line {number}" for number in range(1976, 2000)), "ERROR tests.call_log: the last")
    assert len(capsys.readouterr().out) > 10_000


@pytest.mark.parametrize("count", [1, 24, 25, 26, 49, 50, 51, 52, 76, 200])
@pytest.mark.parametrize("is_one_print", [True, False])
def test_no_line_is_lost_or_twice_at_the_limits(count: int, is_one_print: bool) -> None:  # noqa: FBT001
    """S-TOOL-35: whatever the number of prints."""
    texts = [f"line {number}" for number in range(count)]
    with CallLog() as lines:
        for text in ["\n".join(texts)] if is_one_print else texts:
            print(text)
    more = count - 50
    between = () if more <= 0 else (f"{more} more {'line' if more == 1 else 'lines'}",)
    assert lines.lines == (tuple(texts) if more <= 0 else (*texts[:25], *between, *texts[-25:]))


def test_records_that_cannot_be_formatted_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-TOOL-35: their text is that of the program; an error is named beside its message."""
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with CallLog() as lines:
        log.warning("%d of %s", "one")  # noqa: PLE1206  the point of this test
        log.error("It failed\nin two lines", exc_info=ValueError("broken"))
        logging.makeLogRecord({"msg": "a copy"})
    assert lines.lines == (
        "WARNING tests.call_log: %d of %s",
        "ERROR tests.call_log: It failed",
        "in two lines (ValueError: broken)",
    )


def test_a_program_may_replace_the_output_while_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-TOOL-35: each of them is left as the program set it, and no line is there twice."""
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", first)
    before = logging.getLogRecordFactory()

    def chained(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = inner(*args, **kwargs)
        record.chained = True
        return record

    with CallLog() as outer:
        inner = logging.getLogRecordFactory()
        logging.setLogRecordFactory(chained)
        with contextlib.redirect_stdout(second), CallLog() as lines:
            print("inside")
            log.warning("warned")
        print("outside")
    assert (lines.lines, outer.lines) == (("inside", "WARNING tests.call_log: warned"), ("outside",))
    assert (first.getvalue(), second.getvalue()) == ("outside\n", "inside\n")
    assert logging.getLogRecordFactory() is chained
    with CallLog() as again:
        log.warning("once")
    assert again.lines == ("WARNING tests.call_log: once",)
    logging.setLogRecordFactory(before)
    with CallLog() as unchained:
        log.warning("once")
    assert (unchained.lines, logging.getLogRecordFactory()) == (("WARNING tests.call_log: once",), before)


@pytest.mark.parametrize("stream", [None, object()])
def test_a_process_may_have_no_output(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-TOOL-35: its log lines are there all the same."""
    monkeypatch.setattr(sys, "stdout", stream)
    with CallLog() as lines:
        log.warning("warned")
    assert lines.lines == ("WARNING tests.call_log: warned",)


def test_a_log_is_over_when_its_call_is() -> None:
    """S-TOOL-35: what a task or thread prints that the call left behind, is in no log."""
    with CallLog() as lines:
        left = contextvars.copy_context()
        print("in time")
    with CallLog() as other:
        left.run(print, "too late")
    assert (lines.lines, other.lines) == (("in time",), ())
