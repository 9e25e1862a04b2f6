"""When somebody is killed. The moments hang on what happens, not on the clock, so that a seed means the same again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.chaos.report import Fault
from tests.chaos.scenarios import Scenario
from tests.chaos.victims import Victim

__all__ = ["ASKED", "ENDING", "GIVEN_UP", "ORPHANED", "OWNED", "PAUSED", "TAKEN_OVER", "Moment", "moments"]

#: Kind of a moment: the run has an owner, who may not have asked anything yet.
OWNED = "owned"
#: Kind of a moment: a policy was asked, so a delegation is being decided.
ASKED = "questions"
#: Kind of a moment: about all answers were given, so files are being completed and the end is put on record.
ENDING = "ending"
#: What becomes of a frozen process's work: it waits; another process takes the run; the scheduler dies, and the next one
#: hands the work out again; Ray gives the node up.
PAUSED, TAKEN_OVER, ORPHANED, GIVEN_UP = "paused", "taken over", "its scheduler killed", "given up"
#: How many of the freezes shall fall into a commit.
_IN_COMMIT = 0.3
#: Kinds of moments that so many more requests must come for.
_COUNTED = frozenset({"arrived", "served", ASKED})
#: A run that makes its own shape may have so many requests less than another.
_FEWER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When somebody is killed: a while after so many more requests or answers, or questions to policies, or an owner."""

    victim: Victim
    kind: str
    more: int
    delay_s: float

    #: how many different requests may have come when somebody dies, so that the run is long enough for all who follow;
    #: None: as many as there are
    most: int | None = None
    #: of a freeze: what becomes of the work
    way: str = ""
    #: of a freeze: whether it shall fall into a commit
    is_in_commit: bool = False

    def __str__(self) -> str:
        what = {OWNED: "it had an owner", ENDING: "it was about to end"}.get(self.kind, f"{self.more} more {self.kind}")
        way = f", {self.way}" if self.way else ""
        return f"{self.victim.name} {self.delay_s * 1000:.0f} ms after {what}{way}"


def moments(
    scenario: Scenario, victims: Sequence[Victim], kills: int, rng: random.Random, *, fault: Fault = "kill"
) -> list[Moment]:
    """When whom, by lot; the run is long enough for all of them."""
    found: list[Moment] = []
    left = {victim.name: kills if victim.most is None else victim.most for victim in victims}
    for _ in range(kills):
        able = [victim for victim in victims if left[victim.name] > 0]
        if not able:
            break
        victim = rng.choice(able)
        left[victim.name] -= 1
        delay_s = rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.1), rng.uniform(0, 0.3)))
        more = rng.randint(1, max(1, scenario.calls // (kills + 1)))
        kinds = ["arrived", "served"]
        if victim.interrupts_run:  # whoever goes on with a run can be killed before it has asked anything
            kinds = ["arrived", "served", "arrived", "served", OWNED]
        if scenario.questions:
            kinds += [ASKED] * 2
        if scenario.is_fed:
            kinds.append(ENDING)
        moment = Moment(victim=victim, kind=rng.choice(kinds), more=more, delay_s=delay_s)
        if fault == "freeze":
            way = rng.choice(_ways(victim, scenario))
            moment = replace(moment, way=way, is_in_commit=rng.random() < _IN_COMMIT)
        found.append(moment)
    return _bounded(found, scenario.calls - (_FEWER if scenario.has_own_shape else 0))


def _ways(victim: Victim, scenario: Scenario) -> Sequence[str]:
    """What can become of the work of a process that is frozen."""
    if victim.ground == "two_nodes":
        return PAUSED, GIVEN_UP
    if victim.interrupts_run or (victim.name == "scheduler" and not scenario.is_fed):
        return PAUSED, TAKEN_OVER
    if victim.name in {"agent", "manager", "callables"}:
        return PAUSED, ORPHANED
    return (PAUSED,)


def _bounded(found: Sequence[Moment], calls: int) -> list[Moment]:
    """Each with its bound; whoever dies when the run is about to end may come too late."""
    bounded: list[Moment] = []
    left = 1
    for moment in reversed(found):
        bounded.append(moment if moment.kind == ENDING else replace(moment, most=calls - left))
        left += moment.more + 1 if moment.kind in _COUNTED else 1
    return bounded[::-1]
