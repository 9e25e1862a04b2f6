"""Texts from users, models, endpoints and tools: make them valid UTF-8, and safe for logs, terminals and headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

LOG_LIMIT = 1000  # characters of a foreign text in a log line

#: An escape in JSON text: a surrogate pair, half of one, or another character.
_JSON_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class TextLine(str):
    """A text that is cut to one line already."""

    __slots__ = ()


def whole_text(text: str) -> str:
    r"""Replace halves of surrogate pairs by U+FFFD; two matching halves become one character.

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
    """Apply `whole_text` to JSON data, unless it is nested too deeply."""
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
    r"""Replace halves of surrogate pairs in JSON text, also escapes such as `\ud800`, by U+FFFD."""
    text = whole_text(text)
    if _HALF_ESCAPE.search(text) is None:
        return text
    return _JSON_ESCAPE.sub(lambda found: "\\ufffd" if found["half"] else found[0], text)


class SurrogateJoiner:
    """Applies `whole_text` to the pieces of a stream, also to a pair that two pieces share."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        piece, self._held = self._held + piece, ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            self._held, piece = piece[-1], piece[:-1]
        return whole_text(piece)

    def finish(self) -> str:
        return whole_text(self._held)


def one_line(text: str, limit: int | None = LOG_LIMIT) -> TextLine:
    r"""Return a text as one line, cut to a length.

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
    if char.isspace() and code > 0xFF and char not in "\u2028\u2029":  # noqa: PLR2004  harmless
        return char
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


#: Characters that control a terminal, or disguise a text.
_STEERING = (
    r"\x00-\x08\x0b-\x1f"  # C0, without tab and line feed
    r"\x7f-\x9f"  # DEL and C1
    r"\xad\u200b\u2060-\u2064\ufeff"  # no width; scripts and emoji need the joiners U+200C and U+200D
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u206f"  # direction of writing
    r"\u2028\u2029"  # line breaks that `split("\n")` ignores
    r"\ufff9-\ufffb\U000e0000-\U000e007f"  # invisible annotations and tags
    r"\ud800-\udfff"  # halves of surrogate pairs
)
_CONTROL = re.compile(rf"(?!\r\n)[{_STEERING}]")  # a carriage return before a line feed is harmless
_IN_JSON = re.compile(rf"(?![\r\n])[{_STEERING}]")  # C0 characters are escaped in JSON text
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""Escape characters that control a terminal, except tabs and line breaks (S-SEC-60).

    `rich` passes the escape character; `repr` escapes the blanks of other scripts too.
    """
    return _CONTROL.sub(_escape, text)


def escape_surrogates(text: str) -> str:
    r"""Replace halves of surrogate pairs, which no stream can encode, by visible escapes."""
    return _SURROGATE.sub(_escape, text)


def escape_unencodable(text: str, encoding: str | None) -> str:
    r"""Replace characters that an encoding lacks by visible escapes; None: it has all."""
    return text if encoding is None else text.encode(encoding, "backslashreplace").decode(encoding)


def escape_json(text: str, encoding: str | None = None) -> str:
    """Escape characters of JSON text that control a terminal, or that the encoding lacks."""
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


_NOT_CARRIED = re.compile(r"[^\t\x20-\x7e]")  # clients encode other characters in different ways, and most fail
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def header_flaw(value: str) -> str:
    r"""Return why a text cannot be a header's value, without its content, or "".

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
    return "" if _NAME.fullmatch(name) else "is no name of a header"


CHARACTERS_PER_TOKEN = 4


def estimate_tokens(characters: int) -> int:
    """Estimate the tokens of a text, rounded down."""
    return characters // CHARACTERS_PER_TOKEN
