"""What became of a run that was disturbed, in counts and words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["FAULTS", "Fault", "Report"]

#: What is done to a run.
Fault = Literal["kill", "freeze", "damage", "delete", "batch"]
FAULTS: tuple[Fault, ...] = ("kill", "freeze", "damage", "delete", "batch")


@dataclass(slots=True, kw_only=True)
class Report:
    """What became of one run."""

    scenario: str
    victims: str
    seed: int
    fault: Fault = "kill"
    #: how often it was done
    strikes: int = 0
    #: freezes of a process in the middle of a commit
    in_commits: int = 0
    #: programs that worked on it: the first, and each resumption
    runs: int = 0
    requests: int = 0
    repeats_of_recorded: int = 0
    repeats_in_flight: int = 0
    policies_asked_again: int = 0
    rules_broken: int = 0
    unknown_outcomes: int = 0
    #: processes that woke when they had been replaced, and were refused
    refused: int = 0
    #: processes that were frozen in the middle of a commit, and ended by who took their run over
    ended: int = 0
    #: requests that woken processes sent before they were stopped
    slipped: int = 0
    #: damages and deletions that a program told of
    told: int = 0
    #: damages that touched nothing that is recorded
    unaffected: int = 0
    #: how often the request came that came most often
    most_alike: int = 0
    #: what the record takes on the disk
    record_bytes: int = 0
    seconds: float = 0.0
    #: what happened, in order
    story: list[str] = field(default_factory=list[str])
    violations: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        what = f"{self.scenario} / {self.fault} {self.victims}, seed {self.seed}: {self.strikes} times, "
        what += f"{self.runs} programs, {self.requests} requests, {self.repeats_in_flight} repeated in flight, "
        what += f"{self.policies_asked_again} policies asked again, {self.unknown_outcomes} unknown outcomes, "
        what += f"none more often than {self.most_alike} times, {self.record_bytes / 1000:.0f} kB of record, "
        what += f"{self.refused} refused, {self.ended} ended, {self.slipped} slipped, {self.told} told, {self.seconds:.1f} s"
        return "\n".join([what, *(f"  ! {each}" for each in self.violations)])
