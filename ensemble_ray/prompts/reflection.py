"""Texts of reflections: notes for a task's prompt, the request to a model that reflects, its answer. Package: prompts. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ensemble_ray.prompts.sections import Piece, Section, SectionKind

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task
    from ensemble_ray.values.reflection import TaskReflection

__all__ = ["ReflectionParts", "build_reflection_request", "improvement_section", "parse_reflection"]

#: Headings of a model's answer, in their order (S-REFL-11).
_HEADINGS = ("REFINED_DESCRIPTION", "REFINED_EXPECTED_OUTPUT", "OBSERVATIONS", "SUGGESTIONS")
#: A heading begins a line; models like to make it bold or a title.
_HEADING = re.compile(rf"^[ \t#*]*({'|'.join(_HEADINGS)})[ \t*]*:[ \t*]*", re.MULTILINE)
_BULLETS = ("- ", "* ")
_NOTES_HEADING = """\
## Task Improvement Notes (from prior executions)
Earlier executions of this task left these notes. Use what helps you with your task.
"""

_REQUEST = """\
You improve the instructions of a recurring task. You are shown the task, what was wanted, what was produced and the notes of
earlier executions. Write down how the instructions should be changed so that the next execution gives a better output. Keep
what the task is about; do not do the task itself.

## Task Description
{description}

## Expected Output
{expected_output}

## Produced Output
{output}

## Notes of Prior Executions
{prior}

## Answer Format
Answer with these four sections in this order, and nothing else:

REFINED_DESCRIPTION:
How the task should be described.

REFINED_EXPECTED_OUTPUT:
How the expected output should be described.

OBSERVATIONS:
- what you noticed about the produced output, one line each

SUGGESTIONS:
- what to do differently next time, one line each"""


class ReflectionParts(NamedTuple):
    """What an answer says; "" and empty where it says nothing."""

    description: str = ""
    expected_output: str = ""
    observations: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()


def improvement_section(reflection: TaskReflection) -> Section:
    """Return what earlier runs learned of a task, for its prompt (S-REFL-8)."""
    notes = Piece(label=SectionKind.IMPROVEMENT_NOTES.value, text="\n".join(_notes(reflection)))
    return Section(kind=SectionKind.IMPROVEMENT_NOTES, heading=_NOTES_HEADING, pieces=(notes,), first_to_go="first")


def build_reflection_request(task: Task, output: str, prior: TaskReflection | None) -> str:
    """Return the one message to a model that reflects on an output (S-REFL-11)."""
    notes = "There are none: this is the first execution." if prior is None else "\n".join(_notes(prior)).lstrip("\n")
    return _REQUEST.format(
        description=task.description, expected_output=task.expected_output, output=output, prior=notes
    )


def parse_reflection(text: str) -> ReflectionParts:
    """Return the sections of an answer; the first of each heading counts (S-REFL-12)."""
    found = list(_HEADING.finditer(text))
    sections: dict[str, str] = {}
    for place, heading in enumerate(found):
        end = found[place + 1].start() if place + 1 < len(found) else len(text)
        sections.setdefault(heading[1], text[heading.end() : end].strip())
    description, expected_output, observations, suggestions = (sections.get(name, "") for name in _HEADINGS)
    return ReflectionParts(description, expected_output, _items(observations), _items(suggestions))


def _notes(reflection: TaskReflection) -> list[str]:
    lines = ["", "### Refined Instructions", reflection.refined_description]
    lines += ["", "### Output Guidance", reflection.refined_expected_output]
    for heading, items in (("Observations", reflection.observations), ("Suggestions", reflection.suggestions)):
        lines += ["", f"### {heading}", *(f"- {item}" for item in items)] if items else []
    return lines


def _items(section: str) -> tuple[str, ...]:
    lines = (line.strip() for line in section.splitlines())
    return tuple(item for line in lines if line.startswith(_BULLETS) and (item := line[2:].strip()))
