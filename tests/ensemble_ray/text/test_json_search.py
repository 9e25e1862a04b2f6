"""The first JSON value in a text, found with a bounded amount of work."""

from __future__ import annotations

import re

import pytest

from ensemble_ray.text.answers import FoundJson, find_json, iter_json

_ANY = re.compile(r"[\[{]")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("no brackets", None),
        ("a [b] {c}", None),
        ('so: {"a": [1]} and [2]', FoundJson({"a": [1]}, 4, 14)),
        ('[x {"a": 1}', FoundJson({"a": 1}, 3, 11)),
        ("[" * 100_000, None),
        ('{"a":' * 100_000, None),
        ("[" + "9" * 5000 + "]", None),
        ('["open {}', FoundJson({}, 7, 9)),
    ],
)
def test_first_value_that_decodes_is_found(text: str, found: FoundJson | None) -> None:
    """S-SEC-21, S-SEC-22."""
    assert find_json(text, _ANY) == found


def test_all_values_are_found_each_once() -> None:
    """S-OUT-12: not those inside of others, nor inside the part of a broken one that decodes."""
    text = '{"a": {"b": 1}} [x] [2] {"c": {"d": 3}, oops {"e": 4}'
    assert [found.value for found in iter_json(text, _ANY)] == [{"a": {"b": 1}}, [2], {"e": 4}]


def test_search_ends_when_it_has_read_the_text_eight_times_in_vain() -> None:
    """S-SEC-22: what comes after is not looked for."""
    rest = "9" * 10_000 + "{}"
    assert find_json("[" * 8 + rest, _ANY) is not None
    assert find_json("[" * 12 + rest, _ANY) is None
