"""Texts that others wrote, made fit for UTF-8 and for log lines. Layer: lowest; pure, imports nothing of ours.

In: texts of users, models, endpoints, tools. Out: the same texts without halves of surrogate pairs, which no UTF-8 has;
or one bounded line without control characters. Never: an exception because of what a text holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

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


#: Ranges of characters that steer a terminal, or that show a text as another one than it is.
_STEERING = (
    r"\x00-\x08\x0b-\x1f"  # C0, without tab and line feed
    r"\x7f-\x9f"  # DEL and C1
    r"\xad\u200b\u2060-\u2064\ufeff"  # no width; the joiners U+200C and U+200D are needed by scripts and emoji
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # direction of writing
    r"\u2028\u2029"  # ends of lines that are none to `split("\n")`
    r"\ufff9-\ufffb\U000e0000-\U000e007f"  # annotations and tags, which nobody sees
    r"\ud800-\udfff"  # halves of pairs, which have no form in UTF-8
)
#: A carriage return before a line feed does no harm.
_CONTROL = re.compile(rf"(?!\r\n)[{_STEERING}]")
#: The same in JSON text, which has escapes of its own for what stands below the blank.
_IN_JSON = re.compile(rf"(?![\r\n])[{_STEERING}]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""Return the text with everything that a terminal would obey as a visible escape, such as `\x1b`.

    Tabs and ends of lines stay, and so does every character that is only unusual.

    Source:
        S-SEC-60. `rich` and the standard library have no such function: `rich` takes out five characters and lets the
        escape character pass, `repr` escapes blanks of other scripts too.
    """
    return _CONTROL.sub(_escape, text)


def escape_surrogates(text: str) -> str:
    r"""Return the text with halves of surrogate pairs, which no stream can encode, as visible escapes such as `\ud83d`."""
    return _SURROGATE.sub(_escape, text)


def escape_unencodable(text: str, encoding: str | None) -> str:
    r"""Return the text with each character that an encoding lacks as a visible escape, such as `\u2026`; None has all."""
    return text if encoding is None else text.encode(encoding, "backslashreplace").decode(encoding)


def escape_json(text: str, encoding: str | None = None) -> str:
    """Return JSON text with the same data, in which everything that a terminal would obey is escaped as JSON does it.

    Args:
        text: The text.
        encoding: Of where it goes; all that is not ASCII is escaped where the encoding lacks a character. None: UTF-8.
    """
    safe = _IN_JSON.sub(_escaped_in_json, text)
    try:
        safe.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return _NOT_ASCII.sub(_escaped_in_json, safe)
    return safe


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _escaped_in_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


#: Clients differ in how they encode anything else, and most fail.
_NOT_CARRIED = re.compile(r"[^\t\x20-\x7e]")
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def header_flaw(value: str) -> str:
    r"""Return why a text cannot be sent in a header, without repeating it; empty when it can.

    Examples:
        >>> header_flaw("sk-1\nsk-2"), header_flaw("sk-\u201c1")
        ('holds a line break, which no header can carry', 'holds the character U+201C, which no header can carry')
    """
    found = _NOT_CARRIED.search(value)
    if found is None:
        return ""
    what = "a line break" if found[0] in "\r\n" else f"the character U+{ord(found[0]):04X}"
    return f"holds {what}, which no header can carry"


def header_name_flaw(name: str) -> str:
    """Return why a text is no name of a header; empty when it is one."""
    return "" if _NAME.fullmatch(name) else "is no name of a header"


#: Characters that are counted as one token.
CHARACTERS_PER_TOKEN = 4


def estimate_tokens(characters: int) -> int:
    """Return the tokens of that many characters, rounded down."""
    return characters // CHARACTERS_PER_TOKEN
