"""`python -m benchmarks cached-prompts`: the share of the input tokens that a provider's cache of prompts can have.

The requests are those of real runs with a scripted model, encoded as they are sent. A request can use what an earlier one of the
same run has in common with it from its beginning. Without breakpoints that counts from 1,024 tokens on, in steps of 128, as OpenAI
stores prompts; with breakpoints, it is the longest beginning that an earlier request marked, of at least 1,024 tokens, as
Anthropic stores them. A token is four characters, as in all estimates of the library.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from ensemble_ray import Agent, ChatMessage, Ensemble, MapEnsemble, Task, ToolCall, ToolSpec, tool
from ensemble_ray.llm.protocol.request import PromptCache, RequestOptions
from ensemble_ray.testing import ScriptedCall, ScriptedModel

__all__ = ["RUNS", "Share", "fan_out", "main", "manager", "map_items", "sent_in", "share_of", "tool_loop"]

_CHARACTERS_PER_TOKEN = 4
_LEAST, _STEP = 1024, 128  # tokens
_OPENROUTER = "https://openrouter.ai/api/v1 model"
_GUIDE = "Rate the tone of a message, and name what its writer wants. Give reasons in one sentence. "
_PAGE = "The tide table of the harbour, with heights in metres and times of the day. "

Sent = tuple[Sequence[ChatMessage], Sequence[ToolSpec]]


class _Rating(BaseModel):
    tone: Literal["calm", "angry"]
    reason: str


@tool
def search(text: str) -> str:
    """Search the notes of the harbour office, and return the best page.

    Args:
        text: Words to search for.
    """
    return f"{text}: " + _PAGE * 8


@dataclass(frozen=True, slots=True)
class Share:
    """Input tokens of all requests of a run, and those of them that the cache can have."""

    sent: int
    cached: int

    @property
    def part(self) -> float:
        """The share, from 0 to 1."""
        return self.cached / self.sent if self.sent else 0.0


def map_items(items: int) -> ScriptedModel:
    """A map over items with a guide in the background of its agent, and typed answers."""
    model = ScriptedModel(otherwise='{"tone": "calm", "reason": "It asks."}')
    reader = Agent("Reader", "Rate messages", background=_GUIDE * 60, llm=model)

    def of(item: int) -> Task:
        return Task(
            f"Rate message {item}: " + f"Where is my parcel number {item}? " * 8,
            "A rating",
            agent=reader,
            output_type=_Rating,
        )

    MapEnsemble(items=range(items), map_task=of).run(runtime="inline", durability="off")
    return model


def fan_out(tasks: int) -> ScriptedModel:
    """Tasks over items with the output of one task as their common context."""
    model = ScriptedModel(otherwise="calm")
    writer = Agent("Writer", "Write", llm=ScriptedModel("A rule of the house. " * 400))
    reader = Agent("Reader", "Rate messages", llm=model)
    guide = Task("Write the guide", "A guide", name="guide", agent=writer)
    rated = [
        Task(f"Rate message {item}: Where is my parcel number {item}?", "A rating", agent=reader, context=[guide])
        for item in range(tasks)
    ]
    Ensemble([guide, *rated], workflow="parallel").run(runtime="inline", durability="off")
    return model


def tool_loop(turns: int) -> ScriptedModel:
    """A tool loop of so many turns."""
    calls = [ToolCall(f"call-{turn}", "search", json.dumps({"text": f"page {turn}"})) for turn in range(turns - 1)]
    model = ScriptedModel(*calls, "done")
    agent = Agent("Clerk", "Answer questions", background=_GUIDE * 50, tools=[search], llm=model, max_iterations=turns)
    Ensemble([Task("Find the tides", "A table", agent=agent)]).run(runtime="inline", durability="off")
    return model


def manager(delegations: int) -> ScriptedModel:
    """A manager that delegates to five workers in turn; only its own requests count."""
    roles = ["Writer", "Reader", "Clerk", "Painter", "Judge"]
    calls = [
        ToolCall(
            f"call-{number}",
            "delegate_task",
            json.dumps({"agent_role": roles[number % len(roles)], "task_description": f"Do part {number} of the work"}),
        )
        for number in range(delegations)
    ]
    model = ScriptedModel(*calls, "done")
    workers = [
        Agent(role, f"Be a good {role}", background=_GUIDE * 8, llm=ScriptedModel(otherwise=_PAGE * 12))
        for role in roles
    ]
    Ensemble(
        [Task("Do the work", "All of it")], agents=workers, workflow="hierarchical", llm=model, manager_llm=model
    ).run(runtime="inline", durability="off")
    return model


#: By name: makes the run and returns its model.
RUNS: Mapping[str, Callable[[], ScriptedModel]] = {
    "map of 1,000 items": lambda: map_items(1000),
    "1,000 tasks with one context": lambda: fan_out(1000),
    "tool loop of 20 turns": lambda: tool_loop(20),
    "manager with 10 delegations": lambda: manager(10),
}


def share_of(requests: Sequence[Sent], cache: PromptCache, *, marks_results: bool = False) -> Share:
    """Return what a cache can have of requests in their order."""
    options = RequestOptions.of("model", {}, "a benchmark")
    stored: set[int] = set()
    sent = cached = 0
    for messages, tools in requests:
        body = json.loads(options.encode(messages, tools, cache=cache, origin=_OPENROUTER if marks_results else ""))
        text, marks = _flatten(body)
        if cache == "breakpoints":
            ends = [end for end in marks if end >= _LEAST * _CHARACTERS_PER_TOKEN]
            blocks = list(_blocks(body))
        else:
            ends = list(range(_LEAST * _CHARACTERS_PER_TOKEN, len(text) + 1, _STEP * _CHARACTERS_PER_TOKEN))
            blocks = ends
        sent += len(text)
        cached += max((end for end in blocks if hash(text[:end]) in stored), default=0)
        stored |= {hash(text[:end]) for end in ends}
    return Share(sent // _CHARACTERS_PER_TOKEN, cached // _CHARACTERS_PER_TOKEN)


def sent_in(model: ScriptedModel) -> list[Sent]:
    """Return the requests that a model received."""
    calls: Sequence[ScriptedCall] = model.calls
    return [(call.messages, call.tools) for call in calls]


def _parts(body: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the texts of a request in the order in which providers read them, and whether a breakpoint follows."""
    yield json.dumps(body.get("tools", [])), False
    for message in body["messages"]:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        yield f"\n{message['role']}: ", False
        for part in cast("Sequence[Mapping[str, Any]]", parts):
            yield part["text"], "cache_control" in part
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"]), False


