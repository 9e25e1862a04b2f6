"""Texts that others wrote, made fit for UTF-8 and for log lines. Floor: lowest; pure, imports nothing of ours.

In: texts of users, models, endpoints, tools. Out: the same texts without halves of surrogate pairs, which no UTF-8 has;
or one bounded line without control characters. Never: an exception because of what a text holds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, cast

__all__ = ["LOG_LIMIT", "BoundedLogger", "Line", "bounded_logger", "one_line", "whole_data", "whole_json", "whole_text"]

#: Longest text of others in a log line, characters.
LOG_LIMIT = 1000

#: What an escape in JSON text stands for: a whole pair, half of one, or anything else.
_JSON_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HALF_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


class Line(str):
    """A text that is one line and as long as it shall be."""

    __slots__ = ()


def whole_text(text: str) -> str:
    r"""Return the text with each half of a surrogate pair replaced by U+FFFD; two halves that fit become one character.

    Example:
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


def one_line(text: str, limit: int | None = LOG_LIMIT) -> Line:
    r"""Return the text as one line: control characters escaped, cut to so many characters with a word about the rest.

    Args:
        text: Whatever somebody wrote.
        limit: Characters of it that are shown; None: all.

    Example:
        >>> one_line("first\nsecond", 9)
        'first\\nsec... [12 characters in all]'
    """
    if isinstance(text, Line):
        return text
    shown = text if limit is None else text[:limit]
    clean = shown if shown.isprintable() else "".join(map(_printable, shown))
    return Line(f"{clean}... [{len(text)} characters in all]" if len(shown) < len(text) else clean)


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


class BoundedLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose warnings and errors stay one bounded line each, whatever others wrote into what they show.

    Texts and errors among the arguments go through `one_line`; numbers and `Line`s are left as they are. Lines below
    WARNING, which people ask for to see all, are not changed.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log as any logger does."""
        if not self.logger.isEnabledFor(level):
            return
        if level >= logging.WARNING:
            args = tuple(_bounded(each) for each in args)
        # This method is a frame between the caller and the library's own.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        self.logger.log(level, msg, *args, **kwargs)


def _bounded(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        return one_line(str(value))
    except Exception:  # noqa: BLE001  a text of somebody's class that fails must not fail what is logged
        return f"<{type(value).__name__}>"


def bounded_logger(name: str) -> BoundedLogger:
    """Return the module's logger; every module that logs gets its own here."""
    return BoundedLogger(logging.getLogger(name), {})
