"""What a run and its launcher are to each other. Contracts and values only.

A `Run` has the life that all runs have: a state, events, a result, a record that may answer it. A launcher knows one kind of
work: what it is made of, how it is begun, and what came of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.errors import message_of
from ensemble_ray.errors.texts import is_library_file
from ensemble_ray.events.delivery import Delivery, EventLog, EventStream, listeners_of
from ensemble_ray.events.telemetry.active import caller_here, tracers_here
from ensemble_ray.events.tracing import RunTracedEvent, RunTracer
from ensemble_ray.execute.agent.context_window import check_context_budget
from ensemble_ray.execute.callables import callable_name
from ensemble_ray.execute.orders import RunContext, RunModels
from ensemble_ray.execute.reflection import LocalRunReflections
from ensemble_ray.execute.review.console import ConsoleReviewHandler
from ensemble_ray.execute.review.handlers import LocalReviewer
from ensemble_ray.memory.tools import LocalRunMemory, rules_of
from ensemble_ray.ports import EnteredRun
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads
from ensemble_ray.prompts.task import build_system_prompt, fixed_parts, render_parts
from ensemble_ray.record.opening import store_at
from ensemble_ray.runs.ports import RunRequest, SubmissionReason
from ensemble_ray.tools.waiting import NoOpToolMetrics
from ensemble_ray.values.delegation import DelegationContext
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.trace import RunTracing, parse_traceparent

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from contextlib import AsyncExitStack

    from ensemble_ray.definition.ensemble import EnsembleDefinition
    from ensemble_ray.definition.fields import Origin
    from ensemble_ray.definition.run_rules import RunRules, Watched
    from ensemble_ray.events import Event
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.ports import Dashboard
    from ensemble_ray.record.result import RunEnd, RunResultHead, RunResults
    from ensemble_ray.record.stores import RunStore, StoreAddress
    from ensemble_ray.runs.ports import Runtime
    from ensemble_ray.values.outputs import EnsembleOutput
    from ensemble_ray.values.reviews import RunDirective
    from ensemble_ray.values.trace import CaptureMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """That a run is in the record already and goes on."""

    #: its first fact
    header: PlanRecorded
    #: how many tasks have recorded outputs
    recorded_tasks: int = 0
    #: how many of them are of items of a map-reduce
    recorded_items: int = 0
    #: whether it is over, so that its recorded output is all there is to give
    is_completed: bool = False
    #: why it is submitted
    submission: SubmissionReason = SubmissionReason.RESUMED
    #: whether another definition than the recorded one may go on with it (S-DUR-36)
    allows_changes: bool = False
    #: what its recorded answers cost, where it has a budget
    spent: Amount = NOTHING
    #: how often it was resumed, this time included
    beginning: int = 1
    #: what was done until then was told of by an earlier beginning; Unix time, s
    told_until: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScope:
    """What a launcher knows of the run that it launches."""

    run_id: str
    runtime: Runtime
    #: where the run is recorded; None: nowhere
    store_address: StoreAddress | None
    events: RunEvents
    log_fields: Mapping[str, str]
    #: where the definition came from
    origin: str
    #: whether its caller chose the id
    is_named: bool
    #: None: the run begins
    resumption: Resumption | None
    #: set when the run is cancelled
    cancelled: asyncio.Event
    #: set when its work was handed to the runtime
    begun: asyncio.Event
    #: what its spans have in common; None: nobody traces it
    tracing: RunTracing | None = None

    @property
    def store(self) -> RunStore:
        """The records of the runtime, also where this run has none."""
        return store_at(self.runtime.store_address)

    @property
    def submission(self) -> SubmissionReason:
        """Why the run is submitted."""
        return SubmissionReason.FIRST if self.resumption is None else self.resumption.submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What will run, for people and for traces."""

    workflow: str
    inputs: Mapping[str, str]
    #: 0 where nobody knows yet
    total_tasks: int
    #: such as `3 tasks, 2 agents`
    size: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """How a run ended, and what its tasks gave."""

    end: RunEnd
    results: RunResults
    #: what the run raises; None: it did not fail
    failure: BaseException | None = None
    #: what to warn of, such as a budget that is spent; "": nothing
    warning: str = ""


