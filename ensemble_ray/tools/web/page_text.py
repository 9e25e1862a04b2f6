"""Extract the text of an HTML page. This file is also a program that `page_reader.py` starts.

Usage: `python page_text.py CHARACTERS CPU_S MEMORY_BYTES`. It reads a page in UTF-8 from standard input and writes at most
that many characters of its text. A malicious page can take hours to parse (the parser compares each new element with
all open ones, and there may be a million), and the parser is C code that its own process cannot stop. Another process can
be killed, and the system enforces its limits. It imports no module of this package, to start in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

#: elements without text of the page (S-BIT-41)
_REMOVED = frozenset({"script", "style", "nav", "footer", "header"})
#: elements within a line; every other element separates words
_INLINE = frozenset(
    {
        *("a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i"),
        *("ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup"),
        *("time", "tt", "u", "var", "wbr"),
    }
)


def page_text(html: str) -> str:
    """Return the words of a page's body, separated by single spaces (S-BIT-41)."""
    from selectolax.lexbor import LexborHTMLParser

    body = LexborHTMLParser(html).body
    if body is None:
        return ""
    pieces: list[str] = []
    # an explicit stack: pages may nest deeper than Python's stack
    pending: list[LexborNode | str] = [body]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            pieces.append(node)
        elif node.is_text_node:
            pieces.append(node.text_content or "")
        elif node.is_element_node and node.tag not in _REMOVED:
            if node.tag not in _INLINE:
                pieces.append(" ")
                pending.append(" ")
            pending.extend(reversed(list(node.iter(include_text=True))))
    return " ".join("".join(pieces).split())


def _limit_resources(cpu_s: int, memory_bytes: int) -> None:
    with contextlib.suppress(ImportError):
        import resource

        for kind, soft, hard in (
            (resource.RLIMIT_CORE, 0, 0),
            # the hard limit is later, so that the signal of the soft limit shows the reason
            (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
            (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        ):
            # a stricter limit remains
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    _most, *_limits = (int(argument) for argument in sys.argv[1:])
    _limit_resources(*_limits)
    _text = page_text(sys.stdin.buffer.read().decode("utf-8", "replace"))
    sys.stdout.buffer.write(_text[:_most].encode("utf-8", "replace"))
