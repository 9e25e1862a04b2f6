"""PlannedLauncher: runs that plan all tasks before the first starts (S-ENG-1)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.validation import doubled_names, validate
from ensemble_ray.errors import AgentExecutionError, BudgetExhaustedError, ValidationError, message_of
from ensemble_ray.events import TaskFailedEvent, TaskStartEvent
from ensemble_ray.execute.agent.attempts import RecordedModel
from ensemble_ray.execute.orders import RunContext, RunOutcome
from ensemble_ray.execute.scope import describe_exhaustion, spending_here
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE, Plan
from ensemble_ray.plan.planner import (
    Planned,
    ResolvedTasks,
    manager_context,
    needs_synthesis,
    plan_run,
    resolve_tasks,
    synthesize_agents,
    workers_of,
)
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.concurrency import USER_ERRORS, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.prompts.task import manager_prompts
from ensemble_ray.record.identity.definition import run_data
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.result import (
    FailureSeen,
    RunEnd,
    RunResultHead,
    RunResults,
    error_trace,
    failure_of,
    failures_seen,
    manager_failure,
    planned_results,
    summaries,
    violation_trace,
)
from ensemble_ray.record.resume.planned import PlannedResumeReader, read_planned
from ensemble_ray.record.resume.reading import KeepOutput, read_answers, read_recalled, read_stored, recorded_output
from ensemble_ray.record.stores import OwnedRun, StoreAddress
from ensemble_ray.record.totals import UsageTally
from ensemble_ray.record.units import EndedUnits, in_level_order, placed_outcome
from ensemble_ray.runs.attachments import (
    check_attachments,
    detach_contents,
    read_attachments,
    read_inputs,
    refuse_in_hierarchy,
)
from ensemble_ray.runs.launching import (
    RunConclusion,
    RunScope,
    WorkSummary,
    check_context_budgets,
    check_deps_of,
    costs_of,
    request_of,
)
from ensemble_ray.runs.ports import PlannedWork, RunRequest, SubmissionReason, SubmittedRun, claim_run, release_run
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.values.ids import instance_of, new_object_id, node_key
from ensemble_ray.values.metrics import Amount, RunBudget
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason, RunState
from ensemble_ray.values.reviews import ModelSwitch, RunDirective
from ensemble_ray.values.trace import CaptureMode, ErrorTrace, TaskTrace
from ensemble_ray.values.value import utc_of


def conclude(plan: Plan, outcome: RunOutcome) -> RunConclusion:
    outcome = placed_outcome(plan, outcome)
    ended = EndedUnits(
        plan=plan, results=outcome.units, failures=outcome.unit_failures, outputs=dict(outcome.completed)
    )
    tasks = [
        FailureSeen(
            at=failed.at,
            error=failed.failure.cause,
            completed_before=failed.completed_before,
            node=ended.nodes[node_key(failed.instance)],
        )
        for failed in outcome.failures
    ]
    failures = failures_seen(ended, tasks, [(unit, failure.cause) for unit, failure in outcome.raised])
    end = RunEnd(
        state=outcome.state,
        exit_reason=outcome.exit_reason,
        started_at=utc_of(outcome.started_at),
        # The clocks of the first process and of this one may differ.
        completed_at=utc_of(max(outcome.started_at, outcome.completed_at)),
        errors=tuple(_errors(plan, outcome, failures)),
        open_reviews=outcome.open_reviews,
    )
    has_failed = outcome.state in {RunState.FAILED, RunState.INTERRUPTED}
    failure = failure_of(ended, failures, [output for _, output in outcome.delegated]) if has_failed else None
    warning = ""
    if outcome.state is RunState.BUDGET_EXHAUSTED:
        warning = describe_exhaustion(each.error for _, each in outcome.unfinished)
    elif outcome.state is RunState.INTERRUPTED:
        warning = "The run was interrupted, since a model's account has no credit. Resume it when the account has some"
    return RunConclusion(end=end, results=_results_of(plan, outcome, ended), failure=failure, warning=warning)


def _results_of(plan: Plan, outcome: RunOutcome, ended: EndedUnits) -> RunResults:
    by_instance = [(instance, output.trace) for instance, output in ended.outputs.items() if output.trace is not None]
    left = [*((failed.instance, failed.failure) for failed in outcome.failures), *outcome.unfinished]
    by_instance += [(instance, failure.trace) for instance, failure in left if failure.trace is not None]
    traces = in_level_order(plan, by_instance)
    manager = traces[0][1] if traces else None
    return planned_results(
        ended,
        traces,
        summaries(plan),
        delegated=[output for _, output in outcome.delegated],
        worker_traces=() if plan.hierarchy is None else _worker_traces(manager, outcome),
        object_ids={node.key: node.object_id for node in plan.nodes},
    )


def _worker_traces(manager: TaskTrace | None, outcome: RunOutcome) -> list[TaskTrace]:
    """Return traces in the order of the manager's calls (26, ExecutionTrace)."""
    gave = [output.trace for _, output in outcome.delegated if output.trace is not None]
    failed = sorted(outcome.failed_delegations, key=lambda trace: trace.completed_at)
    found: dict[int, TaskTrace] = {}
    attempts = () if manager is None else manager.delegations
    # Equal calls are distinguished by the order of their ends.
    for attempt, each in sorted(enumerate(attempts), key=lambda entry: entry[1].completed_at):
        pool = gave if each.succeeded else failed
        asked = (each.worker_role, each.task_description)
        place = next((n for n, one in enumerate(pool) if (one.agent_role, one.task_description) == asked), None)
        if place is not None:
            found[attempt] = pool.pop(place)
    return [*(found[attempt] for attempt in sorted(found)), *gave, *failed]


