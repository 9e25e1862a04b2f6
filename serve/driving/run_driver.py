"""Carries out accepted runs, and reviews, directives and model switches of running ones."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import (
    Ensemble,
    EnsembleError,
    IllegalStateError,
    ReviewDecidedError,
    ReviewDecision,
    RunExistsError,
    RunState,
    ValidationError,
)
from ensemble_ray.errors.texts import describe
from ensemble_ray.execute.review.gates import describe_misfit
from ensemble_ray.plan.unit_plans import task_keys
from ensemble_ray.process.context import bounded_logger, use_traceparent
from ensemble_ray.process.forks import SystemClock, threads
from ensemble_ray.record.open_reviews import Gate, fold_gates
from ensemble_ray.record.opening import store_at
from ensemble_ray.recovery.deciding import find_pending, record_decision
from ensemble_ray.recovery.resuming import start_resumed
from ensemble_ray.serve.driving.active import (
    Outcome,
    as_open_review,
    open_reviews,
    outcome_of_defect,
    outcome_of_error,
    outcome_of_output,
    recorded_outcome,
    status_of_state,
)
from ensemble_ray.serve.driving.requests import EndpointLimits, change_team, items_of, options_of
from ensemble_ray.serve.failures import describe_refusal, failure_of, is_refusal
from ensemble_ray.serve.schemas import (
    DecidedReview,
    FirstDecision,
    ItemsDataset,
    NewDecision,
    NewDirective,
    NewModel,
    Refusal,
    ReviewConflict,
    ReviewOfEnsemble,
    RunStatus,
    Verdict,
)
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.reviews import ReviewTiming
from ensemble_ray.values.trace import parse_traceparent

if TYPE_CHECKING:
    from ensemble_ray import Runtime
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.serve.catalog import DatasetCatalog
    from ensemble_ray.serve.driving.active import ActiveRun
    from ensemble_ray.serve.driving.ledger import RunLedger
    from ensemble_ray.serve.schemas import RunDetail
    from ensemble_ray.teamfile import Runnable
    from ensemble_ray.values.task_output import OutputType


_log = bounded_logger(__name__)
#: Polling interval for a run that another process may resume, s.
_LOOK_S = 1.0
#: Polls during which the cluster's scheduler may resume a run. It polls once a second as well.
_GRACE_LOOKS = 10


#: Pauses before a retry, s; the last one repeats.
_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
#: Name in decisions if the endpoint does not identify callers.
_ANYBODY = "a client of the endpoint"


class RunsTeam:
    """Runs teams on one runtime."""

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
        """Carry out a run and return its outcome. An error of the run is an outcome.

        `is_recovered` means that the run may have started in another process.
        """
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
        except Refusal as refusal:  # the operator has lowered a limit after the run was accepted
            return Outcome(status=RunStatus.REJECTED, error=describe_refusal(refusal))
        except (EnsembleError, IllegalStateError) as error:
            if not is_refusal(error):
                _log.warning("Run %s failed: %s", run_id, describe(error))
            return outcome_of_error(error, run_id)
        except Exception as error:  # noqa: BLE001  code of the team can raise anything; the endpoint must survive
            _log.warning("Run %s failed: %s", run_id, describe(error))
            return outcome_of_defect(error, run_id)

    def find_output_type(self, active: ActiveRun, key: str) -> OutputType | None:
        """Return the declared output type of a task, if it has one. Generated tasks have none."""
        definition = change_team(active.team.definition, active.asked, self._tools)
        if not isinstance(definition, Ensemble):
            return None
        tasks = definition.all_tasks
        return dict(zip(task_keys(tasks), (task.output_type for task in tasks), strict=True)).get(key)

    async def wait_for_decision(self, active: ActiveRun) -> None:
        """Return when a waiting run has a decision, was resumed or should end."""
        run_id = active.entry.run_id
        while not active.is_cancelled and not active.decided.is_set() and await self._is_waiting(run_id):
            with contextlib.suppress(TimeoutError):  # another process may write a decision to the record
                await asyncio.wait_for(active.decided.wait(), _LOOK_S)

    async def _is_waiting(self, run_id: str) -> bool:
        """Return whether a run waits for people and has a gate that has not expired."""
        summary = await self._store.summary(run_id)
        if summary is None or summary.state is not RunState.WAITING:
            return False
        now = datetime.fromtimestamp(SystemClock().now(), UTC)
        return any(each.expires_at is None or each.expires_at > now for each in await open_reviews(self._store, run_id))

    async def _is_resumed_by_scheduler(self, run_id: str) -> bool:
        """Return whether the cluster's scheduler resumes a run whose gates are decided."""
        if self._runtime.name == "inline":
            return False
        for _ in range(_GRACE_LOOKS):
            summary = await self._store.summary(run_id)
            if summary is None or summary.state is not RunState.WAITING:
                return True
            await asyncio.sleep(_LOOK_S)
        return False

    async def end_waiting(self, active: ActiveRun) -> Outcome:
        """End a run that was cancelled while it waited for people; return its outcome."""
        return await self.carry_out(active, is_recovered=True)

    async def _run(self, active: ActiveRun, *, is_recovered: bool) -> Outcome:
        active.run = run = await self._begin(active, is_recovered=is_recovered)
        if active.is_cancelled:
            await run.acancel()
        output = await run.aresult()
        active.decided.clear()  # the run has read these decisions
        return outcome_of_output(run.state, output)

    async def _begin(self, active: ActiveRun, *, is_recovered: bool) -> Run:
        definition = await threads.run(self._definition, active)
        entry, asked = active.entry, active.asked
        if is_recovered and await self._is_recorded(entry.run_id):
            return await start_resumed(entry.run_id, definition, runtime=self._runtime, has_caller=False)
        span = parse_traceparent(asked.traceparent or "")  # earlier releases accepted invalid values
        with use_traceparent("" if span is None else str(span)):  # S-INT-38
            return definition.begin(
                asked.inputs,
                runtime=self._runtime,
                run_id=entry.run_id,
                options=options_of(asked, active.team.definition, self._limits),
                is_watched=False,
            )

    def _definition(self, active: ActiveRun) -> Runnable:
        """Return the team with the items or the tasks of the request, and a listener for streamed tokens."""
        items: object = items_of(active.asked, self._limits, self._datasets)
        if isinstance(items, ItemsDataset):
            items = self._datasets.open(items.dataset)
        team = active.team
        definition = (
            change_team(team.definition, active.asked, self._tools) if items is None else team.with_items(items)
        )
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
            elif active.decided.is_set():  # resume without waiting for the cluster's scheduler
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
    """Writes the ends of an endpoint's runs to its ledger, one at a time.

    `kept` is the number of ended runs that remain in the ledger. `on_lost` is called if another process owns it.
    """

    def __init__(self, ledger: RunLedger, *, kept: int, on_lost: Callable[[RunExistsError], object]) -> None:
        self._ledger = ledger
        self._on_lost = on_lost
        self._kept = kept
        self._turn = asyncio.Lock()

    async def write(self, run_id: str, outcome: RunDetail) -> bool:
        """Write the end of a run, and retry until it is stored. False: the ledger does not accept it.

        After a cancelled call the record still contains the end.
        """
        tries = 0
        async with self._turn:
            while True:
                try:
                    await threads.run(self._ledger.end, run_id, outcome, kept=self._kept)
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


