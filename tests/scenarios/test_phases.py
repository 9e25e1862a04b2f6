"""Phases on both runtimes: their order, what they see and give, reviews, failures and early exits."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    ExitEarlyError,
    ExitReason,
    Loop,
    MaxLoopIterationsExceededError,
    MemoryStore,
    ParallelExecutionError,
    Phase,
    PhaseReview,
    PhaseReviewDecision,
    PhaseStatus,
    RateLimit,
    RateLimitedChatModel,
    Review,
    ReviewDecision,
    ReviewRequest,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskStartEvent,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, task
from tests.scenarios.answering import answering, fail_of, raws, run_of
from tests.scenarios.teams import PATIENCE_S, Watcher, by_task, prompt_of, task_of, told_by_us

COMPLETED, FAILED, SKIPPED = PhaseStatus.COMPLETED, PhaseStatus.FAILED, PhaseStatus.SKIPPED


def phase(name: str, *members: object, after: object = (), **fields: object) -> Phase:
    """A phase of these tasks and loops."""
    loops = [each for each in members if isinstance(each, Loop)]
    tasks = [each for each in members if not isinstance(each, Loop)]
    return Phase(name=name, tasks=tasks, loops=loops, after=after, **fields)  # type: ignore[arg-type]


def reviewed_by(*decisions: object, name: str = "check", **fields: object) -> PhaseReview:
    """A review that decides so, one decision after the other."""
    return PhaseReview(task=answering(name, *decisions), **fields)  # type: ignore[arg-type]


def test_diamond_gives_its_outputs_in_the_order_of_completion(runtime: Runtime) -> None:
    """S-PHASE-3, S-PHASE-32, S-PHASE-34, S-PHASE-35, S-PHASE-38, S-PHASE-40 to S-PHASE-44, S-PHASE-103, S-PHASE-111."""
    first, second = answering("a1"), answering("a2")
    a = phase("A", first, second)
    left = task("write on {topic}", name="left", handler=lambda asked: asked.description, context=[first])
    b = phase("B", left, after=[a])
    right = answering("right", context=[a.output])
    c = phase("C", right, after=[a])
    last = answering("last", context=[left, c.output, second])
    d = phase("D", last, after=[b, c])
    watcher = Watcher()
    output = run_of(Ensemble(phases=[d, c, b, a]), runtime, watcher)
    assert raws(output) == [
        "a1[]", "a2[]", "right[a1[],a2[]]", "write on bees", "last[write on bees,right[a1[],a2[]],a2[]]",
    ]  # fmt: skip
    assert output.raw == output.task_outputs[-1].raw
    assert {name: len(outputs) for name, outputs in output.phase_outputs.items()} == {"A": 2, "C": 1, "B": 1, "D": 1}
    assert list(output.phase_outputs) == ["A", "C", "B", "D"]
    found = [output.get_output(each) for each in (first, second, left, right, last)]
    assert [each and each.raw for each in found] == [output.task_outputs[place].raw for place in (0, 1, 3, 2, 4)]
    assert [(each.task_index, each.total_tasks) for each in watcher.of(TaskStartEvent)] == [
        (1, 2), (2, 2), (1, 1), (1, 1), (1, 1),
    ]  # fmt: skip
    trace = output.trace
    assert trace is not None
    assert trace.workflow == "phases"
    assert [(each.name, each.path, each.status, each.attempts) for each in trace.phases] == [
        (name, f"phase:{name}", COMPLETED, 1) for name in "ACBD"
    ]
    assert [len(each.task_traces) for each in trace.phases] == [2, 1, 1, 1]
    for each in trace.phases:
        assert each.duration == each.completed_at - each.started_at > timedelta()


def test_roots_run_side_by_side_and_share_what_the_ensemble_has(runtime: Runtime) -> None:
    """S-PHASE-30, S-PHASE-31, S-PHASE-37: they meet at a barrier; one memory store, the same listeners."""
    barrier = threading.Barrier(2)

    def meet(asked: ScriptedCall) -> str:
        barrier.wait(PATIENCE_S)
        return f"met {task_of(asked)}"

    model = ScriptedModel(otherwise=by_task(left=meet, right=meet, third="too much"))
    store, watcher = MemoryStore.in_memory(), Watcher()
    left, right = task("left", memory_scopes=["notes"]), task("right", memory_scopes=["notes"])
    both = [phase("L", left), phase("R", right)]
    team = Ensemble(phases=both, llm=model, memory_store=store, listeners=[watcher])
    output = team.run(runtime=runtime)
    assert sorted(raws(output)) == ["met left", "met right"]
    assert sorted(entry.content for entry in store.retrieve("notes", "", 9)) == ["met left", "met right"]
    assert sorted(watcher.lines) == ["complete left", "complete right", "start left", "start right"]
    assert sorted(output.phase_outputs) == ["L", "R"]


def test_phases_share_the_bucket_of_the_ensemble() -> None:
    """S-PHASE-37: the second phase finds that the first has taken the only permit."""
    inner = ScriptedModel(otherwise="x")
    first = phase("A", task("a"))
    model = RateLimitedChatModel.of(inner, RateLimit.of(1, 3600), wait_timeout=0.01)
    error = fail_of(Ensemble(phases=[first, phase("B", task("b"), after=[first])], llm=model), "inline")
    assert "Rate limit exceeded" in str(error.__cause__)
    assert len(inner.calls) == 1
    assert isinstance(error, TaskExecutionError)
    assert error.phase_statuses == {"A": COMPLETED, "B": FAILED}


def test_review_sends_a_phase_back_with_its_own_output_and_feedback(runtime: Runtime) -> None:
    """S-PHASE-35, S-PHASE-62 to S-PHASE-65, S-PHASE-80, S-PHASE-81, S-PHASE-83, S-PHASE-84, S-PHASE-94: by real prompts."""
    model = ScriptedModel(
        *(answer(text, 10, 1) for text in ("draft one", "polish one", "RETRY: be: bolder", "draft two", "polish two")),
        *(answer(text, 10, 1) for text in ("retry: Shorter", "draft three", "polish three", "APPROVE", "printed")),
    )
    writer = agent(model)
    draft = task("draft", writer)
    polish = task("polish", writer, context=[draft])
    check = task("check", writer, context=[draft, polish])
    write = phase("write", draft, polish, review=PhaseReview.of(check))
    show = phase("print", task("print", writer, context=[draft, write.output]), after=[write])
    watcher = Watcher()
    output = run_of(Ensemble(phases=[show, write]), runtime, watcher)
    prompts = [prompt_of(each) for each in model.calls]
    assert [task_of(each) for each in model.calls] == [*["draft", "polish", "check"] * 3, "print"]
    assert [("Revision Instructions" in each) for each in prompts] == [False] * 3 + [True, True, False] * 2 + [False]
    again, polished, _ = prompts[3:6]
    assert again.startswith("## Revision Instructions (Attempt 2)")
    assert ("be: bolder" in again, "draft one" in again, "polish one" in again) == (True, True, False)
    assert ("be: bolder" in polished, "polish one" in polished, "draft two" in polished) == (True, True, True)
    third = prompts[6]
    assert third.startswith("## Revision Instructions (Attempt 3)")
    assert ("Shorter" in third, "bolder" in third, "draft two" in third, "draft one" in third) == (
        True,
        False,
        True,
        False,
    )
    assert ("draft two" in prompts[5], "polish two" in prompts[5], "one" in prompts[5]) == (True, True, False)
    assert (prompts[9].count("draft three"), prompts[9].count("polish three")) == (2, 1)
    assert "two" not in prompts[9]
    assert raws(output) == ["draft three", "polish three", "printed"]
    assert output.get_output(check) is None
    assert output.metrics.total_input_tokens == 100
    assert output.trace is not None
    traced = [(each.name, each.attempts, len(each.task_traces)) for each in output.trace.phases]
    assert traced == [("write", 3, 6), ("__review__write", 3, 3), ("print", 1, 1)]
    assert [each.task_description for each in watcher.of(TaskCompleteEvent)] == [task_of(each) for each in model.calls]


def test_review_without_budget_accepts_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """S-PHASE-81, S-PHASE-82, S-PHASE-86, S-PHASE-88: each case says so once, and the run completes."""
    a = phase("A", answering("a"), review=reviewed_by("RETRY: more", max_retries=0))
    b = phase("B", answering("b"), after=[a], review=reviewed_by("RETRY_PREDECESSOR Z: more", name="check b"))
    review = reviewed_by("RETRY_PREDECESSOR B: more", name="check c", max_predecessor_retries=0)
    with caplog.at_level(logging.WARNING):
        output = run_of(Ensemble(phases=[a, b, phase("C", answering("c"), after=[b], review=review)]), "inline")
    assert raws(output) == ["a[]", "b[]", "c[]"]
    texts = [record.getMessage() for record in told_by_us(caplog.records, logging.WARNING)]
    assert [text.partition(":")[0] for text in texts] == ["Phase 'A'", "Phase 'B'", "Phase 'C'"]


def test_review_sends_a_predecessor_back(inline_runtime: Runtime) -> None:
    """S-PHASE-87 to S-PHASE-91: its outputs take the place of the old; whoever asked starts anew; its own review does not."""
    model = ScriptedModel(
        *("facts one", "APPROVE", "other", "article one", "RETRY: bolder", "article two"),
        *("RETRY_PREDECESSOR research: dig deeper", "facts two", "article three", "APPROVE"),
    )
    by = agent(model)
    find = task("find", by)
    research = phase("research", find, review=PhaseReview.of(task("check facts", by)))
    other = phase("other", task("other", by), after=[research])
    text = task("write", by, context=[find])
    write = phase("write", text, after=[research], review=PhaseReview.of(task("check text", by, context=[text])))
    output = run_of(Ensemble(phases=[other, write, research]), inline_runtime)
    assert [task_of(each) for each in model.calls] == [
        "find", "check facts", "other", "write", "check text", "write", "check text", "find", "write", "check text",
    ]  # fmt: skip
    prompts = [prompt_of(each) for each in model.calls]
    assert prompts[7].startswith("## Revision Instructions (Attempt 2)")
    assert ("dig deeper" in prompts[7], "facts one" in prompts[7]) == (True, True)
    assert ("Revision" in prompts[8], "facts two" in prompts[8], "facts one" in prompts[8]) == (False, True, False)
    assert {name: [each.raw for each in outputs] for name, outputs in output.phase_outputs.items()} == {
        "other": ["other"], "research": ["facts two"], "write": ["article three"],
    }  # fmt: skip
    assert raws(output) == ["other", "facts two", "article three"]


def test_failed_task_fails_its_phase_and_skips_what_follows(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-PHASE-50 to S-PHASE-55, S-PHASE-57: what does not depend on it runs to the end, also what had not started."""
    a = phase("A", answering("a1"), answering("a2", ValueError("broke")), answering("a3"))
    b = phase("B", answering("b"), after=[a])
    c = phase("C", answering("c"), after=[b])
    d = phase("D", answering("d"))
    e = phase("E", answering("e"), after=[d])
    error = fail_of(Ensemble(phases=[a, b, c, d, e]), runtime)
    assert type(error) is TaskExecutionError
    assert str(error) == "Task 'a2' failed: Deterministic task handler threw an exception: broke (ValueError)"
    assert (error.task_description, type(error.__cause__)) == ("do a2", AgentExecutionError)
    assert [each.raw for each in error.completed_task_outputs] == ["d[]", "e[]", "a1[]"]
    assert error.phase_statuses == {"A": FAILED, "B": SKIPPED, "C": SKIPPED, "D": COMPLETED, "E": COMPLETED}
    assert error.trace is not None
    assert {each.name: each.status for each in error.trace.phases} == error.phase_statuses
    warned = [record.getMessage() for record in told_by_us(caplog.records, logging.WARNING)]
    assert [text for text in warned if text.startswith("Phase ")] == [
        "Phase 'B' is skipped: its predecessor 'A' failed",
        "Phase 'C' is skipped: its predecessor 'B' was skipped, since 'A' failed",
    ]


