"""Resume a recorded run (S-DUR-35). The run does not repeat recorded calls."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from msgspec.structs import replace

from ensemble_ray.definition.fields import Durability, OnUnknown, Origin
from ensemble_ray.definition.redactor import check_redactor
from ensemble_ray.definition.run_options import RunFields, RunOptions, merge_options
from ensemble_ray.ensemble import Ensemble, join, join_run
from ensemble_ray.errors import EnsembleError, RecordError, RunExistsError, ValidationError, message_of
from ensemble_ray.execute.effects import answers_before
from ensemble_ray.execute.redaction import clean_planned, clean_resolved
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.plan.planner import Planned, needs_synthesis, plan_run, synthesize_agents
from ensemble_ray.process.concurrency import bridge, run_blocking, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.head import RunHead, head_facts, read_head
from ensemble_ray.record.identity.definition import recorded_inputs
from ensemble_ray.record.map_reduce_fold import refusal_of
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.progress import tasks_done
from ensemble_ray.record.resume.planned import read_wanted
from ensemble_ray.record.resume.reading import check_larger, options_again, read_pages, read_switches, recorded_budget
from ensemble_ray.record.source import recorded_plan
from ensemble_ray.record.stores import RecordedRun, RunStore, read_fork_advice
from ensemble_ray.record.totals import PAID, UsageTally
from ensemble_ray.record.unknown_outcomes import read_begun_work
from ensemble_ray.runs.attachments import restore_attachments
from ensemble_ray.runs.handle import Run
from ensemble_ray.runs.launching import ResumeState, costs_of
from ensemble_ray.runs.planned import check
from ensemble_ray.runs.ports import Runtime, SubmissionReason
from ensemble_ray.runtime import connect
from ensemble_ray.teamfile import Runnable, find_planned_form, load_source
from ensemble_ray.text.redaction import Redaction
from ensemble_ray.values.ids import task_instance
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolSpec
from ensemble_ray.values.metrics import RunBudget
from ensemble_ray.values.outputs import EnsembleOutput, RunState
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun


async def check_outcomes(store: RunStore, found: RecordedRun, head: RunHead, definition: Runnable) -> None:
    """Refuse to repeat a call of a handler or runner with an unknown outcome, unless the definition sets a policy.

    Dynamic runs are exempt: they leave out or retry their failed items.

    Raises:
        ValidationError: there is such a call.
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


_log = bounded_logger(__name__)
_ENDING_S = 15.0  # How long processes of a local cluster may survive a killed driver, s; measured: 4 to 10.
_LOOK_S = 0.2
_ANSWER_S = 2.0  # Timeout for a connection to a cluster's head on this machine, s.


def resume(
    run_id: str,
    ensemble: Runnable | None = None,
    *,
    runtime: Runtime | str | None = None,
    options: RunOptions | None = None,
    take_over: bool = False,
    allow_changes: bool = False,
    allow_loss: bool = False,
    **fields: Unpack[RunFields],
) -> EnsembleOutput:
    """Continue a run that was interrupted, cancelled or had spent its budget, and wait for its output.

    Recorded work is reused and not repeated; a completed run returns its recorded output.

    Args:
        run_id: The run's id, a unique prefix of it, or `latest`.
        ensemble: Its definition; None: loaded from the source in the run's record.
        runtime: Runtime that continues the run; default: its previous runtime.
        options: Options that change from now on, such as a larger `max_tokens`; default: unchanged.
        take_over: Claim the run even if a process still owns it, such as a frozen one. That process can write no more.
        allow_changes: Continue although the definition differs from the recorded one.
        allow_loss: Continue although a part of the record is lost. The run repeats the lost work, except calls of
            tools that are `once`: their outcome is unknown, and `on_unknown` decides.
        fields: The same options as keyword arguments, as in `Ensemble.run`.

    Raises:
        ValidationError: there is no such run, it failed, or its definition differs or cannot be loaded; the message
            names the next step.
        RunExistsError: a process owns it.
        RecordError: its record is damaged; the message names the loss.
        EnsembleError: the run failed.
    """
    asked = start_resumed(
        run_id,
        ensemble,
        runtime=runtime,
        options=merge_options(options, fields),
        take_over=take_over,
        allow_changes=allow_changes,
        allow_loss=allow_loss,
    )
    return join(run_blocking(asked))


async def aresume(
    run_id: str,
    ensemble: Runnable | None = None,
    *,
    runtime: Runtime | str | None = None,
    options: RunOptions | None = None,
    take_over: bool = False,
    allow_changes: bool = False,
    allow_loss: bool = False,
    **fields: Unpack[RunFields],
) -> EnsembleOutput:
    """`resume` for async code, with the same contract; cancelling it ends the run first."""
    asked = start_resumed(
        run_id,
        ensemble,
        runtime=runtime,
        options=merge_options(options, fields),
        take_over=take_over,
        allow_changes=allow_changes,
        allow_loss=allow_loss,
    )
    return await join_run(await bridge(asked))


