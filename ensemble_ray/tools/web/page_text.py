"""The words of a page's body. Package: built-in tools. In: HTML; out: text. Pure.

This file is also a program: `python page_text.py CHARACTERS CPU_S MEMORY_BYTES` reads a page in UTF-8 from standard input
and writes that many characters of its text at most. Parsing is C code that nothing in its process can stop, and a
page may be made so that it takes hours (a million open elements: each new one is compared with all of them); a
process can be killed, and the system holds it to its limits. It imports the parser alone, so it starts in a tenth of
a second; that is why nothing of this package is imported here.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

#: whole elements that hold no words of the page (S-BIT-41)
_REMOVED = frozenset({"script", "style", "nav", "footer", "header"})
#: elements that run on in the line; around every other one there is a gap between words
_INLINE = frozenset(
    {
        *("a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i"),
        *("ins", "kbd", "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup"),
        *("time", "tt", "u", "var", "wbr"),
    }
)


def page_text(html: str) -> str:
    """Return the words of a page's body, one space between them; "" where there is no body (S-BIT-41).

    Words of neighbouring blocks are kept apart, a word that inline markup divides stays whole. It takes as long as the
    page is made to take: call it for a page of a stranger only in a process that can be killed.
    """
    from selectolax.lexbor import LexborHTMLParser

    body = LexborHTMLParser(html).body
    if body is None:
        return ""
    pieces: list[str] = []
    # a stack of our own: pages nest deeper than Python's
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
            pending.extend(reversed(_children(node)))
    return " ".join("".join(pieces).split())


def _children(node: LexborNode) -> list[LexborNode]:
    found: list[LexborNode] = []
    child = node.first_child
    while child is not None:
        found.append(child)
        child = child.next
    return found


def _hold_to(cpu_s: int, memory_bytes: int) -> None:
    """Let the system end this process when it takes more; where it cannot, its starter ends it."""
    with contextlib.suppress(ImportError):
        import resource

        for kind, soft, hard in (
            (resource.RLIMIT_CORE, 0, 0),
            # the second one later, so that the first one's signal says what it was
            (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
            (resource.RLIMIT_AS, memory_bytes, memory_bytes),
        ):
            # a limit that is stricter already stays
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (soft, hard))


def _main() -> None:
    most, cpu_s, memory_bytes = (int(argument) for argument in sys.argv[1:])
    _hold_to(cpu_s, memory_bytes)
    text = page_text(sys.stdin.buffer.read().decode("utf-8", "replace"))
    sys.stdout.buffer.write(text[:most].encode("utf-8", "replace"))


if __name__ == "__main__":
    _main()
