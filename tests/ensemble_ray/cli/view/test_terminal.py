"""What goes to the streams, and how."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from ensemble_ray.cli.view.terminal import (
    SafeFormatter,
    guard_streams,
    screen_line,
    show,
    show_answer,
    show_json,
    write_note,
)

HOSTILE = "\x1b[2J\u202e\ud83d"


def test_every_stream_gets_what_it_can_show(capsys: pytest.CaptureFixture[str]) -> None:
    """S-SEC-60, S-SEC-61: views and notes are safe wherever they go; an answer that nobody watches is data."""
    show(HOSTILE)
    show_answer(HOSTILE)
    write_note(HOSTILE)
    printed, said = capsys.readouterr()
    assert printed == "\\x1b[2J\\u202e\\ud83d\n\x1b[2J\u202e\\ud83d\n"
    assert said == "\\x1b[2J\\u202e\\ud83d\n"


def test_json_holds_whatever_the_data_is(capsys: pytest.CaptureFixture[str]) -> None:
    """S-SEC-63: what JSON has no number for, and values of a program, are texts; so is what steers a terminal."""

    class Own:
        def __str__(self) -> str:
            return "own"

    show_json({"hostile": HOSTILE, "number": float("nan"), "value": Own()})
    printed = capsys.readouterr().out

    def refuse(name: str) -> object:
        raise ValueError(name)

    assert json.loads(printed, parse_constant=refuse) == {"hostile": HOSTILE, "number": "NaN", "value": "own"}
    assert printed.isascii()


def test_a_log_record_is_safe_with_its_traceback() -> None:
    """S-SEC-64: the error's text stands in both."""
    error = OSError(HOSTILE)
    record = logging.LogRecord("n", logging.ERROR, "p", 1, "Wrong: %s", (HOSTILE,), (OSError, error, None))
    text = SafeFormatter().format(record)
    assert text.count(r"\x1b[2J\u202e\ud83d") == 2
    assert text.replace("\n", "").isprintable()


def test_one_line_is_one_line_and_no_longer_than_asked() -> None:
    """S-SEC-60: escapes count."""
    assert screen_line("a\nb\r\nc\x1b", 80) == r"a b c\x1b"
    assert screen_line("\x1b" * 100, 10) == "\\x1b\\x1b\\…"


UNUSUAL = "na\u00efve \u2026 \u4e2d \U0001f600"


def guarded(monkeypatch: pytest.MonkeyPatch, encoding: str) -> tuple[io.TextIOWrapper, io.TextIOWrapper]:
    """Standard output and error of a program with that encoding, after its start."""
    output, error = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    for name in ("sys.excepthook", "sys.unraisablehook", "threading.excepthook", "warnings.formatwarning"):
        monkeypatch.setattr(name, print)  # so that they are restored
    monkeypatch.setattr("logging.lastResort", None)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", error)
    guard_streams()
    return output, error


def written(stream: io.TextIOWrapper) -> str:
    """What a reader of the same encoding sees."""
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode(stream.encoding)


ENCODINGS = pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-8"])


@ENCODINGS
def test_what_an_encoding_lacks_is_an_escape(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """S-LLM-34: in results, answers and notes; nothing is lost, and nothing fails."""
    with monkeypatch.context() as patched:
        output, error = guarded(patched, encoding)
        show(UNUSUAL)
        show_answer(UNUSUAL)
        write_note(UNUSUAL)
    expected = UNUSUAL.encode(encoding, "backslashreplace").decode(encoding)
    assert written(output) == f"{expected}\n{expected}\n"
    assert written(error) == f"{expected}\n"


@ENCODINGS
def test_json_is_the_same_data_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """S-LLM-34, S-SEC-63: JSON has escapes of its own."""
    with monkeypatch.context() as patched:
        output, _ = guarded(patched, encoding)
        show_json({UNUSUAL: [UNUSUAL, HOSTILE]})
    assert json.loads(written(output)) == {UNUSUAL: [UNUSUAL, HOSTILE]}


def test_json_is_written_to_a_stream_without_an_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-LLM-34: a program that calls a command may collect its results as text."""
    collected = io.StringIO()
    monkeypatch.setattr("sys.stdout", collected)
    show_json({"word": UNUSUAL})
    assert json.loads(collected.getvalue()) == {"word": UNUSUAL}
