"""What one agent process learns of an endpoint holds in the others, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    GuardrailResult,
    OpenAIChatModel,
    ParallelExecutionError,
    RayRuntime,
    RetryPolicy,
    TaskFailedEvent,
)
from ensemble_ray.testing import Fault, ModelServer, ServedRequest
from tests.scenarios.teams import Marks, agent, task

Servers = Callable[..., ModelServer]

#: The endpoint is down for so long after its fifth failure, s: less than a breaker stays open, far more than news travel.
DOWN_S = 3.0


def test_calls_of_another_process_wait_when_an_endpoint_fails_for_everybody(
    ray_runtime: RayRuntime, model_server: Servers, tmp_path: Path
) -> None:
    """S-DUR-64: Ann's five failures open the breaker in Bob's process too; his first call is the probe, and is answered.

    Did he not wait, his first call would find the endpoint down.
    """
    failed_at: list[float] = []

    def answer(request: ServedRequest) -> Fault | str:
        if request.number < 5:
            failed_at.append(time.monotonic())
            return Fault(status=503, message="down")
        return "Done" if time.monotonic() - failed_at[-1] > DOWN_S else Fault(status=503, message="down")

    server = model_server(answer)
    marks = Marks(tmp_path / "marks")

    def after_ann(_: object) -> GuardrailResult:
        marks.wait("ann failed")
        return GuardrailResult.success()

    def tell(event: TaskFailedEvent) -> None:
        marks.add("ann failed")

    model = OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test")
    team = Ensemble(
        tasks=[
            task("ann", agent(model, "Ann", isolation="process")),
            task("bob", agent(model, "Bob", isolation="process"), input_guardrails=[after_ann]),
        ],
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        on_task_failed=tell,
        retry=RetryPolicy(first_delay=0, max_delay=0),
    )
    with pytest.raises(ParallelExecutionError) as ended:
        team.run(runtime=ray_runtime)
    (cause,) = ended.value.failed_task_causes.values()
    assert "HTTP 503" in str(cause)
    (bob,) = ended.value.completed_task_outputs
    assert (bob.raw, bob.metrics.retry_count) == ("Done", 0)
    assert len(server.requests) == 6
