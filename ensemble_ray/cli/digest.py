"""The demo's team: readers take notes of passages, an editor joins the notes into a digest. Room: cli.

A reader's task holds its passage. A deterministic task lists the notes of a group, so that the editor is given notes
and not the passages that they were made of; a group fits the editor's window. Groups are joined again, until one text
is left.
"""

from __future__ import annotations

import re
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
#: What the editor is asked for.
_EDIT = "Join the notes into one text. Keep what each of them says."
_EDITED = "A text with one short sentence for each note."
#: The number of a list's next item ends no sentence.
_SENTENCE_END = re.compile(r"(?<! \d)(?<! \d\d)[.!?][\"')\u201d\u2019]*(?= |$)|[\u3002\uff01\uff1f]")


class NoteList:
    """Handler that lists what the tasks before it gave, each under its label, in whole sentences."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)

    def __call__(self, context: TaskHandlerContext) -> str:
        """The list."""
        given = zip(self.labels, context.context_outputs, strict=True)
        return "\n".join(f"- {label}: {whole_sentences(output.raw)}" for label, output in given)


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestTeam:
    """The team, and which of its tasks give what the digest is printed from."""

    ensemble: Ensemble
    #: lists of the readers' notes
    notes: tuple[Task, ...]
    digest: Task


def digest_team(
    passages: Sequence[Passage], *, reader_llm: ChatModel, editor_llm: ChatModel, max_parallel_tasks: int
) -> DigestTeam:
    """The team for these passages; there must be at least one."""
    readers = [_reader(number, reader_llm) for number in range(1, min(_READERS, len(passages)) + 1)]
    editor = Agent(
        role="Editor",
        goal="Make short texts out of notes",
        llm=editor_llm,
    )
    reading = [
        Task(
            name=f"read-{number}",
            description=f"Say in one or two short sentences what this text about '{passage.label}' says.\n\n{passage.text}",
            expected_output="One or two short sentences in plain words.",
            agent=readers[(number - 1) % len(readers)],
        )
        for number, passage in enumerate(passages, start=1)
    ]
    labelled = [(passage.label, task) for passage, task in zip(passages, reading, strict=True)]
    tasks = list(reading)
    notes, digest = _joined(labelled, editor, tasks)
    ensemble = Ensemble(tasks=tasks, workflow=Workflow.PARALLEL, max_parallel_tasks=max_parallel_tasks)
    return DigestTeam(ensemble=ensemble.with_origin("ensemble-ray demo"), notes=tuple(notes), digest=digest)


def _reader(number: int, llm: ChatModel) -> Agent:
    return Agent(role=f"Reader {number}", goal="Say what a text is about, briefly and in plain words", llm=llm)


def _joined(labelled: Sequence[tuple[str, Task]], editor: Agent, tasks: list[Task]) -> tuple[list[Task], Task]:
    """Add the tasks that join the notes, level by level; gives the lists of the readers' notes, and the last task."""
    if len(labelled) == 1:
        return [], labelled[0][1]  # there is nothing to join
    of_readers: list[Task] = []
    level = 1
    while True:
        groups = [labelled[start : start + _GROUP] for start in range(0, len(labelled), _GROUP)]
        is_last = len(groups) == 1
        joined: list[tuple[str, Task]] = []
        for number, group in enumerate(groups, start=1):
            place = "" if is_last and level == 1 else f"-{level}-{number}"
            notes = Task(
                name=f"notes{place}",
                description="The notes",
                expected_output="A list",
                handler=NoteList([label for label, _ in group]),
                context=[task for _, task in group],
            )
            text = Task(
                name="digest" if is_last else f"digest{place}",
                description=_EDIT,
                expected_output=_EDITED,
                agent=editor,
                context=[notes],
            )
            tasks += [notes, text]
            joined.append((f"part {number}", text))
            if level == 1:
                of_readers.append(notes)
        if is_last:
            return of_readers, joined[0][1]
        labelled, level = joined, level + 1


def render_digest(team: DigestTeam, output: EnsembleOutput) -> str:
    """The digest for people: the editor's text, then the notes that it was made from."""
    digest = output.get_output(team.digest)
    notes = [found.raw for task in team.notes if (found := output.get_output(task)) is not None]
    lines = ["Digest", "", whole_sentences("" if digest is None else digest.raw)]
    return "\n".join([*lines, "", "Notes", "", *notes] if notes else lines)


def whole_sentences(text: str) -> str:
    """The text on one line, without a last sentence that the token limit cut; all of it where it has no other."""
    words = " ".join(text.split())
    ends = [found.end() for found in _SENTENCE_END.finditer(words)]
    return words[: ends[-1]] if ends else words
