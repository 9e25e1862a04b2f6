"""What memory reminds a task of, as sections of the user prompt. Package: prompts.

Texts are inserted as they are: never cut, never resolved as templates (S-TPL-37).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.values.memory import RecalledMemory

__all__ = ["memory_sections", "scope_sections", "short_term_section"]


def scope_sections(memory: RecalledMemory | None) -> list[str]:
    """Return a section for each scope that has entries (S-MEM-73)."""
    return [] if memory is None else [_scope_section(*each) for each in memory.scopes]


def memory_sections(memory: RecalledMemory | None) -> list[str]:
    """Return the sections of long-term memory and of entities (S-MEM-31, S-MEM-42)."""
    if memory is None:
        return []
    return [
        _listed(
            "## Long-Term Memory",
            "Earlier runs left what follows. Use what helps you with your task.",
            memory.long_term,
        ),
        _listed(
            "## Entity Knowledge",
            "These facts are known.",
            [f"**{name}**: {fact}" for name, fact in memory.entities],
        ),
    ]


def short_term_section(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return what was done before in this run, laid out as the context of a task is (S-MEM-21, S-TPL-35)."""
    if not entries:
        return ""
    lines = [
        "## Short-Term Memory (Current Run)",
        "Tasks of this run gave the results below. Use what helps you with your task.",
    ]
    for role, description, content in entries:
        lines += ["", "---", f"### {role}: {description}", content, "---"]
    return "\n".join(lines)


def _scope_section(scope: str, contents: Sequence[str]) -> str:
    if not contents:
        return ""
    lines = [f"## Memory: {scope}", f'The memory scope "{scope}" has what follows. Use what helps you with your task.']
    for content in contents:
        lines += ["", "---", content, "---"]
    return "\n".join(lines)


def _listed(heading: str, explanation: str, items: Sequence[str]) -> str:
    return "\n".join([heading, explanation, "", *(f"- {item}" for item in items)]) if items else ""
