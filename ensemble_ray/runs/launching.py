"""Contracts between a `Run`, which holds state, events and result, and its launcher."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct, structs

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import OnUnknown, Origin
from ensemble_ray.definition.redactor import check_redactor, describe_redaction
from ensemble_ray.definition.run_rules import RunListeners, RunRules
from ensemble_ray.definition.validation import embedding_models, priced_models
from ensemble_ray.errors import message_of
from ensemble_ray.errors.texts import is_library_file
from ensemble_ray.events import Event, RunTracedEvent, RunTracer
from ensemble_ray.events.delivery import Delivery, EventLog, listeners_of
from ensemble_ray.events.telemetry.listener import caller_here, tracers_here
from ensemble_ray.execute.agent.context_window import check_context_budget
from ensemble_ray.execute.callables import callable_name
from ensemble_ray.execute.memory import LocalRunReflections
from ensemble_ray.execute.orders import RunContext, RunModels
from ensemble_ray.execute.redaction import clean_fact
from ensemble_ray.execute.review.handlers import ConsoleReviewHandler, LocalReviewer
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.llm.fallback import members_of
from ensemble_ray.llm.names import NO_NAMES, declared_names, model_names
from ensemble_ray.llm.prices import decide_prices, load_library, needs_library
from ensemble_ray.memory.tools import LocalRunMemory, rules_of
from ensemble_ray.plan.planner import Planned
from ensemble_ray.ports import Dashboard, DashboardRun
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import TEXT_FILTER, bounded_logger
from ensemble_ray.process.run_context import Provided, RunDeps, check_deps
from ensemble_ray.prompts.task import build_system_prompt, fixed_parts, render_parts
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.result import RunEnd, RunResultHead, RunResults
from ensemble_ray.record.stores import RunStore, StoreAddress
from ensemble_ray.runs.ports import RunRequest, Runtime, SubmissionReason
from ensemble_ray.text.foreign_text import CHARACTERS_PER_TOKEN
from ensemble_ray.text.redaction import Redaction
from ensemble_ray.tools.user_code import NoOpToolMetrics
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason, RunState
from ensemble_ray.values.prices import RunCosts, RunPrices
from ensemble_ray.values.reviews import RunDirective
from ensemble_ray.values.trace import CaptureMode, RunTracing, parse_traceparent

_NO_TAGS: Mapping[str, str] = {}


class ResumeState(Struct, frozen=True, kw_only=True):
    header: PlanRecorded
    recorded_tasks: int = 0  # tasks with recorded outputs
    recorded_items: int = 0  # items of a map-reduce among them
    is_completed: bool = False  # only the recorded output is returned
    submission: SubmissionReason = SubmissionReason.RESUMED
    allows_changes: bool = False  # a changed definition may resume the run (S-DUR-36)
    spent: Amount = NOTHING  # cost of recorded answers, if there is a budget
    beginning: int = 1  # beginnings so far, with this one
    reported_until: float = 0.0  # Unix time, s, until which earlier beginnings have reported all events


class RunScope(Struct, frozen=True, kw_only=True):
    run_id: str
    runtime: Runtime
    store_address: StoreAddress | None  # None: the run is not recorded
    events: RunEvents
    log_fields: Mapping[str, str]
    origin: str  # of the definition
    is_named: bool  # the caller chose the id
    resumption: ResumeState | None  # None: the run is new
    cancelled: asyncio.Event
    begun: asyncio.Event  # set when the runtime has received the work
    tracing: RunTracing | None = None  # None: not traced
    costs: RunCosts = None
    tags: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    user: str = ""

    @property
    def store(self) -> RunStore:
        """The runtime's records, also of an unrecorded run."""
        return store_at(self.store_address or self.runtime.store_address)

    @property
    def submission(self) -> SubmissionReason:
        return SubmissionReason.FIRST if self.resumption is None else self.resumption.submission


