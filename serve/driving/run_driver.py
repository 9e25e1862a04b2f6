"""Open runs of one process: their outcomes, and how they are carried out, reviewed and steered."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus

import msgspec
from msgspec import Struct

from ensemble_ray import Ensemble, EnsembleOutput, ReviewDecision, RunExistsError, RunState, Runtime, ValidationError
from ensemble_ray.access.quotas import UNLIMITED, Allowance
from ensemble_ray.errors import EnsembleError, IllegalStateError, RecordError, ReviewDecidedError, ReviewRoleError
from ensemble_ray.errors.texts import describe
from ensemble_ray.execute.review.gates import describe_misfit
from ensemble_ray.facts.runs import OWN_ERRORS, RecordedCause, RecordedError
from ensemble_ray.plan.unit_plans import task_keys
from ensemble_ray.process.concurrency import SystemClock, threads
from ensemble_ray.process.context import bounded_logger, use_traceparent
from ensemble_ray.record.following import LiveEvents
from ensemble_ray.record.head import RunHead, read_head
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.open_reviews import Gate, fold_gates
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import RunStore
from ensemble_ray.record.trace import fold_output, raised_by
from ensemble_ray.recovery.deciding import find_pending, record_decision
from ensemble_ray.recovery.resuming import start_resumed
from ensemble_ray.runs.handle import Run
from ensemble_ray.runs.map_reduce.recovery import load_failure
from ensemble_ray.serve import schemas
from ensemble_ray.serve.callers import code_of, describe_refusal, failure_of, is_refusal, status_of_name
from ensemble_ray.serve.catalog import DatasetCatalog, ServedTeam
from ensemble_ray.serve.driving.ledger import Document, LedgerEntry, RunLedger
from ensemble_ray.serve.driving.requests import EndpointLimits, change_team, inputs_of, items_of, lowered, options_of
from ensemble_ray.serve.driving.usage import UsageWriter
from ensemble_ray.serve.schemas import Refusal, RunStatus
from ensemble_ray.teamfile import Runnable
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.reviews import OpenReview, ReviewTiming
from ensemble_ray.values.task_output import OutputType
from ensemble_ray.values.trace import parse_traceparent

STATUSES = {each: RunStatus.RUNNING if each is RunState.PENDING else RunStatus(each.value) for each in RunState}
_log = bounded_logger(__name__)
#: Polling for a run that another process may resume: interval, s, and number for the scheduler.
_LOOK_S = 1.0
_GRACE_LOOKS = 10
#: The last one repeats.
_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
_ANYBODY = "a client of the endpoint"
_IN_RECORD = "The record of the run says more"


class ActiveRun(Struct, kw_only=True, eq=False):
    entry: LedgerEntry
    team: ServedTeam
    asked: schemas.NewRun
    #: streamed tokens, until its outcome is stored
    live: LiveEvents = msgspec.field(default_factory=LiveEvents)
    run: Run | None = None
    is_kept: bool = False
    #: here or in another process
    has_begun: bool = False
    #: waits for people, outside of the queue
    is_aside: bool = False
    #: set by a decision until the run resumes
    decided: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    is_cancelled: bool = False
    #: what the quotas of its key leave to it
    allowance: Allowance = UNLIMITED
    #: set before `done`
    ended: schemas.RunDetail | None = None
    done: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Outcome(Struct, frozen=True, kw_only=True):
    status: RunStatus
    result: schemas.FinishedRun | None = None
    error: schemas.Failure | None = None


def outcome_of_output(state: RunState, output: EnsembleOutput) -> Outcome:
    return Outcome(status=STATUSES[state], result=schemas.FinishedRun.of(output))


def outcome_of_error(error: BaseException, run_id: str) -> Outcome:
    status = RunStatus.REJECTED if is_refusal(error) else RunStatus.FAILED
    return Outcome(status=status, error=failure_of(error, run_id))


def outcome_of_defect(error: BaseException, run_id: str) -> Outcome:
    """Return the outcome of a run with an unexpected error. The error's text is only logged."""
    return Outcome(status=RunStatus.FAILED, error=_defect(type(error).__name__, run_id, "The endpoint's log says more"))


