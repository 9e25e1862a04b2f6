"""Foreign text made safe for a terminal: what a terminal would obey is shown as text. Pure; imports nothing of ours.

In: text of models, endpoints, tools, files, users. Out: the same text with control characters as their escapes.
Never: a text from elsewhere that reaches a terminal by another way (S-SEC-60).
"""

from __future__ import annotations

import re

__all__ = ["escape_controls", "escape_json", "escape_surrogates", "escape_unencodable"]

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


def escape_json(text: str, encoding: str = "utf-8") -> str:
    """Return JSON text with the same data, in which everything that a terminal would obey is escaped as JSON does it.

    Args:
        text: The text.
        encoding: Of where it goes; all that is not ASCII is escaped where the encoding lacks a character.
    """
    safe = _IN_JSON.sub(_escaped_in_json, text)
    try:
        safe.encode(encoding)
    except UnicodeEncodeError:
        return _NOT_ASCII.sub(_escaped_in_json, safe)
    return safe


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _escaped_in_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
