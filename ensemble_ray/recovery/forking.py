"""Fork a recorded run: start a new run that reuses part of its record (S-DUR-54)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.definition.fields import Durability
from ensemble_ray.definition.run_options import RunFields, RunOptions, merge_options
from ensemble_ray.ensemble import Ensemble, join, join_run
from ensemble_ray.errors import RecordError, RunExistsError, ValidationError
from ensemble_ray.execute.agent.attempts import RecordedModel
from ensemble_ray.execute.effects import answers_before
from ensemble_ray.facts.effects import is_making_agent
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import OutputRecorded, PlanRecorded, RecordedFork
from ensemble_ray.plan.planner import (
    Planned,
    ResolvedTasks,
    needs_synthesis,
    plan_run,
    resolve_tasks,
    synthesize_agents,
)
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import bridge, run_blocking, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.head import RunHead, locate_errors, name_in, origin_in, read_head
from ensemble_ray.record.identity.definition import recorded_inputs, run_data
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.fork import (
    ForkPlan,
    asked_agents,
    copied_facts,
    plan_fork,
    plan_unit_fork,
    reused_differences,
)
from ensemble_ray.record.resume.reading import budget_of, options_of_fork, recorded_options
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.record.stores import RecordedRun, RunStore
from ensemble_ray.recovery.resuming import plan_again, planned_form, recorded_definition, start_resumed
from ensemble_ray.runs.attachments import copy_contents, detach_contents, read_attachments, read_inputs
from ensemble_ray.runs.handle import Run
from ensemble_ray.runs.launching import decide_costs, name_of, recorded_prices
from ensemble_ray.runs.planned import check
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.runtime import connect
from ensemble_ray.schedule.stimuli import Begun, encode_stimulus
from ensemble_ray.teamfile import Runnable
from ensemble_ray.values.ids import RUN, delegating_call, node_key
from ensemble_ray.values.ids import new_run_id as fresh_run_id
from ensemble_ray.values.metrics import RunBudget
from ensemble_ray.values.outputs import EnsembleOutput, RunState

if TYPE_CHECKING:
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun

_log = bounded_logger(__name__)
_NAMED = 20


def fork(
    run_id: str,
    from_task: str,
    ensemble: Runnable | None = None,
    *,
    inputs: Mapping[str, object] | None = None,
    runtime: Runtime | str | None = None,
    new_run_id: str | None = None,
    allow_changes: bool = False,
    options: RunOptions | None = None,
    **fields: Unpack[RunFields],
) -> EnsembleOutput:
    """Start a new run that reuses the record before a task, and wait for its output.

    The new run repeats that task and all later work: in a sequential run all later tasks, in a parallel run all tasks
    that depend on it. It also repeats tasks without an output. It reuses all other tasks as recorded, with the recorded
    inputs. In loops, phases and graphs, it reuses the work before the named execution and the verdicts of predicates
    and conditions.

    Args:
        run_id: Id of the run to fork, a unique prefix of it, or `latest`; the fork does not change this run.
        from_task: Name of the first task to repeat, or `task-2` for the second task if it has no name. If the run has
            loops, phases or a graph, also one of their executions or a task in it: `loop:refine#2`,
            `graph:triage#4/check#0`.
        ensemble: The definition, which may differ in the repeated tasks; None: loaded from the recorded source.
        inputs: Values that replace or extend the recorded inputs of repeated tasks.
        runtime: Runtime of the new run; default: the runtime of the forked run.
        new_run_id: Id of the new run; default a fresh UUID.
        allow_changes: Reuse recorded outputs also of tasks with a changed definition.
        options: Options that the new run changes, such as a larger `max_tokens`; default: the options of the forked
            run, without its tags.
        fields: The same options as keyword arguments, as in `Ensemble.run`.

    Raises:
        ValidationError: there is no such run or task, or the definition of a reused task has changed.
        RunExistsError: the run is running, or a run with the new id exists.
        RecordError: its record is damaged.
        EnsembleError: the new run failed.
    """
    options = merge_options(options, fields)
    offered = offer_fork(run_id, from_task, ensemble, inputs=inputs, runtime=runtime)
    begun = _accept(offered, runtime=runtime, new_run_id=new_run_id, allow_changes=allow_changes, options=options)
    return join(run_blocking(begun))


async def afork(
    run_id: str,
    from_task: str,
    ensemble: Runnable | None = None,
    *,
    inputs: Mapping[str, object] | None = None,
    runtime: Runtime | str | None = None,
    new_run_id: str | None = None,
    allow_changes: bool = False,
    options: RunOptions | None = None,
    **fields: Unpack[RunFields],
) -> EnsembleOutput:
    """`fork` for async code, with the same contract; cancelling it ends the new run first."""
    options = merge_options(options, fields)
    offered = offer_fork(run_id, from_task, ensemble, inputs=inputs, runtime=runtime)
    begun = _accept(offered, runtime=runtime, new_run_id=new_run_id, allow_changes=allow_changes, options=options)
    return await join_run(await bridge(begun))


class ForkOffer(Struct, frozen=True, kw_only=True):
    """Preview of a fork before any fact is written: the work to reuse and to repeat."""

    run_id: str
    from_task: str
    plan: ForkPlan
    descriptions: Mapping[str, str]  # of reused and repeated tasks, by name in the plan; "" for an execution of a unit
    differences: Sequence[str]  # changes in the definition of reused tasks
    ensemble: Ensemble
    inputs: Mapping[str, object]
    planned: Planned
    header: PlanRecorded  # first fact of the forked run; with the options of the new run after the offer is accepted
    facts: Sequence[Fact]
    store: RunStore


async def offer_fork(
    run_id: str,
    from_task: str,
    ensemble: Runnable | None = None,
    *,
    inputs: Mapping[str, object] | None = None,
    runtime: Runtime | str | None = None,
) -> ForkOffer:
    """Return the work that a fork repeats and reuses; see `fork`. Calls no model. On the library's loop."""
    store = store_at(connect(runtime or "inline").store_address)
    found = await store.find(run_id)
    if (await read_head(store, found.run_id)).is_dynamic:
        raise ValidationError(
            f"Run '{found.run_id}' was a map-reduce whose tasks are made while it runs: it has no plan to fork from. "
            "If it failed, resume it, which retries failed tasks. To map skipped items again, start a run over "
            "DeadLetters(path) of its dead letters"
        )
    facts = await store.facts(found.run_id)
    header = RunHead(facts).header
    _check(found, header)
    call = f"fork('{found.run_id}', TASK, ensemble)"
    loaded = await threads.run(recorded_definition, found, origin_in(header), call) if ensemble is None else ensemble
    definition = planned_form(loaded)
    before_inputs = recorded_inputs(header)
    chosen = await read_inputs({**before_inputs, **(inputs or {})})
    planned = await plan_again(_as_run(definition, header), chosen, facts, header)
    with locate_errors(found.location):
        before = recorded_plan(header.plan or {})
        if before.units or planned.plan.units:  # executions name the work
            plan = plan_unit_fork(before, planned.plan, facts, found.run_id, from_task)
        else:
            done = [fact.name for fact in facts if isinstance(fact.data, OutputRecorded)]
            keys = {node_key(each) for each in done if delegating_call(each) is None}
            plan = plan_fork(planned.plan, keys, from_task)
    if inputs:
        recorded = resolve_tasks(definition, {**chosen, **before_inputs})
        _check_inputs(found.run_id, plan.keys, recorded, resolve_tasks(definition, chosen))
    known = {node.key: node.description for node in planned.plan.nodes}  # units have no description
    return ForkOffer(
        run_id=found.run_id,
        from_task=from_task,
        plan=plan,
        descriptions={name: known.get(name) or known.get(node_key(name), "") for name in (*plan.reused, *plan.again)},
        differences=reused_differences(
            header,
            run_data(planned, _as_run(definition, header)),
            plan.keys,
            asked=asked_agents(facts, plan.instances),
            units=plan.units,
        ),
        ensemble=definition,
        inputs=chosen,
        planned=planned,
        header=header,
        facts=facts,
        store=store,
    )