def test_what_fails_a_phase_beside_a_task_leaves_as_a_task_execution_error(inline_runtime: Runtime) -> None:
    """S-PHASE-53, S-PHASE-54, S-PHASE-85, S-PHASE-92, S-PHASE-93: class, text, cause, outputs and statuses."""
    after = answering("b")
    rejected = phase("A", answering("a"), review=reviewed_by("REJECT: no good: at all"))
    error = fail_of(Ensemble(phases=[rejected, phase("B", after, after=[rejected])]), inline_runtime)
    assert (type(error), str(error)) == (
        TaskExecutionError, "Phase 'A' was rejected by review: no good: at all",
    )  # fmt: skip
    assert error.phase_statuses == {"A": FAILED, "B": SKIPPED}
    assert [each.raw for each in error.completed_task_outputs] == ["a[]"]

    raising = phase("A", answering("a"), review=reviewed_by(ValueError("broke")))
    error = fail_of(Ensemble(phases=[raising, phase("B", after, after=[raising])]), inline_runtime)
    assert isinstance(error, TaskExecutionError)
    assert str(error) == "Task 'check' failed: Deterministic task handler threw an exception: broke (ValueError)"
    assert error.phase_statuses == {"A": FAILED, "B": SKIPPED}
    assert [each.raw for each in error.completed_task_outputs] == ["a[]"]

    again = phase("A", answering("a", "a1", ValueError("second")))
    asking = phase("B", after, after=[again], review=reviewed_by("RETRY_PREDECESSOR A: more"))
    error = fail_of(Ensemble(phases=[again, asking, phase("C", answering("c"), after=[asking])]), inline_runtime)
    assert isinstance(error, TaskExecutionError)
    assert str(error) == "Task 'a' failed: Deterministic task handler threw an exception: second (ValueError)"
    assert error.phase_statuses == {"A": FAILED, "B": FAILED, "C": SKIPPED}
    assert list(error.completed_task_outputs) == []

    capped = Loop(name="refine", body=[answering("w")], max_iterations=2, on_max_iterations="throw")
    error = fail_of(Ensemble(phases=[phase("A", answering("a"), capped)]), inline_runtime)
    assert isinstance(error, TaskExecutionError)
    assert str(error) == "Phase failed: Loop 'refine' did not converge after 2 iterations"
    assert isinstance(error.__cause__, MaxLoopIterationsExceededError)
    assert [each.raw for each in error.completed_task_outputs] == ["a[]", "w[]"]


