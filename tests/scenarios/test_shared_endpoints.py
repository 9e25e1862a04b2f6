"""What one agent process learns of an endpoint holds in the others, too."""

from __future__ import annotations

import json
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
    ToolCall,
    tool,
)
from ensemble_ray.llm.limits import breaker
from ensemble_ray.llm.limits.endpoints import process_endpoints
from ensemble_ray.testing import Fault, ModelServer, ServedRequest
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks, until

Servers = Callable[..., ModelServer]

#: A breaker stays open for so long in Bob's process, s; and the endpoint is down for less after its fifth failure.
OPEN_S, DOWN_S = 1.0, 0.7


@tool(timeout=None, effect="none")
def listen(path: str, endpoint: str) -> str:
    """Tell that this agent is at work, and come back when its process has heard that the endpoint fails."""

    def is_open() -> bool:
        found = process_endpoints()._endpoints.get(endpoint)
        return found is not None and found.breaker.is_open

    usual, breaker.FIRST_OPEN_S = breaker.FIRST_OPEN_S, OPEN_S
    try:
        Marks(Path(path)).add("bob listens")
        until(is_open, "news of the endpoint")
    finally:
        breaker.FIRST_OPEN_S = usual
    return "heard"


def test_calls_of_another_process_wait_when_an_endpoint_fails_for_everybody(
    ray_runtime: RayRuntime, model_server: Servers, tmp_path: Path
) -> None:
    """S-DUR-64: Ann's five failures open the breaker in Bob's process too; his next call is the probe, and is answered.

    Did he not wait, that call would find the endpoint down.
    """
    failed_at: list[float] = []
    marks = Marks(tmp_path / "marks")

    def answer(request: ServedRequest) -> Fault | ToolCall | str:
        if not request.tools:  # Ann's
            failed_at.append(time.monotonic())
        elif not failed_at:
            return call("listen", json.dumps({"path": str(marks.path), "endpoint": model.endpoint_id}))
        elif time.monotonic() - failed_at[-1] > DOWN_S:
            return "Done"
        return Fault(status=503, message="down")

    def after_bob(_: object) -> GuardrailResult:
        marks.wait("bob listens")
        return GuardrailResult.success()

    server = model_server(answer)
    model = OpenAIChatModel("m", base_url=server.base_url, api_key="sk-of-a-test")
    team = Ensemble(
        tasks=[
            task("ann", agent(model, "Ann", isolation="process"), input_guardrails=[after_bob]),
            task("bob", agent(model, "Bob", isolation="process", tools=[listen])),
        ],
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        retry=RetryPolicy(first_delay=0, max_delay=0),
    )
    with pytest.raises(ParallelExecutionError) as ended:
        team.run(runtime=ray_runtime)
    (cause,) = ended.value.failed_task_causes.values()
    assert "HTTP 503" in str(cause)
    (bob,) = ended.value.completed_task_outputs
    assert (bob.raw, bob.metrics.retry_count) == ("Done", 0)
    assert (len(failed_at), len(server.requests)) == (5, 7)
