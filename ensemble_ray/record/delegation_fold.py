"""One recorded attempt to hand work on, as it stands in traces. Package: record. Pure.

In: the decision about a call, its result where there is one, and what the worker's own facts tell. Out: the effect that
the delegating task noted, or would have noted. Never: a result that nobody recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.execute.effects import DelegationEffect
from ensemble_ray.facts.effects import read_request
from ensemble_ray.values.delegation import DelegationResponse, DelegationStatus, spoken_role
from ensemble_ray.values.ids import delegated_instance

if TYPE_CHECKING:
    from ensemble_ray.facts.effects import DelegationDecided, ToolReturned
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import TaskTrace

__all__ = ["WorkerFold", "delegation_effect", "worker_role"]

#: What the response of an attempt says that was begun and never came back.
_NO_RESULT = "No result was recorded: the run ended during this delegation"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFold:
    """What the worker's own facts tell."""

    #: whether it began
    is_recorded: bool = False
    output: TaskOutput | None = None
    #: message of its failure
    failure: str = ""
    trace: TaskTrace | None = None
    #: time of its last fact
    last_at: float = 0.0


def worker_role(decision: Fact[DelegationDecided], roles: Mapping[str, str]) -> str:
    """Role of who was asked; of a refused attempt that of the one who is meant, or what the model wrote.

    Args:
        decision: What was decided.
        roles: Roles by agent key.
    """
    found = roles.get(decision.data.worker or "")
    if found is not None:
        return found
    asked = read_request(decision).agent_role
    return next((role for role in roles.values() if spoken_role(role) == spoken_role(asked)), asked)


def delegation_effect(
    decision: Fact[DelegationDecided], result: ToolReturned | None, worker: WorkerFold, *, depth: int, role: str
) -> DelegationEffect:
    """Return the effect of one attempt.

    Args:
        decision: What was decided.
        result: What the delegating model was told; None where the run ended before.
        worker: What the worker did; empty where nobody was asked.
        depth: How deep the delegating task is; 0 for one of the plan.
        role: See `worker_role`.
    """
    request, began = read_request(decision), decision.data.started_at
    text, errors, raw, took = _result_of(decision.data, result, worker, began)
    response = DelegationResponse(
        task_id=request.task_id,
        status=DelegationStatus.FAILURE if errors else DelegationStatus.SUCCESS,
        worker_role=role,
        raw_output=raw,
        errors=errors,
        duration=timedelta(seconds=max(0.0, took)),
    )
    *_, turn, call = decision.name.split("/")
    return DelegationEffect(
        request=request,
        response=response,
        worker_role=role,
        depth=depth,
        started_at=began,
        position=(int(turn), int(call.removeprefix("call-"))),
        text=text,
        is_started=decision.data.worker is not None and (worker.is_recorded or result is not None),
        instance=delegated_instance(decision.name),
        output=worker.output if not errors else None,
        trace=worker.trace,
    )


def _result_of(
    decision: DelegationDecided, result: ToolReturned | None, worker: WorkerFold, began: float
) -> tuple[str, tuple[str, ...], str | None, float]:
    """Return the text for the model, errors, the worker's text, and how long it took, s."""
    text, duration_s = ("", 0.0) if result is None else (result.text, result.duration_s)
    if decision.worker is None:  # nobody was asked, whether or not the model has heard of it
        reason, hint = decision.refusal or ("", "")
        return text or (f"{reason}\n{hint}" if hint else reason), (reason or "refused",), None, duration_s
    if result is not None and not result.is_success:
        return text, (text.removeprefix("Error: "),), None, duration_s
    if result is not None:
        return text, (), text if worker.output is None else worker.output.raw, duration_s
    duration_s = worker.last_at - began
    if worker.output is not None:
        return worker.output.raw, (), worker.output.raw, duration_s
    reason = worker.failure or _NO_RESULT
    return f"Error: {worker.failure}" if worker.failure else _NO_RESULT, (reason,), None, duration_s
