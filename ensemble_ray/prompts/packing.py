"""Packing of a request's sections into a context budget. Pure.

Rules (S-MEM-132 to S-MEM-135):
1. Sections that fit do not change.
2. Kinds of sections are shortened in the order of `SectionKind`, each down to half of an equal share of the room before the
   next kind is shortened. The part of a share that a section does not use is added to the next one.
3. Pieces of a section are shortened in the same way, but to no less than 100 tokens. If that needs more than half of the
   room, whole pieces are dropped, in the same order.
4. A shortened text keeps its beginning and its end, with a marker between them. A note replaces dropped pieces.
   Both contain the number of missing tokens.
The result never has more characters than the room, and depends only on the sections and the room.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.prompts.task import Piece, Section, SectionKind
from ensemble_ray.text.foreign_text import CHARACTERS_PER_TOKEN, estimate_tokens

MARKER_ROOM = 48  # longest marker between head and tail, characters
_NOTE_ROOM = 64  # longest note about left-out pieces, characters
_LEAST = 100 * CHARACTERS_PER_TOKEN  # shortest form of a text, characters


class SectionCut(Struct, frozen=True, kw_only=True):
    """Missing part of a section, or of one of its pieces."""

    label: str
    tokens: int  # before the cut
    cut_tokens: int  # 0: not cut


class PackedSection(Struct, frozen=True, kw_only=True):
    """A section in its final form."""

    section: Section
    cuts: tuple[SectionCut, ...]
    kept: tuple[int, ...]  # positions, in the original section, of the remaining pieces


def pack_sections(sections: Sequence[Section], sizes: Sequence[int], room: int) -> list[PackedSection]:
    """Return the sections in the same order, shortened to fit into `room` characters.

    `sizes` are the characters per section in the request, with the text after it.
    """
    kinds = list(SectionKind)
    order = sorted(range(len(sections)), key=lambda position: kinds.index(sections[position].kind))
    allotted = shrink([sizes[position] for position in order], [0] * len(order), room)
    packed: dict[int, PackedSection] = {}
    spare = 0
    for position, allowed in zip(order, allotted, strict=True):
        section, size = sections[position], sizes[position]
        if allowed + spare >= size:
            everything = tuple(range(len(section.pieces)))
            cuts = _cuts(section, [0] * len(everything))
            packed[position], used = PackedSection(section=section, cuts=cuts, kept=everything), size
        else:
            packed[position], used = _pack(section, size, allowed + spare)
        spare += allowed - used
    return [packed[position] for position in range(len(sections))]


def shrink(sizes: Sequence[int], leasts: Sequence[int], room: int) -> list[int]:
    """Return new sizes that fit the room, in the same order; 0: the entry is dropped.

    `sizes` are in the order of shortening; `leasts` are the smallest sizes of entries that are not dropped.
    """
    kept = list(sizes)
    if sum(kept) <= room:
        return kept
    needed = [min(size, least) for size, least in zip(sizes, leasts, strict=True)]
    total, first = sum(needed), 0
    # Entries that are dropped last keep half of the room: a few whole texts are more useful than many stubs.
    while first < len(kept) and total > (room if first == len(kept) - 1 else room // 2):
        total -= needed[first]
        kept[first] = 0
        first += 1
    share = max(0, room) // (2 * max(1, sum(size > 0 for size in kept)))
    # First, entries are shortened to the share at most; then, if necessary, to their smallest size.
    for floors in ([max(least, share) for least in leasts], leasts):
        excess = sum(kept) - room
        for position in range(first, len(kept)):
            if excess <= 0:
                return kept
            cut = min(excess, max(0, kept[position] - floors[position]))
            kept[position] -= cut
            excess -= cut
    return kept


def cut_text(text: str, room: int) -> str:
    """Return head and tail of a text with a marker between them, with at most `room` characters; >= `MARKER_ROOM`."""
    if len(text) <= room:
        return text
    kept = room - MARKER_ROOM
    tail = kept // 2
    missing = max(1, estimate_tokens(len(text) - kept))
    marker = f"[... {missing:,} tokens left out ...]"
    if not kept:
        return marker
    return f"{text[: kept - tail]}\n{marker}\n{text[len(text) - tail :]}"


def fixed_size(section: Section, piece: Piece) -> int:
    """Characters of a piece that cannot be cut: its marker, if each piece of the section must stay."""
    return min(len(piece.text), MARKER_ROOM) if section.keeps_all else 0


def _pack(section: Section, size: int, room: int) -> tuple[PackedSection, int]:
    """Return the part of a too large section that fits, and its largest number of characters."""
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
    note = ""
    if left_out:
        entries = "1 entry" if len(left_out) == 1 else f"{len(left_out):,} entries"
        tokens = max(1, estimate_tokens(sum(missing[position] for position in left_out)))
        note = f"[... {entries} with {tokens:,} tokens left out ...]"
    result = PackedSection(
        section=replace(section, pieces=tuple(shown), note=note),
        cuts=_cuts(section, missing),
        kept=tuple(position for position in range(len(pieces)) if position not in left_out),
    )
    return result, used if shown else 0


def _cuts(section: Section, missing: Sequence[int]) -> tuple[SectionCut, ...]:
    """Return the cuts of a section: one for all, or one for each piece."""
    sizes = [len(piece.text) for piece in section.pieces]
    if section.label:
        return (_cut(section.label, sum(sizes), sum(missing)),)
    return tuple(_cut(piece.label, *each) for piece, *each in zip(section.pieces, sizes, missing, strict=True))


def _cut(label: str, characters: int, missing: int) -> SectionCut:
    tokens = estimate_tokens(characters)
    cut = min(max(1, estimate_tokens(missing)), max(1, tokens)) if missing else 0
    return SectionCut(label=label, tokens=max(tokens, cut), cut_tokens=cut)
