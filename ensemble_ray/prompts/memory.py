"""What memory reminds a task of, as sections of the user prompt. Package: prompts.

Texts are inserted as they are, never resolved as templates (S-TPL-37), and cut for a context budget alone (S-MEM-132).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ensemble_ray.prompts.context import entry_piece
from ensemble_ray.prompts.sections import Piece, Section, SectionKind

if TYPE_CHECKING:
    from ensemble_ray.values.memory import RecalledMemory

__all__ = ["memory_sections", "scope_sections", "short_term_section"]


def scope_sections(memory: RecalledMemory | None) -> list[Section]:
    """Return a section for each scope that has entries (S-MEM-73)."""
    return [] if memory is None else [_scope_section(*each) for each in memory.scopes]


def memory_sections(memory: RecalledMemory | None) -> list[Section]:
    """Return the sections of long-term memory and of entities (S-MEM-31, S-MEM-42)."""
    if memory is None:
        return []
    return [
        _make_list(
            SectionKind.LONG_TERM,
            "## Long-Term Memory\nEarlier runs left what follows. Use what helps you with your task.",
            memory.long_term,
            first_to_go="last",  # the most relevant one comes first (S-MEM-30)
        ),
        _make_list(
            SectionKind.ENTITIES,
            "## Entity Knowledge\nThese facts are known.",
            [f"**{name}**: {fact}" for name, fact in memory.entities],
            first_to_go="longest",
        ),
    ]


def short_term_section(entries: Sequence[tuple[str, str, str]]) -> Section:
    """Return what was done before in this run, laid out as the context of a task is (S-MEM-21, S-TPL-35)."""
    return Section(
        kind=SectionKind.SHORT_TERM,
        heading="## Short-Term Memory (Current Run)\n"
        "Tasks of this run gave the results below. Use what helps you with your task.",
        pieces=tuple(entry_piece(*entry) for entry in entries),
        first_to_go="first",
    )


def _scope_section(scope: str, contents: Sequence[str]) -> Section:
    label = f"{SectionKind.SCOPE.value} '{scope}'"
    return Section(
        kind=SectionKind.SCOPE,
        label=label,
        heading=f'## Memory: {scope}\nThe memory scope "{scope}" has what follows. Use what helps you with your task.',
        pieces=tuple(Piece(label=label, before="\n\n---\n", text=content, after="\n---") for content in contents),
        first_to_go="longest",  # by age or by meaning: the store's order is its own (S-MEM-63, S-MEM-65)
    )


def _make_list(
    kind: SectionKind, heading: str, items: Sequence[str], *, first_to_go: Literal["last", "longest"]
) -> Section:
    return Section(
        kind=kind,
        label=kind.value,
        heading=f"{heading}\n",
        pieces=tuple(Piece(label=kind.value, before="\n- ", text=item) for item in items),
        first_to_go=first_to_go,
    )