async def start_resumed(
    run_id: str,
    ensemble: Runnable | None = None,
    *,
    runtime: Runtime | str | None = None,
    options: RunOptions | None = None,
    take_over: bool = False,
    allow_changes: bool = False,
    allow_loss: bool = False,
    is_watched: bool = False,
    has_caller: bool = True,
) -> Run | MapReduceRun:
    """Begin to resume a run and return its handle; see `resume`. On the library's loop.

    Without a caller, a task with an unknown outcome fails, because no process can choose (S-DUR-25, S-DUR-145).
    """
    # The address depends on the runtime only if a runtime was created by hand.
    store = store_at(connect(runtime or "inline").store_address)
    found = await store.find(run_id)
    if allow_loss:
        await store.accept_loss(found.run_id, by_force=take_over)
        found = await store.find(found.run_id)
    found = await _wait_while_ending(store, found, take_over=take_over)
    facts = await head_facts(store, found.run_id)
    head = RunHead(facts)
    fork = ""
    if head.state is RunState.FAILED and not head.is_dynamic:
        fork = await read_fork_advice(store, found.run_id, head.source.place, unit=head.failed_unit)
    check_resumable(found, head, take_over=take_over, fork=fork)
    # Loading runs user code, which may be slow.
    call = f"resume('{found.run_id}', ensemble)"
    definition = await threads.run(recorded_definition, found, head.source, call) if ensemble is None else ensemble
    _check_has_plan(found.run_id, definition, head)
    header, is_completed = head.header, head.state is RunState.COMPLETED
    options = options_again(facts, options)
    again = definition.with_options(options)
    progress, tally = await tasks_done(store, found.run_id), UsageTally()
    if _budget(again) is not None:
        tally = UsageTally(costs_of(again, header))
        await read_pages(store, found.run_id, kinds_of(*PAID), tally.apply_all)
    spent = tally.spent
    if head.state is RunState.BUDGET_EXHAUSTED:
        check_larger(found.run_id, head.source.place, recorded_budget(facts), _budget(again), spent)
    if again.durability is Durability.OFF and not is_completed:
        raise ValidationError(
            f"Run '{found.run_id}' cannot resume with durability 'off', which has no record: use 'effects' or 'run'"
        )
    if not is_completed:
        for each in await read_switches(store, found.run_id):
            if each.model is not None and each.model not in again.models:  # S-CTL-12
                raise ValidationError(
                    f"A user switched run '{found.run_id}' to the model '{each.model}', which the ensemble does not have "
                    f"any more. Known: [{', '.join(sorted(again.models))}]"
                )
        if has_caller:
            await check_outcomes(store, found, head, again)
    return definition.begin(
        recorded_inputs(header),
        runtime=runtime or header.runtime or None,
        run_id=found.run_id,
        options=options,
        is_watched=is_watched,
        resumption=ResumeState(
            header=header,
            recorded_tasks=progress.executions,
            recorded_items=progress.items_done,
            is_completed=is_completed,
            submission=SubmissionReason.of_resume(takes_over=take_over),
            allows_changes=allow_changes,
            spent=spent,
            beginning=head.beginnings + 1,
            reported_until=head.reported_until,
        ),
    )


def _budget(definition: Runnable) -> RunBudget | None:
    return RunBudget.of(definition.max_tokens, definition.max_cost)


async def _wait_while_ending(store: RunStore, found: RecordedRun, *, take_over: bool) -> RecordedRun:
    """Wait for the processes of a cluster that lost its driver to end, and return the run's new state.

    Does not wait if the cluster answers, except for a run with gates: its scheduler may just have resumed it.
    """
    if not found.state.is_active or take_over:
        return found
    if (await read_head(store, found.run_id)).header.runtime != "ray":
        return found
    if await _is_cluster_there(found) and not await store.gates_of(found.run_id):
        return found
    _log.warning("Run '%s' is running: waiting up to %.0f s, in case its cluster is ending", found.run_id, _ENDING_S)
    for _ in range(int(_ENDING_S / _LOOK_S)):
        if not found.state.is_active:
            break
        await asyncio.sleep(_LOOK_S)
        found = await store.summary(found.run_id) or found
    return found


