"""Texts that others wrote: fit for UTF-8, and fit for a log line."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import SurrogateJoiner, one_line, whole_data, whole_json, whole_text

ROOT = Path(__file__).resolve().parents[3]
#: Texts with halves of surrogate pairs among everything else.
TEXTS = st.text(st.one_of(st.characters(), st.sampled_from('\ud800\udbff\udc00\udfff\ud83d\ude00\\u{}"')))


@given(TEXTS)
def test_any_text_can_be_encoded_when_it_is_made_whole(text: str) -> None:
    """S-SEC-56: and one that could be before is the same."""
    whole = whole_text(text)
    assert whole.encode().decode() == whole
    assert whole_text(whole) == whole
    if not re.search("[\ud800-\udfff]", text):
        assert whole is text


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("caf\u00e9", "caf\u00e9"),
        ("a\ud800b", "a\ufffdb"),
        ("\udcff", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
    ],
)
def test_halves_are_replaced_and_pairs_joined_when_a_text_holds_them(text: str, whole: str) -> None:
    """S-SEC-56: U+FFFD for a half."""
    assert whole_text(text) == whole
    assert whole_data({text: [text, 1, None, (text,)]}) == {whole: [whole, 1, None, (text,)]}


def test_data_stays_as_it_is_when_it_is_nested_beyond_the_stack() -> None:
    """S-SEC-56: never another error."""
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert whole_data(deep) is deep
    while deep:  # freed level by level: the interpreter's own way down is short
        deep = deep.pop()  # type: ignore[assignment]


@pytest.mark.heavy
@given(st.recursive(TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8))
def test_json_names_no_halves_when_it_is_made_whole(value: object) -> None:
    """S-SEC-56: escapes of halves are replaced, of pairs kept; an escaped backslash is no escape."""
    whole = json.loads(whole_json(json.dumps(value)))
    assert whole == json.loads(json.dumps(whole_data(value)))
    assert json.dumps(whole, ensure_ascii=False).encode()


@pytest.mark.parametrize("text", [r"\ud800" * 40_000, "\\" * 200_000, r"\ud8" * 50_000, '"\\ud800\\' * 30_000])
def test_json_is_made_whole_in_linear_time_when_it_is_all_escapes(text: str) -> None:
    """S-SEC-56: what is no JSON is no exception here."""
    assert whole_json(text).encode()


@given(TEXTS, st.integers(1, 5))
def test_pieces_make_the_same_text_when_it_comes_cut(text: str, size: int) -> None:
    """S-SEC-56: two halves in two pieces are one character; nothing is held but half of a pair."""
    pieces = SurrogateJoiner()
    fed = [pieces.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(fed) + pieces.finish() == whole_text(text)
    for piece in fed:
        piece.encode()


@given(TEXTS, st.integers(1, 50))
def test_a_text_is_one_printable_line_when_it_is_shown(text: str, limit: int) -> None:
    """S-SEC-58: bounded, and it says how long the whole is."""
    line = one_line(text, limit)
    assert line.isprintable()
    assert one_line(line) is line
    assert ("characters in all]" in line) >= (len(text) > limit)
    if text.isprintable() and len(text) <= limit:
        assert line == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\r\n\tb", r"a\r\n\tb"),
        ("\x1b[31mred\x07\x9b", r"\x1b[31mred\x07\x9b"),
        ("a\u2028b\u202ec\U000e0001", r"a\u2028b\u202ec\U000e0001"),
        ("half \ud800", "half \ufffd"),
        ("x" * 1001, "x" * 1000 + "... [1001 characters in all]"),
    ],
)
def test_what_a_terminal_or_a_reader_would_obey_is_escaped_when_shown(text: str, line: str) -> None:
    """S-SEC-58: line breaks of every kind, escape sequences, directions."""
    assert one_line(text) == line


class Unspeakable:
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_warnings_are_bounded_lines_when_others_wrote_what_they_show(caplog: pytest.LogCaptureFixture) -> None:
    """S-SEC-58: from WARNING on, whatever the arguments are; below it everything is as it was given."""
    log = bounded_logger("ensemble_ray.of_this_test")
    foreign = "first\nERROR forged\x1b[2J" + "x" * 50_000
    with caplog.at_level(logging.INFO, "ensemble_ray.of_this_test"):
        log.warning("%s said %d times: %s", "me\n", 3, foreign)
        log.error("%s and %s", ValueError(foreign), Unspeakable())
        log.warning("%s", one_line("y" * 3000, None))
        log.info("%s", foreign)
        log.debug("%s", foreign)
    first, second, third, fourth = caplog.records
    assert first.getMessage().startswith(r"me\n said 3 times: first\nERROR forged\x1b[2Jxxx")
    assert second.getMessage().endswith("characters in all] and <Unspeakable>")
    for record in (first, second):
        assert len(record.getMessage()) < 1100
        assert record.getMessage().isprintable()
    assert third.getMessage() == "y" * 3000
    assert fourth.getMessage() == foreign
    assert {record.filename for record in caplog.records} == {Path(__file__).name}


def test_every_logger_of_the_library_is_a_bounded_one() -> None:
    """S-SEC-58: a module that logs says `bounded_logger(__name__)`."""
    sources = [path for room in ("ensemble_ray", "actors", "serve") for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 300
    plain = [str(path) for path in sources if "logging.getLogger(__name__)" in path.read_text(encoding="utf-8")]
    assert plain == []
