"""Reviews of phases: acceptance, retries, predecessors that are sent back, rejection."""

from __future__ import annotations

import pytest

from ensemble_ray import RunState
from ensemble_ray.schedule.instructions import Evaluate, ReflectOn, Start, TaskChanges, UnitFailure
from ensemble_ray.schedule.phases import PhaseState
from tests.ensemble_ray.schedule.nesting import loop
from tests.ensemble_ray.schedule.phased import Phased, instances, phase, reviewed, shown

A0, A1, A2 = "phase:A#0/a#0", "phase:A#1/a#0", "phase:A#2/a#0"
B0, B1, B2 = "phase:B#0/b#0", "phase:B#1/b#0", "phase:B#2/b#0"


def check(name: str, execution: int = 0) -> str:
    """The instance of a review."""
    return f"phase:{name}#{execution}/check-{name}#0"


def again(execution: str, attempt: int, feedback: str, prior: str) -> Start:
    """A task of a later attempt, without context."""
    return Start(instance=execution, changes=TaskChanges(attempt=attempt, feedback=feedback, prior=prior), context=())


def chain(**fields: object) -> Phased:
    """Two phases, one after the other, whose second is reviewed for the first time."""
    run = Phased(phase("A"), reviewed("B", after=["A"], **fields), phase("C", after=["B"]), context={"b": ("a",)})
    run.begin()
    run.complete(A0)
    run.complete(B0)
    return run


def test_review_runs_after_all_tasks_and_its_text_is_read() -> None:
    """S-PHASE-62, S-PHASE-63: it is shown what this attempt gave, and what predecessors did."""
    run = Phased(phase("R"), reviewed("A", "x", "y", after=["R"]), context={"check-A": ("r", "y", "x")})
    run.begin()
    run.complete("phase:R#0/r#0")
    assert instances(run.complete("phase:A#0/x#0")) == ["phase:A#0/y#0"]
    (start,) = run.complete("phase:A#0/y#0")
    assert isinstance(start, Start)
    assert (start.instance, start.wants_text) == (check("A"), True)
    assert shown([start]) == [["phase:R#0/r#0", "phase:A#0/y#0", "phase:A#0/x#0"]]


def test_approval_lets_successors_begin() -> None:
    """S-PHASE-80, S-PHASE-65, S-PHASE-64: not before; the review is none of the outputs."""
    run = chain()
    assert instances(run.review(check("B"), "APPROVE")) == ["phase:C#0/c#0"]
    run.complete("phase:C#0/c#0")
    assert (run.results["B"].outputs, run.results["B"].reviews) == ((B0,), (check("B"),))
    assert run.warnings == []


def test_unknown_answer_approves_with_a_warning() -> None:
    """S-PHASE-74."""
    run = chain()
    assert instances(run.review(check("B"), "Looks fine")) == ["phase:C#0/c#0"]
    assert run.warnings == ["Phase 'B': its review gave no decision, which approves: Looks fine"]


def test_retry_reruns_all_tasks_with_the_feedback() -> None:
    """S-PHASE-81, S-PHASE-83, S-PHASE-84: each with its own output of this attempt; context is of the new attempt."""
    run = Phased(reviewed("A", "x", "y"), context={"y": ("x",)})
    run.begin()
    for feedback, attempt in (("first", 1), ("second", 2)):
        before = f"phase:A#{attempt - 1}"
        run.complete(f"{before}/x#0")
        run.complete(f"{before}/y#0")
        wanted = run.review(check("A", attempt - 1), f"RETRY: {feedback}")
        assert wanted == [again(f"phase:A#{attempt}/x#0", attempt, feedback, f"{before}/x#0")]
        (start,) = run.complete(f"phase:A#{attempt}/x#0")
        assert isinstance(start, Start)
        assert start.changes == TaskChanges(attempt=attempt, feedback=feedback, prior=f"{before}/y#0")
        assert shown([start]) == [[f"phase:A#{attempt}/x#0"]]
        if attempt == 1:
            continue
        run.complete("phase:A#2/y#0")
        run.review(check("A", 2), "approve")
    assert run.results["A"].outputs == ("phase:A#2/x#0", "phase:A#2/y#0")
    assert run.results["A"].reviews == (check("A", 0), check("A", 1), check("A", 2))
    assert run.results["A"].attempts == 3


def test_last_output_is_accepted_when_retries_are_used_up() -> None:
    """S-PHASE-81: three attempts and three reviews by default, then a WARN."""
    run = Phased(reviewed("A"))
    run.begin()
    for execution in range(3):
        run.complete(f"phase:A#{execution}/a#0")
        run.review(check("A", execution), "RETRY: more")
    assert run.statuses == {"A": "completed"}
    assert run.results["A"].outputs == (A2,)
    text = "Phase 'A': its review asked for another attempt after 2 retries; the output is accepted as it is"
    assert run.warnings == [text]