class WorkSummary(Struct, frozen=True, kw_only=True):
    """The prepared work, for users and traces."""

    workflow: str
    inputs: Mapping[str, str]
    total_tasks: int  # 0: unknown
    size: str


class RunConclusion(Struct, frozen=True, kw_only=True):
    end: RunEnd
    results: RunResults
    failure: BaseException | None = None  # the run raises this error
    warning: str = ""  # to log, such as a spent budget


class Launcher(Protocol):
    """Prepares and launches one run, on the library's loop."""

    @property
    def definition(self) -> RunListeners: ...

    @property
    def has_begun(self) -> bool: ...

    async def prepare(self, scope: RunScope) -> WorkSummary | ExitReason:
        """Prepare the work; return why the run ended early if it was cancelled or has spent its budget."""
        ...

    def describe(self) -> PlanRecorded:
        """Return the record's first fact."""
        ...

    async def replay(
        self, scope: RunScope, header: PlanRecorded | None, description: RunResultHead
    ) -> EnsembleOutput | None:
        """Return the output of a finished run with this id (S-SET-39). An EnsembleError: it cannot be returned.

        `header` is this run's first fact; None: compared already.
        """
        ...

    async def launch(self, scope: RunScope, header: PlanRecorded, mode: CaptureMode) -> RunConclusion | ExitReason:
        """Launch the work and wait for its end; return a reason if it was cancelled before. May raise EnsembleError."""
        ...

    async def stop(self) -> None:
        """Ask running work to end; the scope is already marked as cancelled."""

    async def inject(self, directive: RunDirective) -> bool:
        """Record a directive for later tasks; return False if none will start. May raise EnsembleError."""
        ...

    def close(self) -> None: ...


class RunEvents:
    def __init__(
        self,
        definition: RunListeners,
        *,
        fields: dict[str, str],
        is_read: bool,
        on_interrupt: Callable[[BaseException], None],
    ) -> None:
        """`on_interrupt` is called on an interrupted listener's thread (S-SET-27)."""
        declared = listeners_of(definition.listeners, definition.callbacks)
        self.listeners: Sequence[object] = (*declared, *tracers_here(declared))
        self._log = EventLog(is_open=is_read)
        self._delivery = Delivery(self.listeners, fields=fields, on_interrupt=on_interrupt)
        self.interest: frozenset[str] = self._delivery.interest | self._log.interest  # methods with a receiver
        self.wait_until_delivered, self.stream = self._delivery.wait_until_delivered, self._log.stream

    @property
    def trace_id(self) -> str | None:
        """The trace id of a listener."""
        trace_ids = (getattr(listener, "trace_id", None) for listener in self.listeners)
        return next((str(found) for found in trace_ids if found is not None), None)

    def wants(self, event_type: type[Event]) -> bool:
        return event_type.method in self.interest

    def emit(self, event: Event) -> None:
        self._delivery.emit(event)
        self._log.emit(event)

    async def close(self, run_id: str, exit_reason: ExitReason) -> None:
        """Return when every listener has received every event and the end."""
        self._delivery.end(run_id, exit_reason)
        await self._delivery.close()
        self._log.close()


_log = bounded_logger(__name__)


def name_of(definition: RunRules, origin: Origin) -> str:
    """Return a team's name, else the file or variable of its definition; "" in a notebook (S-DOM-84)."""
    main = sys.modules["__main__"]
    program = "" if getattr(main, "__spec__", None) else str(getattr(main, "__file__", None) or "")
    is_own = program.endswith(".py") and not is_library_file(program)  # false for Ray's program in its tasks and actors
    return definition.name or origin.name or (Path(program).stem if is_own else "")


