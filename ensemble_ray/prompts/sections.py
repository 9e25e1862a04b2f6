"""What a request is packed of: sections that may give way, each with pieces of text. Package: prompts. Values only.

A section is a text with a seam at each entry of a list, so that it can be shown whole, or less of it (`packing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

__all__ = ["SEPARATOR", "Piece", "PromptPart", "Section", "SectionKind", "render_parts"]

#: Stands between the parts of a prompt.
SEPARATOR = "\n\n"


class SectionKind(Enum):
    """What a section has, in the order in which kinds give way: the first one first (S-MEM-133)."""

    HISTORY = "history"
    LONG_TERM = "long-term memory"
    ENTITIES = "entity knowledge"
    SCOPE = "memory scope"
    IMPROVEMENT_NOTES = "improvement notes"
    TOOL_RESULTS = "tool results"
    SHORT_TERM = "short-term memory"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """An entry of a section."""

    #: whose text it is, for those who are told what was cut
    label: str
    #: what is shown around the text, and never shortened
    before: str = ""
    text: str
    after: str = ""

    @property
    def size(self) -> int:
        """Characters, with what stands around the text."""
        return len(self.before) + len(self.text) + len(self.after)

    def render(self) -> str:
        """Return the piece as a prompt has it."""
        return f"{self.before}{self.text}{self.after}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a request that may give way."""

    kind: SectionKind
    #: what it is told as; "": each piece is told under its own label
    label: str = ""
    heading: str = ""
    #: in the order in which they are shown; without any there is no section
    pieces: tuple[Piece, ...]
    #: which piece gives way first; `longest`: where nothing is known of what they are worth
    first_to_go: Literal["first", "last", "longest"]
    #: whether each piece must stay, if only as a marker, as the results of tools must that were asked for
    keeps_all: bool = False
    #: what is said of pieces that were left out
    note: str = ""

    @property
    def order(self) -> list[int]:
        """Positions of the pieces, in the order in which they give way."""
        positions = list(range(len(self.pieces)))
        if self.first_to_go == "last":
            return positions[::-1]
        if self.first_to_go == "longest":
            return sorted(positions, key=lambda position: -len(self.pieces[position].text))
        return positions

    def render(self) -> str:
        """Return the section as a prompt has it, without a line break at its end; "" without pieces."""
        if not self.pieces:
            return ""
        pieces = "".join([piece.render() for piece in self.pieces])
        note = f"{SEPARATOR}{self.note}" if self.note else ""
        return f"{self.heading}{pieces}{note}"


#: A part of a user prompt: text that is never cut, or a section.
PromptPart: TypeAlias = str | Section


def render_parts(parts: Sequence[PromptPart]) -> str:
    """Return the parts as one text; empty ones leave no trace."""
    texts = [part if isinstance(part, str) else part.render() for part in parts]
    return SEPARATOR.join(filter(None, texts))
