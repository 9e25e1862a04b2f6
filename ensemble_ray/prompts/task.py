"""Prompts of a task, of a manager, and of a reflection."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Sequence
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import ManagerPromptContext, ManagerPromptStrategy
from ensemble_ray.definition.task import Task
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.memory import RecalledMemory, TaskReflection
from ensemble_ray.values.task_output import TaskOutput

_log = bounded_logger(__name__)

SEPARATOR = "\n\n"  # text between the parts of a prompt
LONG_OUTPUT = 10_000  # characters of one context output above which a warning is logged (S-TPL-34)
_SHOWN = 80  # length of a task's description in a log line
#: Instruction of every agent (S-TPL-16, S-TPL-20).
_INSTRUCTION = (
    "You must produce a final answer that matches the expected output of the task you are given. "
    "Be accurate and thorough, and aim for the quality of work you would sign with your name. "
    "Give the answer itself and nothing else: no preamble before it and no postscript after it."
)
_CONTEXT_HEADING = (
    "## Context from Previous Tasks\nEarlier tasks gave the results below. Use what helps you with your task."
)
_ADDITIONAL_HEADING = "## Additional Context\nThe request for this run contains this text. Consider it in your work."
_REVISION = "A previous attempt at this task was not accepted. Take the feedback into account."
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

#: Sections of a reflection, in their order (S-REFL-11).
_REFLECTION_SECTIONS = ("REFINED_DESCRIPTION", "REFINED_EXPECTED_OUTPUT", "OBSERVATIONS", "SUGGESTIONS")
#: A heading begins a line. Models may write it in bold or as a title.
_REFLECTION_HEADING = re.compile(rf"^[ \t#*]*({'|'.join(_REFLECTION_SECTIONS)})[ \t*]*:[ \t*]*", re.MULTILINE)
_BULLETS = ("- ", "* ")


class SectionKind(Enum):
    """Content of a section. Kinds are shortened in this order, the first one first (S-MEM-133)."""

    HISTORY = "history"
    LONG_TERM = "long-term memory"
    ENTITIES = "entity knowledge"
    SCOPE = "memory scope"
    IMPROVEMENT_NOTES = "improvement notes"
    TOOL_RESULTS = "tool results"
    SHORT_TERM = "short-term memory"
    CONTEXT = "context"


class Piece(Struct, frozen=True, kw_only=True):
    """An entry of a section."""

    label: str  # source of the text, for reports of cuts
    before: str = ""  # text around it, which is never shortened
    text: str
    after: str = ""

    @property
    def size(self) -> int:
        """Characters, with the text around it."""
        return len(self.before) + len(self.text) + len(self.after)

    def render(self) -> str:
        """Return the piece as text of a prompt."""
        return f"{self.before}{self.text}{self.after}"


class Section(Struct, frozen=True, kw_only=True):
    """A part of a request that may be shortened."""

    kind: SectionKind
    label: str = ""  # name in reports of cuts; "": each piece is reported under its own label
    heading: str = ""
    pieces: tuple[Piece, ...]  # in the order of the prompt; without pieces there is no section
    #: piece that is shortened first; `longest` if their value is unknown
    first_to_go: Literal["first", "last", "longest"]
    keeps_all: bool = False  # whether each piece must stay, at least as a marker: a tool call needs its result
    note: str = ""  # text in place of dropped pieces

    @property
    def order(self) -> list[int]:
        """Positions of the pieces, in the order of shortening."""
        positions = list(range(len(self.pieces)))
        if self.first_to_go == "last":
            return positions[::-1]
        if self.first_to_go == "longest":
            return sorted(positions, key=lambda position: -len(self.pieces[position].text))
        return positions

    def render(self) -> str:
        """Return the section as text of a prompt, without a line break at its end; "" without pieces."""
        if not self.pieces:
            return ""
        pieces = "".join([f"{piece.before}{piece.text}{piece.after}" for piece in self.pieces])
        note = f"{SEPARATOR}{self.note}" if self.note else ""
        return f"{self.heading}{pieces}{note}"


PromptPart: TypeAlias = str | Section  # A part of a user prompt: text that is never cut, or a section


class ReflectionParts(NamedTuple):
    """Sections of a reflection; missing ones are empty."""

    description: str = ""
    expected_output: str = ""
    observations: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()


def build_system_prompt(agent: Agent) -> str:
    """Return role, background, goal, the fixed instruction and the form of the answer, in this order.

    Parts that the agent does not have are omitted. The text ends without white space.
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
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("System prompt built: %d characters", len(prompt))
    return prompt


