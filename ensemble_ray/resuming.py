"""Going on with a recorded run (S-DUR-35). Floor: above loader, since a run knows where its definition came from.

In: a run's id. Out: its output, as if nothing had happened. Never: a request whose answer is in the record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from ensemble_ray.definition.durability import Durability
from ensemble_ray.definition.ensemble import RunOptions
from ensemble_ray.ensemble import Ensemble, join, joined
from ensemble_ray.errors import RecordError, RunExistsError, ValidationError
from ensemble_ray.execute.recorded import answers_before
from ensemble_ray.limits.budget import NOTHING, Amount, RunBudget
from ensemble_ray.loader import load_source
from ensemble_ray.loop import bridge, run_blocking
from ensemble_ray.outputs import EnsembleOutput, RunState
from ensemble_ray.record.recovery import Recovered
from ensemble_ray.record.run_budget import check_larger, options_again, recorded_budget
from ensemble_ray.record.spent import spent_of
from ensemble_ray.record.stores import RunStore, RunSummary, store_at
from ensemble_ray.run_handle import Resumption, Run
from ensemble_ray.runtime import Runtime, connect
from ensemble_ray.threads import threads

if TYPE_CHECKING:
    from ensemble_ray.messages import Fact

__all__ = ["aresume", "begin_again", "recorded_definition", "resume"]

_log = logging.getLogger(__name__)
#: How long a local cluster may outlive the driver that started it, s; measured: 10.
_ENDING_S = 15.0


def resume(
    run_id: str,
    ensemble: Ensemble | None = None,
    *,
    runtime: Runtime | str | None = None,
    options: RunOptions | None = None,
    take_over: bool = False,
    allow_changes: bool = False,
) -> EnsembleOutput:
    """Continue a run that was interrupted or cancelled, or had spent its budget, and wait for its output.

    What is recorded is used and not done again; of a completed run it is the recorded output.

    Args:
        run_id: The run's id, the beginning of it, or `latest`.
        ensemble: Its definition; None: loaded from where the run's record says that it came from.
        runtime: Where it goes on; default: where it ran.
        options: What it does differently from now on, such as a larger `max_tokens`; default: as before.
        take_over: Take it also from a process that still owns it, such as a frozen one, which then can write no more.
        allow_changes: Go on although the definition differs from the recorded one.

    Raises:
        ValidationError: there is no such run, it failed, its definition differs or cannot be had; the message says
            what to do.
        RunExistsError: a process owns it.
        RecordError: its record is damaged.
        EnsembleError: the run failed.
    """
    asked = begin_again(
        run_id, ensemble, runtime=runtime, options=options, take_over=take_over, allow_changes=allow_changes
    )
    return join(run_blocking(asked))


async def aresume(
    run_id: str,
    ensemble: Ensemble | None = None,
    *,
    runtime: Runtime | str | None = None,
    options: RunOptions | None = None,
    take_over: bool = False,
    allow_changes: bool = False,
) -> EnsembleOutput:
    """`resume` for async code, with the same contract; cancelling it ends the run first."""
    asked = begin_again(
        run_id, ensemble, runtime=runtime, options=options, take_over=take_over, allow_changes=allow_changes
    )
    return await joined(await bridge(asked))


async def begin_again(
    run_id: str,
    ensemble: Ensemble | None = None,
    *,
    runtime: Runtime | str | None = None,
    options: RunOptions | None = None,
    take_over: bool = False,
    allow_changes: bool = False,
    is_watched: bool = False,
) -> Run:
    """Begin to continue a run and give its handle; see `resume`. On the library's loop."""
    # Where a run is recorded follows from the runtime's kind only if one was made by hand.
    store = store_at(connect(runtime or "inline").store_address)
    found = await _settled(store, await store.find(run_id), take_over=take_over)
    facts = await store.facts(found.run_id)
    recovered = Recovered(facts)
    _check(found, recovered, take_over=take_over)
    # Loading runs user code, which may take its time.
    call = f"resume('{found.run_id}', ensemble)"
    definition = await threads.run(recorded_definition, found, recovered, call) if ensemble is None else ensemble
    header, is_completed = recovered.header, recovered.state is RunState.COMPLETED
    options = options_again(facts, options)
    again = definition.with_options(options)
    spent = _spent(found.run_id, again, facts, is_exhausted=recovered.state is RunState.BUDGET_EXHAUSTED)
    if again.durability is Durability.OFF and not is_completed:
        raise ValidationError(
            f"Run '{found.run_id}' cannot go on with durability 'off', which records nothing: use 'effects' or 'run'"
        )
    return Run(
        definition,
        cast("Mapping[str, object]", header.get("inputs") or {}),
        runtime=runtime or cast("str", header.get("runtime") or None),
        run_id=found.run_id,
        options=options,
        is_watched=is_watched,
        origin=definition.source,
        resumption=Resumption(
            header=header,
            answers=answers_before(facts),
            recorded_tasks=sum(task.output is not None for task in recovered.tasks.values()),
            is_completed=is_completed,
            takes_over=take_over,
            allows_changes=allow_changes,
            spent=spent,
        ),
    )


def _spent(run_id: str, definition: Ensemble, facts: Sequence[Fact], *, is_exhausted: bool) -> Amount:
    """What the run spent, where it has a budget now; one that spent its budget needs a larger one."""
    budget = RunBudget.of(definition.max_tokens, definition.max_cost)
    if budget is None:
        return NOTHING
    spent = spent_of(facts, definition.cost_configuration)
    if is_exhausted:
        check_larger(run_id, recorded_budget(facts), budget, spent)
    return spent


async def _settled(store: RunStore, found: RunSummary, *, take_over: bool) -> RunSummary:
    """The run as it stands when a cluster that lost its driver has ended, which takes it some seconds."""
    recorded = await store.facts(found.run_id) if found.state.is_going_on and not take_over else []
    if not any(fact.kind == "plan" and fact.data.get("runtime") == "ray" for fact in recorded):
        return found
    _log.warning("Run '%s' is running: waiting up to %.0f s, in case its cluster is ending", found.run_id, _ENDING_S)
    for _ in range(int(_ENDING_S)):
        if not found.state.is_going_on:
            break
        await asyncio.sleep(1.0)
        found = await store.summary(found.run_id) or found
    return found


def _check(found: RunSummary, recovered: Recovered, *, take_over: bool) -> None:
    """Refuse what cannot go on, and say what can be done instead."""
    run_id = found.run_id
    if recovered.state is RunState.FAILED:
        raise ValidationError(
            f"Run '{run_id}' failed and is not resumed. A new run can use what it recorded before the task that "
            f"failed: ensemble-ray fork {run_id} --from TASK"
        )
    if found.state.is_going_on and not take_over:
        owner = found.owner or "a process"
        raise RunExistsError(
            f"Run '{run_id}' is running: {owner} owns it. Wait for its end; if that process hangs, take the run from it "
            "with take_over=True (--take-over)"
        )
    if not recovered.header:
        raise RecordError(f"Run '{run_id}' recorded no plan in {found.place}: it never began. Run it anew", found.place)


def recorded_definition(found: RunSummary, recovered: Recovered, call: str) -> Ensemble:
    """The definition that the run was recorded with, as it stands today.

    Raises:
        ValidationError: only the program that began the run has it; the message names the call to make there.
    """
    if not recovered.source.place:
        raise ValidationError(
            f"Run '{found.run_id}' was begun by a program, so its definition is not known here: "
            f"call ensemble_ray.{call} in that program"
        )
    return load_source(recovered.source)