def _errors(plan: Plan, outcome: RunOutcome, failures: Sequence[FailureSeen]) -> Iterator[ErrorTrace]:
    for failed in failures:
        yield failed.as_trace()
    # A run may fail without a failed task: a manager broke its constraints.
    if plan.hierarchy is not None and outcome.state is RunState.FAILED and not outcome.failures:
        roles = {output.agent_role for _, output in outcome.delegated}
        if violations := violations_of(plan.hierarchy, roles):
            yield violation_trace(violations, outcome.completed_at)
    if outcome.state is RunState.BUDGET_EXHAUSTED:
        nodes = {node.key: node for node in plan.nodes}
        for instance, failure in outcome.unfinished:
            if isinstance(failure.error, BudgetExhaustedError):
                node = nodes.get(node_key(instance))
                role, description = ("", "") if node is None else (node.agent_role, node.description)
                yield error_trace(failure.error, at=outcome.completed_at, agent_role=role, task_description=description)
                return


async def restore_reflections(request: RunRequest, scope: RunScope) -> None:
    """Later tasks see the same reflections as tasks before the interruption (S-REFL-2)."""
    if request.reflections is None or not scope.is_named or scope.store_address is None:
        return
    async for key, recalled in read_recalled(scope.store, scope.run_id):
        request.reflections.restore(key, recalled)


async def restore_short_term(request: RunRequest, scope: RunScope) -> None:
    """Restore memory from completed tasks, in order (S-MEM-112); other tasks run and note again."""
    if request.memory is None or request.context.memory is None or not request.context.memory.has_short_term:
        return
    if not scope.is_named or scope.store_address is None:
        return
    async for instance, output in read_stored(scope.store, scope.run_id):
        request.memory.restore(instance, output)


_log = bounded_logger(__name__)


def check(definition: EnsembleDefinition, inputs: Mapping[str, object] | None) -> ResolvedTasks:
    """Validate the definition and resolve its templates (`PromptTemplateError`), without model calls."""
    for warning in (*validate(definition), *doubled_names(definition.all_tasks)):
        _log.warning("%s", warning)
    return resolve_tasks(definition, inputs)


