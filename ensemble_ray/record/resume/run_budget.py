"""What a recorded run was allowed, and what it is allowed when it goes on. Pure.

In: facts of the run as a whole (`plan`, `resume`), and what somebody chooses now. Out: the options that it goes on with.
Must never happen: a run that spent its budget goes on with the same one, to end at once (S-BUD-6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.definition.run_options import RunOptions, tags_in
from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.facts.runs import PlanRecorded, RecordedBudget, RunResumed
from ensemble_ray.record.resume.advice import resume_advice
from ensemble_ray.values.metrics import RunBudget

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.values.metrics import Amount


def budget_of(budget: RunBudget | None) -> RecordedBudget | None:
    """Return a run's budget as its facts tell it; None where it has none."""
    return None if budget is None else RecordedBudget(budget.max_tokens, budget.max_cost)


def recorded_budget(facts: Iterable[Fact]) -> RunBudget | None:
    """Return the budget that the run had last; None where it had none."""
    last = _newest(facts)
    if last is None or last.budget is None or last.budget == (None, None):
        return None
    return RunBudget(max_tokens=last.budget.max_tokens, max_cost=last.budget.max_cost)


def options_again(facts: Iterable[Fact], chosen: RunOptions | None) -> RunOptions:
    """Return the options that a run goes on with: those chosen now, else those that it had last.

    Args:
        facts: Its facts of the kinds `plan` and `resume`, in order; others are passed over.
        chosen: What is chosen now.
    """
    last = _newest(facts)
    recorded = recorded_options(last)
    now = {} if chosen is None else chosen.model_dump(exclude_none=True)
    return RunOptions(**{**_options(last), **now}) if now else recorded


def recorded_options(header: PlanRecorded | RunResumed | None) -> RunOptions:
    """Return the options that the beginning or continuation of a run tells.

    Raises:
        RecordError: they are none.
    """
    try:
        return RunOptions(**_options(header))
    except (TypeError, ValidationError) as error:
        raise RecordError(
            f"The record is damaged: the options of the run cannot be read: {message_of(error)}"
        ) from error


def options_of_fork(header: PlanRecorded, chosen: RunOptions | None) -> Mapping[str, object] | None:
    """Return what a fork records of its options: those of the run that it is of but its tags, and those chosen now (S-DUR-142)."""
    own = {} if chosen is None else chosen.model_dump(mode="json", exclude_none=True)
    if header.options is None:
        return own or None
    return {**{name: value for name, value in header.options.items() if name != "tags"}, **own}


def check_larger(run_id: str, origin: str, before: RunBudget | None, now: RunBudget | None, spent: Amount) -> None:
    """Refuse to go on with a run that spent its budget, unless more may be spent now (S-BUD-6).

    Args:
        run_id: The run's id.
        origin: Where its definition came from; empty: a program began it.
        before: The budget that it ended under.
        now: The one that it is to go on with.
        spent: What it spent.

    Raises:
        ValidationError: it would end at once.
    """
    if now is None or before is None or (now.allows_more(before) and now.covers(spent)):
        return
    raise ValidationError(
        f"Run '{run_id}' spent its budget ({before.describe_limits()}): {before.describe(spent)} are spent. Go on with a larger "
        f"one: {resume_advice(run_id, origin, field='max_tokens=N')} (max_cost=, --max-cost for money)"
    )


def _newest(facts: Iterable[Fact]) -> PlanRecorded | RunResumed | None:
    """Return the newest fact that tells of options: the first one, or a continuation that changed them."""
    last: PlanRecorded | RunResumed | None = None
    for fact in facts:
        match fact.data:
            case PlanRecorded() as first:
                last = first
            case RunResumed(options=options, budget=budget) as again if options is not None or budget is not None:
                last = again
            case _:
                pass
    return last


def _options(header: PlanRecorded | RunResumed | None) -> Mapping[str, Any]:
    if header is None or not header.options:
        return {}
    options = cast("Mapping[str, Any]", header.options)
    return {**options, "tags": tags_in(options)} if "tags" in options else options
