"""What goes to the streams, and how."""

from __future__ import annotations

import json
import logging

import pytest

from ensemble_ray.cli.view.terminal import SafeFormatter, say, screen_line, show, show_answer, show_json

HOSTILE = "\x1b[2J\u202e\ud83d"


def test_every_stream_gets_what_it_can_show(capsys: pytest.CaptureFixture[str]) -> None:
    """S-SEC-60, S-SEC-61: views and notes are safe wherever they go; an answer that nobody watches is data."""
    show(HOSTILE)
    show_answer(HOSTILE)
    say(HOSTILE)
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