def test_retry_is_accepted_when_none_is_allowed() -> None:
    """S-PHASE-82: one attempt, one review."""
    run = Phased(reviewed("A", max_retries=0))
    run.begin()
    run.complete(A0)
    run.review(check("A"), "RETRY")
    assert (run.results["A"].attempts, len(run.warnings)) == (1, 1)


def test_retried_phase_sees_the_same_predecessors_again() -> None:
    """S-PHASE-36, S-PHASE-94: its key is the same, its occurrence the next."""
    run = chain()
    assert shown(run.review(check("B"), "RETRY: more")) == [[A0]]
    assert run.started[-1] == B1


def test_loop_in_a_retried_phase_is_told_the_feedback() -> None:
    """S-PHASE-81, S-LOOP-140: its first task, with the loop's own last output."""
    run = Phased(reviewed("A", "loop:refine"), loop("refine", "w", "c", max_iterations=1, has_until=False))
    run.begin()
    run.complete("phase:A#0/loop:refine#0/w#0")
    run.complete("phase:A#0/loop:refine#0/c#0")
    wanted = run.review(check("A"), "RETRY: more")
    prior = "phase:A#0/loop:refine#0/c#0"
    assert wanted == [again("phase:A#1/loop:refine#0/w#0", 1, "more", prior)]


def test_rejection_fails_the_phase() -> None:
    """S-PHASE-85: with the reason; successors are skipped."""
    run = chain()
    run.review(check("B"), "REJECT: off topic")
    assert run.statuses == {"A": "completed", "B": "failed", "C": "skipped"}
    assert run.end.state is RunState.FAILED
    failure = UnitFailure(unit="phase:B", at=3.0, reason="rejected", completed_before=3, message="off topic")
    assert run.end.unit_failures == (failure,)


def test_failed_review_fails_the_phase() -> None:
    """S-PHASE-93: the failure is the task's own."""
    run = chain()
    run.fail(check("B"))
    assert run.statuses == {"A": "completed", "B": "failed", "C": "skipped"}
    assert run.end.unit_failures == ()
    assert run.results["B"].outputs == (B0,)


@pytest.mark.parametrize("name", ["R", "C", "unknown", "b", ""])
def test_only_a_direct_predecessor_can_be_sent_back(name: str) -> None:
    """S-PHASE-86: any other name warns and approves."""
    run = Phased(phase("R"), phase("A", after=["R"]), reviewed("B", after=["A"]), phase("C", after=["B"]))
    run.begin()
    run.complete("phase:R#0/r#0")
    run.complete(A0)
    run.complete(B0)
    assert instances(run.review(check("B"), f"RETRY_PREDECESSOR {name}: more")) == ["phase:C#0/c#0"]
    if name:
        what = f"its review sent back '{name}', which is no direct predecessor"
        assert run.warnings == [f"Phase 'B': {what}; the output is accepted as it is"]


def test_predecessor_that_is_sent_back_reruns_and_the_phase_starts_again() -> None:
    """S-PHASE-87, S-PHASE-89, S-PHASE-91: without the predecessor's review; its new output is the one that counts."""
    run = Phased(reviewed("A"), reviewed("B", after=["A"]), context={"b": ("a",)})
    run.begin()
    run.complete(A0)
    run.review(check("A"), "APPROVE")
    run.complete(B0)
    run.review(check("B"), "RETRY: shorter")
    run.complete(B1)
    assert run.review(check("B", 1), "RETRY_PREDECESSOR A: more") == [again(A1, 1, "more", A0)]
    (start,) = run.complete(A1)
    assert start == Start(instance=B2, context=start.context)  # type: ignore[union-attr]  # from its original tasks
    assert shown([start]) == [[A1]]
    run.complete(B2)
    run.review(check("B", 2), "APPROVE")
    assert {name: each.outputs for name, each in run.results.items()} == {"A": (A1,), "B": (B2,)}
    assert run.results["A"].reviews == (check("A"),)


def test_retries_of_the_phase_begin_anew_after_its_predecessor_reran() -> None:
    """S-PHASE-87: attempt 0, the whole budget."""
    run = chain(max_retries=1)
    run.review(check("B"), "RETRY: shorter")
    run.complete(B1)
    run.review(check("B", 1), "RETRY_PREDECESSOR A: more")
    run.complete(A1)
    run.complete(B2)
    (start,) = run.review(check("B", 2), "RETRY: shorter")
    assert isinstance(start, Start)
    assert start.changes == TaskChanges(attempt=1, feedback="shorter", prior=B2)
    assert run.warnings == []


