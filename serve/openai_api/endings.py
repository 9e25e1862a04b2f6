"""How a run ended, as an answer of the OpenAI API: a text, or a failure, and never an empty answer for a failure. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.serve.run_schemas import RunStatus
from ensemble_ray.serve.schemas import Failure

if TYPE_CHECKING:
    from ensemble_ray.serve.run_schemas import RunDetail
    from ensemble_ray.serve.schemas import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamAnswer:
    """What a team answered."""

    text: str
    #: whether its budget was spent before it was done
    is_cut: bool
    metrics: Metrics
    #: what the model of its last task thought; None: nothing that is known
    reasoning: str | None = None


def answer_of(run: RunDetail) -> TeamAnswer | Failure:
    """Return what came of a run that has ended, or waits for a person (S-SRV-110, S-SRV-112)."""
    if run.error is not None:
        return run.error
    match run.status:
        case RunStatus.WAITING:
            gates = ", ".join(each.gate_id for each in run.reviews)
            named = f"at [{gates}]" if gates else f"(GET /runs/{run.run_id} names the gates)"
            text = (
                f"Run '{run.run_id}' waits for a person to decide {named}. Its answer is at GET /v1/responses/{run.run_id} "
                "when that is done"
            )
            return _failure(run, HTTPStatus.CONFLICT, "RUN_WAITING", text)
        case RunStatus.CANCELLED:
            return _failure(run, HTTPStatus.BAD_GATEWAY, "RUN_CANCELLED", f"Run '{run.run_id}' was cancelled")
        case RunStatus.INTERRUPTED:
            text = f"Run '{run.run_id}' was interrupted. What is recorded of it is kept"
            return _failure(run, HTTPStatus.SERVICE_UNAVAILABLE, "RUN_INTERRUPTED", text)
        case _:
            pass
    is_cut = run.status is RunStatus.BUDGET_EXHAUSTED
    if run.result is None or (is_cut and not run.result.raw):
        text = f"Run '{run.run_id}' ended without an answer: {run.status}"
        return _failure(run, HTTPStatus.BAD_GATEWAY, "NO_ANSWER", text)
    reasoning = run.result.tasks[-1].reasoning if run.result.tasks else None
    return TeamAnswer(text=run.result.raw, is_cut=is_cut, metrics=run.result.metrics, reasoning=reasoning)


def begun_anew(run: RunDetail) -> Failure:
    """Return the failure of a stream whose text turned out to be another one than the answer (S-SRV-123)."""
    text = (
        f"The answer was begun anew while it was said, so that what was streamed is not the answer. It is at "
        f"GET /v1/responses/{run.run_id}"
    )
    return _failure(run, HTTPStatus.BAD_GATEWAY, "ANSWER_BEGUN_ANEW", text)


def _failure(run: RunDetail, status: HTTPStatus, code: str, message: str) -> Failure:
    return Failure(error="RunError", code=code, status=status, message=message, run_id=run.run_id)