async def accept_fork(
    offer: ForkOffer,
    *,
    runtime: Runtime | str | None = None,
    new_run_id: str | None = None,
    allow_changes: bool = False,
    options: RunOptions | None = None,
    listeners: Sequence[object] = (),
) -> Run | MapReduceRun:
    """Begin the offered run and return its handle; `listeners` receive its events too. On the library's loop.

    Raises:
        ValidationError: the definition of a reused task has changed, or the new run would have no record.
        RunExistsError: a run with the new id exists.
    """
    offer = replace(offer, header=replace(offer.header, options=options_of_fork(offer.header, options)))
    if offer.differences and not allow_changes:
        more = f" and {len(offer.differences) - _NAMED} more" if len(offer.differences) > _NAMED else ""
        raise ValidationError(
            f"Fork of run '{offer.run_id}': the definition of reused tasks has changed: "
            f"{'; '.join(offer.differences[:_NAMED])}{more}. Fork from an earlier task, or allow the changes "
            "(allow_changes=True, --allow-changes): then the fork reuses the recorded outputs unchanged"
        )
    if _as_run(offer.ensemble, offer.header).durability == Durability.OFF:
        raise ValidationError(
            f"Fork of run '{offer.run_id}': with durability 'off' a run has no record, and a fork lives by one. "
            "Choose 'effects' or 'run'"
        )
    chosen = new_run_id or fresh_run_id()
    _log.info(
        "Run %s: a fork of %s from task '%s'; used: %d tasks, done again: %s",
        chosen, offer.run_id, offer.from_task, len(offer.plan.reused), ", ".join(offer.plan.again),
    )  # fmt: skip
    await _write(offer, chosen)
    definition = offer.ensemble
    for listener in listeners:
        definition = definition.with_additional_listener(listener)
    # The checks above have judged the changes.
    own = None if options is None or options.deps is None else RunOptions(deps=options.deps)
    return await start_resumed(chosen, definition, runtime=runtime, allow_changes=True, options=own)


