"""Review gates that are decided on pages of a dashboard, on both runtimes: one, several at a time, none in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import httpx
import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleOutput,
    ExitReason,
    HumanInputTool,
    MapEnsemble,
    Review,
    ReviewHandler,
    ReviewTimeoutError,
    Runtime,
    Task,
    TaskExecutionError,
    WebDashboard,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.pages import Background, Said, kinds, opened, stored, url_of


def team(dashboard: WebDashboard, names: Sequence[str] = ("a", "b"), **fields: Any) -> Ensemble:
    """Return a team whose tasks give `done`."""
    tasks = [task(name, agent(ScriptedModel(otherwise="done"), f"W{name}")) for name in names]
    return Ensemble(tasks=tasks, dashboard=dashboard, **fields)


def running(ensemble: Ensemble, runtime: Runtime | str, **arguments: Any) -> Background:
    """Begin a run."""
    return Background(lambda: ensemble.run(runtime=runtime, **arguments))


def raws(output: EnsembleOutput) -> list[str]:
    """Return the texts of an output."""
    return [each.raw for each in output.task_outputs]


def test_gates_of_a_run(runtime: Runtime) -> None:
    """S-WEB-10, S-WEB-50, S-WEB-53, S-WEB-54: each waits for its decision, of which the first counts; an edit is what goes on."""
    dashboard = WebDashboard(port=0)
    with dashboard, opened(dashboard) as page:
        run = running(team(dashboard, review_policy="after_every_task"), runtime, run_id="reviewed")
        first = page.until("review_requested")
        assert (first["run_id"], first["task_description"], first["task_output"]) == ("reviewed", "a", "done")
        assert (first["timing"], first["on_timeout"], first["timeout_ms"]) == ("after_execution", "continue", 300_000)
        page.decide(first["review_id"], "Edit", "edited")
        page.decide(first["review_id"], "exit_early")
        page.decide("unknown", "exit_early")
        assert page.until("review_decided")["decision"] == "edit"
        second = page.until("review_requested")
        assert second["review_id"] != first["review_id"]
        page.decide(second["review_id"], "approve")
        assert raws(run.result()) == ["edited", "done"]
        assert page.until_end()[-1]["exit_reason"] == "completed"


def test_a_gate_that_ends_the_run(inline_runtime: Runtime) -> None:
    """S-WEB-53, S-WEB-33."""
    dashboard = WebDashboard(port=0)
    with dashboard, opened(dashboard) as page:
        run = running(team(dashboard, review_policy="after_every_task"), inline_runtime)
        page.decide(page.until("review_requested")["review_id"], "exit")
        output = run.result()
        assert page.until_end()[-1]["exit_reason"] == "user_exit_early"
    assert (output.exit_reason, raws(output)) == (ExitReason.USER_EXIT_EARLY, ["done"])


def test_several_gates_at_a_time(runtime: Runtime) -> None:
    """S-WEB-58, S-WEB-21, S-WEB-59: of a parallel run; they resolve in any order, whoever decides."""
    dashboard = WebDashboard(port=0)
    tasks = [
        task(
            name,
            agent(ScriptedModel("done"), f"W{name}"),
            review=Review(prompt=f"{name}?", required_role="lawyer", timeout=0),
        )
        for name in "abc"
    ]
    with dashboard, opened(dashboard) as page:
        run = running(Ensemble(tasks=tasks, workflow="parallel", dashboard=dashboard), runtime)
        gates = {each["prompt"]: each for each in (page.until("review_requested") for _ in tasks)}
        assert set(gates) == {"a?", "b?", "c?"}
        assert all(each["required_role"] == "lawyer" and "timeout_ms" not in each for each in gates.values())
        listed = httpx.get(f"{url_of(dashboard)}/api/reviews").json()
        assert {each["review_id"] for each in listed} == {each["review_id"] for each in gates.values()}
        assert all(each["expires_at"] is None for each in listed)
        for name in "cab":
            page.decide(gates[f"{name}?"]["review_id"], "edit", f"{name} edited")
            assert page.until("review_decided")["review_id"] == gates[f"{name}?"]["review_id"]
        assert sorted(raws(run.result())) == ["a edited", "b edited", "c edited"]
        assert httpx.get(f"{url_of(dashboard)}/api/reviews").json() == []


def test_questions_of_tasks(runtime: Runtime) -> None:
    """S-WEB-50: what a tool asks comes to pages, too."""
    model = ScriptedModel(
        answer("", calls=[call("human_input", '{"question": "Which colour?"}')]), otherwise="blue it is"
    )
    dashboard = WebDashboard(port=0)
    ensemble = Ensemble(tasks=[task("a", agent(model, tools=[HumanInputTool()]))], dashboard=dashboard)
    with dashboard, opened(dashboard) as page:
        run = running(ensemble, runtime)
        asked = page.until("review_requested")
        assert (asked["timing"], asked["task_output"]) == ("during_execution", "")
        assert "Which colour?" in asked["task_description"]
        page.decide(asked["review_id"], "edit", "blue")
        told = page.until_end()
        assert run.result().raw == "blue it is"
    assert [each["tool_result"] for each in told if each["type"] == "tool_called"] == ["blue"]


def test_gates_of_items() -> None:
    """S-WEB-50: tasks that are made while the run goes on have gates, too."""
    dashboard = WebDashboard(port=0, review_timeout=0)

    def mapped(item: str) -> Task:
        return Task(description=item, expected_output="a text", review=Review.required())

    ensemble = MapEnsemble(items=["x", "y"], map_task=mapped, llm=ScriptedModel(otherwise="done"), dashboard=dashboard)
    with dashboard, opened(dashboard) as page:
        run = Background(lambda: ensemble.run(runtime="inline"))
        for _ in range(2):
            gate = page.until("review_requested")
            page.decide(gate["review_id"], "edit", gate["task_description"].upper())
        assert sorted(raws(run.result())) == ["X", "Y"]


@pytest.mark.parametrize(
    ("review", "timeout_ms", "action"),
    [(None, 100, "exit_early"), (Review(timeout=0.2, on_timeout="continue"), 200, "continue")],
)
def test_nobody_answers_in_time(inline_runtime: Runtime, review: Review | None, timeout_ms: int, action: str) -> None:
    """S-WEB-51, S-WEB-52, S-WEB-55, S-WEB-57: the dashboard's time where the task describes no gate; nobody needs to look."""
    dashboard = WebDashboard(port=0, review_timeout=timedelta(seconds=0.1), on_timeout="exit_early")
    tasks = [task("a", agent(ScriptedModel("done")), review=review)]
    ensemble = Ensemble(tasks=tasks, dashboard=dashboard, review_policy="after_every_task")
    with dashboard:
        with opened(dashboard) as page:
            run = running(ensemble, inline_runtime)
            asked = page.until("review_requested")
            assert (asked["timeout_ms"], asked["on_timeout"]) == (timeout_ms, action)
            assert page.until("review_timed_out")["action"] == action
            output = run.result()
        reason = ExitReason.TIMEOUT if action == "exit_early" else ExitReason.COMPLETED
        assert output.exit_reason is reason
        again = ensemble.replace(tasks=[task("a", agent(ScriptedModel("done")), review=review)])
        assert again.run(runtime=inline_runtime).exit_reason is reason


