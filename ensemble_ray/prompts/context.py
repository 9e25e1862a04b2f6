"""What earlier tasks gave, as a section of the user prompt. Package: prompts.

Texts of other tasks are inserted as they are, never resolved as templates (S-TPL-37), and cut for a context budget alone
(S-TPL-34, S-MEM-132).
"""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.prompts.sections import Piece, Section, SectionKind
from ensemble_ray.values.task_output import TaskOutput

__all__ = ["LONG_OUTPUT", "context_part", "context_section", "entry_piece", "warn_of_long_outputs"]

_log = bounded_logger(__name__)

#: Characters of one context output above which a warning is logged (S-TPL-34).
LONG_OUTPUT = 10_000
_SHOWN = 80
_HEADING = "## Context from Previous Tasks"
_EXPLANATION = "Earlier tasks gave the results below. Use what helps you with your task."


def context_section(outputs: Sequence[TaskOutput]) -> str:
    """Return the section, without a line break at its end; "" when there are no outputs (S-TPL-32)."""
    return context_part(outputs).render()


def context_part(outputs: Sequence[TaskOutput]) -> Section:
    """Return the section with its seams."""
    return Section(
        kind=SectionKind.CONTEXT,
        heading=f"{_HEADING}\n{_EXPLANATION}",
        pieces=tuple([entry_piece(output.agent_role, output.task_description, output.raw) for output in outputs]),
        first_to_go="first",
    )


def entry_piece(role: str, description: str, text: str) -> Piece:
    """Return what one task gave, as sections of such entries have it."""
    return Piece(label=role, before=f"\n\n---\n### {role}: {description}\n", text=text, after="\n---")


def warn_of_long_outputs(outputs: Sequence[TaskOutput]) -> None:
    """Log a warning for each output that fills much of a model's window; it is passed on uncut (S-TPL-34)."""
    for output in outputs:
        if len(output.raw) > LONG_OUTPUT:
            _log.warning(
                "Context output of task '%s' is %d characters long (threshold %d); it is passed on uncut",
                output.task_description[:_SHOWN],
                len(output.raw),
                LONG_OUTPUT,
            )
