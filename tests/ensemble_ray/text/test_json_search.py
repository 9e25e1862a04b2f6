"""The first JSON value in a text, found with a bounded amount of work."""

from __future__ import annotations

import re

import pytest

from ensemble_ray.text.json_search import FoundJson, find_json

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


@pytest.mark.parametrize("rest", ["1," * 5000, '"' + "a" * 10_000, "9" * 10_000])
def test_search_ends_when_it_has_read_the_text_eight_times_in_vain(rest: str) -> None:
    """S-SEC-22: what comes after is not looked for."""
    assert find_json("[" * 8 + rest.replace("{", "") + "{}", _ANY) is not None
    assert find_json("[" * 12 + rest + "{}", _ANY) is None