def test_a_timeout_that_fails(inline_runtime: Runtime) -> None:
    """S-WEB-55."""
    dashboard = WebDashboard(port=0, review_timeout=0.1, on_timeout="fail")
    with dashboard, opened(dashboard) as page:
        run = running(team(dashboard, ["a"], review_policy="after_every_task"), inline_runtime)
        with pytest.raises(TaskExecutionError) as failed:
            run.result()
        told = page.until_end()
    assert isinstance(failed.value.__cause__, ReviewTimeoutError)
    assert [each["action"] for each in told if each["type"] == "review_timed_out"] == ["fail"]
    assert told[-1]["exit_reason"] == "error"


def test_reloading_the_only_page(inline_runtime: Runtime) -> None:
    """S-WEB-56, S-WEB-60: it decides nothing, and neither does a dashboard that stops and starts: the page finds the review again."""
    dashboard = WebDashboard(port=0, review_timeout=0, on_timeout="continue")
    with dashboard:
        with opened(dashboard) as page:
            run = running(team(dashboard, ["a"], review_policy="after_every_task"), inline_runtime)
            asked = page.until("review_requested")
        with opened(dashboard) as reloaded:
            assert asked in stored(reloaded)
            assert [each["review_id"] for each in _open(dashboard)] == [asked["review_id"]]
    with dashboard, opened(dashboard) as again:
        assert asked in stored(again)
        again.decide(asked["review_id"], "edit", "better")
        assert raws(run.result()) == ["better"]