class Launcher(Protocol):
    """Prepares the work of one run, launches it, and brings back how it ended. Everything on the library's loop."""

    @property
    def definition(self) -> Watched:
        """What runs, with the options of this run."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether the work was handed to the runtime."""
        ...

    async def prepare(self, scope: RunScope) -> Prepared | ExitReason:
        """Find out what will run; give why the run ends where it was cancelled meanwhile, or has spent its budget.

        Raises:
            EnsembleError: the definition cannot run.
        """
        ...

    def describe(self) -> PlanRecorded:
        """Return what the record's first fact says of the prepared work."""
        ...

    async def replay(
        self, scope: RunScope, header: PlanRecorded | None, description: RunResultHead
    ) -> EnsembleOutput | None:
        """Return what a finished run of that id gave; it is not run again (S-SET-39). None: there is none.

        Args:
            scope: The run.
            header: The first fact that the run would record; None: that has been compared.
            description: What its trace says of it.

        Raises:
            EnsembleError: it ended otherwise, or was of another definition.
        """
        ...

    async def launch(self, scope: RunScope, header: PlanRecorded, mode: CaptureMode) -> Conclusion | ExitReason:
        """Launch the work and wait for its end; give why the run ends where it was cancelled before it began.

        Raises:
            EnsembleError: it broke, so that there is no end of it.
        """
        ...

    async def stop(self) -> None:
        """Ask what goes on to end; the scope is marked as cancelled already."""
        ...

    async def inject(self, directive: RunDirective) -> bool:
        """Tell the tasks that start from now on, and return when that is on record; False: none will start.

        Raises:
            EnsembleError: it cannot be recorded, or whoever coordinates the run cannot be reached.
        """
        ...

    def close(self) -> None:
        """Tell readers that nothing comes any more."""
        ...


class RunEvents:
    """Listeners and readers of one run."""

    def __init__(
        self,
        definition: Watched,
        *,
        fields: dict[str, str],
        is_read: bool,
        on_interrupt: Callable[[BaseException], None],
    ) -> None:
        """Make it.

        Args:
            definition: Has the listeners.
            fields: Log fields for their threads.
            is_read: Whether a stream may be asked for.
            on_interrupt: Called on the thread of a listener that was interrupted (S-SET-27).
        """
        declared = listeners_of(definition.listeners, definition.callbacks)
        self._listeners = (*declared, *tracers_here(declared))
        self._log = EventLog(is_open=is_read)
        self._delivery = Delivery(self._listeners, fields=fields, on_interrupt=on_interrupt)
        #: the listener methods that anybody wants; it does not change
        self.interest: frozenset[str] = self._delivery.interest | self._log.interest

    @property
    def trace_id(self) -> str | None:
        """The id that a listener gave to what it traces."""
        trace_ids = (getattr(listener, "trace_id", None) for listener in self._listeners)
        return next((str(found) for found in trace_ids if found is not None), None)

    @property
    def listeners(self) -> Sequence[object]:
        """All of them, that of the environment included."""
        return self._listeners

    def wants(self, event_type: type[Event]) -> bool:
        """Return whether a listener or a reader wants events of that type."""
        return event_type.method in self.interest

    def emit(self, event: Event) -> None:
        """Hand the event to listeners and readers."""
        self._delivery.emit(event)
        self._log.emit(event)

    async def wait_until_delivered(self, *event_types: type[Event]) -> None:
        """Return when the listeners to one of these types have heard of all that happened so far."""
        await self._delivery.wait_until_delivered(*event_types)

    def stream(self) -> EventStream:
        """Return all events, the past ones first."""
        return self._log.stream()

    async def close(self, run_id: str, exit_reason: ExitReason) -> None:
        """Return when every listener has every event, and its end; then no more events come."""
        self._delivery.end(run_id, exit_reason)
        await self._delivery.close()
        self._log.close()


_log = bounded_logger(__name__)


def name_of(definition: RunRules, origin: Origin) -> str:
    """Return what runs of a team are called: its name, else the file or variable that it was loaded from (S-DOM-84).

    A team that a program made is called as the program's file. Empty where there is none, as in a notebook.
    """
    main = sys.modules["__main__"]
    program = "" if getattr(main, "__spec__", None) else str(getattr(main, "__file__", None) or "")
    is_own = program.endswith(".py") and not is_library_file(program)  # Ray's, in its tasks and actors
    return definition.name or origin.name or (Path(program).stem if is_own else "")


async def show_run(
    dashboard: Dashboard | None, run_id: str, store: StoreAddress | None, leaving: AsyncExitStack
) -> None:
    """Have a run shown until a stack is left (S-WEB-11, S-WEB-12).

    Args:
        dashboard: What shows it; None: nothing does.
        run_id: The run's id.
        store: Where it is recorded; None: nowhere.
        leaving: The stack.

    Raises:
        EnsembleError: the dashboard cannot be started.
    """
    if dashboard is not None:
        entered = EnteredRun(run_id=run_id)
        if store is not None:
            entered = EnteredRun(run_id=run_id, is_recorded=True, home=store.home, url=store.url)
        await threads.run(dashboard.enter_run, entered)
        leaving.push_async_callback(_leave, dashboard)


