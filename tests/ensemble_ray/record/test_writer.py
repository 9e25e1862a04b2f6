"""The thread that writes records."""

import logging
import threading

import pytest

from ensemble_ray.record.sqlite.journal import GroupWriter


class Book:
    """Something to write."""

    def __init__(self, error: Exception | None = None) -> None:
        self.written = 0
        self.done = threading.Event()
        self.error = error

    def write_out(self) -> None:
        self.written += 1
        self.done.set()
        if self.error is not None:
            raise self.error


def _writers() -> set[threading.Thread]:
    """Threads that write records; others of this process come and go."""
    return {thread for thread in threading.enumerate() if thread.name == "ensemble-ray-record"}


def test_everybody_who_asked_is_written_when_somebody_hurries() -> None:
    """At once, whatever the group's time."""
    writer = GroupWriter(group_s=1000)
    first, second = Book(), Book()
    writer.ask(first)
    writer.ask(second)
    writer.hurry()
    assert first.done.wait(60)
    assert second.done.wait(60)


def test_group_is_written_when_its_time_is_over() -> None:
    """Without anybody hurrying."""
    writer = GroupWriter(group_s=0.001)
    book = Book()
    writer.ask(book)
    assert book.done.wait(60)


def test_finish_waits_for_everything_that_was_asked() -> None:
    """For the end of the process."""
    writer = GroupWriter(group_s=1000)
    books = [Book() for _ in range(10)]
    for book in books:
        writer.ask(book)
    writer.finish(60)
    assert [book.written for book in books] == [1] * 10


def test_finish_returns_when_nothing_was_ever_written() -> None:
    """No thread is started for it."""
    before = _writers()
    GroupWriter().finish()
    assert _writers() == before


def test_others_are_written_when_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The thread serves everybody."""
    writer = GroupWriter(group_s=1000)
    bad, good = Book(RuntimeError("broken")), Book()
    with caplog.at_level(logging.ERROR):
        writer.ask(bad)
        writer.ask(good)
        writer.finish(60)
    assert good.written == 1
    assert "could not be written" in caplog.text


def test_thread_is_a_daemon() -> None:
    """A disk that hangs does not hold the process's exit."""
    writer = GroupWriter(group_s=1000)
    found: list[bool] = []

    class Look:
        def write_out(self) -> None:
            found.append(threading.current_thread().daemon)

    writer.ask(Look())
    writer.finish(60)
    assert found == [True]
