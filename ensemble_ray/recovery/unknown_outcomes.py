"""Refuses to resume a run that would fail at once of a handler with an unknown outcome (S-DUR-145).

In: a run's record and its definition. Out: nothing, or an error, before anything is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.errors import ValidationError
from ensemble_ray.record.resume.planned import read_wanted
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.record.unknown_outcomes import read_begun_work
from ensemble_ray.values.ids import task_instance
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.record.head import RunHead
    from ensemble_ray.record.stores import RecordedRun, RunStore
    from ensemble_ray.teamfile import Runnable


async def check_outcomes(store: RunStore, found: RecordedRun, head: RunHead, definition: Runnable) -> None:
    """Refuse a run that would call a handler or runner of unknown outcome again, where the definition does not say what to do.

    Runs whose tasks are made while they run are not concerned: their failed items are left out, or tried again.

    Raises:
        ValidationError: there is such a call.
        RecordError: the record is damaged.
    """
    if head.is_dynamic or not head.header.plan or definition.on_unknown != OnUnknown.TELL_MODEL:
        return
    begun = await read_begun_work(store, found.run_id)
    wanted = await read_wanted(store, found.run_id, recorded_plan(head.header.plan)) if begun else frozenset[str]()
    for name, fact in begun.items():
        if (instance := task_instance(name)) in wanted:
            kind, when = fact.data.tool_name, utc_of(fact.at).isoformat(timespec="seconds")
            raise ValidationError(
                f"Run '{found.run_id}' is not resumed, and stays {found.state.value}: the {kind} of task '{instance}' was called "
                f"at {when} and did not return, so its outcome is unknown. Say what to do: Ensemble(on_unknown='ask') or a "
                "function asks whether it was done, on_unknown='fail' fails the task"
            )
