"""Review gates of runs, on both runtimes: what is decided, what runs after it, what the output and the record say."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from ensemble_ray import (
    AbstractAgentTool,
    Ensemble,
    ExitReason,
    HumanInputTool,
    Review,
    ReviewDecision,
    ReviewHandler,
    ReviewRequest,
    ReviewTimeoutError,
    Runtime,
    TaskExecutionError,
    TaskHandlerContext,
    ToolResult,
    ValidationError,
    resume,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, wait_for


class Reviewer:
    """Decides by what it is asked; holds a lock and a list of its own, so that a copy would be seen."""

    def __init__(self, **decisions: ReviewDecision | Exception) -> None:
        self._decisions = decisions
        self._lock = threading.Lock()
        self.asked: list[tuple[str, str, str]] = []

    def review(self, request: ReviewRequest) -> ReviewDecision:
        """Decide."""
        with self._lock:
            self.asked.append((request.timing, request.task_description, request.task_output))
        decision = self._decisions.get(request.task_description, ReviewDecision.continue_execution())
        if isinstance(decision, Exception):
            raise decision
        return decision


def given(context: TaskHandlerContext) -> str:
    """Say what it was given."""
    return "+".join([context.description, *(each.raw for each in context.context_outputs)])


def test_decisions_of_a_run(runtime: Runtime) -> None:
    """S-REV-11, S-REV-12, S-REV-19, S-REV-31, S-REV-49: agents' and handlers' tasks; an edit is what later tasks are given."""
    reviewer, watcher = Reviewer(a=ReviewDecision.edit("edited")), Watcher()
    first = task("a", agent(ScriptedModel("written")))
    second = task("b", handler=given, context=[first], before_review=Review.required())
    third = task("c", handler=given, context=[second], review=Review.skip())
    ensemble = Ensemble(
        tasks=[first, second, third],
        review_handler=reviewer,
        review_policy="after_every_task",
        listeners=[watcher],
    )
    output = ensemble.run(runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["edited", "b+edited", "c+b+edited"]
    assert output.get_output(first).raw == "edited"  # type: ignore[union-attr]
    assert reviewer.asked == [
        ("after_execution", "a", "written"),
        ("before_execution", "b", ""),
        ("after_execution", "b", "b+edited"),
    ]
    assert (output.exit_reason, output.is_complete) == (ExitReason.COMPLETED, True)
    assert watcher.lines == ["start a", "complete a", "start b", "complete b", "start c", "complete c"]


def test_a_gate_behind_a_task_ends_the_run(inline_runtime: Runtime) -> None:
    """S-REV-32, S-REV-34, S-REV-35, S-REV-36, S-REV-38: its output is the last one."""
    model = ScriptedModel("one", "two", "never")
    worker, watcher = agent(model), Watcher()
    exported: list[int] = []
    ensemble = Ensemble(
        tasks=[task(name, worker) for name in ("a", "b", "c")],
        review_handler=Reviewer(b=ReviewDecision.exit_early()),
        review_policy="after_every_task",
        listeners=[watcher],
        trace_exporter=lambda trace: exported.append(len(trace.task_traces)),
    )
    output = ensemble.run(runtime=inline_runtime)
    assert ([each.raw for each in output.task_outputs], output.raw) == (["one", "two"], "two")
    assert (output.exit_reason, output.is_complete) == (ExitReason.USER_EXIT_EARLY, False)
    assert [each.raw for each in output.completed_tasks] == ["one", "two"]
    assert output.last_completed_output is not None
    assert output.last_completed_output.raw == "two"
    assert watcher.lines == ["start a", "complete a", "start b", "complete b"]
    assert (len(model.calls), exported, output.metrics.total_llm_call_count) == (2, [2], 2)


def test_a_gate_before_the_first_task_leaves_nothing(inline_runtime: Runtime) -> None:
    """S-REV-30, S-REV-35: no model call, no event, an empty text; its reason is the time."""
    model, watcher = ScriptedModel("never"), Watcher()
    asked = task("a", agent(model), before_review=Review.required())
    reviewer = Reviewer(a=ReviewDecision.exit_early_timeout())
    output = Ensemble(tasks=[asked], review_handler=reviewer, listeners=[watcher]).run(runtime=inline_runtime)
    assert (output.raw, output.task_outputs, output.last_completed_output) == ("", (), None)
    assert (output.exit_reason, model.calls, watcher.lines) == (ExitReason.TIMEOUT, (), [])


@pytest.mark.parametrize("workflow", ["sequential", "parallel"])
def test_what_a_handler_raises_reaches_the_caller(runtime: Runtime, workflow: str) -> None:
    """S-REV-39: as the cause, in every workflow, with the task's failed event."""
    watcher = Watcher()
    ensemble = Ensemble(
        tasks=[task("a", handler=given, review=Review.required())],
        review_handler=Reviewer(a=ReviewTimeoutError("Review gate timed out after 60s (on_timeout=fail)")),
        workflow=workflow,
        listeners=[watcher],
    )
    with pytest.raises(TaskExecutionError) as failed:
        ensemble.run(runtime=runtime)
    assert isinstance(failed.value.__cause__, ReviewTimeoutError)
    assert str(failed.value.__cause__) == "Review gate timed out after 60s (on_timeout=fail)"
    assert watcher.lines == ["start a", "failed a"]


def test_a_decision_of_a_wrong_type_names_its_handler(inline_runtime: Runtime) -> None:
    """S-REV-81."""

    def approve(_request: ReviewRequest) -> bool:
        return True

    ensemble = Ensemble(tasks=[task("a", handler=given, review=Review.required())], review_handler=approve)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="Review handler 'approve' returned bool, expected a ReviewDecision"):
        ensemble.run(runtime=inline_runtime)