def test_failed_tasks_of_a_parallel_phase_are_told_of_together(inline_runtime: Runtime) -> None:
    """S-PHASE-50, S-PHASE-53: where errors do not stop it."""
    members = [answering("a1"), answering("a2", ValueError("broke")), answering("a3")]
    team = Ensemble(phases=[phase("A", *members, workflow="parallel")], parallel_error_strategy="continue_on_error")
    error = fail_of(team, inline_runtime)
    assert isinstance(error, TaskExecutionError)
    assert str(error).startswith("Phase failed: 1 of 3 tasks failed: 'a2':")
    assert isinstance(error.__cause__, ParallelExecutionError)
    assert [each.raw for each in error.completed_task_outputs] == ["a1[]", "a3[]"]


def test_run_that_exits_early_gives_what_completed(inline_runtime: Runtime) -> None:
    """S-PHASE-56, S-PHASE-57, S-PHASE-104: nothing further starts, a review included; nothing is raised."""
    first = phase("A", answering("a"))
    second = phase(
        "B", answering("b1"), answering("b2", ExitEarlyError("enough")), answering("b3"), after=[first],
        review=reviewed_by("REJECT: never asked"),
    )  # fmt: skip
    output = run_of(Ensemble(phases=[first, second, phase("C", answering("c"), after=[second])]), inline_runtime)
    assert output.exit_reason is ExitReason.USER_EXIT_EARLY
    assert raws(output) == ["a[]", "b1[]"]
    assert list(output.phase_outputs) == ["A", "B"]
    assert output.trace is not None
    assert {each.name: each.status for each in output.trace.phases} == {"A": COMPLETED, "B": COMPLETED, "C": SKIPPED}