async def recorded_outcome(store: RunStore, run_id: str) -> Outcome | None:
    """Return the recorded outcome of a run; None: it can be resumed. Raises `RecordError` for a damaged record."""
    head = await read_head(store, run_id)
    match head.state:
        case RunState.INTERRUPTED | RunState.WAITING:
            return None
        case RunState.FAILED:
            return Outcome(status=RunStatus.FAILED, error=await _recorded_failure(store, head, run_id))
        case RunState.COMPLETED if head.is_dynamic:
            return None  # a resumed run returns its output without another call
        case state:
            try:
                return outcome_of_output(state, fold_output(await store.facts(run_id)))
            except (IllegalStateError, RecordError):
                return Outcome(status=STATUSES[state])


async def open_reviews(store: RunStore, run_id: str) -> list[schemas.OpenReview]:
    gates = [gate.review() for gate in fold_gates(await store.gates_of(run_id)) if gate.is_open]
    return [as_open_review(each) for each in gates]


def as_open_review(gate: OpenReview) -> schemas.OpenReview:
    return schemas.OpenReview(
        run_id=gate.run_id,
        gate_id=gate.gate_id,
        timing=gate.timing.value,
        task_description=gate.task_description,
        task_output=gate.task_output,
        prompt=gate.prompt or "",
        required_role=gate.required_role,
        created_at=gate.created_at,
        expires_at=gate.expires_at,
    )


def _defect(name: str, run_id: str, where: str) -> schemas.Failure:
    return schemas.Failure(
        error="InternalError",
        code="INTERNAL_ERROR",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        message=f"{name} in the code of the team. {where}",
        run_id=run_id,
    )


async def _recorded_failure(store: RunStore, head: RunHead, run_id: str) -> schemas.Failure:
    own = head.own_error if head.is_dynamic else None
    if own is not None and not own.key:
        raised = None
    elif head.is_dynamic:
        raised = await load_failure(store, run_id)
    else:
        raised = raised_by(RunHistory(await store.facts(run_id), has_details=True))
    if raised is not None:
        is_own = isinstance(raised, OWN_ERRORS)
        return failure_of(raised, run_id) if is_own else _defect(type(raised).__name__, run_id, _IN_RECORD)
    first = head.errors[0] if head.errors else RecordedError("", "TaskExecutionError", "The run failed", is_own=True)
    name = first.error_type.rpartition(".")[2]
    if not first.is_own:
        return _defect(name, run_id, _IN_RECORD)
    shown: list[RecordedCause | RecordedError] = [*first.causes, *head.errors[1:]]
    return schemas.Failure(
        error=name,
        code=code_of(name),
        status=status_of_name(name),
        message=first.message,
        run_id=run_id,
        causes=[f"{each.error_type}: {each.message}" for each in shown if each.is_own],
    )


def summary_of(entry: LedgerEntry, *, is_active: bool, place: schemas.QueuePlace | None = None) -> schemas.RunSummary:
    """Return a run for a list. Without an end and an owner it is interrupted."""
    is_left = not entry.status.is_final and not is_active
    return schemas.RunSummary(
        run_id=entry.run_id,
        status=RunStatus.INTERRUPTED if is_left else entry.status,
        ensemble=entry.ensemble,
        tags=dict(entry.tags),
        created_at=entry.created_at,
        ended_at=entry.ended_at,
        queue=place,
        version=entry.version,
    )


def detail_of(
    entry: LedgerEntry, state: RunStatus | Outcome, reviews: Sequence[schemas.OpenReview] = ()
) -> schemas.RunDetail:
    """Return a run in a state, or with the outcome with which it ends now."""
    outcome = state if isinstance(state, Outcome) else None
    return schemas.RunDetail(
        run_id=entry.run_id,
        status=state.status if isinstance(state, Outcome) else state,
        ensemble=entry.ensemble,
        tags=dict(entry.tags),
        created_at=entry.created_at,
        ended_at=None if outcome is None else datetime.fromtimestamp(SystemClock().now(), UTC),
        result=None if outcome is None else outcome.result,
        error=None if outcome is None else outcome.error,
        reviews=[*reviews],
        version=entry.version,
    )


