"""The demo's team: a reader takes notes of passages, an editor joins the notes into a digest, level by level.

An adaptive map-reduce: each passage is an item, and a group of notes fits a budget of tokens, so that the editor's window
holds it. Groups are joined again, until one text is left.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.cli.view.terminal import count_noun
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.map_reduce import MapReduceEnsemble
from ensemble_ray.teamfile.fields import GroupPrompt, ItemPrompt

if TYPE_CHECKING:
    from ensemble_ray.cli.demo.passages import Passage
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.values.outputs import EnsembleOutput

#: Tokens of notes that the editor joins at a time: two of its own longest texts, so that each level has half as many.
BUDGET_TOKENS = 160
#: What the editor is asked for.
_EDIT = "Tell what these notes say."
_EDITED = "A text with one short sentence for each note."
#: The number of a list's next item ends no sentence.
_SENTENCE_END = re.compile(r"(?<! \d)(?<! \d\d)[.!?][\"')\u201d\u2019]*(?= |$)|[\u3002\uff01\uff1f]")


def digest_team(
    passages: Sequence[Passage], *, reader_llm: ChatModel, editor_llm: ChatModel, max_parallel_tasks: int
) -> MapReduceEnsemble:
    """Return the team for these passages; there must be at least one."""
    reader = Agent(role="Reader", goal="Say what a text is about, briefly and in plain words", llm=reader_llm)
    editor = Agent(role="Editor", goal="Make short texts out of notes", llm=editor_llm)
    reading = Task(
        # The editor is shown the first paragraph of what a reader was asked, so the passage stands behind it (S-MR-118).
        description="Say in one or two short sentences what this text about '{label}' says.\n\n{text}",
        expected_output="One or two short sentences in plain words.",
        agent=reader,
    )
    joining = Task(description=_EDIT, expected_output=_EDITED, agent=editor)
    return MapReduceEnsemble(
        items=[{"label": passage.label, "text": passage.text} for passage in passages],
        map_task=ItemPrompt(reading),
        reduce_task=GroupPrompt(joining),
        target_token_budget=BUDGET_TOKENS,
        max_parallel_tasks=max_parallel_tasks,
    )


def render_digest(passages: Sequence[Passage], output: EnsembleOutput) -> str:
    """Return the digest for people: the editor's text, the notes it was made from, and the tree of what was done."""
    traces = output.trace.task_traces
    notes = [each.raw for each in output.task_outputs if each.trace is not None and each.trace.node_type == "map"]
    lines = ["Digest", "", whole_sentences(output.raw), "", "Notes", ""]
    lines += [
        f"- {passage.label}: {whole_sentences(note)}" for passage, note in zip(passages, notes, strict=False)
    ]  # an early end has fewer notes
    lines += ["", "Tree", ""]
    for level in output.trace.map_reduce_levels:
        done = [each for each in traces if each.map_reduce_level == level.level]
        tokens = f"{sum(each.metrics.input_tokens for each in done):,} + {sum(each.metrics.output_tokens for each in done):,}"
        node_type = done[0].node_type or "task"
        lines.append(
            f"level {level.level}  {count_noun(level.task_count, node_type):<14}  {tokens} tokens, {level.duration.total_seconds():.1f} s"
        )
    return "\n".join(lines)


def whole_sentences(text: str) -> str:
    """Return the text on one line, without a last sentence that the token limit cut; all of it if it has no other."""
    words = " ".join(text.split())
    ends = [found.end() for found in _SENTENCE_END.finditer(words)]
    return words[: ends[-1]] if ends else words
