"""Tags of runs on the command line: to set them, and to filter lists by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ensemble_ray.definition.run_options import RunOptions


Tags = Annotated[
    list[str] | None,
    typer.Option(
        "--tag", metavar="NAME[=VALUE]", help="A word about the run, to find it again with runs --tag; repeatable."
    ),
]
TagFilter = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="NAME[=VALUE]", help="Only runs with this tag; repeatable: with all of them."),
]


def read_tags(words: Sequence[str]) -> dict[str, str] | None:
    """Return tags by name, or None without tags.

    Raises:
        ValidationError: A tag has no name, or a name is repeated.
    """
    from ensemble_ray.errors import ValidationError  # the help does not need it

    found: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name:
            raise ValidationError(f"--tag: '{word}' has no name. Write --tag NAME, or --tag NAME=VALUE")
        if name in found:
            raise ValidationError(f"--tag: '{name}' occurs twice")
        found[name] = value
    return found or None


def run_options(max_tokens: int | None, max_cost: float | None, tags: Sequence[str] | None = None) -> RunOptions | None:
    """Return the options of a run with that budget and those tags, or None if there are none.

    Raises:
        ValidationError: An amount is not above 0, or a tag is invalid.
    """
    chosen = read_tags(tags or ())
    if max_tokens is None and max_cost is None and chosen is None:
        return None
    from ensemble_ray.definition.run_options import RunOptions

    return RunOptions(max_tokens=max_tokens, max_cost=max_cost, tags=chosen)


def is_tagged(tags: Mapping[str, str], wanted: Sequence[str]) -> bool:
    from ensemble_ray.definition.run_options import has_tag

    return all(has_tag(tags, each, separator="=") for each in wanted)


def format_tags(tags: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" if value else name for name, value in tags.items())