def test_phase_holds_loops_and_gives_what_they_project(inline_runtime: Runtime) -> None:
    """S-PHASE-103, S-PHASE-110, S-PHASE-111: `loop.output` in its own phase and in a later one, `phase.output` after it."""
    writer = answering("w", "w1", "w2", "w3", "w4")
    loop = Loop(name="refine", body=[writer, answering("c", context=[writer])], max_iterations=2)
    review = reviewed_by("RETRY: again", "APPROVE")
    a = phase("A", answering("a"), loop, answering("end", context=[loop.output]), review=review)
    b = phase("B", answering("b", context=[a.output]), answering("x", context=[loop.output]), after=[a])
    output = run_of(Ensemble(phases=[a, b]), inline_runtime)
    assert raws(output) == ["a[]", "w4", "c[w4]", "end[w4,c[w4]]", "b[a[],w4,c[w4],end[w4,c[w4]]]", "x[w4,c[w4]]"]
    assert output.trace is not None
    assert [each.path for each in output.trace.loop_traces] == ["phase:A#0/loop:refine", "phase:A#1/loop:refine"]


def test_phases_share_the_review_handler(inline_runtime: Runtime) -> None:
    """S-PHASE-37: one object is asked about the tasks of every phase."""
    asked: list[str] = []

    def decide(request: ReviewRequest) -> ReviewDecision:
        asked.append(request.task_output)
        return ReviewDecision.Edit(f"edited {request.task_output}")

    first = task("a", handler=lambda _: "a1", review=Review.required())
    second = task("b", handler=lambda _: "b1", review=Review.required())
    a = phase("A", first)
    output = run_of(Ensemble(phases=[a, phase("B", second, after=[a])], review_handler=decide), inline_runtime)
    assert asked == ["a1", "b1"]
    assert raws(output) == ["edited a1", "edited b1"]


def test_decisions_are_texts_that_a_review_may_return(inline_runtime: Runtime) -> None:
    """S-PHASE-75, S-PHASE-62: the output of a handler may be the text of a decision."""
    decisions = [PhaseReviewDecision.Retry("more").to_text(), PhaseReviewDecision.Approve().to_text()]
    a = phase("A", answering("a", "a1", "a2"), review=reviewed_by(*decisions))
    assert raws(run_of(Ensemble(phases=[a]), inline_runtime)) == ["a2"]
