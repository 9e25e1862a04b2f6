"""Passages for the demo: bounded, nothing lost, every source heard."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import ValidationError
from ensemble_ray.cli.demo import at_most_tokens, passages_of, select_passages, topics

LONGEST, MOST_TOKENS = 1900, 1500


#: Anything, and what places to cut are made of; repeated, since texts that are drawn by the character are seldom long.
_PIECES = st.text(max_size=40) | st.text(alphabet="ab \n.\u6f22", max_size=40)
_TEXTS = st.lists(st.tuples(_PIECES, st.integers(1, 300)), max_size=4).map(
    lambda repeated: "".join(piece * times for piece, times in repeated)
)


@pytest.mark.heavy
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(_TEXTS)
def test_no_passage_can_overflow_a_window(text: str) -> None:
    """Whatever the text is made of; and no character of it is lost but white space and rulers."""
    passages = list(passages_of("x", text))
    assert all(0 < len(each.text) <= LONGEST for each in passages)
    assert all(at_most_tokens(each.text) <= MOST_TOKENS for each in passages)
    kept = {char for each in passages for char in each.text}
    assert {char for char in text if char.isalnum()} <= kept


def test_texts_are_cut_at_paragraphs() -> None:
    """Where there are some; rulers under headings are left out."""
    paragraphs = [f"Paragraph {number}. " + "word " * 100 for number in range(6)]
    text = "Title\n=====\n\n" + "\n\n".join(paragraphs)
    passages = list(passages_of("book", text))
    assert [each.label for each in passages] == ["book, part 1", "book, part 2"]
    assert passages[0].text.startswith("Title\n\nParagraph 0.")
    assert all(each.text.startswith(("Title", "Paragraph")) for each in passages)


def test_one_long_word_is_cut_inside() -> None:
    """There is no better place."""
    assert sum(len(each.text) for each in passages_of("x", "y" * 10_000)) == 10_000


def test_topics_of_the_language_are_read_when_no_file_is_given() -> None:
    """They come with every Python."""
    selection = select_passages([], count=8)
    assert len(selection.passages) == 8
    assert len({each.label for each in selection.passages}) == 8
    assert selection.available > 20
    assert {"for", "while", "with"} <= {name for name, _ in topics()}


def test_every_file_is_heard_when_there_are_more_passages_than_asked_for(tmp_path: Path) -> None:
    """In turn, and in the order of the files."""
    for name, pages in (("a.txt", 5), ("b.txt", 1), ("c.txt", 5)):
        (tmp_path / name).write_text("\n\n".join("words " * 250 for _ in range(pages)), encoding="utf-8")
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    selection = select_passages(files, count=4)
    assert [each.label for each in selection.passages] == ["a.txt, part 1", "a.txt, part 2", "b.txt", "c.txt, part 1"]
    assert selection.available == 11


def test_all_wrong_files_are_named_at_once(tmp_path: Path) -> None:
    """Missing, a directory, no text, empty."""
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "empty").write_text(" \n", encoding="utf-8")
    with pytest.raises(ValidationError) as caught:
        select_passages([tmp_path / "gone", tmp_path, tmp_path / "image", tmp_path / "empty"], count=1)
    for part in ("there is no file", "is a directory", "is not UTF-8 text", "is empty"):
        assert part in str(caught.value)
