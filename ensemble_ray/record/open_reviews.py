"""Review gates as a run's facts tell of them: asked, decided, or closed by the end of what they belong to. Pure.

Rules:
1. A gate is open from when it was asked until somebody decides; the first decision counts (S-REV-128).
2. It is closed where its task, the work that handed on its task, or the tool's call that asked has ended without a decision.
3. A process that owns the run asks its own handler at gates where it put no task down, and nobody else decides there.
4. When its timeout has passed, the gate stays open, and nobody decides any more: what follows from the timeout follows when
   the run goes on (S-REV-84).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

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

#: Kinds of facts that tell of gates.
GATE_KINDS = kinds_of(ReviewRequested, ReviewDecided)
#: Kinds of facts that close the gates of what they tell the end of.
END_KINDS = kinds_of(OutputRecorded, FailureRecorded, ExitRecorded, ItemOutputRecorded, ToolReturned)

#: What stands between the name of a tool's call and the number of its question.
_IN_CALL = "-review-"


class Obstacle(StrEnum):
    """Why nobody can decide at a gate (any more)."""

    #: somebody has
    DECIDED = "decided"
    #: what it belongs to has ended
    CLOSED = "closed"
    #: the process that owns the run asks its own handler
    ATTACHED = "attached"
    #: its timeout has passed
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate of a run."""

    #: what is asked, as it was recorded last
    asked: Fact[ReviewRequested]
    #: the decision that counts; None: there is none
    decided: Fact[ReviewDecided] | None = None
    #: whether it is closed without a decision
    is_closed: bool = False

    @property
    def gate_id(self) -> str:
        """Its id."""
        return self.asked.data.review_id

    @property
    def is_open(self) -> bool:
        """Whether it waits for a decision."""
        return self.decided is None and not self.is_closed

    @property
    def expires_at(self) -> float | None:
        """When its timeout passes, Unix time, s; None: it waits without limit."""
        timeout_s = self.asked.data.timeout_s
        return None if timeout_s is None else self.asked.at + timeout_s

    def review(self) -> OpenReview:
        """Return it as lists give it."""
        return self.asked.data.open_since(self.asked.run, self.asked.at)


def obstacle_at(gate: Gate, *, at: float, is_owned: bool) -> Obstacle | None:
    """Return why nobody can decide at a gate; None: anybody can.

    Args:
        gate: The gate.
        at: The time now, Unix time, s.
        is_owned: Whether a process owns the run.
    """
    if gate.decided is not None:
        return Obstacle.DECIDED
    if gate.is_closed:
        return Obstacle.CLOSED
    if is_owned and not gate.asked.data.detached:
        return Obstacle.ATTACHED
    return Obstacle.EXPIRED if gate.expires_at is not None and gate.expires_at <= at else None


def ends_of(name: str) -> Sequence[tuple[str, str]]:
    """Return what closes a gate: instance and name of the facts of `END_KINDS` that tell the end of what it belongs to.

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
        elif "#" in parts[count]:  # the call that handed on the work
            found.append((path.rsplit("/", 2)[0], path))
    call, mark, _ = name.rpartition(_IN_CALL)
    return [*found, (call.rsplit("/", 2)[0], call)] if mark else found


def fold_gates(facts: Iterable[Fact]) -> Sequence[Gate]:
    """Return the gates that a run has asked at, oldest first; facts of other kinds are passed over."""
    asked: dict[str, Fact[ReviewRequested]] = {}
    decided: dict[str, Fact[ReviewDecided]] = {}
    ended: set[str] = set()
    for fact in facts:
        if isinstance(fact.data, ReviewRequested):
            asked[fact.name] = cast("Fact[ReviewRequested]", fact)  # its time is that of the first
        elif isinstance(fact.data, ReviewDecided):
            decided.setdefault(fact.name, cast("Fact[ReviewDecided]", fact))
        elif fact.kind in END_KINDS:
            ended.add(fact.name)
    return [
        Gate(
            asked=gate,
            decided=decided.get(name),
            is_closed=any(end in ended for _, end in ends_of(name)),
        )
        for name, gate in asked.items()
    ]


def ends_of_open(facts: Iterable[Fact]) -> Sequence[tuple[str, str]]:
    """Return `ends_of` all gates that are open by the facts of `GATE_KINDS` alone, each once."""
    gates = (gate for gate in fold_gates(facts) if gate.is_open)
    return list(dict.fromkeys(end for gate in gates for end in ends_of(gate.asked.name)))


def open_reviews(facts: Iterable[Fact]) -> Sequence[OpenReview]:
    """Return the gates of a run that wait for a decision, oldest first."""
    return [gate.review() for gate in fold_gates(facts) if gate.is_open]
