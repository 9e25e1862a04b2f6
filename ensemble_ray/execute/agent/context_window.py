"""The requests of one task, held to its context budget. Pure.

In: the conversation of a task as it is. Out: as much of it as may be sent, and what was cut. What fits is sent as it is. The
task, its expected output and format, revision feedback, the system prompt, the model's own words and the descriptions of tools
are never cut (S-MEM-132); where they alone are too much, no request is made (S-MEM-137).
Must never happen: a request over the budget; another request for the same conversation, since a resumed run builds it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.fact import as_count, as_mapping, as_sequence, as_text
from ensemble_ray.prompts.packing import fixed_size, pack_sections
from ensemble_ray.prompts.task import SEPARATOR, Piece, Section, SectionKind, render_parts
from ensemble_ray.text.foreign_text import CHARACTERS_PER_TOKEN, estimate_tokens
from ensemble_ray.values.messages import ChatMessage

if TYPE_CHECKING:
    from ensemble_ray.prompts.packing import PackedSection, SectionCut
    from ensemble_ray.prompts.task import PromptPart
    from ensemble_ray.values.messages import ToolSpec


def request_characters(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> int:
    """Characters of the messages of a request, and of its tool descriptions."""
    characters = sum(len(message.content or "") for message in messages)
    characters += sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    fields = (message.provider_fields for message in messages)
    characters += sum(len(each.message) + sum(map(len, each.tool_calls)) for each in fields if each is not None)
    return characters + sum(len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters)) for tool in tools)


def estimated_input(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> int:
    """Input tokens of a request: a token for each four characters of its messages and tool descriptions (S-BUD-2)."""
    return estimate_tokens(request_characters(messages, tools))


_SYSTEM = 1
#: A question of the history and its answer.
_TURN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRequest:
    """A conversation as it is sent."""

    messages: Sequence[ChatMessage]
    #: in the order of the request; empty: all of it is sent
    cuts: tuple[SectionCut, ...] = ()
    #: tokens of the whole
    needed_tokens: int = 0


def check_context_budget(name: str, budget_tokens: int, characters: int) -> None:
    """Refuse a budget that what is never cut does not fit into (S-MEM-137).

    Args:
        name: Of the task.
        budget_tokens: Its budget.
        characters: What is never cut.

    Raises:
        ValidationError: it is too small; the text says what is needed.
    """
    if characters > budget_tokens * CHARACTERS_PER_TOKEN:
        needed = -(-characters // CHARACTERS_PER_TOKEN)
        raise ValidationError(
            f"Task '{name}': context_budget {budget_tokens:,} is too small: what is never cut (instructions, tools, the task "
            f"with its expected output, format and revision feedback, and the model's own words) needs at least {needed:,} tokens"
        )


class ContextWindow:
    """Fits the requests of one task into its budget."""

    def __init__(
        self,
        name: str,
        budget_tokens: int,
        *,
        parts: Sequence[PromptPart],
        history: Sequence[ChatMessage] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        """Make one for a task.

        Args:
            name: Of the task, for errors.
            budget_tokens: Most tokens of a request.
            parts: What its user prompt is made of.
            history: What was said before it.
            tools: What is offered with each request.
        """
        self.budget_tokens = budget_tokens
        self._name = name
        self._parts = parts
        self._history = history
        self._tool_characters = request_characters((), tools)
        self._first_answer = _SYSTEM + len(history) + 1

    def fit(self, messages: Sequence[ChatMessage]) -> FittedRequest:
        """Return as much of a conversation as fits; the same messages where all of it does.

        Args:
            messages: System prompt, history, user prompt, and what was said and called since.

        Raises:
            ValidationError: what is never cut does not fit.
        """
        characters = request_characters(messages, ()) + self._tool_characters
        room = self.budget_tokens * CHARACTERS_PER_TOKEN - characters
        if room >= 0:
            return FittedRequest(messages=messages)
        prompt = [part for part in self._parts if isinstance(part, Section)]
        sections = [*prompt, _history_section(self._history), _results_section(messages[self._first_answer :])]
        sizes = [
            *(len(part.render()) + len(SEPARATOR) for part in prompt),
            *(sum(piece.size - fixed_size(each, piece) for piece in each.pieces) for each in sections[len(prompt) :]),
        ]
        room += sum(sizes)
        check_context_budget(self._name, self.budget_tokens, characters - sum(sizes))
        packed = pack_sections(sections, sizes, room)
        return FittedRequest(
            messages=self._rebuild(messages, packed),
            cuts=tuple(cut for each in (packed[-2], *packed[:-2], packed[-1]) for cut in each.cuts),
            needed_tokens=-(-characters // CHARACTERS_PER_TOKEN),
        )

    def _rebuild(self, messages: Sequence[ChatMessage], packed: Sequence[PackedSection]) -> list[ChatMessage]:
        """Return the conversation with the packed sections in place of the whole ones."""
        *prompt, history, results = (each.section for each in packed)
        sections = iter(prompt)
        parts = [next(sections) if isinstance(part, Section) else part for part in self._parts]
        texts = iter(results.pieces)
        return [
            *messages[:_SYSTEM],
            *self._kept_history(history, packed[-2].kept),
            replace(messages[self._first_answer - 1], content=render_parts(parts)),
            *(
                replace(message, content=next(texts).text) if message.role == "tool" else message
                for message in messages[self._first_answer :]
            ),
        ]

    def _kept_history(self, section: Section, kept: Sequence[int]) -> list[ChatMessage]:
        """Return the turns that are kept; the first question says what was left out before it."""
        found: list[ChatMessage] = []
        for turn, piece in zip(kept, section.pieces, strict=True):
            question, answer = self._history[turn * _TURN : (turn + 1) * _TURN]
            if section.note and not found:
                question = replace(question, content=f"{section.note}{SEPARATOR}{question.content}")
            found += [question, replace(answer, content=piece.text)]
        return found


def _history_section(history: Sequence[ChatMessage]) -> Section:
    label = SectionKind.HISTORY.value
    turns = zip(history[::_TURN], history[1::_TURN], strict=True)
    return Section(
        kind=SectionKind.HISTORY,
        label=label if history else "",
        pieces=tuple(Piece(label=label, before=asked.content or "", text=said.content or "") for asked, said in turns),
        first_to_go="first",
    )


def _results_section(messages: Sequence[ChatMessage]) -> Section:
    """Return what tools gave; each request of the model keeps an answer, if only a marker."""
    results = [message for message in messages if message.role == "tool"]
    return Section(
        kind=SectionKind.TOOL_RESULTS,
        pieces=tuple(Piece(label=each.name or "tool", text=each.content or "") for each in results),
        first_to_go="first",
        keeps_all=True,
    )


#: Cuts that a line names; a long tool loop has many.
_NAMED = 3


def context_data(
    cuts: Sequence[SectionCut], *, turn: int, budget_tokens: int, needed_tokens: int
) -> Mapping[str, object]:
    """Return what a trace tells of a request that was cut (S-MEM-136).

    Args:
        cuts: Of its sections, in the order of the request; whole ones count, and are not listed.
        turn: Number of the model call.
        budget_tokens: What the request may have.
        needed_tokens: What all of it would have had.
    """
    return {
        "turn": turn,
        "budget_tokens": budget_tokens,
        "needed_tokens": needed_tokens,
        "sections": len(cuts),
        "whole": sum(not cut.cut_tokens for cut in cuts),
        "cut": [
            {"name": cut.label, "tokens": cut.tokens, "cut_tokens": cut.cut_tokens} for cut in cuts if cut.cut_tokens
        ],
    }


def describe_cuts(data: Mapping[str, object]) -> list[str]:
    """Return a text for each cut of such data."""
    found = [as_mapping(entry) for entry in as_sequence(data.get("cut"))]
    return [
        f"{as_text(entry.get('name'))} cut by {as_count(entry.get('cut_tokens')):,} of "
        f"{as_count(entry.get('tokens')):,} tokens"
        for entry in found
    ]


def describe_context(data: Mapping[str, object]) -> str:
    """Return such data on one line: `3 of 5 sections whole, writer cut by 1,200 of 2,000 tokens`."""
    cuts = describe_cuts(data)
    counts = f"{as_count(data.get('whole'))} of {as_count(data.get('sections'))} sections whole"
    more = [f"{len(cuts) - _NAMED:,} more cut"] if len(cuts) > _NAMED else []
    return ", ".join((counts, *cuts[:_NAMED], *more))
