"""Cut a task's requests to its context budget, always the same way, since a resumed run rebuilds the conversation.

Prompts, feedback, the model's own words and tool descriptions are never cut (S-MEM-132).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.fact import as_count, as_mapping, as_sequence, as_text
from ensemble_ray.prompts.packing import PackedSection, SectionCut, fixed_size, pack_sections
from ensemble_ray.prompts.task import SEPARATOR, Piece, PromptPart, Section, SectionKind, render_parts
from ensemble_ray.text.foreign_text import CHARACTERS_PER_TOKEN, estimate_tokens
from ensemble_ray.values.messages import ChatMessage, ToolSpec

_SYSTEM, _TURN = 1, 2  # messages of the system prompt, and of one turn of the history
_LISTED = 3


def request_characters(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> int:
    characters = sum(len(message.content or "") for message in messages)
    characters += sum(len(call.name) + len(call.arguments) for message in messages for call in message.tool_calls)
    attached = [each.estimated_tokens for message in messages for each in message.attachments]
    characters += sum(attached) * CHARACTERS_PER_TOKEN
    fields = (message.provider_fields for message in messages)
    characters += sum(len(each.message) + sum(map(len, each.tool_calls)) for each in fields if each is not None)
    return characters + sum(len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters)) for tool in tools)


def estimated_input(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> int:
    """Estimate the input tokens of a request: one for four characters (S-BUD-2), and more for attachments (S-ATT-40)."""
    return estimate_tokens(request_characters(messages, tools))


def check_context_budget(name: str, budget_tokens: int, characters: int) -> None:
    """Raise `ValidationError` if the budget of task `name` is below the characters that are never cut (S-MEM-137)."""
    if characters > budget_tokens * CHARACTERS_PER_TOKEN:
        needed = -(-characters // CHARACTERS_PER_TOKEN)
        raise ValidationError(
            f"Task '{name}': context_budget {budget_tokens:,} is too small: what is never cut (instructions, tools, the task "
            f"with its expected output, format and revision feedback, and the model's own words) needs at least {needed:,} tokens"
        )


class FittedRequest(Struct, frozen=True, kw_only=True):
    messages: Sequence[ChatMessage]
    cuts: tuple[SectionCut, ...] = ()  # in request order; empty: the conversation is complete
    needed_tokens: int = 0


class ContextWindow:
    def __init__(
        self,
        name: str,
        budget_tokens: int,
        *,
        parts: Sequence[PromptPart],
        history: Sequence[ChatMessage] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        """Create a window for requests with these parts of the user prompt, a history before it, and tools."""
        self.budget_tokens = budget_tokens
        self._name = name
        self._parts = parts
        self._history = history
        self._tool_characters = request_characters((), tools)
        self._first_answer = _SYSTEM + len(history) + 1

    def fit(self, messages: Sequence[ChatMessage]) -> FittedRequest:
        """Cut a conversation to the budget. A fitting conversation is returned as the same object."""
        characters = request_characters(messages, ()) + self._tool_characters
        room = self.budget_tokens * CHARACTERS_PER_TOKEN - characters
        if room >= 0:
            return FittedRequest(messages=messages)
        prompt = [part for part in self._parts if isinstance(part, Section)]
        label, turns = SectionKind.HISTORY.value, zip(self._history[::_TURN], self._history[1::_TURN], strict=True)
        history = Section(
            kind=SectionKind.HISTORY,
            label=label if self._history else "",
            pieces=tuple(Piece(label=label, before=one.content or "", text=two.content or "") for one, two in turns),
            first_to_go="first",
        )
        answers = [message for message in messages[self._first_answer :] if message.role == "tool"]
        results = Section(
            kind=SectionKind.TOOL_RESULTS,
            pieces=tuple(Piece(label=each.name or "tool", text=each.content or "") for each in answers),
            first_to_go="first",
            keeps_all=True,  # each tool call needs a result, at least a marker
        )
        others = [history, results]
        sizes = [
            *(len(part.render()) + len(SEPARATOR) for part in prompt),
            *(sum(piece.size - fixed_size(each, piece) for piece in each.pieces) for each in others),
        ]
        check_context_budget(self._name, self.budget_tokens, characters - sum(sizes))
        packed = pack_sections([*prompt, *others], sizes, room + sum(sizes))
        return FittedRequest(
            messages=self._rebuild(messages, packed),
            cuts=tuple(cut for each in (packed[-2], *packed[:-2], packed[-1]) for cut in each.cuts),
            needed_tokens=-(-characters // CHARACTERS_PER_TOKEN),
        )

    def _rebuild(self, messages: Sequence[ChatMessage], packed: Sequence[PackedSection]) -> list[ChatMessage]:
        *prompt, history, results = (each.section for each in packed)
        kept: list[ChatMessage] = []
        for turn, piece in zip(packed[-2].kept, history.pieces, strict=True):
            question, answer = self._history[turn * _TURN : (turn + 1) * _TURN]
            if history.note and not kept:  # the first question reports the turns that were cut before it
                question = replace(question, content=f"{history.note}{SEPARATOR}{question.content}")
            kept += [question, replace(answer, content=piece.text)]
        sections = iter(prompt)
        parts = [next(sections) if isinstance(part, Section) else part for part in self._parts]
        texts = iter(results.pieces)
        return [
            *messages[:_SYSTEM],
            *kept,
            replace(messages[self._first_answer - 1], content=render_parts(parts)),
            *(
                replace(message, content=next(texts).text) if message.role == "tool" else message
                for message in messages[self._first_answer :]
            ),
        ]


def context_data(
    cuts: Sequence[SectionCut], *, turn: int, budget_tokens: int, needed_tokens: int
) -> Mapping[str, object]:
    """Return the trace's data of a cut request (S-MEM-136); complete sections only count."""
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
    return [
        f"{as_text(cut.get('name'))} cut by {as_count(cut.get('cut_tokens')):,} of {as_count(cut.get('tokens')):,} tokens"
        for cut in map(as_mapping, as_sequence(data.get("cut")))
    ]


def describe_context(data: Mapping[str, object]) -> str:
    """Return such data as `3 of 5 sections whole, writer cut by 1,200 of 2,000 tokens`."""
    cuts = describe_cuts(data)
    counts = f"{as_count(data.get('whole'))} of {as_count(data.get('sections'))} sections whole"
    more = [f"{len(cuts) - _LISTED:,} more cut"] if len(cuts) > _LISTED else []
    return ", ".join((counts, *cuts[:_LISTED], *more))
