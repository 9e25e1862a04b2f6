"""Foreign text for a terminal: what it would obey is shown, what is only unusual stays."""

from __future__ import annotations

import json
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray.text.foreign_text import escape_controls, escape_json, escape_surrogates

_ALL = [chr(number) for number in range(0x110000)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("ab\rcd\x08", r"ab\rcd\x08"),
        ("one\r\ntwo\tthree\n", "one\r\ntwo\tthree\n"),
        ("\u202etxt.exe\u2066", r"\u202etxt.exe\u2066"),
        ("a\u2028b\u2029c\u200b\ufeff", r"a\u2028b\u2029c\u200b\ufeff"),
        ("half \ud83d", r"half \ud83d"),
        ("tag \U000e0041", r"tag \U000e0041"),
        # What people write stays: accents, blanks and joiners of other scripts, emoji of several parts, private signs.
        ("é\u00a0ü\u3000字 \u0645\u06cc\u200c\u062e 👩\u200d💻 \ue0b0 \\x1b", "é\u00a0ü\u3000字 \u0645\u06cc\u200c\u062e 👩\u200d💻 \ue0b0 \\x1b"),
    ],
)  # fmt: skip
def test_a_text_shows_what_a_terminal_would_obey(text: str, shown: str) -> None:
    """S-SEC-60: as Python writes it."""
    assert escape_controls(text) == shown


@pytest.mark.heavy
def test_no_control_character_is_forgotten() -> None:
    """S-SEC-60: of all of Unicode, what steers or hides is escaped, and nothing that can be seen is."""
    escaped = {each for each in _ALL if escape_controls(each) != each}
    assert {each for each in _ALL if unicodedata.category(each) in {"Cc", "Cs", "Zl", "Zp"}} - escaped == {"\t", "\n"}
    assert {each for each in _ALL if unicodedata.bidirectional(each) in _OVERRIDES} <= escaped
    assert {unicodedata.category(each) for each in escaped} == {"Cc", "Cf", "Cs", "Zl", "Zp", "Cn"}


_OVERRIDES = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@pytest.mark.heavy
@settings(max_examples=30)
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_stays_the_same_data(data: object) -> None:
    """S-SEC-63: the escapes are JSON's own."""
    text = escape_json(json.dumps(data, ensure_ascii=False, indent=2))
    assert json.loads(text) == data
    assert escape_controls(text) == text
    text.encode("utf-8")


@pytest.mark.heavy
def test_every_character_passes_through_json() -> None:
    """S-SEC-63: also those that only halves of pairs and five digits can write."""
    assert json.loads(escape_json(json.dumps(_ALL, ensure_ascii=False))) == _ALL


def test_halves_of_pairs_alone_are_escaped_in_data() -> None:
    """S-SEC-61: what a stream can encode stays as it was given."""
    assert escape_surrogates("\x1b[2J \ud83d 😀") == "\x1b[2J \\ud83d 😀"


@pytest.mark.heavy
@pytest.mark.parametrize("text", ["\x1b" * 200_000, "\r" * 200_000, "a" * 200_000, "\r\n" * 100_000])
def test_a_long_text_costs_in_proportion(text: str) -> None:
    """S-SEC-60: a model chooses how long it is, and what repeats in it."""
    began = time.process_time()
    escape_controls(text)
    escape_json(text)
    assert time.process_time() - began < 5.0