async def inject_directive(active: ActiveRun, directive: NewDirective, by: str) -> None:
    """Send a directive to the tasks of a run that start from now on.

    Raises:
        Refusal: the run is not running at the moment.
    """
    run_id = active.entry.run_id
    if active.run is not None:
        try:
            await active.run.ainject(directive.text, directive.ttl_s, given_by=by)
        except IllegalStateError:
            pass  # not running: the same as not started
        else:
            return
    text = f"Run '{run_id}' is not running at the moment. Send the directive again when it is"
    raise Refusal(HTTPStatus.CONFLICT, "RUN_NOT_RUNNING", text, run_id=run_id)


async def switch_run_model(active: ActiveRun, model: NewModel, by: str) -> None:
    """Switch the model of the tasks of a run that start from now on.

    Raises:
        Refusal: the team has no such model or agent, or the run is not running at the moment.
    """
    run_id, known = active.entry.run_id, sorted(active.team.definition.models)
    if model.model is not None and model.model not in known:
        text = f"The team '{active.entry.ensemble}' has no model '{model.model}'. There are: [{', '.join(known)}]"
        raise Refusal(HTTPStatus.BAD_REQUEST, "MODEL_NOT_FOUND", text, run_id=run_id)
    if active.run is not None:
        try:
            await active.run.aswitch_model(model.model, agent=model.agent, given_by=by)
        except ValidationError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, "AGENT_NOT_FOUND", str(error), run_id=run_id) from error
        except IllegalStateError:
            pass  # not running: the same as not started
        else:
            return
    text = f"Run '{run_id}' is not running at the moment. Switch the model when it is"
    raise Refusal(HTTPStatus.CONFLICT, "RUN_NOT_RUNNING", text, run_id=run_id)


