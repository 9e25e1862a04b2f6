"""States of a phase and the table of their transitions. Package: schedule.

`waiting`      not all of its predecessors are completed: not begun, or to be run again.
`running`      the members of an attempt run.
`reviewing`    the review of the attempt runs.
`reflecting`   what the accepted attempt taught is written down.
`completed`    its attempt was accepted.
`failed`       a member or the review failed, the review rejected it, or a predecessor that it sent back failed.
`skipped`      never begun, or withdrawn and not run again: a predecessor did not complete, or the run was ending.
`cut_short`    the run ended while it ran; it keeps the outputs that it has.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from ensemble_ray.plan.units import PhaseUnit
from ensemble_ray.schedule.instructions import TaskChanges
from ensemble_ray.values.ids import instance_of

__all__ = ["PHASE_TRANSITIONS", "PhaseEvent", "PhaseState", "ScheduledPhase"]


class PhaseState(StrEnum):
    """Where a phase stands."""

    WAITING = "waiting"
    RUNNING = "running"
    REVIEWING = "reviewing"
    REFLECTING = "reflecting"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CUT_SHORT = "cut_short"


class PhaseEvent(StrEnum):
    """What happens to a phase."""

    PREDECESSORS_COMPLETED = "all predecessors completed"
    MEMBERS_COMPLETED = "its members completed, without a review to come"
    REVIEW_FOLLOWS = "its members completed, its review follows"
    ACCEPTED = "its review accepted"
    REFLECTION_FOLLOWS = "its attempt is accepted, and tasks in it are reflected on"
    REFLECTED = "its tasks are reflected on, or the run was cancelled"
    SENT_BACK = "its review asked for another attempt"
    PREDECESSOR_SENT_BACK = "its review sent a predecessor back"
    REJECTED = "its review rejected"
    FAILED = "a member or its review failed"
    WITHDRAWN = "a successor's review sent it back"
    RERUN_FAILED = "the predecessor that it sent back failed"
    PREDECESSOR_LOST = "a predecessor failed or was skipped"
    RUN_ENDED = "the run is ending"


_S, _E = PhaseState, PhaseEvent

#: (state, event) -> next state; the whole rule about phases, as data. What is not here is a defect.
PHASE_TRANSITIONS: dict[tuple[PhaseState, PhaseEvent], PhaseState] = {
    (_S.WAITING, _E.PREDECESSORS_COMPLETED): _S.RUNNING,
    (_S.WAITING, _E.PREDECESSOR_LOST): _S.SKIPPED,
    (_S.WAITING, _E.RERUN_FAILED): _S.FAILED,
    (_S.WAITING, _E.RUN_ENDED): _S.SKIPPED,
    (_S.RUNNING, _E.MEMBERS_COMPLETED): _S.COMPLETED,
    (_S.RUNNING, _E.REVIEW_FOLLOWS): _S.REVIEWING,
    (_S.RUNNING, _E.FAILED): _S.FAILED,
    (_S.RUNNING, _E.RUN_ENDED): _S.CUT_SHORT,
    (_S.RUNNING, _E.REFLECTION_FOLLOWS): _S.REFLECTING,
    (_S.REVIEWING, _E.REFLECTION_FOLLOWS): _S.REFLECTING,
    (_S.REFLECTING, _E.REFLECTED): _S.COMPLETED,
    (_S.REVIEWING, _E.ACCEPTED): _S.COMPLETED,
    (_S.REVIEWING, _E.SENT_BACK): _S.RUNNING,
    (_S.REVIEWING, _E.PREDECESSOR_SENT_BACK): _S.WAITING,
    (_S.REVIEWING, _E.REJECTED): _S.FAILED,
    (_S.REVIEWING, _E.FAILED): _S.FAILED,
    (_S.REVIEWING, _E.RUN_ENDED): _S.CUT_SHORT,
    (_S.COMPLETED, _E.WITHDRAWN): _S.WAITING,
}


@dataclass(slots=True)
class ScheduledPhase:
    """A phase of a run, and what is known of it."""

    unit: PhaseUnit
    state: PhaseState = PhaseState.WAITING
    #: executions that began; the next one has this occurrence
    executions: int = 0
    #: 0-based, since it last started from its original tasks
    attempt: int = 0
    #: of the execution that runs or comes next
    changes: TaskChanges | None = None
    #: whether that one is for a successor, and has no review (S-PHASE-89)
    is_rerun: bool = False
    #: attempts of its predecessors that it sees (S-PHASE-36)
    seen: tuple[str, ...] = ()
    #: the attempt that was accepted last; it is seen also while the phase runs again (S-PHASE-102)
    accepted: str = ""
    #: executions of its review, in order
    reviews: list[str] = field(default_factory=list[str])
    #: how often successors sent it back
    reruns: int = 0
    #: feedback of successors that sent it back and are not served yet, in order
    requests: deque[str] = field(default_factory=deque[str])
    #: the phases that sent it back and wait for it
    requesters: list[ScheduledPhase] = field(default_factory=list["ScheduledPhase"])
    #: how often its review sent each predecessor back
    sent_back: Counter[str] = field(default_factory=Counter[str])
    started_at: float = 0.0
    settled_at: float = 0.0

    @property
    def instance(self) -> str:
        """Return the execution that began last; "" before the first."""
        return instance_of(self.unit.key, occurrence=self.executions - 1) if self.executions else ""