def test_parallel_tasks_are_asked_about_one_at_a_time(runtime: Runtime, tmp_path: Path) -> None:
    """S-REV-17, S-REV-37, S-PAR-31, S-PAR-32: an exit at one gate: what runs finishes and is asked about no more."""
    marks = Marks(tmp_path / "marks")
    asked: list[str] = []
    is_asked = threading.Event()

    def leave(request: ReviewRequest) -> ReviewDecision:
        asked.append(request.task_description)
        is_asked.set()
        marks.wait("slow is done")
        return ReviewDecision.exit_early()

    def slow(_context: TaskHandlerContext) -> str:
        marks.wait("asked")
        marks.add("slow is done")
        return "slow text"

    slow_task = task("slow", handler=slow, review=Review.required())
    tasks = [
        task("quick", handler=given, review=Review.required()),
        slow_task,
        task("after", handler=given, context=[slow_task]),
    ]
    run = Ensemble(tasks=tasks, workflow="parallel", review_handler=leave, review_policy="after_last_task").start(
        runtime=runtime
    )
    wait_for(is_asked)
    marks.add("asked")
    output = run.result(timeout_s=PATIENCE_S)
    assert sorted(each.raw for each in output.task_outputs) == ["quick", "slow text"]
    assert (output.exit_reason, asked) == (ExitReason.USER_EXIT_EARLY, ["quick"])


def test_ready_made_handlers_work_anywhere(runtime: Runtime) -> None:
    """S-REV-40, S-REV-41."""
    for handler in (ReviewHandler.auto_approve(), ReviewHandler.auto_approve_with_delay(0.001)):
        asked = task("a", handler=given, review=Review.required())
        output = Ensemble(tasks=[asked], review_handler=handler).run(runtime=runtime)
        assert (output.raw, output.exit_reason) == ("a", ExitReason.COMPLETED)


class Payment(AbstractAgentTool):
    """Asks in its thread before it pays."""

    name = "pay"
    description = "Pays."
    require_approval = True

    def do_execute(self, text: str, /) -> ToolResult:
        """Ask and pay."""
        decision = self.request_approval(f"Pay {text}")
        refused = isinstance(decision, ReviewDecision.ExitEarly)
        return ToolResult.failure(f"Rejected by reviewer: {text}") if refused else ToolResult.success("paid")


def test_tools_ask_the_process_that_started_the_run(runtime: Runtime) -> None:
    """S-REV-54, S-REV-60, S-REV-63, S-REV-65: a question, an approval and a refusal, from wherever the tools run."""
    reviewer = Reviewer(
        **{"Which colour?": ReviewDecision.edit("blue"), "Pay 6": ReviewDecision.exit_early()}  # type: ignore[arg-type]
    )
    model = ScriptedModel(
        call("human_input", '{"input": "Which colour?"}'),
        [call("pay", '{"input": "5"}', number=1), call("pay", '{"input": "6"}', number=2)],
        "done",
    )
    worker = agent(model, tools=[HumanInputTool(), Payment()])
    output = Ensemble(tasks=[task("a", worker)], review_handler=reviewer).run(runtime=runtime)
    trace = output.task_outputs[0].trace
    assert trace is not None
    results = [made.result for turn in trace.llm_interactions for made in turn.tool_calls]
    assert results == ["blue", "paid", "Error: Rejected by reviewer: 6"]
    assert sorted(reviewer.asked) == [("during_execution", asked, "") for asked in ("Pay 5", "Pay 6", "Which colour?")]
    assert output.exit_reason is ExitReason.COMPLETED


def test_a_question_inside_a_task_ends_the_run_without_it(inline_runtime: Runtime) -> None:
    """S-REV-33, S-REV-52: the task that asked is not in the output."""
    model = ScriptedModel("one", call("human_input", '{"input": "Go on?"}'), "never")
    worker = agent(model, tools=[HumanInputTool()])
    reviewer = Reviewer(**{"Go on?": ReviewDecision.exit_early()})  # type: ignore[arg-type]
    output = Ensemble(tasks=[task(name, worker) for name in ("a", "b", "c")], review_handler=reviewer).run(
        runtime=inline_runtime
    )
    assert ([each.raw for each in output.task_outputs], output.exit_reason) == (["one"], ExitReason.USER_EXIT_EARLY)


def test_a_resumed_run_asks_nobody_twice(runtime: Runtime) -> None:
    """S-REV-83, S-REV-84, S-REV-87: a run that was cancelled while a gate was open: that gate is asked again, no other."""
    is_asked, reviewer = threading.Event(), Reviewer(a=ReviewDecision.edit("edited"))

    async def never(request: ReviewRequest) -> ReviewDecision:
        if request.task_description == "b":
            is_asked.set()
            await asyncio.get_running_loop().create_future()
        return reviewer.review(request)

    def team(handler: object) -> Ensemble:
        first = task("a", handler=given)
        second = task("b", handler=given, context=[first])
        return Ensemble(tasks=[first, second], review_handler=handler, review_policy="after_every_task")  # type: ignore[arg-type]

    run = team(never).start(runtime=runtime)
    wait_for(is_asked)
    run.cancel()
    run.join(PATIENCE_S)
    again = Reviewer(b=ReviewDecision.exit_early())
    output = resume(run.id, team(again), runtime=runtime)
    assert [each.raw for each in output.task_outputs] == ["edited", "b+edited"]
    assert again.asked == [("after_execution", "b", "b+edited")]
    assert output.exit_reason is ExitReason.USER_EXIT_EARLY
    assert [each.raw for each in resume(run.id, team(Reviewer()), runtime=runtime).task_outputs] == [
        "edited",
        "b+edited",
    ]
