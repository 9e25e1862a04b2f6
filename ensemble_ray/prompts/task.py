"""The user prompt: what to do, after what. In: a resolved task and outputs. Out: text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.memory import RecalledMemory, TaskReflection
from ensemble_ray.values.task_output import TaskOutput

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


#: Headings of a model's answer, in their order (S-REFL-11).
_HEADINGS = ("REFINED_DESCRIPTION", "REFINED_EXPECTED_OUTPUT", "OBSERVATIONS", "SUGGESTIONS")
#: A heading begins a line; models like to make it bold or a title.
_HEADING_REFLECTION = re.compile(rf"^[ \t#*]*({'|'.join(_HEADINGS)})[ \t*]*:[ \t*]*", re.MULTILINE)
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
    found = list(_HEADING_REFLECTION.finditer(text))
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


_REVISION = "A previous attempt at this task was not accepted. Take the feedback into account."


def build_user_prompt(
    task: Task,
    context_outputs: Sequence[TaskOutput] = (),
    memory: RecalledMemory | None = None,
    notes: TaskReflection | None = None,
    directives: Sequence[str] = (),
) -> str:
    """Memory, context, improvement notes, revision notes, directives, the task, the expected output and the output format.

    Sections without content are left out.

    Args:
        task: With its variables resolved.
        context_outputs: Outputs of its context tasks, in the order of its context list.
        memory: What it is reminded of; where short-term memory is on, that stands in place of the context.
        notes: What earlier runs learned of it.
        directives: What people told the run while it goes on.
    """
    if memory is None or memory.short_term is None:
        warn_of_long_outputs(context_outputs)
    prompt = render_parts(user_prompt_parts(task, context_outputs, memory, notes, directives))
    _log.debug("User prompt built: %d characters", len(prompt))
    return prompt


def user_prompt_parts(
    task: Task,
    context_outputs: Sequence[TaskOutput] = (),
    memory: RecalledMemory | None = None,
    notes: TaskReflection | None = None,
    directives: Sequence[str] = (),
) -> list[PromptPart]:
    """Return what the prompt of `build_user_prompt` is made of: sections that a context budget may cut, and the rest."""
    short_term = None if memory is None else memory.short_term
    sections = [*scope_sections(memory)]
    if short_term is not None:
        sections.append(short_term_section(short_term))
    elif context_outputs:
        sections.append(context_part(context_outputs))
    sections += memory_sections(memory)
    if notes is not None:
        sections.append(improvement_section(notes))
    return [*[section for section in sections if section.pieces], *fixed_parts(task, directives)]


def fixed_parts(task: Task, directives: Sequence[str] = ()) -> list[str]:
    """Return what no context budget cuts: what the task itself says, and what people told its run."""
    parts = [
        _revision_section(task),
        _directives_section(directives),
        f"## Task\n{task.description}",
        f"## Expected Output\n{task.expected_output}",
        _format_section(task),
    ]
    return [part for part in parts if part]


def _revision_section(task: Task) -> str:
    """Return what was wrong with the previous attempt (S-TPL-36)."""
    feedback = task.revision_feedback
    if feedback is None or not feedback.strip():
        return ""
    attempt = f" (Attempt {task.attempt_number + 1})" if task.attempt_number > 0 else ""
    lines = [f"## Revision Instructions{attempt}", _REVISION, "", "### Feedback", feedback]
    previous = task.prior_attempt_output
    if previous is not None and previous.strip():
        lines += ["", "### Previous Output", previous]
    return "\n".join(lines)


def _directives_section(directives: Sequence[str]) -> str:
    """Return what people told the run (S-TPL-57); further lines of one are indented, so that each is one entry of the list."""
    if not directives:
        return ""
    entries = ["- " + text.strip().replace("\n", "\n  ") for text in directives]
    return "\n".join(["## Active Directives", *entries])


def _format_section(task: Task) -> str:
    if task.output_type is None:
        return ""
    from ensemble_ray.prompts.output_format import output_format_section  # only typed tasks need schemas

    return output_format_section(task.output_type)


#: What every agent is told (S-TPL-16, S-TPL-20).
_INSTRUCTION = (
    "You must produce a final answer that matches the expected output of the task you are given. "
    "Be accurate and thorough, and aim for the quality of work you would sign with your name. "
    "Give the answer itself and nothing else: no preamble before it and no postscript after it."
)


def build_system_prompt(agent: Agent) -> str:
    """Role, background, goal, the fixed instruction and the form of the answer, in this order.

    Parts that the agent does not have leave no trace; the text ends without white space.
    """
    parts = [f"You are {agent.role}."]
    background = (agent.background or "").strip()
    if background:
        parts.append(background)
    parts += ["", f"Your personal goal is: {agent.goal}", "", _INSTRUCTION]
    response_format = agent.response_format.strip()
    if response_format:
        parts.append(f"Output format instructions: {response_format}")
    prompt = "\n".join(parts).rstrip()
    _log.debug("System prompt built: %d characters", len(prompt))
    return prompt
