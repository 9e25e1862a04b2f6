"""How a step ended, as its row tells it. Package: studio. Pure."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from hashlib import sha256
from typing import TYPE_CHECKING

from ensemble_ray.facts.lenient import as_mapping, as_text
from ensemble_ray.studio.views.step_state import title_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ensemble_ray.facts.ends import FailureRecorded, OutputRecorded
    from ensemble_ray.studio.views.step_state import StepState

__all__ = ["apply_failure", "apply_output"]


def apply_output(state: StepState, given: OutputRecorded) -> None:
    """Take the output of a step; its text is not kept."""
    output = given.read()
    state.output_digest = sha256(output.raw.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    completed = output.completed_at
    state.agent = state.agent or output.agent_role
    if not state.title or state.title == state.node or state.node is None:
        state.title = title_of(output.task_description) or state.title
    if state.started_at is None:
        state.begin(completed or 0.0)
    _apply_metrics(state, output.metrics)
    state.end("completed", completed or state.started_at or 0.0)


def apply_failure(state: StepState, failure: FailureRecorded, at: float) -> None:
    """Take the failure of a step."""
    trace = failure.trace
    if trace is not None:
        data = as_mapping(trace) if not hasattr(trace, "metrics") else {}
        state.agent = state.agent or as_text(data.get("agent_role"))
        _apply_metrics(state, as_mapping(data.get("metrics")))
    text = f"{failure.error_type}: {failure.message}" if failure.message else failure.error_type
    state.end("failed", at, text)


def _apply_metrics(state: StepState, metrics: Mapping[str, object]) -> None:
    """Take the cost that was estimated."""
    estimate = as_mapping(metrics.get("cost_estimate"))
    if not estimate:
        return
    try:
        state.cost = Decimal(str(estimate.get("total_cost")))
    except InvalidOperation:  # a record that somebody else wrote
        return
    state.currency = as_text(estimate.get("currency"))