def build_user_prompt(
    task: Task,
    context_outputs: Sequence[TaskOutput] = (),
    memory: RecalledMemory | None = None,
    notes: TaskReflection | None = None,
    directives: Sequence[str] = (),
    *,
    additional_context: str = "",
) -> str:
    """Return memory, context, notes, additional context, directives, task, expected output and output format.

    Empty sections are omitted.

    Args:
        task: With its variables resolved.
        context_outputs: Outputs of its context tasks, in the order of its context.
        memory: Recalled memory; short-term memory replaces the context.
        notes: Improvement notes of earlier runs.
        directives: Directives of people to the running run.
        additional_context: Text of the run for all its tasks; it precedes the task's own.
    """
    if memory is None or memory.short_term is None:
        for output in context_outputs:
            if len(output.raw) > LONG_OUTPUT:  # fills a large part of a model's window; it is not cut (S-TPL-34)
                _log.warning(
                    "Context output of task '%s' is %d characters long (threshold %d); it is passed on uncut",
                    output.task_description[:_SHOWN],
                    len(output.raw),
                    LONG_OUTPUT,
                )
    prompt = render_parts(
        user_prompt_parts(task, context_outputs, memory, notes, directives, additional_context=additional_context)
    )
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("User prompt built: %d characters", len(prompt))
    return prompt


def user_prompt_parts(
    task: Task,
    context_outputs: Sequence[TaskOutput] = (),
    memory: RecalledMemory | None = None,
    notes: TaskReflection | None = None,
    directives: Sequence[str] = (),
    *,
    additional_context: str = "",
) -> list[PromptPart]:
    """Return the parts of `build_user_prompt`: sections that a context budget may cut, and fixed text.

    Sections without pieces are omitted.
    """
    short_term = None if memory is None else memory.short_term
    sections = [] if memory is None else scope_sections(memory)
    if short_term is not None:  # earlier outputs of this run, in the form of a context section (S-MEM-21, S-TPL-35)
        sections.append(
            Section(
                kind=SectionKind.SHORT_TERM,
                heading="## Short-Term Memory (Current Run)\n"
                "Tasks of this run gave the results below. Use what helps you with your task.",
                pieces=tuple(entry_piece(*entry) for entry in short_term),
                first_to_go="first",
            )
        )
    elif context_outputs:
        sections.append(context_part(context_outputs))
    if memory is not None:
        sections += memory_sections(memory)
    if notes is not None:
        # Improvement notes from earlier runs (S-REFL-8).
        kind = SectionKind.IMPROVEMENT_NOTES
        pieces = (Piece(label=kind.value, text="\n".join(_notes(notes))),)
        sections.append(Section(kind=kind, heading=_NOTES_HEADING, pieces=pieces, first_to_go="first"))
    return [
        *[section for section in sections if section.pieces],
        *fixed_parts(task, directives, additional_context=additional_context),
    ]


def fixed_parts(task: Task, directives: Sequence[str] = (), *, additional_context: str = "") -> list[str]:
    """Return the parts that no context budget cuts: texts of the task, and directives to the run."""
    parts = [] if task.revision_feedback is None else [_revision_section(task)]
    if additional_context or task.additional_context:
        added = filter(None, (additional_context.strip(), (task.additional_context or "").strip()))
        parts.append(SEPARATOR.join((_ADDITIONAL_HEADING, *added)))
    if directives:
        # further lines of a directive are indented, so that each is one entry of the list (S-TPL-57)
        entries = ["- " + text.strip().replace("\n", "\n  ") for text in directives]
        parts.append("\n".join(["## Active Directives", *entries]))
    parts += [f"## Task\n{task.description}", f"## Expected Output\n{task.expected_output}"]
    if task.attachments:  # the content follows the text, in this order (S-ATT-22)
        parts.append("\n".join(["## Attachments", *[f"- {each.kind}: {each.name}" for each in task.attachments]]))
    if task.output_type is not None:
        from ensemble_ray.prompts.output_format import output_format_section  # needed only for typed tasks

        parts.append(output_format_section(task.output_type))
    return [*filter(None, parts)]


