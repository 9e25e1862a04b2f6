"""Texts that others wrote, made fit for UTF-8 and for log lines. Layer: lowest; pure, imports nothing of ours.

In: texts of users, models, endpoints, tools. Out: the same texts without halves of surrogate pairs, which no UTF-8 has;
or one bounded line without control characters. Never: an exception because of what a text holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

__all__ = [
    "LOG_LIMIT",
    "TextLine",
    "WholePieces",
    "one_line",
    "whole_data",
    "whole_json",
    "whole_text",
]

#: Longest text of others in a log line, characters.
LOG_LIMIT = 1000

#: What an escape in JSON text stands for: a whole pair, half of one, or anything else.
_JSON_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class TextLine(str):
    """A text that is one line and as long as it shall be."""

    __slots__ = ()


def whole_text(text: str) -> str:
    r"""Return the text with each half of a surrogate pair replaced by U+FFFD; two halves that fit become one character.

    Examples:
        >>> whole_text("caf\ud800") == "caf\ufffd"
        True
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def whole_data(value: object) -> object:
    """Return JSON data with `whole_text` applied to its texts and keys; data nested beyond the stack stays as it is."""
    try:
        return _whole(value)
    except RecursionError:
        return value


def _whole(value: object) -> object:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, Mapping):
        return {_whole(key): _whole(each) for key, each in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list):
        return [_whole(each) for each in cast("list[object]", value)]
    return value


def whole_json(text: str) -> str:
    r"""Return JSON text in which escapes such as `\ud800` that name half of a pair name U+FFFD instead."""
    text = whole_text(text)
    if _HALF_ESCAPE.search(text) is None:
        return text
    return _JSON_ESCAPE.sub(lambda found: "\\ufffd" if found["half"] else found[0], text)


class WholePieces:
    """Makes pieces of one text whole: half of a pair at a piece's end waits for the other half."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return what of the text is whole now."""
        piece = self._held + piece
        self._held = ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            self._held, piece = piece[-1], piece[:-1]
        return whole_text(piece)

    def finish(self) -> str:
        """Return the rest: U+FFFD for half of a pair that nothing followed."""
        return whole_text(self._held)


def one_line(text: str, limit: int | None = LOG_LIMIT) -> TextLine:
    r"""Return the text as one line: control characters escaped, cut to so many characters with a word about the rest.

    Args:
        text: Whatever somebody wrote.
        limit: Characters of it that are shown; None: all.

    Examples:
        >>> one_line("first\nsecond", 9)
        'first\\nsec... [12 characters in all]'
    """
    if isinstance(text, TextLine):
        return text
    shown = text if limit is None else text[:limit]
    clean = shown if shown.isprintable() else "".join(map(_printable, shown))
    return TextLine(f"{clean}... [{len(text)} characters in all]" if len(shown) < len(text) else clean)


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    if char in _NAMED:
        return _NAMED[char]
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:  # noqa: PLR2004  halves of surrogate pairs
        return "\ufffd"
    if char.isspace() and code > 0xFF and char not in "\u2028\u2029":  # noqa: PLR2004  wide blanks are harmless
        return char
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004
