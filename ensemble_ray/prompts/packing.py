"""Sections of a request, packed into the room that a context budget leaves them. Pure.

Rules (S-MEM-132 to S-MEM-135):
1. What fits stays as it is.
2. Kinds of sections give way in their order (`SectionKind`), each down to half of an equal share of the room before the
   next one does. What a section does not use of its share is the next one's.
3. So do the pieces of a section; none is shortened to less than 100 tokens. Where that would take more than half of the
   room, pieces are left out whole, in the same order.
4. A shortened text keeps its beginning and its end, with a marker between them; of pieces that were left out a note is
   kept. Both say how many tokens are missing.
Must never happen: more characters than the room has; another result for the same sections and the same room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ensemble_ray.prompts.task import Piece, Section, SectionKind
from ensemble_ray.text.foreign_text import CHARACTERS_PER_TOKEN, estimate_tokens

#: Characters that a marker between head and tail takes at most.
MARKER_ROOM = 48
#: Characters of the longest note of what was left out.
_NOTE_ROOM = 64
#: Characters to which a text is shortened at least.
_LEAST = 100 * CHARACTERS_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionCut:
    """How much of a section, or of one of its pieces, is missing."""

    label: str
    #: what it had
    tokens: int
    #: 0: it is whole
    cut_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSection:
    """A section as it is sent."""

    section: Section
    cuts: tuple[SectionCut, ...]
    #: positions of the pieces that are kept, in the section as it was
    kept: tuple[int, ...]


def shrink(sizes: Sequence[int], leasts: Sequence[int], room: int) -> list[int]:
    """Return what each entry keeps of its size; 0: it is left out.

    Args:
        sizes: Of the entries, in the order in which they give way.
        leasts: What each needs at least of its size to be kept at all.
        room: What all together may have.

    Returns:
        Sizes that fit the room, in the same order.
    """
    kept = list(sizes)
    if sum(kept) <= room:
        return kept
    needed = [min(size, least) for size, least in zip(sizes, leasts, strict=True)]
    total, first = sum(needed), 0
    # Half of the room is for those that are left out last: many stubs would tell less than a few whole texts.
    while first < len(kept) and total > (room if first == len(kept) - 1 else room // 2):
        total -= needed[first]
        kept[first] = 0
        first += 1
    share = max(0, room) // (2 * max(1, sum(size > 0 for size in kept)))
    # The share is a floor while others can give way; then only what an entry needs to be kept is.
    for floors in ([max(least, share) for least in leasts], leasts):
        excess = sum(kept) - room
        for position in range(first, len(kept)):
            if excess <= 0:
                return kept
            given = min(excess, max(0, kept[position] - floors[position]))
            kept[position] -= given
            excess -= given
    return kept


def cut_text(text: str, room: int) -> str:
    """Return the head and the tail of a text with a marker between them, in at most that many characters; >= `MARKER_ROOM`."""
    if len(text) <= room:
        return text
    kept = room - MARKER_ROOM
    tail = kept // 2
    missing = max(1, estimate_tokens(len(text) - kept))
    marker = f"[... {missing:,} tokens left out ...]"
    if not kept:
        return marker
    return f"{text[: kept - tail]}\n{marker}\n{text[len(text) - tail :]}"


def pack_sections(sections: Sequence[Section], sizes: Sequence[int], room: int) -> list[PackedSection]:
    """Return the sections in the same order, as much of them as fits.

    Args:
        sections: What may give way.
        sizes: Characters that each takes whole, with what stands behind it in the request.
        room: Characters for all of them; >= 0.
    """
    kinds = list(SectionKind)
    order = sorted(range(len(sections)), key=lambda position: kinds.index(sections[position].kind))
    allotted = shrink([sizes[position] for position in order], [0] * len(order), room)
    packed: dict[int, PackedSection] = {}
    spare = 0
    for position, allowed in zip(order, allotted, strict=True):
        section, size = sections[position], sizes[position]
        if allowed + spare >= size:
            packed[position], used = _whole(section), size
        else:
            packed[position], used = _pack(section, size, allowed + spare)
        spare += allowed - used
    return [packed[position] for position in range(len(sections))]


def fixed_size(section: Section, piece: Piece) -> int:
    """Characters of a piece that its section does not give way with: room for its marker, where each piece must stay."""
    return min(len(piece.text), MARKER_ROOM) if section.keeps_all else 0


def _whole(section: Section) -> PackedSection:
    kept = tuple(range(len(section.pieces)))
    return PackedSection(section=section, cuts=_cuts(section, [0] * len(kept)), kept=kept)


def _pack(section: Section, size: int, room: int) -> tuple[PackedSection, int]:
    """Return what fits of a section that is too large, and how many characters that takes at most."""
    pieces = section.pieces
    fixed = [fixed_size(section, piece) for piece in pieces]
    sizes = [piece.size - base for piece, base in zip(pieces, fixed, strict=True)]
    frames = [len(piece.before) + len(piece.after) - base for piece, base in zip(pieces, fixed, strict=True)]
    around = size - sum(sizes)
    order = section.order
    wanted = [sizes[position] for position in order]
    leasts = [max(0, frames[position] + _LEAST) for position in order]
    allotted = shrink(wanted, leasts, room - around)
    if not section.keeps_all and any(each and not now for each, now in zip(wanted, allotted, strict=True)):
        around += _NOTE_ROOM
        allotted = shrink(wanted, leasts, room - around)
    kept = dict(zip(order, allotted, strict=True))
    shown: list[Piece] = []
    missing = [0] * len(pieces)
    left_out: list[int] = []
    used = around
    for position, piece in enumerate(pieces):
        if not kept[position] and sizes[position] and not section.keeps_all:
            missing[position] = len(piece.text)
            left_out.append(position)
            continue
        used += kept[position]
        if kept[position] < sizes[position]:
            text_room = kept[position] - frames[position]
            missing[position] = len(piece.text) - (text_room - MARKER_ROOM)
            shown.append(replace(piece, text=cut_text(piece.text, text_room)))
        else:
            shown.append(piece)
    note = _note(len(left_out), sum(missing[position] for position in left_out)) if left_out else ""
    result = PackedSection(
        section=replace(section, pieces=tuple(shown), note=note),
        cuts=_cuts(section, missing),
        kept=tuple(position for position in range(len(pieces)) if position not in left_out),
    )
    return result, used if shown else 0


def _note(count: int, characters: int) -> str:
    entries = "1 entry" if count == 1 else f"{count:,} entries"
    return f"[... {entries} with {max(1, estimate_tokens(characters)):,} tokens left out ...]"


def _cuts(section: Section, missing: Sequence[int]) -> tuple[SectionCut, ...]:
    """Return what is missing: of the section as one, or of each piece."""
    sizes = [len(piece.text) for piece in section.pieces]
    if section.label:
        return (_cut(section.label, sum(sizes), sum(missing)),)
    return tuple(_cut(piece.label, *each) for piece, *each in zip(section.pieces, sizes, missing, strict=True))


def _cut(label: str, characters: int, missing: int) -> SectionCut:
    tokens = estimate_tokens(characters)
    cut = min(max(1, estimate_tokens(missing)), max(1, tokens)) if missing else 0
    return SectionCut(label=label, tokens=max(tokens, cut), cut_tokens=cut)
