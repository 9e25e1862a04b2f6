"""Extract the text of an HTML page. This file is also a program that `page_reader.py` starts.

Usage: `python page_text.py CHARACTERS CPU_S MEMORY_BYTES`, with a page in UTF-8 as standard input. A malicious page can take
hours in the parser's C code; only another process can be killed. It imports nothing of this package, to start fast.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_REMOVED = frozenset({"script", "style", "nav", "footer", "header"})
_INLINE = frozenset(  # within a line; others separate words
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
    # pages may nest deeper than Python's stack
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
            # the signal of the soft limit shows the reason
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
