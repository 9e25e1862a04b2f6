"""Sections that are packed into a room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.prompts.packing import MARKER_ROOM, cut_text, pack_sections, shrink
from ensemble_ray.prompts.task import SEPARATOR, Piece, Section, SectionKind

SIZES = st.lists(st.integers(0, 5000), max_size=12)


def section(kind: SectionKind, *texts: str, order: str = "first") -> Section:
    """A section of texts between lines."""
    pieces = tuple(Piece(label=f"p{i}", before="\n---\n", text=text, after="\n---") for i, text in enumerate(texts))
    return Section(kind=kind, heading=f"## {kind.value}", pieces=pieces, first_to_go=order)  # type: ignore[arg-type]  a word


def sizes_of(sections: list[Section]) -> list[int]:
    """What each takes whole, with the blank line behind it."""
    return [len(each.render()) + len(SEPARATOR) if each.pieces else 0 for each in sections]


@given(SIZES, st.integers(0, 500), st.integers(0, 30_000))
def test_entries_keep_no_more_than_fits_and_go_in_order(sizes: list[int], least: int, room: int) -> None:
    """S-MEM-132, S-MEM-133: never above the room; what can be kept whole is; the first ones are left out first."""
    kept = shrink(sizes, [least] * len(sizes), room)
    assert sum(kept) <= room
    assert all(0 <= now <= size for now, size in zip(kept, sizes, strict=True))
    if sum(sizes) <= room:
        assert kept == sizes
    shown = [now > 0 for now, size in zip(kept, sizes, strict=True) if size]
    assert not least or shown == sorted(shown), "what gives way later is left out only behind what gives way earlier"
    assert all(now >= min(size, least) for now, size in zip(kept, sizes, strict=True) if now)


def test_each_entry_keeps_half_of_an_equal_share_while_others_can_give_way() -> None:
    """S-MEM-134: the first one gives way down to a quarter of the room, as there are two; then the next one does."""
    assert shrink([1000, 1000], [10, 10], 1300) == [325, 975]
    assert shrink([1000, 1000], [10, 10], 1900) == [900, 1000]
    assert shrink([0, 1000, 100], [10, 10, 10], 400) == [0, 300, 100]


@given(st.text(max_size=3000), st.integers(MARKER_ROOM, 3000))
def test_a_cut_text_keeps_its_head_and_its_tail(text: str, room: int) -> None:
    """S-MEM-135: and has a marker between them."""
    shown = cut_text(text, room)
    assert len(shown) <= room
    if len(text) <= room:
        assert shown == text
        return
    head, _, tail = shown.partition("[... ")
    assert text.startswith(head.removesuffix("\n"))
    assert text.endswith(tail.partition(" tokens left out ...]")[2].removeprefix("\n"))


def test_a_marker_says_how_many_tokens_are_missing() -> None:
    """S-MEM-135."""
    shown = cut_text("a" * 2000 + "b" * 2000, 448)
    assert shown == f"{'a' * 200}\n[... 900 tokens left out ...]\n{'b' * 200}"


SECTIONS = st.lists(
    st.builds(
        lambda kind, sizes, order: section(kind, *("x" * size for size in sizes), order=order),
        st.sampled_from([kind for kind in SectionKind if kind is not SectionKind.TOOL_RESULTS]),
        st.lists(st.integers(0, 4000), min_size=1, max_size=5),
        st.sampled_from(["first", "last", "longest"]),
    ),
    max_size=5,
)


@given(SECTIONS, st.integers(0, 20_000))
def test_packed_sections_fit_their_room(sections: list[Section], room: int) -> None:
    """S-MEM-132, S-MEM-136: never above it, in the same order, nothing cut that is not told; the same again."""
    packed = pack_sections(sections, sizes_of(sections), room)
    assert sum(sizes_of([each.section for each in packed])) <= room
    assert [each.section.kind for each in packed] == [each.kind for each in sections]
    for before, after in zip(sections, packed, strict=True):
        texts = [
            after.section.pieces[after.kept.index(i)].text if i in after.kept else None
            for i in range(len(before.pieces))
        ]
        for piece, text, cut in zip(before.pieces, texts, after.cuts, strict=True):
            assert (text == piece.text) == (cut.cut_tokens == 0) or not piece.text
            assert cut.cut_tokens <= cut.tokens
    assert packed == pack_sections(sections, sizes_of(sections), room)


def test_kinds_give_way_in_their_order() -> None:
    """S-MEM-133: history before notes of memory, these before context; what one does not use is the next one's."""
    texts = dict.fromkeys((SectionKind.CONTEXT, SectionKind.SCOPE, SectionKind.HISTORY), "x" * 4000)
    sections = [section(kind, text) for kind, text in texts.items()]

    def cut(room: int) -> list[int]:
        return [sum(each.cut_tokens for each in one.cuts) for one in pack_sections(sections, sizes_of(sections), room)]

    assert [tokens > 0 for tokens in cut(11_000)] == [False, False, True]
    assert [tokens > 0 for tokens in cut(8_000)] == [False, True, True]
    assert [tokens > 0 for tokens in cut(5_000)] == [True, True, True]


def test_the_longest_notes_of_a_scope_give_way_first() -> None:
    """S-MEM-133: nobody knows what they are worth."""
    notes = section(SectionKind.SCOPE, "a" * 500, "b" * 3000, "c" * 400, order="longest")
    (packed,) = pack_sections([notes], sizes_of([notes]), 2500)
    assert [cut.cut_tokens > 0 for cut in packed.cuts] == [False, True, False]


def test_a_note_says_which_entries_are_left_out() -> None:
    """S-MEM-135: where 100 tokens of each would take more than half of the room."""
    entries = section(SectionKind.CONTEXT, *("x" * 4000 for _ in range(5)))
    (packed,) = pack_sections([entries], sizes_of([entries]), 1200)
    assert packed.kept == (4,)
    assert packed.section.render().endswith("\n---\n\n[... 4 entries with 4,000 tokens left out ...]")
