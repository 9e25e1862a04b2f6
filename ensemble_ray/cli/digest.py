"""The demo's team: readers take notes of passages, an editor joins the notes into a digest. Room: cli.

A reader's task holds its passage. A deterministic task tidies each note, so that the editor is given notes and not the
passages that they were made of. Notes are joined in groups that fit the editor's window, and the groups again, until
one text is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.ensemble import Ensemble

if TYPE_CHECKING:
    from ensemble_ray.cli.passages import Passage
    from ensemble_ray.execute.handler import TaskHandlerContext
    from ensemble_ray.outputs import EnsembleOutput
    from ensemble_ray.ports import ChatModel

__all__ = ["DigestTeam", "digest_team", "render_digest", "whole_sentences"]

#: Readers that share the passages.
_READERS = 2
#: Notes that an editor joins at a time.
_GROUP = 8
_SENTENCE_ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")


def tidy_note(context: TaskHandlerContext) -> str:
    """Handler that gives the note before it, in whole sentences."""
    return whole_sentences(context.context_outputs[0].raw) or "(nothing)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestTeam:
    """The team, and which of its tasks give what the digest is printed from."""

    ensemble: Ensemble
    #: label of each passage with the task that takes notes of it
    notes: tuple[tuple[str, Task], ...]
    digest: Task


def digest_team(
    passages: Sequence[Passage], *, reader_llm: ChatModel, editor_llm: ChatModel, max_parallel_tasks: int
) -> DigestTeam:
    """The team for these passages; there must be at least one."""
    readers = [_reader(number, reader_llm) for number in range(1, min(_READERS, len(passages)) + 1)]
    editor = Agent(
        role="Editor",
        goal="Join short notes into one short text that a newcomer understands",
        llm=editor_llm,
    )
    tasks: list[Task] = []
    notes: list[tuple[str, Task]] = []
    for number, passage in enumerate(passages, start=1):
        reading = Task(
            name=f"read-{number}",
            description=f"Say in one or two short sentences what this text about '{passage.label}' says.\n\n{passage.text}",
            expected_output="One or two short sentences in plain words.",
            agent=readers[(number - 1) % len(readers)],
        )
        note = Task(
            name=f"note-{number}",
            description=f"Note on '{passage.label}'",
            expected_output="The note in whole sentences",
            handler=tidy_note,
            context=[reading],
        )
        tasks += [reading, note]
        notes.append((passage.label, note))
    digest = _joined([note for _, note in notes], editor, tasks)
    ensemble = Ensemble(tasks=tasks, workflow=Workflow.PARALLEL, max_parallel_tasks=max_parallel_tasks)
    return DigestTeam(ensemble=ensemble.with_origin("ensemble-ray demo"), notes=tuple(notes), digest=digest)


def _reader(number: int, llm: ChatModel) -> Agent:
    return Agent(role=f"Reader {number}", goal="Say what a text is about, briefly and in plain words", llm=llm)


def _joined(notes: Sequence[Task], editor: Agent, tasks: list[Task]) -> Task:
    """Tasks that join the notes, level by level; gives the last one."""
    level = 1
    while True:
        groups = [notes[start : start + _GROUP] for start in range(0, len(notes), _GROUP)]
        is_last = len(groups) == 1
        joined = [
            Task(
                name="digest" if is_last else f"digest-{level}-{number}",
                description="Write a short summary, in three sentences, of what all the notes above say.",
                expected_output="Three sentences in plain words.",
                agent=editor,
                context=group,
            )
            for number, group in enumerate(groups, start=1)
        ]
        tasks += joined
        if is_last:
            return joined[0]
        notes, level = joined, level + 1


def render_digest(team: DigestTeam, output: EnsembleOutput) -> str:
    """The digest for people: the editor's text, then the notes that it was made from."""
    digest = output.get_output(team.digest)
    lines = ["Digest", "", whole_sentences("" if digest is None else digest.raw), "", "Notes", ""]
    for label, note in team.notes:
        found = output.get_output(note)
        if found is not None:
            lines.append(f"- {label}: {whole_sentences(found.raw)}")
    return "\n".join(lines)


def whole_sentences(text: str) -> str:
    """The text on one line, without a last sentence that the token limit cut; all of it where it has no other."""
    words = " ".join(text.split())
    ends = [position for position, char in enumerate(words) if char in _SENTENCE_ENDS]
    ends = [end for end in ends if end + 1 == len(words) or words[end + 1] in " \u201d\"')" or words[end] > "\u2000"]
    return words[: ends[-1] + 1] if ends else words
