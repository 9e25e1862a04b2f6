"""Inputs in texts that user code made of data."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ensemble_ray.definition.fields import braced_texts, fill_inputs

INPUTS = {"topic": "SECRET", "language": "Czech"}


class _Model(BaseModel):
    text: str


@dataclass(slots=True)
class _Row:
    texts: list[str]


class _Plain:
    def __init__(self, text: str) -> None:
        self.model = _Model(text=text)
        self.owner = self


@pytest.mark.parametrize(
    "item",
    [
        "a {topic}.",
        b"a {topic}.",
        {"a {topic}.": 1},
        [1, {"b": ("a {topic}.",)}],
        {"a {topic}."},
        _Model(text="a {topic}."),
        _Row(["a {topic}."]),
        _Plain("a {topic}."),
        Path("a {topic}."),
    ],
)
def test_texts_of_an_item_are_found_wherever_it_has_them(item: object) -> None:
    """S-MR-203: in keys, elements and attributes."""
    assert braced_texts(item) == ("a {topic}.",)


@pytest.mark.parametrize("item", [None, 5, 1.5, "a {} {1, 2} {not a name}", [], object(), int, print])
def test_item_has_no_texts_when_nothing_in_it_is_a_name_in_braces(item: object) -> None:
    """S-MR-203."""
    assert braced_texts(item) == ()


def test_texts_are_found_once_when_an_item_contains_itself() -> None:
    """S-MR-203."""
    item: list[object] = ["{a}"]
    item.append(item)
    assert braced_texts(item) == ("{a}",)


@pytest.mark.parametrize(
    ("text", "item", "filled"),
    [
        ("Review: {item}", "const f = {topic}", "Review: const f = {topic}"),
        ("On {topic}: {item}", "const f = {topic}", "On SECRET: const f = {topic}"),
        ("On {topic}: {item}", "{{topic}} {topic}!", "On SECRET: {{topic}} {topic}!"),
        ("Into {language}: {item}", "The {language} word.", "Into Czech: The {language} word."),
        ("{item} (on {topic})", "x = {topic}; y = {other}", "x = {topic}; y = {other} (on SECRET)"),
        ("On {topic}: {item}", {"text": "a\n'{topic}' é"}, "On SECRET: {item}"),
        ("On {topic}: {json}", {"text": 'a\n"{topic}" é'}, "On SECRET: {json}"),
        # Cut, stripped, or only a part of it.
        ("On {topic}: {cut}", "This is about {topic}, and about more", "On SECRET: This is about {topic}, and"),
        ("On {topic}: {words}", "This is about\n  {topic} and more", "On SECRET: This is about {topic} and more"),
        # It could be either: it stays.
        ("{topic}: {item}", "{topic}", "{topic}: {topic}"),
        ("{unknown} {{topic}}", "plain", "{unknown} {{topic}}"),
        ('{"a": {topic}}', "plain", '{"a": SECRET}'),
    ],
)
def test_inputs_are_filled_in_beside_what_the_item_says(text: str, item: Any, filled: str) -> None:
    """S-MR-117, S-MR-203: as the item is shown, as Python's or JSON's text, or in part."""
    shown = {
        "{item}": str(item),
        "{json}": json.dumps(item, ensure_ascii=False),
        "{cut}": str(item)[:26],
        "{words}": " ".join(str(item).split()),
    }
    for name, value in shown.items():
        text, filled = text.replace(name, value), filled.replace(name, value)
    assert fill_inputs(text, INPUTS, braced_texts(item)) == filled


@given(
    st.lists(st.sampled_from(["{topic}", "{", "}", "{{", "}}", "topic", " ", "a", "\n", "'"]), max_size=12).map("".join)
)
def test_item_keeps_its_text_whatever_it_says(item: str) -> None:
    """S-MR-203: alone in a text, behind one, and in front of one."""
    data = braced_texts(item)
    assert fill_inputs(f"Review this: {item}", INPUTS, data) == f"Review this: {item}"
    assert fill_inputs(f"Review this: {item}. On {{language}}.", INPUTS, data) == f"Review this: {item}. On Czech."
    assert fill_inputs(f"Review this: {[item]}", INPUTS, data) == f"Review this: {[item]}"
