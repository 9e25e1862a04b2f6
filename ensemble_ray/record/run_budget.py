"""What a recorded run was allowed, and what it is allowed when it goes on. Room: record. Pure.

In: facts of the run as a whole (`plan`, `resume`), and what somebody chooses now. Out: the options that it goes on with.
Must never happen: a run that spent its budget goes on with the same one, to end at once (S-BUD-6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.definition.run_rules import RunOptions
from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.record.task_fold import as_mapping
from ensemble_ray.values.amounts import RunBudget

if TYPE_CHECKING:
    from ensemble_ray.values.amounts import Amount
    from ensemble_ray.values.messages import Fact

__all__ = ["budget_data", "check_larger", "options_again", "recorded_budget", "recorded_options"]


def budget_data(budget: RunBudget | None) -> dict[str, object]:
    """What a run's facts `plan` and `resume` tell of its budget; empty where it has none."""
    if budget is None:
        return {}
    return {"budget": {"max_tokens": budget.max_tokens, "max_cost": budget.max_cost}}


def recorded_budget(facts: Iterable[Fact]) -> RunBudget | None:
    """The budget that the run had last; None where it had none."""
    last = as_mapping(_newest(facts).get("budget"))
    tokens, cost = (cast("int | None", last.get(name)) for name in ("max_tokens", "max_cost"))
    return None if tokens is None and cost is None else RunBudget(max_tokens=tokens, max_cost=cost)


def options_again(facts: Iterable[Fact], chosen: RunOptions | None) -> RunOptions:
    """The options that a run goes on with: those chosen now, else those that it had last.

    Args:
        facts: Its facts of the kinds `plan` and `resume`, in order; others are passed over.
        chosen: What is chosen now.
    """
    last = _newest(facts)
    known = recorded_options(last)
    now = {} if chosen is None else chosen.model_dump(exclude_none=True)
    return RunOptions(**{**cast("Mapping[str, Any]", as_mapping(last.get("options"))), **now}) if now else known


def recorded_options(header: Mapping[str, object]) -> RunOptions:
    """The options that the data of a `plan` or `resume` fact tells.

    Raises:
        RecordError: they are none.
    """
    try:
        return RunOptions(**cast("Mapping[str, Any]", as_mapping(header.get("options"))))
    except (TypeError, ValidationError) as error:
        raise RecordError(
            f"The record is damaged: the options of the run cannot be read: {message_of(error)}"
        ) from error


def check_larger(run_id: str, before: RunBudget | None, now: RunBudget | None, spent: Amount) -> None:
    """Refuse to go on with a run that spent its budget, unless more may be spent now (S-BUD-6).

    Args:
        run_id: The run's id.
        before: The budget that it ended under.
        now: The one that it is to go on with.
        spent: What it spent.

    Raises:
        ValidationError: it would end at once.
    """
    if now is None or before is None or (now.allows_more(before) and now.covers(spent)):
        return
    raise ValidationError(
        f"Run '{run_id}' spent its budget ({before.limits_told()}): {before.told(spent)} are spent. Go on with a larger "
        f"one: resume('{run_id}', options=RunOptions(max_tokens=...)), or ensemble-ray resume {run_id} --max-tokens N "
        "(max_cost=, --max-cost for money)"
    )


def _newest(facts: Iterable[Fact]) -> Mapping[str, object]:
    """The data of the newest fact that tells of options: the first one, or a `resume` that changed them."""
    last: Mapping[str, object] = {}
    for fact in facts:
        if fact.kind == "plan" or (fact.kind == "resume" and ("options" in fact.data or "budget" in fact.data)):
            last = fact.data
    return last