async def _is_cluster_there(found: RecordedRun) -> bool:
    """Whether the owner's cluster is on this machine and answers. Its head ends before its processes."""
    owner = found.owner_process
    if owner is None or owner[1] != socket.gethostname():
        return False
    from ensemble_ray.process.private_files import find_cluster  # rarely needed

    cluster = await threads.run(find_cluster, owner[0])
    if cluster is None:
        return False
    host, _, port = cluster.address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def check_resumable(found: RecordedRun, head: RunHead, *, take_over: bool = False, fork: str = "") -> None:
    """Refuse runs that cannot resume, and name alternatives; `fork` is advice for a failed run.

    Raises:
        ValidationError: it failed.
        RunExistsError: a process owns it, and `take_over` is not set.
        RecordError: it never began.
    """
    run_id = found.run_id
    if head.is_dynamic and (refusal := refusal_of(head)):
        raise ValidationError(f"Run '{run_id}' failed and is not resumed: {refusal}")
    if head.state is RunState.FAILED and not head.is_dynamic:
        advice = f" A new run can use what it recorded before the task that failed: {fork}" if fork else ""
        raise ValidationError(f"Run '{run_id}' failed and is not resumed.{advice}")
    if found.state.is_active and not take_over:
        owner = found.owner or "a process"
        raise RunExistsError(
            f"Run '{run_id}' is running: {owner} owns it. Wait for its end; if that process hangs, claim the run "
            "with take_over=True (--take-over)"
        )
    if head.header.is_empty:
        raise RecordError(
            f"Run '{run_id}' recorded no plan in {found.location}: it never began. Run it again", found.location
        )


def _check_has_plan(run_id: str, definition: Runnable, head: RunHead) -> None:
    has_plan = find_planned_form(definition) is not None
    if has_plan is not head.is_dynamic:
        return
    differing = ("made its tasks while it ran", "have a plan") if has_plan else ("had a plan", "are made while it runs")
    raise ValidationError(
        f"Run '{run_id}' {differing[0]}, and the tasks of this {type(definition).__name__} {differing[1]}: "
        "resume it with its original definition"
    )


def planned_form(definition: Runnable) -> Ensemble:
    """Return the definition as one with a plan; a `ValidationError` refuses dynamic definitions."""
    planned = find_planned_form(definition)
    if planned is None:
        raise ValidationError(
            f"The tasks of this {type(definition).__name__} are made while it runs, so it has no plan. Use the original "
            "definition of the run"
        )
    return planned


def recorded_definition(found: RecordedRun, source: Origin, call: str) -> Runnable:
    """Return the definition from the source that the run recorded, in its current state.

    Raises:
        ValidationError: only the program that began the run has it; the message names the call to make there.
    """
    if not source.place:
        raise ValidationError(
            f"Run '{found.run_id}' was begun by a program, so its definition is not known here: "
            f"call ensemble_ray.{call} in that program"
        )
    return load_source(source)


async def plan_again(
    definition: Ensemble,
    inputs: Mapping[str, object],
    facts: Sequence[Fact],
    header: PlanRecorded,
    *,
    is_replay: bool = False,
) -> Planned:
    """Return the current plan for these inputs; recorded answers recreate agents that a model created.

    In a replay, a missing answer is an error; otherwise such an agent is created later.
    """
    resolved = check(definition, inputs)
    resolved = replace(resolved, tasks=tuple(restore_attachments(resolved.tasks, header)))
    redaction = redaction_again(header.ensemble_id or "", definition, header)
    if redaction is not None:
        resolved = clean_resolved(redaction, resolved)
    answers = answers_before(facts)
    try:
        agents = (
            await synthesize_agents(
                resolved, definition, recorded=lambda name, _: _Answers(name, answers.get(name, ()))
            )
            if needs_synthesis(resolved.tasks)
            else {}
        )
    except EnsembleError as error:
        if is_replay:
            raise
        _log.debug("Agents are made when the fork begins: %s", message_of(error))
        agents = {}
    planned = await threads.run(plan_run, definition, resolved, agents)  # a manager's prompts are user code
    return planned if redaction is None else clean_planned(redaction, planned)


def redaction_again(run_id: str, definition: Runnable, header: PlanRecorded) -> Redaction | None:
    """Return the redactor of a recorded run, for a fork or a replay; None: it had none."""
    check_redactor(run_id, definition.redactor, header.redaction)
    return None if definition.redactor is None else definition.redactor.begin(run_id, header.redaction)


class _Answers:
    """A model that returns recorded answers in order; without one, a `ValidationError`."""

    def __init__(self, name: str, facts: Sequence[Fact[ModelAnswered]]) -> None:
        self._name = name
        self._facts = iter(facts)

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        del messages, tools
        fact = next(self._facts, None)
        if fact is None:
            raise ValidationError(f"Replay: no answer is recorded for the call that makes an agent, '{self._name}'")
        return ChatResponse(text=fact.data.text)