def render_parts(parts: Sequence[PromptPart]) -> str:
    """Return the parts as one text, without empty parts."""
    texts = [part if isinstance(part, str) else part.render() for part in parts]
    return SEPARATOR.join(filter(None, texts))


def context_section(outputs: Sequence[TaskOutput]) -> str:
    """Return the section as text, without a line break at its end; "" without outputs (S-TPL-32)."""
    return context_part(outputs).render()


def context_part(outputs: Sequence[TaskOutput]) -> Section:
    """Return the section with its pieces."""
    return Section(
        kind=SectionKind.CONTEXT,
        heading=_CONTEXT_HEADING,
        pieces=tuple([entry_piece(output.agent_role, output.task_description, output.raw) for output in outputs]),
        first_to_go="first",
    )


def entry_piece(role: str, description: str, text: str) -> Piece:
    """Return the piece for the output of a task."""
    return Piece(label=role, before=f"\n\n---\n### {role}: {description}\n", text=text, after="\n---")


def scope_sections(memory: RecalledMemory) -> list[Section]:
    """Return a section for each scope that has entries (S-MEM-73)."""
    sections: list[Section] = []
    for scope, contents in memory.scopes:
        label = f"{SectionKind.SCOPE.value} '{scope}'"
        heading = f'## Memory: {scope}\nThe memory scope "{scope}" has what follows. Use what helps you with your task.'
        pieces = tuple(Piece(label=label, before="\n\n---\n", text=content, after="\n---") for content in contents)
        section = Section(kind=SectionKind.SCOPE, label=label, heading=heading, pieces=pieces, first_to_go="longest")
        sections.append(section)  # the store may order entries by age or by meaning (S-MEM-63, S-MEM-65)
    return sections


def memory_sections(memory: RecalledMemory) -> list[Section]:
    """Return the sections of long-term memory and of entities (S-MEM-31, S-MEM-42)."""
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


def build_reflection_request(task: Task, output: str, prior: TaskReflection | None) -> str:
    """Return the one message to a model that reflects on an output (S-REFL-11)."""
    notes = "There are none: this is the first execution." if prior is None else "\n".join(_notes(prior)).lstrip("\n")
    return _REQUEST.format(
        description=task.description, expected_output=task.expected_output, output=output, prior=notes
    )


def parse_reflection(text: str) -> ReflectionParts:
    """Return the sections of an answer. If a heading repeats, its first section counts (S-REFL-12)."""
    found = list(_REFLECTION_HEADING.finditer(text))
    sections: dict[str, str] = {}
    for place, heading in enumerate(found):
        end = found[place + 1].start() if place + 1 < len(found) else len(text)
        sections.setdefault(heading[1], text[heading.end() : end].strip())
    description, expected_output, observations, suggestions = (sections.get(name, "") for name in _REFLECTION_SECTIONS)
    return ReflectionParts(description, expected_output, _items(observations), _items(suggestions))


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


def _notes(reflection: TaskReflection) -> list[str]:
    lines = ["", "### Refined Instructions", reflection.refined_description]
    lines += ["", "### Output Guidance", reflection.refined_expected_output]
    for heading, items in (("Observations", reflection.observations), ("Suggestions", reflection.suggestions)):
        lines += ["", f"### {heading}", *(f"- {item}" for item in items)] if items else []
    return lines


def _items(section: str) -> tuple[str, ...]:
    lines = (line.strip() for line in section.splitlines())
    return tuple(item for line in lines if line.startswith(_BULLETS) and (item := line[2:].strip()))