async def _accept(offered: Awaitable[ForkOffer], **choices: Any) -> Run | MapReduceRun:
    return await accept_fork(await offered, **choices)


async def _write(offer: ForkOffer, run_id: str) -> None:
    source, now = offer.ensemble.source, time.time()
    recorded, definition = offer.header, _as_run(offer.ensemble, offer.header)
    header = replace(
        run_data(offer.planned, definition),
        ensemble_id=run_id,
        name=name_in(recorded) or name_of(offer.ensemble, source) or None,
        tags=recorded.tags or dict(offer.ensemble.tags) or None,
        options=recorded.options,
        budget=budget_of(RunBudget.of(definition.max_tokens, definition.max_cost)),
        origin=source.place or recorded.origin,
        overrides=dict(source.overrides) if source.place else recorded.overrides,
        runtime=recorded.runtime,
        capture_mode=recorded.capture_mode,
        forked_from=RecordedFork(offer.run_id, offer.from_task),
        prices=recorded_prices(await decide_costs(definition, recorded)),
        started_at=now,
        rest=recorded.rest,
    )
    synthesized = {node_key(fact.instance) for fact in offer.facts if is_making_agent(fact)}
    same = [key for key in synthesized if not reused_differences(offer.header, header, [key])]
    started = Fact(run=run_id, name=RUN, at=now, data=encode_stimulus(Begun(at=now)))
    copies = copied_facts(offer.facts, run_id, offer.plan, redone=same)
    owned = await offer.store.begin(run_id, origin=header.origin or "")
    try:
        planned, answers = await _plan_with_agents(offer, run_id, copies)
        tasks = await read_attachments(list(planned.tasks.values()), recorded)
        planned = replace(planned, tasks=dict(zip(planned.tasks, tasks, strict=True)))
        attached = [each for task in tasks for each in task.attachments]
        attached += [each for fact in copies for each in getattr(fact.data, "attachments", ())]  # results of tools
        await copy_contents(attached, offer.store, offer.run_id, owned.journal)
        for content in detach_contents(planned)[1]:
            await owned.journal.store_content(content)
        described = run_data(planned, definition)
        names = ("plan", "definition", "workflow", "inputs", "agents", "digest")
        header = replace(header, **{name: getattr(described, name) for name in names})
        first = Fact(run=run_id, name=RUN, at=now, data=header)
        await owned.journal.append((first, *answers, started, *copies), until=Persistence.COMMITTED)
    finally:
        await owned.close(RunState.INTERRUPTED)


async def _plan_with_agents(offer: ForkOffer, run_id: str, copies: Sequence[Fact]) -> tuple[Planned, list[Fact]]:
    """Return the plan with the agents of the new run, and the answers of new calls that created agents.

    They are created before the plan is recorded: a process that resumes the fork must find the same definition.
    """
    definition = _as_run(offer.ensemble, offer.header)
    answers: list[Fact] = []
    if not needs_synthesis(definition.all_tasks):
        return offer.planned, answers
    resolved = check(definition, offer.inputs)
    recorded = answers_before(copies)
    agents = await synthesize_agents(
        resolved,
        definition,
        recorded=lambda name, model: RecordedModel(
            model, run_id, name, answers.append, recorded=recorded.get(name, ())
        ),
    )
    return await threads.run(plan_run, definition, resolved, agents), answers


def _check(found: RecordedRun, header: PlanRecorded) -> None:
    if found.state.is_active:
        raise RunExistsError(
            f"Run '{found.run_id}' is running: wait for its end, or end it (ensemble-ray cancel {found.run_id}), then fork it"
        )
    if header.is_empty:
        raise RecordError(
            f"Run '{found.run_id}' recorded no plan in {found.location}: there is nothing to fork", found.location
        )


def _as_run(definition: Ensemble, header: PlanRecorded) -> Ensemble:
    """Return the definition with the options of the forked run."""
    return definition.with_options(recorded_options(header))


def _check_inputs(run_id: str, reused: Sequence[str], recorded: ResolvedTasks, now: ResolvedTasks) -> None:
    """Refuse inputs that change the texts of reused tasks."""
    before, after = (
        {
            key: (task.description, task.expected_output, task.attachments)
            for key, task in zip(each.keys, each.tasks, strict=True)
        }
        for each in (recorded, now)
    )
    changed = [key for key in reused if before[key] != after[key]]
    if changed:
        named = ", ".join(f"'{key}'" for key in changed[:_NAMED])
        raise ValidationError(
            f"Fork of run '{run_id}': the other inputs change the texts or attachments of tasks whose recorded outputs would be used: "
            f"{named}. Fork from '{changed[0]}' or an earlier task"
        )
