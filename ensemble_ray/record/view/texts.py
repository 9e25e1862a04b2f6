"""Texts and numbers of a tree's rows, as people read them. Pure."""

from __future__ import annotations

from datetime import timedelta

from ensemble_ray.text.foreign_text import escape_controls


def row_text(text: str, length: int) -> str:
    """Return a text on one line, without control characters, cut to a length."""
    # Cut first: an answer may be as large as a book. Twice the length leaves room for white space that is joined.
    words = " ".join(text[: 2 * length].split())
    clean = escape_controls(words)
    return clean if len(clean) <= length and len(text) <= 2 * length else f"{clean[:length].rstrip()}..."


def format_seconds(duration: timedelta) -> str:
    """Return a duration, as people read it."""
    seconds = duration.total_seconds()
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    minutes, rest = divmod(round(seconds, 2), 60)
    return f"{minutes:.0f} min {rest:.0f} s" if minutes else f"{rest:.2f} s"


def format_count(number: int, noun: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_tokens(input_tokens: int, output_tokens: int, reasoning_tokens: int = 0) -> str:
    """Input and output tokens, `?` where they are not known; how many of the latter are reasoning, where some are."""
    counts = [f"{count:,}" if count >= 0 else "?" for count in (input_tokens, output_tokens)]
    thought = f", {reasoning_tokens:,} of them reasoning" if reasoning_tokens > 0 else ""
    return f"{counts[0]} + {counts[1]} tokens{thought}"
