"""A budget that several processes share, and what becomes of it when one of them dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from ensemble_ray import (
    AgentSynthesizer,
    ChatResponse,
    Ensemble,
    ExitReason,
    MapEnsemble,
    OpenAIChatModel,
    Runtime,
    Task,
    TokenUsage,
)
from ensemble_ray.actors import spawn
from ensemble_ray.actors.shared.journal import RateLimiter
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.testing import ModelServer, ScriptedCall, ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.dying import kill_first, marks_of, stay, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, until


def test_reservation_of_a_dead_process_is_free_again(
    ray_runtime: Runtime, model_server: Callable[..., ModelServer], tmp_path: Path
) -> None:
    """S-BUD-8, S-BUD-7: its task asks again elsewhere, although both estimates together would not fit."""
    marks = Marks(tmp_path / "marks")
    server = model_server([call("stay", marks_of(marks)), "answered", "answered"])
    model = OpenAIChatModel("m", base_url=server.base_url, api_key="none", max_tokens=1000)
    worker = agent(model, tools=[stay], isolation="process")
    run = Ensemble(tasks=[task("go", worker)], max_tokens=1900).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    server.pause()
    marks.add("over")
    server.wait_in_flight(1, timeout_s=PATIENCE_S)
    kill_first(marks)
    server.wait_arrived(3, timeout_s=PATIENCE_S)
    server.resume()
    output = run.result(timeout_s=PATIENCE_S)
    assert (output.raw, output.exit_reason) == ("answered", ExitReason.COMPLETED)


def test_account_is_rebuilt_when_the_limiters_process_died(ray_runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-BUD-8: what was spent before still counts."""
    marks = Marks(tmp_path / "marks")
    model = ScriptedModel(
        answer("", 400, 0, calls=[call("stay", marks_of(marks))]),
        answer("", 400, 0, calls=[call("stay", marks_of(marks))]),
    )
    run = Ensemble(tasks=[task("go", agent(model, tools=[stay]))], max_tokens=900).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    os.kill(run_blocking(_limiters_process()), signal.SIGKILL)
    marks.add("over")
    output = run.result(timeout_s=PATIENCE_S)
    assert (output.exit_reason, len(model.calls)) == (ExitReason.BUDGET_EXHAUSTED, 2)
    assert output.metrics.total_tokens == 800


def test_requests_that_make_agents_draw_from_the_same_account(ray_runtime: Runtime) -> None:
    """S-BUD-8, S-BUD-2: the caller's process makes an agent for each item, other processes work with it."""
    said = '{"role": "Maker", "goal": "make", "backstory": "made"}'

    def reply(asked: ScriptedCall) -> ChatResponse:
        is_making = len(asked.messages) == 1
        return ChatResponse(said if is_making else "made", usage=TokenUsage(50, 50))

    model = ScriptedModel(otherwise=reply)
    output = MapEnsemble(
        items=range(20),
        map_task=lambda item: Task(description=f"Make {item}", expected_output="A thing"),
        llm=model,
        agent_synthesizer=AgentSynthesizer.llm_based(),
        max_parallel_tasks=1,
        max_tokens=1000,
    ).run(runtime=ray_runtime)
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    # With the estimate of an answer of 50 tokens, one more request would not be sent when 900 to 1,000 are spent.
    assert 8 <= len(model.calls) <= 10


async def _limiters_process() -> int:
    pid: int = await spawn.rate_limiter(RateLimiter).__ray_call__.remote(lambda _: os.getpid())
    return pid
