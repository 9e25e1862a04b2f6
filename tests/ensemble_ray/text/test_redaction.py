"""What is found in texts, and what a text, JSON data and a stream look like after that."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from pydantic import BaseModel, Field

from ensemble_ray.text.redaction import WITHHELD, Redaction, StreamRedaction
from tests.attack.processor_time import processor_limit

KEY_BLOCK = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow/IBAA+KCAQEA\nabc=\n-----END RSA PRIVATE KEY-----"
#: (text, the value in it, its kind)
VALUES = (
    ("write to bob@corp.example now", "bob@corp.example", "EMAIL"),
    ("<a.b+c@sub.corp.example>", "a.b+c@sub.corp.example", "EMAIL"),
    ("jürgen@müller.example", "jürgen@müller.example", "EMAIL"),
    ("https://a.example/?m=bob%40corp.example&b=1", "bob%40corp.example", "EMAIL"),
    ("call +49 170 1234567 today", "+49 170 1234567", "PHONE"),
    ("Tel. 030 12345678.", "030 12345678", "PHONE"),
    ("(030) 123456-78", "(030) 123456-78", "PHONE"),
    ("card 4111 1111 1111 1111, exp", "4111 1111 1111 1111", "CARD"),
    ("card 4111-1111-1111-1111", "4111-1111-1111-1111", "CARD"),
    ("card 4111111111111111", "4111111111111111", "CARD"),
    ("amex 3782 822463 10005", "3782 822463 10005", "CARD"),
    ("IBAN DE89 3704 0044 0532 0130 00 BIC COBADEFF", "DE89 3704 0044 0532 0130 00", "IBAN"),
    ("iban gb29nwbk60161331926819.", "gb29nwbk60161331926819", "IBAN"),
    ("export K=sk-proj-abcDEF0123456789abcd", "sk-proj-abcDEF0123456789abcd", "KEY"),
    ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE", "KEY"),
    ("token ghp_0123456789abcdefghij0123456789abcdef", "ghp_0123456789abcdefghij0123456789abcdef", "KEY"),
    ("Authorization: Bearer abc.DEF-0123456789", "abc.DEF-0123456789", "KEY"),
    ("jwt eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK", "KEY"),
    (f"key:\n{KEY_BLOCK}\nend", KEY_BLOCK, "KEY"),
)
#: texts that look like values and are none
OTHERS = (
    "2024-01-15 at 10:45:00, 2026-11-30T09:36:29.123456+00:00",
    "0.301234567 and 3.14159265358979",
    "card 4111 1111 1111 1112",
    "DE88370400440532013000",
    "order 20240115 4711",
    "run 123e4567-e89b-12d3-a456-426614174000",
    "5d41402abc4b2a76b9719d911017c592",
    "an @ alone, @name and name@",
    "[EMAIL_0123456789ab] and <EMAIL_1f3a9c>",
    "the bearer of this letter",
    "risk-taking-and-asking-for-more",
)


def redaction(**options: object) -> Redaction:
    return Redaction(**{"secret": b"s" * 32, "salt": "run", "region": "DE", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "value", "kind"), VALUES, ids=[each[1][:20] for each in VALUES])
def test_a_value_is_replaced_when_its_pattern_is_on(text: str, value: str, kind: str) -> None:
    """S-RED-1, S-RED-3, S-RED-4: the rest of the text stays, and a clean text is clean."""
    found = redaction()
    cleaned = found.clean(text)
    before, after = text.split(value)
    assert re.fullmatch(rf"{re.escape(before)}\[{kind}_[0-9a-f]{{12}}\]{re.escape(after)}", cleaned)
    assert found.clean(cleaned) == cleaned
    assert found.restore(cleaned) == text


@pytest.mark.parametrize("text", OTHERS)
def test_a_text_stays_when_it_has_no_value(text: str) -> None:
    """S-RED-2: dates, decimals, wrong check digits, ids and placeholders."""
    assert redaction().clean(text) is text


def test_a_value_is_recognisable_within_one_run_alone_when_it_is_replaced() -> None:
    """S-RED-3: the same value has the same placeholder, and another one with another secret."""
    one, again, other = redaction(), redaction(), redaction(secret=b"t" * 32)
    assert one.clean("bob@corp.example, bob@corp.example") == ", ".join([again.clean("bob@corp.example")] * 2)
    assert one.clean("bob@corp.example") not in {other.clean("bob@corp.example"), one.clean("eve@corp.example")}


@pytest.mark.parametrize("value", [each[1] for each in VALUES if "Bearer" not in each[0]])
def test_json_stays_json_when_values_in_it_are_replaced(value: str) -> None:
    r"""S-RED-5: also behind escapes, such as the `\n` before a value."""
    data = {"text": f"a\n{value}\n\t{value} \u00fc", value: [value, 1, None]}
    for text in (json.dumps(data), json.dumps(data, ensure_ascii=False)):
        cleaned = redaction().clean_json(text)
        assert json.loads(cleaned).keys() != data.keys()
        assert value not in json.dumps(json.loads(cleaned), ensure_ascii=False)
    escaped = '{"to": "bob\\u0040corp.example"}'
    assert json.loads(redaction().clean_json(escaped))["to"].startswith("[EMAIL_")


@pytest.mark.parametrize(
    "part",
    ["a", "@", "a@", "a.", "0", "030 ", "DE89 ", "4111 ", "eyJ", "sk-", "Bearer ", "-----BEGIN PRIVATE KEY-----", "\\"],
)
def test_time_is_linear_when_a_text_is_hostile(part: str) -> None:
    """S-RED-6: a megabyte is searched; a quadratic pattern would need hours."""
    with processor_limit(60):
        redaction().clean(part * (300_000 // len(part)))


def test_the_first_group_is_replaced_when_an_expression_has_one() -> None:
    """S-RED-7: an expression without a group is replaced whole."""
    found = redaction(expressions={"case": r"CASE-\d{6}", "patient": r"Patient: (\w+ \w+)"})
    assert re.fullmatch(
        r"\[CASE_\w{12}\], Patient: \[PATIENT_\w{12}\]", found.clean("CASE-123456, Patient: Ann Example")
    )


def test_a_function_finds_values_when_it_is_a_pattern() -> None:
    """S-RED-7, S-RED-9: overlapping values are one."""

    def find(text: str) -> Iterator[tuple[int, int]]:
        at = text.find("Ann")
        if at >= 0:
            yield at, at + 7

    found = redaction(callables={"person": find})
    assert re.fullmatch(r"to \[PERSON_\w{12}\]rp.example", found.clean("to Annabel@corp.example")) is None
    assert re.fullmatch(r"to \[(PERSON|EMAIL)_\w{12}\]", found.clean("to Annabel@corp.example"))


@pytest.mark.parametrize("spans", [[(0, 99)], [("a", 1)], [5], None])
def test_the_text_is_withheld_when_a_function_fails(spans: object) -> None:
    """S-RED-8: the text may contain anything."""
    found = redaction(callables={"person": lambda _: spans})
    assert found.clean("Ann wrote") == WITHHELD
    assert "person" in found.failure


class Word(StrEnum):
    MAIL = "bob@corp.example"


@dataclass(frozen=True, slots=True)
class Plain:
    text: str


class Stored(Struct, frozen=True):
    text: str
    inner: Plain


class Parsed(BaseModel):
    mail: Annotated[str, Field(pattern="@")]
    tags: list[str]


def test_texts_of_data_are_replaced_when_they_have_values() -> None:
    """S-RED-31: no validation, no change of types; clean data is the same object."""
    found = redaction()
    mail, clean = "bob@corp.example", found.clean("bob@corp.example")
    parsed = Parsed(mail=mail, tags=[mail])
    assert found.clean_data(parsed).model_dump() == {"mail": clean, "tags": [clean]}
    assert parsed.mail == mail
    stored = Stored(mail, Plain(mail))
    assert found.clean_data(stored) == Stored(clean, Plain(clean))
    assert found.clean_data({mail: (mail, {mail}, 1, None, b"x")}) == {clean: (clean, {clean}, 1, None, b"x")}
    assert found.clean_data(Word.MAIL) is Word.MAIL
    for same in (Stored("a", Plain("b")), [1, "a"], {"a": ("b",)}, Parsed(mail="a@b.example", tags=[]).tags):
        assert found.clean_data(same) is same


def test_a_placeholder_is_restored_without_its_brackets_when_a_model_drops_them() -> None:
    """S-RED-50: unknown placeholders stay."""
    found = redaction()
    name = found.clean("bob@corp.example").strip("[]")
    assert found.restore(f"{name}, [{name}], [EMAIL_0123456789ab]") == (
        "bob@corp.example, bob@corp.example, [EMAIL_0123456789ab]"
    )
    assert json.loads(found.restore_json(json.dumps({"to": f"[{name}]"}))) == {"to": "bob@corp.example"}


@given(
    st.lists(st.sampled_from([*(each[0] for each in VALUES), " word ", "\n", "long " * 40]), max_size=12),
    st.lists(st.integers(1, 90), min_size=1, max_size=20),
)
def test_a_stream_is_the_clean_text_when_it_is_cut_anywhere(parts: list[str], sizes: list[int]) -> None:
    """S-RED-23: no value leaves in pieces."""
    text, found = " ".join(parts), redaction()
    stream, sent, at, turn = StreamRedaction(found), "", 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        sent += stream.feed(text[at : at + size])
        at, turn = at + size, turn + 1
    sent += stream.finish()
    assert sent == found.clean(text)


def test_words_of_a_stream_are_sent_early_when_no_expression_is_custom() -> None:
    """S-RED-23: with custom patterns the answer is one piece."""
    for found, is_early in ((redaction(), True), (redaction(expressions={"x": "zzz"}), False)):
        stream = StreamRedaction(found)
        assert bool("".join(stream.feed(word) for word in ["word "] * 100)) is is_early
        assert stream.finish().endswith("word ")
