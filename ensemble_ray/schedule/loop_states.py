"""States of a loop, what may happen to it, and the table of its transitions. Package: schedule.

The table is the machine of `loop`: what is not in it changes nothing. The diagram in the architecture page is drawn from it.

`pending`           not begun.
`running`           a task of the body runs.
`asking`            the predicate is asked.
`resetting`         memory is reset before the next iteration.
`exiting`           the run ends early around it: the task that runs is the last.
`cancelling`        the run was cancelled, or failed around it: the task that runs is the last.
`converged`         the predicate held.
`capped`            the cap on iterations ended it.
`budget_exhausted`  the cap on tokens ended it.
`exited`            a task ended the run early, or the run ended early around it.
`failed`            a task, the predicate, or resetting memory failed.
`cancelled`         the run was cancelled or failed around it.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["LOOP_TRANSITIONS", "LoopEvent", "LoopState"]


class LoopState(StrEnum):
    """Where a loop stands."""

    PENDING = "pending"
    RUNNING = "running"
    ASKING = "asking"
    RESETTING = "resetting"
    EXITING = "exiting"
    CANCELLING = "cancelling"
    CONVERGED = "converged"
    CAPPED = "capped"
    BUDGET_EXHAUSTED = "budget_exhausted"
    EXITED = "exited"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Whether it will not change any more."""
        return self in _OVER


_OVER = frozenset(
    {
        LoopState.CONVERGED,
        LoopState.CAPPED,
        LoopState.BUDGET_EXHAUSTED,
        LoopState.EXITED,
        LoopState.FAILED,
        LoopState.CANCELLED,
    }
)


class LoopEvent(StrEnum):
    """What a stimulus means for a loop."""

    BEGUN = "begun"
    TASK_COMPLETED = "task completed, another follows"
    ITERATION_COMPLETED = "iteration completed"
    VERDICT_TRUE = "predicate holds"
    REPEAT = "below every cap"
    REPEAT_WITH_RESET = "below every cap, memory is to be reset"
    CAP_REACHED = "cap on iterations reached"
    BUDGET_REACHED = "cap on tokens reached"
    MEMORY_RESET = "memory was reset"
    RAISED = "user code raised"
    TASK_FAILED = "task failed"
    TASK_EXITED = "task ended the run early"
    TASK_CANCELLED = "task was stopped"
    RUN_EXITS = "run ends early around it"
    RUN_FAILS = "run failed around it"
    RUN_CANCELLED = "run cancelled"


_S, _E = LoopState, LoopEvent

#: (state, event) -> next state; the whole rule about loops, as data. An iteration without a predicate is judged at once.
LOOP_TRANSITIONS: dict[tuple[LoopState, LoopEvent], LoopState] = {
    (_S.PENDING, _E.BEGUN): _S.RUNNING,
    (_S.RUNNING, _E.TASK_COMPLETED): _S.RUNNING,
    (_S.RUNNING, _E.ITERATION_COMPLETED): _S.ASKING,
    (_S.RUNNING, _E.REPEAT): _S.RUNNING,
    (_S.RUNNING, _E.REPEAT_WITH_RESET): _S.RESETTING,
    (_S.RUNNING, _E.CAP_REACHED): _S.CAPPED,
    (_S.RUNNING, _E.BUDGET_REACHED): _S.BUDGET_EXHAUSTED,
    (_S.RUNNING, _E.TASK_FAILED): _S.FAILED,
    (_S.RUNNING, _E.TASK_EXITED): _S.EXITED,
    (_S.RUNNING, _E.TASK_CANCELLED): _S.CANCELLED,
    (_S.RUNNING, _E.RUN_EXITS): _S.EXITING,
    (_S.RUNNING, _E.RUN_FAILS): _S.CANCELLING,
    (_S.RUNNING, _E.RUN_CANCELLED): _S.CANCELLING,
    (_S.ASKING, _E.VERDICT_TRUE): _S.CONVERGED,
    (_S.ASKING, _E.REPEAT): _S.RUNNING,
    (_S.ASKING, _E.REPEAT_WITH_RESET): _S.RESETTING,
    (_S.ASKING, _E.CAP_REACHED): _S.CAPPED,
    (_S.ASKING, _E.BUDGET_REACHED): _S.BUDGET_EXHAUSTED,
    (_S.ASKING, _E.RAISED): _S.FAILED,
    (_S.ASKING, _E.RUN_EXITS): _S.EXITED,
    (_S.ASKING, _E.RUN_FAILS): _S.CANCELLED,
    (_S.ASKING, _E.RUN_CANCELLED): _S.CANCELLED,
    (_S.RESETTING, _E.MEMORY_RESET): _S.RUNNING,
    (_S.RESETTING, _E.RAISED): _S.FAILED,
    (_S.RESETTING, _E.RUN_EXITS): _S.EXITED,
    (_S.RESETTING, _E.RUN_FAILS): _S.CANCELLED,
    (_S.RESETTING, _E.RUN_CANCELLED): _S.CANCELLED,
    (_S.EXITING, _E.TASK_COMPLETED): _S.EXITED,
    (_S.EXITING, _E.ITERATION_COMPLETED): _S.EXITED,
    (_S.EXITING, _E.TASK_FAILED): _S.FAILED,
    (_S.EXITING, _E.TASK_EXITED): _S.EXITED,
    (_S.EXITING, _E.TASK_CANCELLED): _S.EXITED,
    (_S.EXITING, _E.RUN_CANCELLED): _S.CANCELLING,
    (_S.CANCELLING, _E.TASK_COMPLETED): _S.CANCELLED,
    (_S.CANCELLING, _E.ITERATION_COMPLETED): _S.CANCELLED,
    (_S.CANCELLING, _E.TASK_FAILED): _S.FAILED,
    (_S.CANCELLING, _E.TASK_EXITED): _S.EXITED,
    (_S.CANCELLING, _E.TASK_CANCELLED): _S.CANCELLED,
    (_S.CANCELLING, _E.RUN_CANCELLED): _S.CANCELLING,
}
