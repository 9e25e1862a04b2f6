"""Values of HTTP headers that users write: keys above all. Package: text; pure, imports nothing of ours.

In: a text. Out: why no request can carry it. Never: the text itself, which is secret.
"""

from __future__ import annotations

import re

__all__ = ["header_flaw", "header_name_flaw"]

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