def _revision_section(task: Task) -> str:
    """Return the feedback on the previous attempt (S-TPL-36)."""
    feedback = task.revision_feedback
    if feedback is None or not feedback.strip():
        return ""
    attempt = f" (Attempt {task.attempt_number + 1})" if task.attempt_number > 0 else ""
    lines = [f"## Revision Instructions{attempt}", _REVISION, "", "### Feedback", feedback]
    previous = task.prior_attempt_output
    if previous is not None and previous.strip():
        lines += ["", "### Previous Output", previous]
    return "\n".join(lines)


#: Default user prompt, in place of a blank one (S-HIER-10).
_COORDINATE = "Coordinate the agents of your team: delegate the work to them, and put their results into one answer."
_DUTY = (
    "You lead a team of agents. You do not do the work yourself: you hand it to the agents below with the tool "
    "delegate_task, read what comes back, and answer with the whole."
)
_WAYS = (
    "How to delegate:\n"
    "- Call delegate_task with agent_role, which is one of the roles above, and task_description.\n"
    "- An agent sees nothing but your task_description: put everything into it that the agent needs, "
    "and results of other agents word for word.\n"
    "- Ask each agent for one thing at a time, and do not ask again for what you have.\n"
    "- If a call is refused or an agent fails, read why, then try something else."
)
_CLOSING = (
    "Now delegate each task to the agent that fits it best, a task after those whose results it needs. "
    "When all results are there, write the final answer yourself: one complete text that brings the results together. "
    "It is all that the reader will see."
)


class DefaultManagerPromptStrategy:
    """Lists the workers in the system prompt and the tasks in the user prompt.

    Examples:
        >>> DefaultManagerPromptStrategy().build_user_prompt(ManagerPromptContext()).splitlines()[0]
        'Get these tasks done by your agents:'
    """

    def build_system_prompt(self, context: ManagerPromptContext, /) -> str:
        """Return the manager's duty, its workers numbered from 1, and instructions for delegating."""
        agents: list[str] = []
        for number, agent in enumerate(context.agents, start=1):
            background = (agent.background or "").strip()
            more = f"\n   Background: {background}" if background else ""
            agents.append(f"{number}. {agent.role}\n   Goal: {agent.goal}{more}")
        purpose = (context.workflow_description or "").strip()
        parts = [_DUTY, f"What this is for: {purpose}" if purpose else "", "Your agents:", *agents, _WAYS]
        return "\n\n".join(part for part in parts if part)

    def build_user_prompt(self, context: ManagerPromptContext, /) -> str:
        """Return outputs from before the run, every task numbered from 1, and the form of the final answer."""
        numbers = {task.object_id: number for number, task in enumerate(context.tasks, start=1)}
        tasks: list[str] = []
        for number, task in enumerate(context.tasks, start=1):
            lines = [f"Task {number}: {task.description}", f"Expected output: {task.expected_output}"]
            if task.agent is not None:
                lines.append(f"Suggested agent: {task.agent.role}")
            needed = [f"Task {numbers[entry.object_id]}" for entry in task.context if entry.object_id in numbers]
            if needed:
                lines.append(f"Needs the results of: {', '.join(needed)}")
            tasks.append("\n".join(lines))
        parts = [context_section(context.previous_outputs), "Get these tasks done by your agents:", *tasks, _CLOSING]
        return "\n\n".join(part for part in parts if part)


def manager_prompts(strategy: ManagerPromptStrategy | None, context: ManagerPromptContext) -> tuple[str, str]:
    """Return the manager's background and its task's description (S-HIER-10); errors of the strategy propagate (S-HIER-13)."""
    chosen = DefaultManagerPromptStrategy() if strategy is None else strategy
    system = _text_of(chosen.build_system_prompt(context), chosen, "build_system_prompt")
    user = _text_of(chosen.build_user_prompt(context), chosen, "build_user_prompt")
    return system, user if user.strip() else _COORDINATE


def _text_of(value: object, strategy: object, method: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    shown, advice = type(value).__name__, ""
    if inspect.iscoroutine(value):
        value.close()  # avoids a warning
        advice = "; it must not be async"
    raise TypeError(f"{type(strategy).__name__}.{method} must return text, got: {shown}{advice}")