async def open_gates(
    store: RunStore, runs: Mapping[str, ActiveRun], ensembles: frozenset[str] | None
) -> Sequence[ReviewOfEnsemble]:
    """Return the open gates of these runs, oldest first; of all teams without `ensembles`."""
    teams = {run_id: active.entry.ensemble for run_id, active in runs.items()}
    shown = {run_id: team for run_id, team in teams.items() if ensembles is None or team in ensembles}
    if not shown:
        return ()
    return [
        ReviewOfEnsemble(**dict(as_open_review(each.review)), ensemble=shown[each.review.run_id])
        for each in await find_pending(store)
        if each.review.run_id in shown
    ]


async def decide_gate(
    store: RunStore,
    run_id: str,
    gate_id: str,
    decision: NewDecision,
    by: str,
    *,
    find_type: Callable[[str], OutputType | None],
) -> DecidedReview | ReviewConflict:
    """Record a decision; return it, or the earlier decision that counts.

    `find_type` returns the declared output type of a task by its key.

    Raises:
        Refusal: the run has no such gate, the gate is closed or decided by another process, or the edit does not fit.
    """
    # An id must be complete here. Terminals also accept a prefix.
    gates = {gate.gate_id: gate for gate in fold_gates(await store.gates_of(run_id))}
    if (gate := gates.get(gate_id)) is None:
        text = f"Run '{run_id}' has no gate '{gate_id[:200]}'. GET /reviews lists the open gates"
        raise Refusal(HTTPStatus.NOT_FOUND, "REVIEW_NOT_FOUND", text, run_id=run_id)
    if decision.decision is Verdict.EDIT and gate.is_open:
        await threads.run(_check_edit, gate, decision.text or "", find_type)
    by, asked = by or _ANYBODY, _decision_of(decision)
    try:
        run, _ = await record_decision(store, run_id, gate_id, asked, by=by, comment=decision.comment)
    except ReviewDecidedError as error:
        first = FirstDecision(
            decision=error.verdict, by=error.by, decided_at=error.decided_at, comment=error.comment or ""
        )
        return ReviewConflict(**dict(failure_of(error, run_id)), first=first)
    except RunExistsError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, "REVIEW_ASKED_ELSEWHERE", str(error), run_id=run_id) from error
    except ValidationError as error:
        raise Refusal(HTTPStatus.NOT_FOUND, "REVIEW_NOT_FOUND", str(error), run_id=run_id) from error
    return DecidedReview(run_id=run_id, gate_id=gate_id, decision=decision.decision, status=status_of_state(run.state))


def _check_edit(gate: Gate, text: str, find_type: Callable[[str], OutputType | None]) -> None:
    """Raise a `Refusal` if an edit does not fit the output type of its task (S-SRV-231)."""
    if gate.asked.data.timing is not ReviewTiming.AFTER_EXECUTION:
        return
    output_type = find_type(node_key(gate.asked.instance))
    if output_type is not None and (why := describe_misfit(text, output_type)):
        raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "EDIT_INVALID", why, run_id=gate.asked.run, param="text")


def _decision_of(asked: NewDecision) -> ReviewDecision:
    match asked.decision:
        case Verdict.APPROVE:
            return ReviewDecision.continue_execution()
        case Verdict.EDIT:
            return ReviewDecision.edit(asked.text or "")
        case Verdict.EXIT:
            return ReviewDecision.exit_early()