def _flatten(body: Mapping[str, Any]) -> tuple[str, list[int]]:
    text, marks = "", list[int]()
    for part, is_marked in _parts(body):
        text += part
        marks += [len(text)] if is_marked else []
    return text, marks


def _blocks(body: Mapping[str, Any]) -> Iterator[int]:
    length = 0
    for part, _ in _parts(body):
        length += len(part)
        yield length


def main(arguments: Sequence[str]) -> int:
    """Measure and print; always 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks cached-prompts", description=(__doc__ or "").partition("\n")[0]
    )
    parser.parse_args(arguments)
    table = Table(title="Share of the input tokens that a cache of prompts can have", title_justify="left")
    for head in ("run", "requests", "input tokens", "without marks", "breakpoints, before", "gateway", "OpenRouter"):
        table.add_column(head, justify="left" if head == "run" else "right")
    for name, make in RUNS.items():
        sent = sent_in(make())
        automatic = share_of(sent, "off")
        marked = [share_of(sent, "breakpoints", marks_results=each) for each in (False, True)]
        row = (
            f"{len(sent):,}",
            f"{automatic.sent:,}",
            f"{automatic.part:.0%}",
            "0%",
            *(f"{each.part:.0%}" for each in marked),
        )
        table.add_row(name, *row)
    Console(width=None if Console().is_terminal else 120).print(table)
    return 0