async def _leave(dashboard: Dashboard) -> None:
    try:
        await threads.run(dashboard.leave_run)
    except Exception as error:  # noqa: BLE001  the run is done, whatever becomes of its dashboard
        _log.warning("The dashboard could not be stopped: %s", message_of(error))


def exit_reason_of(state: RunState) -> ExitReason:
    """Return why a run in that state gives no more events, as listeners hear it that take its end (S-EVT-23)."""
    match state:
        case RunState.COMPLETED | RunState.CANCELLED | RunState.BUDGET_EXHAUSTED | RunState.WAITING:
            return ExitReason(state.value)
        case _:
            return ExitReason.ERROR


class TracedRun:
    """One run, as those see it who trace it; made where the run is asked for.

    Attributes:
        context: What its spans have in common; None: nobody traces it.
        traceparent: The span that asked for it, also where nobody traces it now; None: none did.
    """

    def __init__(self, run_id: str, events: RunEvents, *, name: str, resumption: Resumption | None) -> None:
        """Find out who traces it, and who asks for it.

        Args:
            run_id: The run's id.
            events: Its listeners.
            name: What its team is called.
            resumption: That it goes on; then it stays part of the trace of who asked for it first.
        """
        caller = caller_here() if resumption is None else parse_traceparent(resumption.header.traceparent or "")
        tracers = [each for each in events.listeners if isinstance(each, RunTracer)]
        self.traceparent = None if caller is None else str(caller)
        self.context: RunTracing | None = None
        if tracers:
            self.context = RunTracing(
                run_id=run_id,
                caller=caller,
                is_sampled=any(each.samples(run_id, caller) for each in tracers),
                beginning=0 if resumption is None else resumption.beginning,
                told_until=0.0 if resumption is None else resumption.told_until,
            )
        self._events = events
        self._name = name
        self._workflow = ""
        #: Unix time, s; None: it has not begun
        self._started_at: float | None = None
        self._failure: BaseException | None = None

    def begin(self, workflow: str) -> None:
        """Note that it has begun."""
        self._started_at, self._workflow = time.time(), workflow

    def answer(self) -> None:
        """Note that the record answered it: nothing was done now."""
        self._started_at = None

    def fail(self, error: BaseException) -> None:
        """Note what it fails with."""
        self._failure = error

    def end(self, state: RunState) -> None:
        """Tell that it is over, behind all of its tasks (S-INT-31)."""
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


def run_context_of(
    definition: EnsembleDefinition,
    planned: Planned,
    *,
    run_id: str,
    interest: frozenset[str],
    capture_mode: CaptureMode,
    log_fields: Mapping[str, str],
    tracing: RunTracing | None = None,
) -> RunContext:
    """Return the context of a run.

    Args:
        definition: The ensemble as this run sees it.
        planned: What it will do.
        run_id: Its id.
        interest: Listener methods that anybody wants.
        capture_mode: What its trace keeps.
        log_fields: The caller's, carried into every process.
        tracing: What its spans have in common; None: nobody traces it.
    """
    plan, limit = planned.plan, definition.delegation_timeout
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
        cost=definition.cost_configuration,
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
        has_reflections=definition.reflection_store is not None or reflects(planned),
        models=RunModels(definition.models),
        tracing=tracing,
    )


def reflects(planned: Planned) -> bool:
    """Return whether a task of the plan is reflected on."""
    return any(task.reflection_config is not None for task in planned.tasks.values())


def request_of(
    scope: RunScope, definition: EnsembleDefinition, planned: Planned, *, capture_mode: CaptureMode
) -> RunRequest:
    """Return what a run asks its runtime with.

    Args:
        scope: The run.
        definition: The rules of its tasks.
        planned: What is known of them.
        capture_mode: What its trace keeps.
    """
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
    """Refuse a run with a task whose own texts are larger than its budget (S-MEM-137).

    Raises:
        ValidationError: there is one; the first one is told.
    """
    for node in planned.plan.nodes:
        task = planned.tasks[node.key]
        budget = task.context_budget or definition.context_budget
        if budget is None or node.agent_key is None:
            continue
        instructions = build_system_prompt(planned.agents[node.agent_key])
        check_context_budget(node.key, budget, len(instructions) + len(render_parts(fixed_parts(task))))