async def show_run(
    dashboard: Dashboard | None, run_id: str, store: StoreAddress | None, leaving: AsyncExitStack
) -> None:
    """Show a run in the dashboard until a stack is closed (S-WEB-11, S-WEB-12). May raise EnsembleError."""
    if dashboard is None:
        return
    entered = DashboardRun(run_id=run_id)
    if store is not None:
        entered = DashboardRun(run_id=run_id, is_recorded=True, home=store.home, url=store.url)
    await threads.run(dashboard.enter_run, entered)

    async def leave() -> None:
        try:
            await threads.run(dashboard.leave_run)
        except Exception as error:  # noqa: BLE001  the run is done, whatever becomes of its dashboard
            _log.warning("The dashboard could not be stopped: %s", message_of(error))

    leaving.push_async_callback(leave)


def exit_reason_of(state: RunState) -> ExitReason:
    """Return the exit reason that listeners receive for a state (S-EVT-23)."""
    match state:
        case RunState.COMPLETED | RunState.CANCELLED | RunState.BUDGET_EXHAUSTED | RunState.WAITING:
            return ExitReason(state.value)
        case _:
            return ExitReason.ERROR


class TracedRun:
    """Tracing of one run; a resumed run stays in the trace of its first caller."""

    def __init__(self, run_id: str, events: RunEvents, *, name: str, resumption: ResumeState | None) -> None:
        caller = caller_here() if resumption is None else parse_traceparent(resumption.header.traceparent or "")
        tracers = [each for each in events.listeners if isinstance(each, RunTracer)]
        self.traceparent = None if caller is None else str(caller)  # the caller's span, also of an untraced run
        self.context: RunTracing | None = None  # None: not traced
        if tracers:
            self.context = RunTracing(
                run_id=run_id,
                caller=caller,
                is_sampled=any(each.samples(run_id, caller) for each in tracers),
                beginning=0 if resumption is None else resumption.beginning,
                reported_until=0.0 if resumption is None else resumption.reported_until,
            )
        self._events = events
        self._name = name
        self._workflow = ""
        self._started_at: float | None = None  # Unix time, s
        self._failure: BaseException | None = None

    def begin(self, workflow: str) -> None:
        self._started_at, self._workflow = time.time(), workflow

    def answer(self) -> None:
        self._started_at = None

    def fail(self, error: BaseException) -> None:
        self._failure = error

    def end(self, state: RunState) -> None:
        """Report the end, after all tasks (S-INT-31)."""
        if self.context is None or self._started_at is None:
            return
        failure = self._failure
        self._events.emit(
            RunTracedEvent(
                run_id=self.context.run_id,
                tracing=self.context,
                workflow=self._workflow,
                name=self._name,
                started_at=self._started_at,
                ended_at=max(time.time(), self._started_at),
                exit_reason=exit_reason_of(state),
                error_type="" if failure is None else type(failure).__name__,
                error_message="" if failure is None else message_of(failure),
            )
        )


def begin_redaction(definition: RunRules, scope: RunScope) -> Redaction | None:
    """Return the redactor of a run, which also cleans the log lines of its process from here on; None: no redactor.

    A `ValidationError`: its key is missing or wrong.
    """
    header = None if scope.resumption is None else scope.resumption.header
    if header is not None:
        check_redactor(scope.run_id, definition.redactor, header.redaction)
    if definition.redactor is None:
        return None
    is_recorded = scope.store_address is not None
    recorded = None if header is None else header.redaction
    redaction = definition.redactor.begin(scope.run_id, recorded, is_recorded=is_recorded)
    TEXT_FILTER.set(redaction.clean)
    return redaction


def describe_redacted(redaction: Redaction, header: PlanRecorded, *, is_new: bool = True) -> PlanRecorded:
    """Return the first fact without values, and with the encrypted values of the plan."""
    header = structs.replace(clean_fact(redaction, header), redaction=describe_redaction(redaction))
    if is_new:  # the first fact has them
        redaction.take_fresh()
    return header