class PlannedLauncher:
    """Launches the plan of one ensemble. Fulfils `Launcher`."""

    def __init__(self, definition: EnsembleDefinition, inputs: Mapping[str, object] | None = None) -> None:
        self.definition = definition
        self._inputs = inputs
        self._planned: Planned
        self._preliminary: list[Fact] = []  # effects before scheduling
        self._submitted: SubmittedRun | None = None
        self._synthesizing: asyncio.Task[Mapping[str, Agent]] | None = None

    @property
    def has_begun(self) -> bool:
        return self._submitted is not None

    async def prepare(self, scope: RunScope) -> WorkSummary | ExitReason:
        check_deps_of(self.definition, scope)
        inputs = await read_inputs({**self.definition.inputs, **(self._inputs or {})})
        resolved = check(self.definition, inputs)
        refuse_in_hierarchy(resolved.tasks, resolved.workflow)
        header = None if scope.resumption is None else scope.resumption.header
        tasks = await read_attachments(resolved.tasks, header)
        if tasks is not resolved.tasks:
            resolved = replace(resolved, tasks=tuple(tasks))
        agents = await self._synthesize(scope, resolved)
        if isinstance(agents, ExitReason):
            return agents
        prompts = await self._make_manager_prompts(scope, resolved, agents)
        self._planned = plan_run(self.definition, resolved, agents, prompts)
        check_context_budgets(self.definition, self._planned)
        check_attachments(self._planned)
        plan = self._planned.plan
        return WorkSummary(
            workflow=plan.shown_workflow,
            inputs=dict(plan.inputs),
            total_tasks=len(plan.nodes),
            size=f"{len(plan.nodes)} tasks, {len(plan.agents)} agents",
        )

    def describe(self) -> PlanRecorded:
        return run_data(self._planned, self.definition)

    async def replay(
        self, scope: RunScope, header: PlanRecorded | None, description: RunResultHead
    ) -> EnsembleOutput | None:
        del description  # the record has its own
        summary = await scope.store.summary(scope.run_id)
        if summary is None:
            return None
        return recorded_output(
            scope.run_id,
            summary.state,
            await scope.store.facts(scope.run_id),
            header,
            output_types={
                key: task.output_type for key, task in self._planned.tasks.items() if task.output_type is not None
            },
            object_ids={node.key: node.object_id for node in self._planned.plan.nodes},
        )

    async def launch(self, scope: RunScope, header: PlanRecorded, mode: CaptureMode) -> RunConclusion | ExitReason:
        planned = self._planned
        contents: Sequence[bytes] = ()
        if scope.store_address is not None:
            planned, contents = detach_contents(planned)
        work = PlannedWork(
            planned=planned,
            header=header,
            preliminary=tuple(self._preliminary),
            delegation_policies=self.definition.delegation_policies,
            submission=scope.submission,
            contents=contents,
        )
        request = request_of(scope, self.definition, self._planned, capture_mode=mode)
        await restore_short_term(request, scope)
        await restore_reflections(request, scope)
        try:
            self._submitted = await scope.runtime.submit(request, work)
        except asyncio.CancelledError:
            if not scope.cancelled.is_set():
                raise
            return ExitReason.CANCELLED
        scope.begun.set()
        if scope.cancelled.is_set():
            await self._submitted.cancel()
        return conclude(self._planned.plan, await self._submitted.wait())

    async def stop(self) -> None:
        if self._submitted is not None:
            await self._submitted.cancel()
        elif self._synthesizing is not None:
            self._synthesizing.cancel()  # synthesis calls a model, which may take long

    async def inject(self, directive: RunDirective) -> bool:
        """Record a directive. A ValidationError: the run has no such agent."""
        if isinstance(directive, ModelSwitch) and directive.agent is not None:
            roles = sorted({agent.role for agent in self._planned.agents.values()})
            if directive.agent not in roles:
                raise ValidationError(f"Unknown agent '{directive.agent}'. Known: [{', '.join(roles)}]")
        return self._submitted is not None and await self._submitted.inject(directive)

    def close(self) -> None:
        """No effect: the run itself notifies readers of events."""

    async def _synthesize(self, scope: RunScope, resolved: ResolvedTasks) -> Mapping[str, Agent] | ExitReason:
        """Return agents for tasks that name none; or a reason if the run was cancelled or spent its budget."""
        if not needs_synthesis(resolved.tasks):
            return {}
        # A recorded run with this id needs no model.
        answers = await read_answers(scope.store, scope.run_id) if scope.is_named else {}
        if scope.cancelled.is_set():
            return ExitReason.CANCELLED
        if scope.store_address is not None:
            await scope.store.summary(scope.run_id)  # report an unavailable store before a model is called (S-DUR-5)
        definition = self.definition  # the coordinator continues the count from these requests' facts
        budget = RunBudget.of(definition.max_tokens, definition.max_cost)
        header = None if scope.resumption is None else scope.resumption.header
        if budget is not None and scope.resumption is not None:
            budget = replace(budget, spent=scope.resumption.spent)
        spending = None if budget is None else spending_here(budget, costs_of(definition, header))

        def record(name: str, model: ChatModel) -> ChatModel:
            """Record a model's calls as effects of the run (S-SET-46)."""
            recorded = answers.get(name, ())
            return RecordedModel(
                model, scope.run_id, name, self._preliminary.append, recorded=recorded, spending=spending
            )

        asked = synthesize_agents(resolved, definition, recorded=record)
        self._synthesizing = asyncio.get_running_loop().create_task(asked)
        await asyncio.wait([self._synthesizing])
        if not self._synthesizing.cancelled():
            try:
                return self._synthesizing.result()
            except BudgetExhaustedError as spent:
                _log.warning("%s", message_of(spent))
                return ExitReason.BUDGET_EXHAUSTED
        if scope.cancelled.is_set():
            return ExitReason.CANCELLED
        raise AgentExecutionError("The agent synthesizer cancelled its own call")

    async def _make_manager_prompts(
        self, scope: RunScope, resolved: ResolvedTasks, agents: Mapping[str, Agent]
    ) -> tuple[str, str] | None:
        """Return a hierarchical manager's prompts. A TaskExecutionError: the user's strategy raised."""
        if resolved.workflow is not Workflow.HIERARCHICAL:
            return None
        workers = [agent for agent, _ in workers_of(self.definition, resolved.tasks, agents, models=resolved.models)]
        strategy, context = self.definition.manager_prompt_strategy, manager_context(workers, resolved.tasks)
        try:
            return await threads.run(manager_prompts, strategy, context)
        except USER_ERRORS as error:
            failure = manager_failure(error)  # S-HIER-13
            failure.run_id = scope.run_id
            # A task that began and failed (S-HIER-60).
            start = TaskStartEvent(
                run_id=scope.run_id,
                instance=instance_of(MANAGER_KEY),
                task_description="",
                agent_role=MANAGER_ROLE,
                task_index=1,
                total_tasks=1,
            )
            scope.events.emit(start)
            failed = TaskFailedEvent(
                run_id=scope.run_id,
                instance=start.instance,
                task_description="",
                agent_role=MANAGER_ROLE,
                task_index=1,
                total_tasks=1,
                cause=error,
                duration=timedelta(),
            )
            scope.events.emit(failed)
            raise failure from error


class ClaimedRun(Struct, frozen=True):
    context: RunContext  # its budget includes recorded spending
    owned: OwnedRun | None = None  # None: not recorded
    recovery: PlannedResumeReader | None = None  # None: the run is new


async def claim_planned(
    address: StoreAddress | None,
    context: RunContext,
    header: PlanRecorded,
    *,
    submission: SubmissionReason,
    preliminary: Sequence[Fact],
    keep: KeepOutput,
) -> ClaimedRun:
    """Claim the record of a run as `claim_run` does, and read it; `keep` receives recorded outputs."""
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
    """Return the context with a new owner's account; `spent` is the cost of all recorded calls."""
    if context.budget is None:
        return context
    account = f"{context.run_id}/{new_object_id()}"
    return replace(context, budget=replace(context.budget, spent=spent, account=account))
