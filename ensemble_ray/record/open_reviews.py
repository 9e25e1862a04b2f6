"""Review gates of a run, folded from its facts: open, decided, or closed. Pure.

A gate is open from its request until its first decision (S-REV-128), or until its task, the call that delegated its
task, or the tool call with the question ends. Only the owning process's handler decides at attached gates. After its
timeout a gate accepts no decision; resuming the run applies the timeout (S-REV-84).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import cast

from msgspec import Struct

from ensemble_ray.facts.effects import ToolReturned
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import (
    ExitRecorded,
    FailureRecorded,
    ItemOutputRecorded,
    OutputRecorded,
    ReviewDecided,
    ReviewRequested,
)
from ensemble_ray.values.reviews import OpenReview

GATE_KINDS = kinds_of(ReviewRequested, ReviewDecided)
#: They close a gate when its task or call ends.
END_KINDS = kinds_of(OutputRecorded, FailureRecorded, ExitRecorded, ItemOutputRecorded, ToolReturned)

_IN_CALL = "-review-"  # Separates the name of a tool call and the number of its question.


class Obstacle(StrEnum):
    DECIDED = "decided"
    CLOSED = "closed"
    ATTACHED = "attached"  # the owning process calls its own handler
    EXPIRED = "expired"


class Gate(Struct, frozen=True, kw_only=True):
    asked: Fact[ReviewRequested]
    decided: Fact[ReviewDecided] | None = None
    is_closed: bool = False

    @property
    def gate_id(self) -> str:
        return self.asked.data.review_id

    @property
    def is_open(self) -> bool:
        return self.decided is None and not self.is_closed

    @property
    def expires_at(self) -> float | None:
        timeout_s = self.asked.data.timeout_s
        return None if timeout_s is None else self.asked.at + timeout_s

    def review(self) -> OpenReview:
        return self.asked.data.open_since(self.asked.run, self.asked.at)


def obstacle_at(gate: Gate, *, at: float, is_owned: bool) -> Obstacle | None:
    """Return why a gate does not accept a decision at a time (Unix time, s), if so."""
    if gate.decided is not None:
        return Obstacle.DECIDED
    if gate.is_closed:
        return Obstacle.CLOSED
    if is_owned and not gate.asked.data.detached:
        return Obstacle.ATTACHED
    return Obstacle.EXPIRED if gate.expires_at is not None and gate.expires_at <= at else None


def ends_of(name: str) -> Sequence[tuple[str, str]]:
    """Return instance and name of the facts of `END_KINDS` that close a gate.

    Examples:
        >>> ends_of("draft#0/2/call-1-review-0")
        [('draft#0', 'draft#0'), ('draft#0', 'draft#0/2/call-1')]
    """
    parts = name.split("/")
    found: list[tuple[str, str]] = []
    for count in range(1, len(parts)):
        path = "/".join(parts[:count])
        if "#" in parts[count - 1]:
            found.append((path, path))
        elif "#" in parts[count]:  # the call that delegated the work
            found.append((path.rsplit("/", 2)[0], path))
    call, mark, _ = name.rpartition(_IN_CALL)
    return [*found, (call.rsplit("/", 2)[0], call)] if mark else found


def fold_gates(facts: Iterable[Fact]) -> Sequence[Gate]:
    asked: dict[str, Fact[ReviewRequested]] = {}
    decided: dict[str, Fact[ReviewDecided]] = {}
    ended: set[str] = set()
    for fact in facts:
        if isinstance(fact.data, ReviewRequested):
            asked[fact.name] = cast("Fact[ReviewRequested]", fact)  # its time counts
        elif isinstance(fact.data, ReviewDecided):
            decided.setdefault(fact.name, cast("Fact[ReviewDecided]", fact))
        elif fact.kind in END_KINDS:
            ended.add(fact.name)
    return [
        Gate(asked=gate, decided=decided.get(name), is_closed=any(end in ended for _, end in ends_of(name)))
        for name, gate in asked.items()
    ]


def ends_of_open(facts: Iterable[Fact]) -> Sequence[tuple[str, str]]:
    gates = (gate for gate in fold_gates(facts) if gate.is_open)
    return list(dict.fromkeys(end for gate in gates for end in ends_of(gate.asked.name)))


def open_reviews(facts: Iterable[Fact]) -> Sequence[OpenReview]:
    return [gate.review() for gate in fold_gates(facts) if gate.is_open]