def run_context_of(
    definition: EnsembleDefinition,
    planned: Planned,
    *,
    run_id: str,
    interest: frozenset[str],
    capture_mode: CaptureMode,
    log_fields: Mapping[str, str],
    tracing: RunTracing | None = None,
    is_fork: bool = False,
    costs: RunCosts = None,
    inputs: Mapping[str, str] | None = None,
    tags: Mapping[str, str] = _NO_TAGS,
    user: str = "",
) -> RunContext:
    """Return the context of a run; `interest` are listener methods with a receiver."""
    plan, limit, chosen = planned.plan, definition.delegation_timeout, definition.chosen_options
    added = additional_context_of(definition)
    return RunContext(
        run_id=run_id,
        workflow=plan.workflow,
        total_tasks=len(plan.nodes),
        interest=interest,
        capture_mode=capture_mode,
        is_verbose=definition.verbose,
        context_budget=definition.context_budget,
        max_tool_output_length=definition.max_tool_output_length,
        tool_log_truncate_length=definition.tool_log_truncate_length,
        log_fields=log_fields,
        cost=costs,
        budget=RunBudget.of(definition.max_tokens, definition.max_cost),
        has_tool_metrics=definition.tool_metrics is not None,
        durability=definition.durability,
        on_unknown=definition.on_unknown if isinstance(definition.on_unknown, OnUnknown) else OnUnknown.ASK,
        retry=definition.retry,
        on_incomplete=definition.on_incomplete,
        delegation=DelegationContext(
            peers=planned.peers,
            max_depth=definition.max_delegation_depth,
            policies=[callable_name(policy) for policy in definition.delegation_policies],
            timeout_s=None if limit is None else limit.total_seconds(),
            retries=definition.delegation_retries,
            most_at_once=definition.max_parallel_tasks,
        ),
        hierarchy=plan.hierarchy,
        memory=rules_of(definition.memory, definition.memory_store),
        review_policy=definition.review_policy if definition.has_reviews else None,
        policy_review=getattr(definition.review_handler, "default_review", None),
        is_detached=definition.is_detached,
        has_reflections=definition.reflection_store is not None
        or any(task.reflection_config is not None for task in planned.tasks.values()),
        models=RunModels(definition.models),
        tracing=tracing,
        began_at=time.time(),
        declared_model=NO_NAMES if plan.nodes else declared_names(definition.llm, model_names(definition.llm)),
        is_fork=is_fork,
        inputs=plan.inputs if inputs is None else inputs,
        tags=tags,
        user=user,
        deps=deps_of(definition),
        max_iterations=None if chosen is None else chosen.max_iterations,
        additional_context=added if planned.redaction is None else planned.redaction.clean(added),
        redaction=planned.redaction,
    )


def deps_of(definition: RunRules) -> RunDeps | None:
    deps = definition.deps
    if isinstance(deps, Provided) and definition.deps_type is not None:
        deps = Provided(deps.factory, definition.deps_type)
    return None if deps is None else RunDeps(deps, place=definition.deps_place)


def check_deps_of(definition: RunRules, scope: RunScope) -> None:
    """Check the deps before any model call; a run that only returns its recorded output needs none."""
    if definition.deps_type is not None and not (scope.resumption is not None and scope.resumption.is_completed):
        check_deps(definition.deps, definition.deps_type, type(definition).__name__)


def additional_context_of(definition: RunRules) -> str:
    """Return the text of the run's options for all prompts; "": none."""
    chosen = definition.chosen_options
    return "" if chosen is None else chosen.additional_context or ""


def costs_of(definition: RunRules, header: PlanRecorded | None = None) -> RunCosts:
    """Return the costs of a run's models. Those that a resumed run decided on at its start stay (S-PRC-14).

    None: no model has a price.
    """
    if definition.cost_configuration is not None:
        return definition.cost_configuration
    if header is not None and header.prices is not None:
        return RunPrices.from_data(header.prices, definition.prices)
    return _new_costs(definition, *_models_of(definition))


