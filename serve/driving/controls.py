"""What people say to runs while these go on: directives, other models, and decisions at gates.

In: runs that are driven here, and the store of their records. Out: what the run or its record took; a `Refusal` where neither takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray import IllegalStateError, ReviewDecidedError, ReviewDecision, RunExistsError, ValidationError
from ensemble_ray.execute.review.gates import describe_misfit
from ensemble_ray.process.forks import threads
from ensemble_ray.record.open_reviews import Gate, fold_gates
from ensemble_ray.recovery.deciding import find_pending, record_decision
from ensemble_ray.serve.control_schemas import (
    DecidedReview,
    FirstDecision,
    NewDecision,
    NewDirective,
    NewModel,
    ReviewConflict,
    ReviewOfEnsemble,
    Verdict,
)
from ensemble_ray.serve.driving.outcomes import as_open_review, status_of_state
from ensemble_ray.serve.failures import failure_of
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.reviews import ReviewTiming

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.serve.driving.active import ActiveRun
    from ensemble_ray.values.task_output import OutputType

#: Who decides where nobody is asked who they are.
_ANYBODY = "a client of the endpoint"


async def inject_directive(active: ActiveRun, directive: NewDirective, by: str) -> None:
    """Tell the tasks of a run that start from now on.

    Raises:
        Refusal: no task of it would be told.
    """
    run_id = active.entry.run_id
    if active.run is not None:
        try:
            await active.run.ainject(directive.text, directive.ttl_s, given_by=by)
        except IllegalStateError:
            pass  # as one that has not begun
        else:
            return
    text = f"Run '{run_id}' does not run just now, so that no task of it would be told. Ask again when it does"
    raise Refusal(HTTPStatus.CONFLICT, "RUN_NOT_RUNNING", text, run_id=run_id)


async def switch_run_model(active: ActiveRun, model: NewModel, by: str) -> None:
    """Let the tasks of a run that start from now on ask another model.

    Raises:
        Refusal: the team has no such model or agent, or no task of it would ask.
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
            pass  # as one that has not begun
        else:
            return
    text = (
        f"Run '{run_id}' does not run just now, so that no task of it would ask another model. Try again when it does"
    )
    raise Refusal(HTTPStatus.CONFLICT, "RUN_NOT_RUNNING", text, run_id=run_id)


async def open_gates(
    store: RunStore, runs: Mapping[str, ActiveRun], ensembles: frozenset[str] | None
) -> Sequence[ReviewOfEnsemble]:
    """Return the gates at which these runs wait, oldest first.

    Args:
        store: Has their records.
        runs: By their ids.
        ensembles: Names of teams; None: all.
    """
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
    """Record a decision; return it, or the one that came first.

    Args:
        store: Has the record.
        run_id: The run's id.
        gate_id: The gate's id.
        decision: The decision.
        by: Who decides.
        find_type: Returns the declared type of a task's output, by its key.

    Raises:
        Refusal: the gate is none of the run's, waits no more, or is asked elsewhere, or the edit does not fit.
    """
    # The beginning of an id, which a terminal takes, is none here.
    gates = {gate.gate_id: gate for gate in fold_gates(await store.gates_of(run_id))}
    if (gate := gates.get(gate_id)) is None:
        text = f"Run '{run_id}' has no gate '{gate_id[:200]}'. GET /reviews lists those that wait"
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
    """Refuse an edit that does not fit the type of its task (S-SRV-231)."""
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