def test_attempt_number_of_a_predecessor_counts_its_reruns() -> None:
    """S-PHASE-87, S-PHASE-88: over the budget the output is accepted with a WARN."""
    run = chain()
    for rerun in (1, 2):
        wanted = run.review(check("B", rerun - 1), "RETRY_PREDECESSOR A: more")
        assert wanted == [again(f"phase:A#{rerun}/a#0", rerun, "more", f"phase:A#{rerun - 1}/a#0")]
        run.complete(f"phase:A#{rerun}/a#0")
        run.complete(f"phase:B#{rerun}/b#0")
    assert instances(run.review(check("B", 2), "RETRY_PREDECESSOR A: more")) == ["phase:C#0/c#0"]
    assert run.warnings == [
        "Phase 'B': its review sent back 'A' again after 2 retries of it; the output is accepted as it is"
    ]


def test_each_predecessor_has_its_own_budget() -> None:
    """S-PHASE-88."""
    run = Phased(phase("A"), phase("R"), reviewed("B", after=["A", "R"], max_predecessor_retries=1))
    run.begin()
    run.complete(A0, "phase:R#0/r#0")
    run.complete(B0)
    assert instances(run.review(check("B"), "RETRY_PREDECESSOR A: more")) == [A1]
    run.complete(A1)
    run.complete(B1)
    assert instances(run.review(check("B", 1), "RETRY_PREDECESSOR R: more")) == ["phase:R#1/r#0"]


def test_each_reviewing_phase_has_its_own_budget_for_a_predecessor() -> None:
    """S-PHASE-100: attempts of the predecessor are numbered over all of them."""
    rules = {"max_predecessor_retries": 1}
    run = Phased(phase("A"), reviewed("B", after=["A"], **rules), reviewed("C", after=["A"], **rules))
    run.begin()
    run.complete(A0)
    run.complete(B0)
    assert run.review(check("B"), "RETRY_PREDECESSOR A: one") == [again(A1, 1, "one", A0)]
    run.complete(A1)
    run.complete("phase:C#0/c#0")
    assert run.review(check("C"), "RETRY_PREDECESSOR A: two") == [again(A2, 2, "two", A1)]


def test_other_successors_are_not_rerun() -> None:
    """S-PHASE-90: neither those that completed nor those that run."""
    run = Phased(phase("A"), reviewed("B", after=["A"]), phase("C", after=["A"]), phase("D", "d", "e", after=["A"]))
    run.begin()
    run.complete(A0)
    run.complete("phase:C#0/c#0")
    run.complete(B0)
    run.review(check("B"), "RETRY_PREDECESSOR A: more")
    run.complete("phase:D#0/d#0")
    run.complete(A1)
    run.complete("phase:D#0/e#0")
    run.complete(B1)
    run.review(check("B", 1), "APPROVE")
    assert [each for each in run.started if each.startswith(("phase:C", "phase:D"))] == [
        "phase:C#0/c#0",
        "phase:D#0/d#0",
        "phase:D#0/e#0",
    ]
    assert list(run.results) == ["C", "A", "D", "B"]


def test_running_phase_keeps_what_it_saw_when_a_predecessor_reruns() -> None:
    """S-PHASE-36, S-PHASE-90: also for its later tasks and attempts."""
    run = Phased(phase("A"), reviewed("B", after=["A"]), reviewed("C", "c", "d", after=["A"]), context={"d": ("a",)})
    run.begin()
    run.complete(A0)
    run.complete(B0)
    run.review(check("B"), "RETRY_PREDECESSOR A: more")
    run.complete(A1)
    assert shown(run.complete("phase:C#0/c#0")) == [[A0]]
    run.complete("phase:C#0/d#0")
    run.review(check("C"), "RETRY: shorter")
    assert shown(run.complete("phase:C#1/c#0")) == [[A0]]


def test_successor_that_had_not_begun_waits_for_the_rerun() -> None:
    """S-PHASE-101: it sees the new output."""
    run = Phased(
        phase("A"), phase("R"), reviewed("B", after=["A"]), phase("C", after=["A", "R"]), context={"c": ("a",)}
    )
    run.begin()
    run.complete(A0)
    run.complete(B0)
    run.review(check("B"), "RETRY_PREDECESSOR A: more")
    assert instances(run.complete("phase:R#0/r#0")) == []
    wanted = run.complete(A1)
    assert instances(wanted) == [B1, "phase:C#0/c#0"]
    assert shown(wanted) == [[], [A1]]


