"""Epochs: how far above the one before it stands what is handed out again. Package: values. Pure.

Whoever writes facts of a task does so under the epoch that the task was handed out with; stores refuse facts of an
epoch below the newest. Work that a task delegates is handed out under the epoch of that task. So an epoch has a digit
for each level of handing out, the highest for the owner of the run:

    owner | scheduler | delegation at depth 1 | at depth 2 | at depth 3 and deeper

Each level raises its own digit, at most nine times, before it gives up. So what a lost process handed out last, on record
or not, is always below what its successor hands out, which raised a higher digit: an orphan can never be taken for its
successor, however often either sent its own delegations again. Levels below the third share their digit: there it holds
while they raise it nine times in all.
Never: a level that hands out more often than its digit can count.
"""

from __future__ import annotations

__all__ = ["MOST_RESENDS", "OWNER_STEP", "REDISPATCH_STEP", "resend_step"]

#: How often a digit can be raised.
MOST_RESENDS = 9
#: How deep delegations have a digit of their own: as deep as they go by default.
_DIGITS = 3
#: A task of the plan that lost its process is handed out again by the scheduler.
REDISPATCH_STEP = 10**_DIGITS
#: A new owner of a run begins above everything that is recorded, and above what the one before may have handed out since.
OWNER_STEP = 10 * REDISPATCH_STEP


def resend_step(depth: int) -> int:
    """How far above the one before it stands a delegation that is sent again.

    Args:
        depth: Of the delegated work; 1 where a task of the plan asks for it.

    Examples:
        >>> [resend_step(depth) for depth in (1, 2, 3, 4)]
        [100, 10, 1, 1]
    """
    step: int = 10 ** max(0, _DIGITS - depth)
    return step