class RunsTeam:
    def __init__(
        self, runtime: Runtime, limits: EndpointLimits, tools: Mapping[str, object], datasets: DatasetCatalog
    ) -> None:
        self._runtime = runtime
        self._datasets = datasets
        self._limits = limits
        self._tools = tools

    @property
    def _store(self) -> RunStore:
        return store_at(self._runtime.store_address)

    async def carry_out(self, active: ActiveRun, *, is_recovered: bool) -> Outcome:
        """Carry out a run. `is_recovered`: it may have started in another process."""
        run_id = active.entry.run_id
        try:
            while is_recovered:
                if (outcome := await self._find_recorded(active)) is not None:
                    return outcome
                try:
                    return await self._run(active, is_recovered=True)
                except RunExistsError:  # the cluster's scheduler resumed it first
                    await asyncio.sleep(_LOOK_S)
            return await self._run(active, is_recovered=False)
        except Refusal as refusal:  # a limit was lowered after the run was accepted
            return Outcome(status=RunStatus.REJECTED, error=describe_refusal(refusal))
        except (EnsembleError, IllegalStateError) as error:
            if not is_refusal(error):
                _log.warning("Run %s failed: %s", run_id, describe(error))
            return outcome_of_error(error, run_id)
        except Exception as error:  # noqa: BLE001  the code of a team can raise anything
            _log.warning("Run %s failed: %s", run_id, describe(error))
            return outcome_of_defect(error, run_id)

    def find_output_type(self, active: ActiveRun, key: str) -> OutputType | None:
        definition = change_team(active.team.definition, active.asked, self._tools)
        if not isinstance(definition, Ensemble):
            return None
        tasks = definition.all_tasks
        return dict(zip(task_keys(tasks), (task.output_type for task in tasks), strict=True)).get(key)

    async def wait_for_decision(self, active: ActiveRun) -> None:
        run_id = active.entry.run_id
        while not active.is_cancelled and not active.decided.is_set() and await self._is_waiting(run_id):
            with contextlib.suppress(TimeoutError):  # another process may decide
                await asyncio.wait_for(active.decided.wait(), _LOOK_S)

    async def _is_waiting(self, run_id: str) -> bool:
        """Return whether a run waits for people at a gate that has not expired."""
        summary = await self._store.summary(run_id)
        if summary is None or summary.state is not RunState.WAITING:
            return False
        now = datetime.fromtimestamp(SystemClock().now(), UTC)
        return any(each.expires_at is None or each.expires_at > now for each in await open_reviews(self._store, run_id))

    async def _is_resumed_by_scheduler(self, run_id: str) -> bool:
        """Return whether the cluster's scheduler resumes a decided run."""
        if self._runtime.name == "inline":
            return False
        for _ in range(_GRACE_LOOKS):
            summary = await self._store.summary(run_id)
            if summary is None or summary.state is not RunState.WAITING:
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    async def _run(self, active: ActiveRun, *, is_recovered: bool) -> Outcome:
        active.run = run = await self._begin(active, is_recovered=is_recovered)
        if active.is_cancelled:
            await run.acancel()
        output = await run.aresult()
        active.decided.clear()  # the run has read these decisions
        return outcome_of_output(run.state, output)

    async def _begin(self, active: ActiveRun, *, is_recovered: bool) -> Run:
        definition = await threads.run(self._definition, active)
        run_id, asked, runtime = active.entry.run_id, active.asked, self._runtime
        if is_recovered and await self._is_recorded(run_id):
            return await start_resumed(run_id, definition, runtime=runtime, has_caller=False)
        span = parse_traceparent(asked.traceparent or "")  # earlier releases accepted invalid values
        with use_traceparent("" if span is None else str(span)):  # S-INT-38
            options = lowered(options_of(asked, active.team.definition, self._limits), active.allowance)
            return definition.begin(inputs_of(asked), runtime=runtime, run_id=run_id, options=options, is_watched=False)

    def _definition(self, active: ActiveRun) -> Runnable:
        items: object = items_of(active.asked, self._limits, self._datasets)
        if isinstance(items, schemas.ItemsDataset):
            items = self._datasets.open(items.dataset)
        definition = active.team.definition
        if items is None:
            definition = change_team(definition, active.asked, self._tools)
        else:
            definition = definition.replace(items=items)
        if not active.team.is_streaming:
            return definition
        return definition.model_copy(update={"listeners": (*definition.listeners, active.live)})

    async def _is_recorded(self, run_id: str) -> bool:
        async for page in self._store.read(run_id):
            return bool(page)
        return False

    async def _find_recorded(self, active: ActiveRun) -> Outcome | None:
        """Return the recorded outcome of a run when no process works on it; None: it can be resumed."""
        run_id = active.entry.run_id
        while (summary := await self._store.summary(run_id)) is not None:
            if summary.state.is_active:
                if active.is_cancelled:
                    await self._store.ask_cancel(run_id)
                await asyncio.sleep(_LOOK_S)
            elif summary.state is not RunState.WAITING or active.is_cancelled:
                break
            elif active.decided.is_set():  # before the cluster's scheduler
                active.decided.clear()
                return None
            elif await self._is_waiting(run_id):
                return Outcome(status=RunStatus.WAITING)
            elif not await self._is_resumed_by_scheduler(run_id):
                return None
        if not await self._is_recorded(run_id):
            return Outcome(status=RunStatus.CANCELLED) if active.is_cancelled else None
        return await recorded_outcome(self._store, run_id)