def test_requests_for_one_phase_are_served_in_order() -> None:
    """S-PHASE-101: all who asked wait for the last rerun."""
    run = Phased(phase("A"), reviewed("B", after=["A"]), reviewed("C", after=["A"]), context={"b": ("a",), "c": ("a",)})
    run.begin()
    run.complete(A0)
    run.complete(B0)
    run.complete("phase:C#0/c#0")
    assert run.review(check("B"), "RETRY_PREDECESSOR A: one") == [again(A1, 1, "one", A0)]
    assert run.review(check("C"), "RETRY_PREDECESSOR A: two") == []
    assert run.complete(A1) == [again(A2, 2, "two", A1)]
    wanted = run.complete(A2)
    assert (instances(wanted), shown(wanted)) == ([B1, "phase:C#1/c#0"], [[A2], [A2]])


def test_phase_sees_the_last_accepted_attempt_of_a_predecessor_that_reruns() -> None:
    """S-PHASE-102: where that is not one that it waits for."""
    run = Phased(
        phase("R"), reviewed("Q", after=["R"]), phase("A", after=["R"]), phase("B", after=["A"]), context={"b": ("r",)}
    )
    run.begin()
    run.complete("phase:R#0/r#0")
    run.complete("phase:Q#0/q#0")
    run.review(check("Q"), "RETRY_PREDECESSOR R: more")
    assert shown(run.complete(A0)) == [["phase:R#0/r#0"]]
    assert run.phases.states["phase:R"] is PhaseState.RUNNING


def test_failed_rerun_fails_the_phase_that_asked_for_it() -> None:
    """S-PHASE-92: its successors and those of the predecessor that had not begun are skipped."""
    run = Phased(
        phase("A"),
        phase("R"),
        reviewed("B", after=["A"]),
        phase("C", after=["B"]),
        phase("D", after=["A"]),
        phase("E", after=["A", "R"]),
    )
    run.begin()
    run.complete(A0)
    run.complete("phase:D#0/d#0")
    run.complete(B0)
    run.review(check("B"), "RETRY_PREDECESSOR A: more")
    run.fail(A1)
    run.complete("phase:R#0/r#0")
    expected = {"D": "completed", "A": "failed", "B": "failed", "E": "skipped", "C": "skipped", "R": "completed"}
    assert run.statuses == expected
    assert run.end.unit_failures == ()
    assert run.warnings == [
        "Phase 'E' is skipped: its predecessor 'A' failed",
        "Phase 'C' is skipped: its predecessor 'B' failed",
    ]


def test_rerun_is_skipped_when_a_phase_before_it_failed_meanwhile() -> None:
    """S-PHASE-51: a phase that was sent back waits for its own predecessors as any other."""
    run = Phased(phase("R"), reviewed("Q", after=["R"]), phase("A", after=["R"]), reviewed("B", after=["A"]))
    run.begin()
    run.complete("phase:R#0/r#0")
    run.complete("phase:Q#0/q#0")
    run.complete(A0)
    run.complete(B0)
    run.review(check("Q"), "RETRY_PREDECESSOR R: more")
    assert run.review(check("B"), "RETRY_PREDECESSOR A: more") == []
    run.fail("phase:R#1/r#0")
    assert run.statuses == {"R": "failed", "Q": "failed", "A": "skipped", "B": "skipped"}
    assert run.results["A"].outputs == ()


def test_an_accepted_attempt_is_reflected_on_before_successors_begin() -> None:
    """S-REFL-19, S-REFL-34: not the rejected one; also one that a successor's review sent for."""
    run = Phased(reviewed("A", reflecting=("a",)), phase("B", after=["A"]))
    run.begin()
    run.complete(A0)
    assert instances(run.review(check("A"), "RETRY: more")) == [A1]
    run.complete(A1)
    assert run.review(check("A", 1), "APPROVE") == [Evaluate(question=ReflectOn(unit="phase:A", execution=2))]
    assert run.phases.states["phase:A"] is PhaseState.REFLECTING
    assert instances(run.reflected("A", 2)) == [B0]
    run.complete(B0)
    assert run.end.state is RunState.COMPLETED


def test_nobody_waits_for_reflections_of_a_cancelled_run() -> None:
    """S-REFL-34: its attempt was accepted all the same; the answer comes too late."""
    run = Phased(reviewed("A", reflecting=("a",)))
    run.begin()
    run.complete(A0)
    run.review(check("A"), "APPROVE")
    run.cancel()
    assert run.end.state is RunState.CANCELLED
    assert run.results["A"].status == "completed"
    assert run.reflected("A", 1) == []
