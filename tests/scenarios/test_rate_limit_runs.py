"""Rate limits in runs: who shares a bucket with whom, across tasks, agents, runs and processes."""

from __future__ import annotations

import threading

import pytest

from ensemble_ray import (
    Ensemble,
    ExitReason,
    RateLimit,
    RateLimitedChatModel,
    Runtime,
    Task,
    TaskCompleteEvent,
    TaskExecutionError,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, wait_for

#: One call, and no other for as long as a test may last.
ONE = RateLimit.of(1, 3600)


def limited(model: ScriptedModel) -> RateLimitedChatModel:
    """The model behind a limit of one call; the second gives up at once."""
    return RateLimitedChatModel.of(model, ONE, wait_timeout=0.01)


def refused(ensemble: Ensemble, runtime: Runtime) -> str:
    """The text of the cause of a run that found no permit."""
    with pytest.raises(TaskExecutionError) as caught:
        ensemble.run(runtime=runtime)
    text = str(caught.value.__cause__)
    assert "Rate limit exceeded: waited 10ms but no token became available." in text
    return text


def test_one_wrapper_is_one_bucket_for_all_its_holders(runtime: Runtime) -> None:
    """S-RATE-20, S-RATE-34, S-RATE-11: two agents, on Ray in two processes, draw from it."""
    inner = ScriptedModel(otherwise="x")
    shared = limited(inner)
    tasks = [
        task("a", agent(shared, "Ann", isolation="process")),
        task("b", agent(shared, "Bob", isolation="process")),
    ]
    refused(Ensemble(tasks=tasks), runtime)
    assert len(inner.calls) == 1


def test_two_wrappers_are_two_buckets(inline_runtime: Runtime) -> None:
    """S-RATE-30, S-RATE-34, S-SET-36: a bucket is its wrapper, whatever model is behind it."""
    inner = ScriptedModel(otherwise="x")
    tasks = [task("a", agent(limited(inner), "Ann")), task("b", agent(limited(inner), "Bob"))]
    assert len(Ensemble(tasks=tasks).run(runtime=inline_runtime).task_outputs) == 2


def test_bucket_of_an_agent_is_kept_across_runs(runtime: Runtime) -> None:
    """S-RATE-30, S-RATE-20."""
    inner = ScriptedModel(otherwise="x")
    ensemble = Ensemble(tasks=[task("a", agent(limited(inner)))])
    assert ensemble.run(runtime=runtime).raw == "x"
    refused(ensemble, runtime)
    assert len(inner.calls) == 1


def test_limit_counts_every_model_call(inline_runtime: Runtime) -> None:
    """S-RATE-22: turns of a tool loop as well."""

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    inner = ScriptedModel(call("look"), "never")
    refused(Ensemble(tasks=[task("a", agent(limited(inner), tools=[look]))]), inline_runtime)
    assert len(inner.calls) == 1


def test_limit_of_a_task_has_a_bucket_of_its_own(runtime: Runtime) -> None:
    """S-RATE-32, S-RATE-31, S-RATE-33: the ensemble's bucket is not used by it."""
    model, own = ScriptedModel(otherwise="x"), ScriptedModel(otherwise="y")
    tasks = [
        Task.of("Write a"),
        Task.of("Write b").replace(rate_limit=ONE),
        Task.of("Write c").replace(rate_limit=ONE, llm=own),
    ]
    output = Ensemble(tasks=tasks, llm=model, rate_limit=ONE).run(runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["x", "x", "y"]


def test_waiting_for_a_permit_holds_nobody_up(inline_runtime: Runtime) -> None:
    """S-RATE-13: a task waits for a permit that will not come; another one is done meanwhile."""
    is_free_done = threading.Event()

    def note(event: TaskCompleteEvent) -> None:
        if event.agent_role == "Free":
            is_free_done.set()

    waiting = agent(RateLimitedChatModel.of(ScriptedModel(otherwise="slow"), ONE, wait_timeout=7200), "Waiting")
    tasks = [task(f"w{n}", waiting) for n in range(2)] + [task("free", agent(ScriptedModel("free"), "Free"))]
    run = Ensemble(tasks=tasks, workflow="parallel", on_task_complete=note).start(runtime=inline_runtime)
    wait_for(is_free_done)
    run.cancel()
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    assert "free" in [each.raw for each in run.result().task_outputs]


def test_permit_comes_to_who_waits_for_it(runtime: Runtime) -> None:
    """S-RATE-13, S-RATE-11: every call has its turn, and the run ends."""
    slow = RateLimitedChatModel.of(ScriptedModel(otherwise="slow"), RateLimit.of(2, 0.2))
    tasks = [task(f"w{n}", agent(slow, "Waiting")) for n in range(3)]
    output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["slow"] * 3
