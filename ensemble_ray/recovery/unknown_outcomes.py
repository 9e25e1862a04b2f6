"""Refuses to resume a run that would fail at once of a handler with an unknown outcome (S-DUR-145).

In: a run's record and its definition. Out: nothing, or an error, before anything is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.errors import ValidationError
from ensemble_ray.execute.tools.unknown import HANDLER, RUNNER
from ensemble_ray.facts.effects import OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.facts.reviews import ReviewRequested
from ensemble_ray.facts.runs import RunResumed, StimulusRecorded
from ensemble_ray.record.source import FoldedSource, RecordedStimuli, recorded_plan
from ensemble_ray.values.ids import task_instance
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
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
    begun = await _list_begun(store, found.run_id)
    wanted = await _list_wanted(store, found.run_id, head) if begun else frozenset[str]()
    for name, fact in begun.items():
        if (instance := task_instance(name)) in wanted:
            kind, when = fact.data.tool_name, utc_of(fact.at).isoformat(timespec="seconds")
            raise ValidationError(
                f"Run '{found.run_id}' is not resumed, and stays {found.state.value}: the {kind} of task '{instance}' was called "
                f"at {when} and did not return, so its outcome is unknown. Say what to do: Ensemble(on_unknown='ask') or a "
                "function asks whether it was done, on_unknown='fail' fails the task"
            )


async def _list_begun(store: RunStore, run_id: str) -> dict[str, Fact[ToolIntended]]:
    """Return the calls of handlers and runners of effect `once` that have no result, by the name of the effect."""
    begun: dict[str, Fact[ToolIntended]] = {}
    async for page in store.read(run_id, kinds=kinds_of(ToolIntended)):
        for fact in page:
            intent = cast("Fact[ToolIntended]", fact)
            if intent.data.effect == "once" and fact.name.rpartition("/")[2] in {HANDLER, RUNNER}:
                begun[fact.name] = intent
    if begun:
        # A handler that came to a detached review is called again whatever its effect (S-REV-117).
        async for page in store.read(
            run_id, kinds=kinds_of(ToolReturned, OutcomeDecided, ReviewRequested), has_data=False
        ):
            for fact in page:
                name = fact.name.partition("-review")[0] if isinstance(fact.data, ReviewRequested) else fact.name
                if name in begun and fact.seq > begun[name].seq:
                    del begun[name]
    return begun


async def _list_wanted(store: RunStore, run_id: str, head: RunHead) -> frozenset[str]:
    """Return the tasks that the run would do when it goes on."""
    stimuli = RecordedStimuli()
    async for page in store.read(run_id, kinds=kinds_of(StimulusRecorded, RunResumed)):
        stimuli.take(page)
    stimuli.undo()
    source = FoldedSource(recorded_plan(head.header.plan or {}))
    for group in stimuli.groups:
        source.handle(group)
    return frozenset(source.source.running)
