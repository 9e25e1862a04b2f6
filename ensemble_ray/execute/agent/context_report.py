"""What a context budget cut of a request, as data of a trace and as a line for people. Package: execute. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ensemble_ray.facts.lenient import as_count, as_mapping, as_sequence, as_text

if TYPE_CHECKING:
    from ensemble_ray.prompts.packing import SectionCut

__all__ = ["context_data", "describe_context", "describe_cuts"]

#: Cuts that a line names; a long tool loop has many.
_NAMED = 3


def context_data(
    cuts: Sequence[SectionCut], *, turn: int, budget_tokens: int, needed_tokens: int
) -> Mapping[str, object]:
    """Return what a trace tells of a request that was cut (S-MEM-136).

    Args:
        cuts: Of its sections, in the order of the request; whole ones count, and are not listed.
        turn: Number of the model call.
        budget_tokens: What the request may have.
        needed_tokens: What all of it would have had.
    """
    return {
        "turn": turn,
        "budget_tokens": budget_tokens,
        "needed_tokens": needed_tokens,
        "sections": len(cuts),
        "whole": sum(not cut.cut_tokens for cut in cuts),
        "cut": [
            {"name": cut.label, "tokens": cut.tokens, "cut_tokens": cut.cut_tokens} for cut in cuts if cut.cut_tokens
        ],
    }


def describe_cuts(data: Mapping[str, object]) -> list[str]:
    """Return a text for each cut of such data."""
    found = [as_mapping(entry) for entry in as_sequence(data.get("cut"))]
    return [
        f"{as_text(entry.get('name'))} cut by {as_count(entry.get('cut_tokens')):,} of "
        f"{as_count(entry.get('tokens')):,} tokens"
        for entry in found
    ]


def describe_context(data: Mapping[str, object]) -> str:
    """Return such data on one line: `3 of 5 sections whole, writer cut by 1,200 of 2,000 tokens`."""
    cuts = describe_cuts(data)
    counts = f"{as_count(data.get('whole'))} of {as_count(data.get('sections'))} sections whole"
    more = [f"{len(cuts) - _NAMED:,} more cut"] if len(cuts) > _NAMED else []
    return ", ".join((counts, *cuts[:_NAMED], *more))
