"""A planned run whose record this process writes, with what is recorded of it.

In: a store, and why the run is submitted. Out: its record, its context with what is spent, what it goes on from.
Never: a record that is loaded whole; one that stays owned where it cannot be read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.planned import read_planned
from ensemble_ray.record.totals import UsageTally
from ensemble_ray.runs.ownership import claim_run, release_run
from ensemble_ray.values.ids import new_object_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.execute.orders import RunContext
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.record.resume.planned import PlannedRecovery
    from ensemble_ray.record.resume.reading import KeepOutput
    from ensemble_ray.record.stores import OwnedRun, StoreAddress
    from ensemble_ray.runs.submission import SubmissionReason
    from ensemble_ray.values.metrics import Amount


@dataclass(frozen=True, slots=True)
class ClaimedRun:
    """A run of this process."""

    #: its budget knows what is spent
    context: RunContext
    #: None: it is recorded nowhere
    owned: OwnedRun | None = None
    #: None: it begins
    recovery: PlannedRecovery | None = None


async def claim_planned(
    address: StoreAddress | None,
    context: RunContext,
    header: PlanRecorded,
    *,
    submission: SubmissionReason,
    preliminary: Sequence[Fact],
    keep: KeepOutput,
) -> ClaimedRun:
    """Own the record of a run, and read what is recorded of it, page by page.

    Args:
        address: Where it is recorded; None: nowhere.
        context: What its tasks share.
        header: The first fact that it would record.
        submission: Why it is submitted.
        preliminary: Effects of before scheduling.
        keep: Takes recorded outputs.

    Raises:
        RunExistsError: another process owns it, or there is a run of that id.
        RecordError: the store cannot be read or written.
    """
    tally = UsageTally(context.cost)
    if address is None:
        tally.apply_all(preliminary)
        return ClaimedRun(with_account(context, tally.spent))
    store, run_id = store_at(address), context.run_id
    owned = await claim_run(store, run_id, origin=header.origin, durability=context.durability, submission=submission)
    recovery = None
    try:
        if submission.is_recorded:
            is_resumed = not submission.is_restart
            recovery = await read_planned(store, run_id, keep, tally.apply_all, is_resumed=is_resumed)
    except BaseException:
        await release_run(owned)
        raise
    tally.apply_all(preliminary)
    is_known = recovery is not None and not recovery.is_empty
    return ClaimedRun(with_account(context, tally.spent), owned, recovery if is_known else None)


def with_account(context: RunContext, spent: Amount) -> RunContext:
    """Return the context for the process that owns the run now: its budget knows what is spent, and has an account of its own.

    Args:
        context: The context as it was made.
        spent: By what is recorded of the run, and by the effects of before scheduling.
    """
    if context.budget is None:
        return context
    account = f"{context.run_id}/{new_object_id()}"
    return replace(context, budget=replace(context.budget, spent=spent, account=account))