class EndWriter:
    """Writes ends of runs to the ledger, one at a time. `kept` ended runs remain in it."""

    def __init__(
        self, ledger: RunLedger, usage: UsageWriter, *, kept: int, on_lost: Callable[[RunExistsError], object]
    ) -> None:
        self._ledger = ledger
        self._usage = usage
        self._on_lost = on_lost
        self._kept = kept
        self._turn = asyncio.Lock()

    async def write(self, run_id: str, outcome: schemas.RunDetail, *documents: Document) -> bool:
        """Write an end with its documents, and retry until it is stored. False: the ledger does not accept it."""
        tries = 0
        async with self._turn:
            while True:
                try:
                    end = partial(self._ledger.end, run_id, outcome, *documents, kept=self._kept)
                    await self._usage.write_with(run_id, end)
                except RunExistsError as error:
                    _log.error("The end of run %s cannot be kept: %s", run_id, describe(error))
                    self._on_lost(error)
                    return False
                except (EnsembleError, sqlite3.Error, OSError) as error:
                    _log.warning("Could not store the end of run %s, retrying: %s", run_id, describe(error))
                except Exception as error:  # noqa: BLE001  waiting clients must get an answer after any defect
                    _log.error("The end of run %s cannot be kept: %s", run_id, describe(error))
                    return False
                else:
                    return True
                await asyncio.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
                tries += 1


async def inject_directive(active: ActiveRun, directive: schemas.NewDirective, by: str) -> None:
    if active.run is not None:
        with contextlib.suppress(IllegalStateError):  # not running: the same as not started
            await active.run.ainject(directive.text, directive.ttl_s, given_by=by)
            return
    raise _not_running(active.entry.run_id, "Send the directive again when it is")


async def switch_run_model(active: ActiveRun, model: schemas.NewModel, by: str) -> None:
    run_id, known = active.entry.run_id, sorted(active.team.definition.models)
    if model.model is not None and model.model not in known:
        text = f"The team '{active.entry.ensemble}' has no model '{model.model}'. There are: [{', '.join(known)}]"
        raise Refusal(HTTPStatus.BAD_REQUEST, "MODEL_NOT_FOUND", text, run_id=run_id)
    if active.run is not None:
        try:
            with contextlib.suppress(IllegalStateError):  # not running: the same as not started
                await active.run.aswitch_model(model.model, agent=model.agent, given_by=by)
                return
        except ValidationError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, "AGENT_NOT_FOUND", str(error), run_id=run_id) from error
    raise _not_running(run_id, "Switch the model when it is")