def _open(dashboard: WebDashboard) -> list[Said]:
    found: list[Said] = httpx.get(f"{url_of(dashboard)}/api/reviews").json()
    return found


def test_joining_during_a_review(inline_runtime: Runtime) -> None:
    """S-WEB-60, S-WEB-42: it is in the snapshot while it is open, and who joined can decide."""
    dashboard = WebDashboard(port=0)
    ensemble = team(dashboard, ["a"])
    ensemble = ensemble.replace(tasks=[each.replace(before_review=Review(timeout=0)) for each in ensemble.tasks])
    with dashboard, opened(dashboard) as early:
        run = running(ensemble, inline_runtime)
        asked = early.until("review_requested")
        with opened(dashboard) as late:
            assert [each for each in stored(late) if each["type"] == "review_requested"] == [asked]
            late.decide(asked["review_id"], "continue")
            assert run.result().raw == "done"
        with opened(dashboard) as last:
            assert "review_requested" not in kinds(stored(last))
            assert "review_decided" in kinds(stored(last))


def test_a_run_that_is_cancelled(runtime: Runtime) -> None:
    """S-WEB-61: its gate goes from the pages."""
    dashboard = WebDashboard(port=0, review_timeout=0)
    with dashboard, opened(dashboard) as page:
        run = team(dashboard, ["a"], review_policy="after_every_task").start(runtime=runtime)
        asked = page.until("review_requested")
        run.cancel()
        decided = page.until("review_decided")
        assert (decided["review_id"], decided["decision"], decided["by"]) == (
            asked["review_id"],
            "exit",
            "(run ending)",
        )
        assert run.result().exit_reason is ExitReason.CANCELLED
        assert page.until_end()[-1]["exit_reason"] == "cancelled"


def test_what_the_record_says_of_a_decision(inline_runtime: Runtime) -> None:
    """S-WEB-61, S-REV-85: who decided, and what."""
    dashboard = WebDashboard(port=0)
    with dashboard, opened(dashboard) as page:
        run = running(team(dashboard, ["a"], review_policy="after_every_task"), inline_runtime)
        page.decide(page.until("review_requested")["review_id"], "edit", "edited")
        assert page.until("review_decided")["by"] == "WebReviewHandler"
        trace = run.result().trace
    (gate,) = json.loads(trace.to_json())["task_traces"][0]["metadata"]["reviews"]
    assert (gate["verdict"], gate["by"], gate["text"]) == ("edit", "WebReviewHandler", "edited")


def test_a_handler_of_the_users_own(inline_runtime: Runtime) -> None:
    """S-WEB-10: a handler of the user's own is asked, and pages only hear of the run."""
    dashboard = WebDashboard(port=0)
    ensemble = team(dashboard, ["a"], review_policy="after_every_task", review_handler=ReviewHandler.auto_approve())
    with dashboard, opened(dashboard) as page:
        ensemble.run(runtime=inline_runtime)
        assert "review_requested" not in kinds(page.until_end())
