"""Tags of a run: how many there may be, how long they may be, and which one is meant."""

from __future__ import annotations

import pytest

from ensemble_ray import RunOptions, ValidationError
from ensemble_ray.definition.run_options import has_tag, tags_in


def test_tags_are_kept_as_they_were_given() -> None:
    """S-DUR-140: up to 64, names of 1 to 256 characters, values of up to 256; halves of surrogate pairs are replaced."""
    most = {f"n{number}": "v" * 256 for number in range(64)}
    assert RunOptions(tags=most).tags == most
    assert RunOptions(tags={"n" * 256: "", "half\ud800": "\udc00"}).tags == {"n" * 256: "", "half\ufffd": "\ufffd"}


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({f"n{number}": "" for number in range(65)}, "RunOptions tags must be at most 64, got: 65"),
        ({"": "v"}, "RunOptions tags: a name must have 1 to 256 characters, got 0: ''"),
        ({"n" * 257: "v"}, "RunOptions tags: a name must have 1 to 256 characters, got 257: 'nnn"),
        ({"n": "v" * 257}, "RunOptions tags: the value of 'n' must have at most 256 characters, got: 257"),
    ],
)
def test_tags_beyond_a_limit_are_refused(tags: dict[str, str], message: str) -> None:
    """S-DUR-140: the message names the tag and the limit, and repeats no long text."""
    with pytest.raises(ValidationError) as refused:
        RunOptions(tags=tags)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 500


def test_what_is_no_text_is_refused() -> None:
    """S-DUR-140: as every other field of another type."""
    with pytest.raises(ValidationError, match="tags"):
        RunOptions(tags={"n": 1})  # type: ignore[dict-item]  refused
    with pytest.raises(ValidationError, match="tags"):
        RunOptions(tags="n")  # type: ignore[arg-type]  refused


def test_records_are_readable_whatever_their_tags_are() -> None:
    """S-DUR-141: a record of an earlier version, or of somebody else, may have tags that could not be given today."""
    recorded: dict[str, object] = {
        "a": "1",
        "": "2",
        "b": 3,
        "c" * 300: "4",
        "d": "5" * 300,
        **dict.fromkeys(map(str, range(70)), "v"),
    }
    found = tags_in({"tags": recorded})
    assert len(found) == 64
    assert (found["a"], found["0"]) == ("1", "v")
    assert tags_in({"tags": ["a"]}) == tags_in({}) == tags_in(None) == {}


def test_a_tag_is_named_alone_or_with_its_value() -> None:
    """S-DUR-143: a value may hold the separator."""
    tags = {"for": "docs=a", "urgent": ""}
    assert has_tag(tags, "for", separator="=")
    assert has_tag(tags, "for=docs=a", separator="=")
    assert has_tag(tags, "urgent", separator="=")
    assert not any(has_tag(tags, each, separator="=") for each in ("for=docs", "fo", "docs", ""))