async def decide_costs(definition: RunRules, header: PlanRecorded | None) -> RunCosts:
    """Return `costs_of` without blocking the loop for the import of the library of prices."""
    if definition.cost_configuration is not None or (header is not None and header.prices is not None):
        return costs_of(definition, header)
    models, embeds = _models_of(definition)
    if any(needs_library(definition.prices, each) for each in (*models, *embeds)):
        await threads.run(load_library)
    return _new_costs(definition, models, embeds)


def _models_of(definition: RunRules) -> tuple[list[object], list[object]]:
    """Return the chat models and the embedding models that a definition names, each once."""
    embeds = [model for _, model in embedding_models(definition)]
    if not isinstance(definition, EnsembleDefinition):
        return list({id(model): model for _, model in priced_models(definition)}.values()), embeds
    # Without the places of `priced_models`: this runs for every task of every run.
    named: list[object] = [definition.llm, definition.manager_llm, *definition.models.values()]
    named += [agent.llm for agent in definition.agents or ()]
    for task in definition.all_tasks:
        named.append(task.llm)
        if (agent := task.agent) is not None:
            named.append(agent.llm)
        if (config := task.reflection_config) is not None:
            named.append(config.model)
    known = {id(model): model for model in named if model is not None}
    return [each for model in known.values() for each in members_of(model)], embeds


def _new_costs(definition: RunRules, models: Sequence[object], embeds: Sequence[object]) -> RunCosts:
    prices = decide_prices(RunPrices(given=definition.prices), models, embeds)
    has_more = not isinstance(definition, EnsembleDefinition)  # factories may make agents with other models
    return prices if prices.decided or prices.given or has_more else None


def recorded_prices(costs: RunCosts) -> dict[str, dict[str, object]] | None:
    """Return the prices that the first fact of a run has; None: no model has a price of its own."""
    return costs.to_data() or None if isinstance(costs, RunPrices) else None


def request_of(
    scope: RunScope,
    definition: EnsembleDefinition,
    planned: Planned,
    *,
    capture_mode: CaptureMode,
    inputs: Mapping[str, str] | None = None,
) -> RunRequest:
    """Return the request of a run; `inputs` replaces those of the plan."""
    handler = None if definition.is_detached else definition.review_handler
    if isinstance(handler, ConsoleReviewHandler):
        handler.warn_without_terminal()
    context = run_context_of(
        definition,
        planned,
        run_id=scope.run_id,
        interest=scope.events.interest,
        capture_mode=capture_mode,
        log_fields=scope.log_fields,
        tracing=scope.tracing,
        is_fork=scope.resumption is not None and scope.resumption.header.forked_from is not None,
        costs=scope.costs,
        inputs=inputs,
        tags=scope.tags,
        user=scope.user,
    )
    store = definition.find_reflection_store(task.reflection_config for task in planned.tasks.values())
    return RunRequest(
        run_id=scope.run_id,
        origin=scope.origin,
        context=context,
        events=scope.events,
        tool_metrics=definition.tool_metrics or NoOpToolMetrics(),
        on_unknown=definition.on_unknown,
        reviewer=None if handler is None else LocalReviewer(handler),
        store=scope.store_address,
        cancelled=scope.cancelled,
        memory=None if context.memory is None else LocalRunMemory(definition.memory, definition.memory_store),
        reflections=None if store is None else LocalRunReflections(store),
    )


def check_context_budgets(definition: EnsembleDefinition, planned: Planned) -> None:
    """Raise a ValidationError for the first task with fixed texts over its context budget (S-MEM-137)."""
    for node in planned.plan.nodes:
        task = planned.tasks[node.key]
        budget = task.context_budget or definition.context_budget
        if budget is None or node.agent_key is None:
            continue
        instructions = build_system_prompt(planned.agents[node.agent_key])
        attached = sum([each.estimated_tokens for each in task.attachments]) * CHARACTERS_PER_TOKEN
        fixed = fixed_parts(task, additional_context=additional_context_of(definition))
        check_context_budget(node.key, budget, len(instructions) + len(render_parts(fixed)) + attached)
