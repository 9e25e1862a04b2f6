"""Runs with a budget, in every workflow: who may ask, who waits, how the run ends, and how it goes on."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from ensemble_ray import (
    AgentSynthesizer,
    CostConfiguration,
    Ensemble,
    ExecutionTrace,
    ExitReason,
    RunOptions,
    RunState,
    Runtime,
    Task,
    TaskFailedEvent,
    ValidationError,
    resume,
    tool,
)
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.delegating import hand, run_of, team, worker
from tests.scenarios.teams import PATIENCE_S, Watcher, by_task, told_by_us, wait_for


@tool
def look() -> str:
    """Look."""
    return "seen"


def counted(asked: ScriptedCall) -> object:
    """An answer of a hundred tokens."""
    return answer(f"text {asked.number}", 50, 50)


def steps(model: ScriptedModel, count: int, **fields: object) -> Ensemble:
    """So many tasks of one agent."""
    by = agent(model)
    return Ensemble(tasks=[task(f"step {number}", by) for number in range(count)], **fields)  # type: ignore[arg-type]  fields of an ensemble


def test_run_ends_early_when_its_budget_is_exhausted(
    runtime: Runtime, home: str, caplog: pytest.LogCaptureFixture
) -> None:
    """S-BUD-3, S-BUD-4, S-BUD-5, S-BUD-11: with what it has; no failure, no export; told once, in words."""
    exported: list[ExecutionTrace] = []
    model, watcher = ScriptedModel(otherwise=counted), Watcher()
    ensemble = steps(model, 6, max_tokens=520, listeners=[watcher], trace_exporter=exported.append)
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        run = ensemble.start(runtime=runtime)
        output = run.result(PATIENCE_S)
    assert (output.exit_reason, run.state, output.is_complete) == (
        ExitReason.BUDGET_EXHAUSTED,
        RunState.BUDGET_EXHAUSTED,
        False,
    )
    assert run.state.is_final
    assert [each.raw for each in output.task_outputs] == [f"text {number}" for number in range(4)]
    assert (output.metrics.total_tokens, len(model.calls)) == (400, 4)
    assert (exported, watcher.of(TaskFailedEvent)) == ([], [])
    told = dict(watcher.heard)["on_ensemble_completed"]
    assert isinstance(told, tuple)
    assert told[-1] is ExitReason.BUDGET_EXHAUSTED
    (warned,) = [record.getMessage() for record in told_by_us(caplog.records)]
    assert warned.startswith(
        "Budget exhausted: the limit is max_tokens 520, 400 tokens are spent, and the next request would need 1"
    )
    assert RunDirectory(Path(home), run.id).state() is RunState.BUDGET_EXHAUSTED


def test_requests_wait_for_the_real_counts_of_others(runtime: Runtime) -> None:
    """S-BUD-3, S-BUD-8: all estimates together would not fit, all real counts do; each agent has a process of its own."""
    tasks = [
        task(f"part {number}", agent(ScriptedModel(answer("text", 20, 20)), f"Writer {number}", isolation="process"))
        for number in range(3)
    ]
    output = Ensemble(tasks=tasks, workflow="parallel", max_tokens=460).run(runtime=runtime)
    assert (output.exit_reason, len(output.task_outputs)) == (ExitReason.COMPLETED, 3)
    assert output.metrics.total_tokens == 120


def test_running_task_finishes_when_it_needs_no_further_request(runtime: Runtime) -> None:
    """S-BUD-4, S-PAR-30: and one that needs another ends without output; a dependent does not start."""
    is_asked = threading.Event()

    def one_more(_asked: ScriptedCall) -> object:
        wait_for(is_asked)
        return answer("", 10, 300, calls=[call("look")])

    def last(_asked: ScriptedCall) -> object:
        is_asked.set()
        return answer("text", 500, 0)

    model = ScriptedModel(otherwise=by_task(one=one_more, two=last))
    by = agent(model, tools=[look])
    one, two = task("one", by), task("two", by)
    three = task("three", by, context=[two])
    output = Ensemble(tasks=[one, two, three], workflow="parallel", max_tokens=850).run(runtime=runtime)
    assert output.exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert [each.task_description for each in output.task_outputs] == ["two"]
    assert len(model.calls) == 2
    assert output.metrics.total_tokens == 810


def test_budget_of_a_manager_and_its_workers_is_one(runtime: Runtime) -> None:
    """S-BUD-2, S-BUD-4: a worker that may ask nothing more ends the whole run, and its manager is not told."""
    manager = ScriptedModel(answer("", 300, 10, calls=[hand("Writer")]), answer("", 300, 10, calls=[hand("Digger")]))
    ensemble = team(manager, [worker("Writer", answer("text", 10, 10)), worker("Digger")], max_tokens=950)
    ran = run_of(ensemble, runtime)
    assert ran.given.exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert [each.raw for each in ran.given.task_outputs] == ["text"]
    assert ran.delegations == ["started Writer", "completed Writer", "started Digger"]
    assert (len(manager.calls), ran.failed) == (2, [])
    assert ran.given.metrics.total_tokens == 640


def test_money_is_limited_as_tokens_are(inline_runtime: Runtime) -> None:
    """S-BUD-10, S-BUD-4: by the rates of the cost configuration."""
    costs = CostConfiguration(input_token_rate=0.01, output_token_rate=0.02, currency="EUR")  # type: ignore[arg-type]  as users write it
    output = steps(ScriptedModel(otherwise=counted), 9, max_cost=7.0, cost_configuration=costs).run(
        runtime=inline_runtime
    )
    assert (output.exit_reason, len(output.task_outputs)) == (ExitReason.BUDGET_EXHAUSTED, 4)
    found = output.metrics.total_cost_estimate
    assert found is not None
    assert found.total_cost == 6


def test_run_goes_on_with_a_larger_budget(runtime: Runtime, home: str) -> None:
    """S-BUD-6, S-BUD-9: what is recorded counts, and is not asked for again; without a larger one it is refused."""
    model = ScriptedModel(otherwise=counted)
    ensemble = steps(model, 8)
    first = ensemble.run(runtime=runtime, run_id="dear", options=RunOptions(max_tokens=420))
    assert len(first.task_outputs) == 3
    for options in (None, RunOptions(max_tokens=420), RunOptions(max_tokens=100)):
        with pytest.raises(ValidationError, match=r"'dear' spent its budget \(max_tokens 420\): 300 tokens are spent"):
            resume("dear", ensemble, runtime=runtime, options=options)
    with pytest.raises(
        ValidationError, match=r"has spent its budget and is not begun again under its id\. Resume it with"
    ):
        ensemble.run(runtime=runtime, run_id="dear")
    second = resume("dear", ensemble, runtime=runtime, options=RunOptions(max_tokens=650))
    assert (second.exit_reason, len(second.task_outputs)) == (ExitReason.BUDGET_EXHAUSTED, 6)
    with pytest.raises(ValidationError, match=r"\(max_tokens 650\): 600 tokens are spent"):
        resume("dear", ensemble, runtime=runtime)
    last = resume("dear", ensemble, runtime=runtime, options=RunOptions(max_tokens=5000))
    assert (last.exit_reason, len(last.task_outputs), len(model.calls)) == (ExitReason.COMPLETED, 8, 8)
    assert RunDirectory(Path(home), "dear").state() is RunState.COMPLETED


def test_task_goes_on_within_itself_with_a_larger_budget(inline_runtime: Runtime) -> None:
    """S-BUD-6: its recorded turns are used, its tool is not called again."""
    model = ScriptedModel(answer("", 300, 10, calls=[call("look")]), "done")
    ensemble = Ensemble(tasks=[task("one", agent(model, tools=[look]))], max_tokens=400)
    assert ensemble.run(runtime=inline_runtime, run_id="r").task_outputs == ()
    output = resume("r", ensemble.replace(max_tokens=4000), runtime=inline_runtime)
    assert (output.raw, output.exit_reason, output.total_tool_calls) == ("done", ExitReason.COMPLETED, 1)
    assert len(model.calls) == 2


def test_budget_counts_the_requests_of_a_synthesizer(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-BUD-2, S-BUD-4: one that may not be sent ends the run before it began; one that was sent is part of the sum."""
    fields = '{"role": "Writer", "goal": "Write", "backstory": "b"}'
    ensemble = Ensemble(tasks=[Task.of("Write it")], agent_synthesizer=AgentSynthesizer.llm_based())
    model = ScriptedModel(answer(fields, 900, 50))
    output = ensemble.replace(llm=model, max_tokens=1000).run(runtime=inline_runtime)
    assert (output.exit_reason, len(model.calls), output.task_outputs) == (ExitReason.BUDGET_EXHAUSTED, 1, ())
    unasked = ScriptedModel()
    output = ensemble.replace(llm=unasked, max_tokens=100).run(runtime=inline_runtime)
    assert (output.exit_reason, unasked.calls) == (ExitReason.BUDGET_EXHAUSTED, ())
    assert output.trace == ExecutionTrace.EMPTY  # it never began (S-MET-2)
    assert "0 tokens are spent, and the next request would need" in caplog.messages[-1]
