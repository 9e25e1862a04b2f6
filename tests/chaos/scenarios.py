"""What is run and killed: a team, its inputs, what the model says, and what must be true at the end.

A new construct adds its teams to `teams.py` and its scenarios to `SCENARIOS`; the harness knows nothing else of them.
The model's answers follow from the request alone, so the same conversation always gets the same answer, whoever asks,
and every answer hangs on everything that came before it: a lost or changed result shows in the last one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ensemble_ray import TokenUsage, ToolCall
from ensemble_ray.testing import Reply, ServedRequest

__all__ = ["SCENARIOS", "Scenario", "World"]

#: Longest time of an answer, s; most take less.
_LATENCY_S = 0.06
_STEP = re.compile(r"Step (\w+) of")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a run leaves outside its record."""

    #: where tools leave a line for each time that they did something
    lines: Path

    def done(self) -> list[Mapping[str, str]]:
        """The lines, oldest first; the line of a process that died while it wrote is none."""
        if not self.lines.exists():
            return []
        whole = self.lines.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in whole]


def _nothing_more(_output: Mapping[str, object], _world: World) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A team to kill."""

    name: str
    #: where `ensemble-ray` finds it: `module:attribute`
    target: str
    #: how many model calls it makes when nobody disturbs it
    calls: int
    #: what the model answers; it must follow from the request alone
    answer: Callable[[ServedRequest, World], Reply]
    inputs: Mapping[str, str] = field(default_factory=lambda: {"topic": "chaos"})
    #: what is wrong with the output, beside its being unlike that of the undisturbed run
    check: Callable[[Mapping[str, object], World], Sequence[str]] = _nothing_more


def plain_answer(request: ServedRequest, _world: World) -> Reply:
    """A word that hangs on the prompt; every third is long enough to be kept as a body of its own."""
    return _final(request, [])


def answer_with_tools(request: ServedRequest, world: World) -> Reply:
    """First an effect that must not be repeated, beside a look; then one that may be; then the answer."""
    step = _step(request)
    turn = sum(message.get("role") == "assistant" for message in request.messages)
    if turn == 0:
        return _asking(request, world, [("append_line", f"{step}-0"), ("look_up", f"{step}-0")])
    if turn == 1:
        return _asking(request, world, [("put", f"{step}-1"), ("append_line", f"{step}-1")])
    # What a tool of unknown outcome told is not the same as what it would have told; the others' results are.
    told = [str(each.get("content")) for each in request.messages if each.get("role") == "tool"]
    return _final(request, [each for each in told if each.startswith(("put ", "found "))])


def _asking(request: ServedRequest, world: World, calls: Sequence[tuple[str, str]]) -> Reply:
    path = str(world.lines)
    wanted = [
        ToolCall(id=f"call_{name}_{text}", name=name, arguments=json.dumps({"path": path, "text": text}))
        for name, text in calls
    ]
    return Reply(tool_calls=wanted, latency_s=_latency_s(_digest(request, [])))


def _final(request: ServedRequest, told: Sequence[str]) -> Reply:
    digest = _digest(request, told)
    text = f"{_step(request)} is {digest[:16]}"
    if int(digest[:4], 16) % 3 == 0:
        text = f"{text} {'and so on ' * 150}".strip()
    return Reply(text=text, usage=TokenUsage(len(_prompt(request)), len(text)), latency_s=_latency_s(digest))


def _prompt(request: ServedRequest) -> str:
    return next(str(each["content"]) for each in request.messages if each.get("role") == "user")


def _step(request: ServedRequest) -> str:
    found = _STEP.findall(_prompt(request))
    return str(found[-1])


def _digest(request: ServedRequest, told: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([_prompt(request), *told]).encode()).hexdigest()


def _latency_s(digest: str) -> float:
    return _LATENCY_S * int(digest[4:8], 16) / 0xFFFF


SCENARIOS = {
    each.name: each
    for each in (
        Scenario(name="chain", target="tests.chaos.teams:chain", calls=8, answer=plain_answer),
        Scenario(name="dag", target="tests.chaos.teams:dag", calls=12, answer=plain_answer),
        Scenario(
            name="chain-with-tools", target="tests.chaos.teams:chain_with_tools", calls=24, answer=answer_with_tools
        ),
        Scenario(name="dag-with-tools", target="tests.chaos.teams:dag_with_tools", calls=33, answer=answer_with_tools),
    )
}
