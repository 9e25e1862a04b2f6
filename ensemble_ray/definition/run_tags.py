"""Tags of a run: words of its caller's own about it, by name. Package: definition. Pure.

In: what a caller gave, or what a record has. Out: names and values, or the first mistake. Must never happen: an old record that cannot be
read because of its tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.text.foreign_text import whole_text

__all__ = ["LONGEST_WORD", "MOST_TAGS", "check_tags", "has_tag", "tags_in"]

#: Tags of one run.
MOST_TAGS = 64
#: Characters of a tag's name and of its value.
LONGEST_WORD = 256


def check_tags(tags: object, owner: str) -> None:
    """Refuse tags that are too many or too long (S-DUR-140); what are no texts is left to pydantic.

    Args:
        tags: What was given; None: none.
        owner: How a message begins: `RunOptions`, ...

    Raises:
        ValidationError: says which tag, and what its limit is.
    """
    if not isinstance(tags, Mapping):
        return
    given = cast("Mapping[object, object]", tags)
    if len(given) > MOST_TAGS:
        raise ValidationError(f"{owner} tags must be at most {MOST_TAGS}, got: {len(given)}")
    for name, value in given.items():
        if isinstance(name, str) and not 0 < len(name) <= LONGEST_WORD:
            raise ValidationError(
                f"{owner} tags: a name must have 1 to {LONGEST_WORD} characters, got {len(name)}: '{brief(name)}'"
            )
        if isinstance(value, str) and len(value) > LONGEST_WORD:
            raise ValidationError(
                f"{owner} tags: the value of '{brief(str(name))}' must have at most {LONGEST_WORD} characters, got: {len(value)}"
            )


def tags_in(options: Mapping[str, object] | None) -> dict[str, str]:
    """Return the tags among a run's recorded options; what could not be given today is left out."""
    recorded = (options or {}).get("tags")
    if not isinstance(recorded, Mapping):
        return {}
    found = {
        whole_text(name): whole_text(value)
        for name, value in cast("Mapping[object, object]", recorded).items()
        if isinstance(name, str) and isinstance(value, str) and 0 < len(name) <= LONGEST_WORD >= len(value)
    }
    return dict(list(found.items())[:MOST_TAGS])


def has_tag(tags: Mapping[str, str], wanted: str, *, separator: str) -> bool:
    """Whether a run has a tag.

    Args:
        tags: The run's.
        wanted: Its name, or name and value with the separator between them.
        separator: What stands between them.
    """
    return any(wanted in {name, f"{name}{separator}{value}"} for name, value in tags.items())