def _not_running(run_id: str, what_to_do: str) -> Refusal:
    text = f"Run '{run_id}' is not running at the moment. {what_to_do}"
    return Refusal(HTTPStatus.CONFLICT, "RUN_NOT_RUNNING", text, run_id=run_id)


async def open_gates(
    store: RunStore, runs: Mapping[str, ActiveRun], ensembles: frozenset[str] | None
) -> Sequence[schemas.ReviewOfEnsemble]:
    """Return the open gates of these runs, oldest first; of all teams without `ensembles`."""
    teams = {run_id: active.entry.ensemble for run_id, active in runs.items()}
    shown = {run_id: team for run_id, team in teams.items() if ensembles is None or team in ensembles}
    if not shown:
        return ()
    return [
        schemas.ReviewOfEnsemble(**dict(as_open_review(each.review)), ensemble=shown[each.review.run_id])
        for each in await find_pending(store)
        if each.review.run_id in shown
    ]


async def decide_gate(
    store: RunStore,
    run_id: str,
    gate_id: str,
    decision: schemas.NewDecision,
    by: str,
    *,
    roles: frozenset[str] | None = None,
    find_type: Callable[[str], OutputType | None],
) -> schemas.DecidedReview | schemas.ReviewConflict:
    """Record a decision; return it, or the earlier decision that counts. `find_type` finds output types by task key."""

    def check_edit(text: str, gate: Gate) -> None:
        is_output = gate.asked.data.timing is ReviewTiming.AFTER_EXECUTION
        output_type = find_type(node_key(gate.asked.instance)) if is_output else None
        if output_type is not None and (why := describe_misfit(text, output_type)):
            raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "EDIT_INVALID", why, run_id=gate.asked.run, param="text")

    # Terminals also accept a prefix of an id.
    gates = {gate.gate_id: gate for gate in fold_gates(await store.gates_of(run_id))}
    if (gate := gates.get(gate_id)) is None:
        text = f"Run '{run_id}' has no gate '{gate_id[:200]}'. GET /reviews lists the open gates"
        raise Refusal(HTTPStatus.NOT_FOUND, "REVIEW_NOT_FOUND", text, run_id=run_id)
    if decision.decision is schemas.Verdict.EDIT and gate.is_open:
        await threads.run(check_edit, decision.text or "", gate)
    by, asked = by or _ANYBODY, _decision_of(decision)
    try:
        run, _ = await record_decision(store, run_id, gate_id, asked, by=by, comment=decision.comment, roles=roles)
    except ReviewRoleError as error:
        raise Refusal(HTTPStatus.FORBIDDEN, "ROLE_REQUIRED", str(error), run_id=run_id) from error
    except ReviewDecidedError as error:
        first = schemas.FirstDecision(
            decision=error.verdict, by=error.by, decided_at=error.decided_at, comment=error.comment or ""
        )
        return schemas.ReviewConflict(**dict(failure_of(error, run_id)), first=first)
    except RunExistsError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, "REVIEW_ASKED_ELSEWHERE", str(error), run_id=run_id) from error
    except ValidationError as error:
        raise Refusal(HTTPStatus.NOT_FOUND, "REVIEW_NOT_FOUND", str(error), run_id=run_id) from error
    return schemas.DecidedReview(run_id=run_id, gate_id=gate_id, decision=decision.decision, status=STATUSES[run.state])


def _decision_of(asked: schemas.NewDecision) -> ReviewDecision:
    match asked.decision:
        case schemas.Verdict.APPROVE:
            return ReviewDecision.continue_execution()
        case schemas.Verdict.EDIT:
            return ReviewDecision.edit(asked.text or "")
        case schemas.Verdict.EXIT:
            return ReviewDecision.exit_early()
