"""Phases: their order, what they see of each other, failures and ends."""

from __future__ import annotations

import pytest

from ensemble_ray import ExitReason, RunState
from ensemble_ray.schedule.instructions import ContextPart, PhaseResult, Start
from ensemble_ray.schedule.phases import PHASE_TRANSITIONS, PhaseEvent, PhaseState
from tests.ensemble_ray.schedule.nesting import cancelled, loop
from tests.ensemble_ray.schedule.phased import Phased, instances, phase, reviewed, shown

DIAMOND = (phase("D", after=["B", "C"]), phase("B", after=["A"]), phase("C", after=["A"]), phase("A"))


def test_roots_start_at_once() -> None:
    """S-PHASE-30, S-PHASE-4."""
    assert instances(Phased(phase("A"), phase("B"), phase("C", after=["A"])).begin()) == [
        "phase:A#0/a#0",
        "phase:B#0/b#0",
    ]


def test_phase_starts_when_its_own_predecessors_completed() -> None:
    """S-PHASE-31: it does not wait for others."""
    run = Phased(phase("A"), phase("slow"), phase("C", after=["A"]))
    run.begin()
    assert instances(run.complete("phase:A#0/a#0")) == ["phase:C#0/c#0"]


def test_last_phase_of_a_diamond_starts_once() -> None:
    """S-PHASE-32, S-PHASE-3: after both; the order of declaration has no effect."""
    run = Phased(*DIAMOND)
    run.begin()
    run.complete("phase:A#0/a#0")
    assert run.complete("phase:C#0/c#0") == []
    assert instances(run.complete("phase:B#0/b#0")) == ["phase:D#0/d#0"]
    run.complete("phase:D#0/d#0")
    assert list(run.results) == ["A", "C", "B", "D"]


def test_phases_are_told_of_in_the_order_in_which_they_completed() -> None:
    """S-PHASE-41, S-PHASE-44: with their outputs, attempts and times."""
    run = Phased(phase("A", "x", "y"), phase("B"))
    run.begin()
    run.complete("phase:A#0/x#0")
    run.complete("phase:B#0/b#0")
    run.complete("phase:A#0/y#0")
    assert run.end.state is RunState.COMPLETED
    assert run.end.units == (
        PhaseResult(
            unit="phase:B", status="completed", outputs=("phase:B#0/b#0",), attempts=1, started_at=0.0, completed_at=2.0
        ),
        PhaseResult(
            unit="phase:A",
            status="completed",
            outputs=("phase:A#0/x#0", "phase:A#0/y#0"),
            attempts=1,
            started_at=0.0,
            completed_at=3.0,
        ),
    )


def test_members_run_by_the_workflow_of_their_phase() -> None:
    """S-PHASE-33: in sequence, or side by side where nothing is waited for."""
    run = Phased(phase("A", "x", "y"), phase("B", "u", "v", workflow="parallel"))
    assert instances(run.begin()) == ["phase:A#0/x#0", "phase:B#0/u#0", "phase:B#0/v#0"]


def test_task_sees_the_outputs_of_predecessors() -> None:
    """S-PHASE-35, S-PHASE-36: of direct and transitive ones, and of its own phase."""
    run = Phased(phase("A"), phase("B", after=["A"]), phase("C", "x", "y", after=["B"]), context={"y": ("a", "x", "b")})
    run.begin()
    run.complete("phase:A#0/a#0")
    run.complete("phase:B#0/b#0")
    assert shown(run.complete("phase:C#0/x#0")) == [["phase:A#0/a#0", "phase:C#0/x#0", "phase:B#0/b#0"]]


def test_task_does_not_see_a_phase_that_is_no_predecessor() -> None:
    """S-PHASE-36: though it completed before."""
    run = Phased(phase("A"), phase("B"), phase("C", after=["B"]), context={"c": ("a",)})
    run.begin()
    run.complete("phase:A#0/a#0")
    (start,) = run.complete("phase:B#0/b#0")
    assert start == Start(instance="phase:C#0/c#0", context=(), missing="a")


def test_task_may_name_a_whole_phase() -> None:
    """S-PHASE-103: all outputs of its accepted attempt, in declared order; of a loop what that projects."""
    draft = phase("A", "x", "loop:refine", "z", workflow="parallel")
    refine = loop("refine", "w", max_iterations=2, has_until=False, output_mode="all_iterations")
    run = Phased(draft, phase("B", after=["A"]), refine, context={"b": ("phase:A",)})
    run.begin()
    run.complete("phase:A#0/z#0")
    run.complete("phase:A#0/loop:refine#0/w#0")
    run.complete("phase:A#0/loop:refine#1/w#0")
    (start,) = run.complete("phase:A#0/x#0")
    iterations = ContextPart(("phase:A#0/loop:refine#0/w#0", "phase:A#0/loop:refine#1/w#0"), is_joined=True)
    parts = (ContextPart(("phase:A#0/x#0",)), iterations, ContextPart(("phase:A#0/z#0",)))
    assert start == Start(instance="phase:B#0/b#0", context=parts)
    run.complete("phase:B#0/b#0")
    assert run.results["A"].outputs == ("phase:A#0/z#0", "phase:A#0/loop:refine", "phase:A#0/x#0")


def test_failed_task_fails_its_sequential_phase_at_once() -> None:
    """S-PHASE-50, S-PHASE-54: the phase keeps what completed."""
    run = Phased(phase("A", "x", "y", "z"))
    run.begin()
    run.complete("phase:A#0/x#0")
    run.fail("phase:A#0/y#0")
    assert run.end.state is RunState.FAILED
    assert run.results["A"].outputs == ("phase:A#0/x#0",)
    assert run.statuses == {"A": "failed"}


def test_failed_task_of_a_parallel_phase_obeys_the_error_strategy() -> None:
    """S-PHASE-50: what does not depend on it goes on where errors do not stop the phase."""
    run = Phased(phase("A", "x", "y", workflow="parallel"), error_strategy="continue_on_error")
    run.begin()
    run.fail("phase:A#0/x#0")
    assert not run.ends
    run.complete("phase:A#0/y#0")
    assert run.results["A"].outputs == ("phase:A#0/y#0",)
    assert run.end.state is RunState.FAILED


def test_successors_of_a_failed_phase_are_skipped_once_with_a_warning() -> None:
    """S-PHASE-51, S-PHASE-57: transitive ones, too; each warning names the phase and its predecessor."""
    run = Phased(*DIAMOND)
    run.begin()
    run.fail("phase:A#0/a#0")
    assert run.statuses == {"A": "failed", "B": "skipped", "C": "skipped", "D": "skipped"}
    assert run.warnings == [
        "Phase 'B' is skipped: its predecessor 'A' failed",
        "Phase 'C' is skipped: its predecessor 'A' failed",
        "Phase 'D' is skipped: its predecessor 'B' was skipped, since 'A' failed",
    ]
    assert run.results["D"] == PhaseResult(unit="phase:D", status="skipped", completed_at=1.0)


def test_independent_phases_run_to_the_end_after_a_failure() -> None:
    """S-PHASE-52, S-PHASE-53: also those that had not started; the run ends when all are settled."""
    run = Phased(phase("A"), phase("B"), phase("C", after=["B"]))
    run.begin()
    run.fail("phase:A#0/a#0")
    assert instances(run.complete("phase:B#0/b#0")) == ["phase:C#0/c#0"]
    run.complete("phase:C#0/c#0")
    assert run.statuses == {"A": "failed", "B": "completed", "C": "completed"}
    assert run.end.state is RunState.FAILED


def test_nothing_starts_after_an_early_exit() -> None:
    """S-PHASE-56, S-PHASE-104: no task and no phase; what runs ends, and what completed is kept."""
    run = Phased(phase("A", "x", "y", "z"), phase("B", "u", "v"), phase("C", after=["B"]))
    run.begin()
    run.complete("phase:A#0/x#0")
    assert instances(run.exit("phase:A#0/y#0", ExitReason.TIMEOUT)) == []
    assert instances(run.complete("phase:B#0/u#0")) == []
    assert (run.end.state, run.end.exit_reason) == (RunState.COMPLETED, ExitReason.TIMEOUT)
    assert {name: (each.status, each.outputs) for name, each in run.results.items()} == {
        "C": ("skipped", ()),
        "A": ("completed", ("phase:A#0/x#0",)),
        "B": ("completed", ("phase:B#0/u#0",)),
    }
    assert run.warnings == []


def test_failed_phase_has_what_its_failed_loop_gave() -> None:
    """S-PHASE-54, S-ERR-36: its iterations are behind what completed."""
    run = Phased(phase("A", "x", "loop:refine"), loop("refine", "w", max_iterations=3, has_until=False))
    run.begin()
    run.complete("phase:A#0/x#0")
    run.complete("phase:A#0/loop:refine#0/w#0")
    run.fail("phase:A#0/loop:refine#1/w#0")
    assert run.results["A"].status == "failed"
    assert run.results["A"].outputs == ("phase:A#0/x#0", "phase:A#0/loop:refine")


def test_loop_in_a_phase_starts_no_iteration_after_an_early_exit() -> None:
    """S-PHASE-56, S-LOOP-142, S-PHASE-104: also where nothing else of its phase waits; what it has is not lost."""
    draft = phase("B", "x", "loop:refine", workflow="parallel")
    run = Phased(phase("A"), draft, loop("refine", "w", max_iterations=3))
    run.begin()
    run.complete("phase:B#0/x#0")
    run.exit("phase:A#0/a#0")
    run.complete("phase:B#0/loop:refine#0/w#0")
    assert run.asked == []
    assert run.end.exit_reason is ExitReason.USER_EXIT_EARLY
    assert run.results["B"].outputs == ("phase:B#0/x#0", "phase:B#0/loop:refine")


def test_review_does_not_start_after_an_early_exit() -> None:
    """S-PHASE-56: the attempt is kept as it is."""
    run = Phased(phase("A"), reviewed("B"))
    run.begin()
    run.exit("phase:A#0/a#0")
    assert instances(run.complete("phase:B#0/b#0")) == []
    assert run.results["B"].outputs == ("phase:B#0/b#0",)


@pytest.mark.parametrize("text", ["RETRY: more", "RETRY_PREDECESSOR R: more"])
def test_review_that_ends_after_an_early_exit_starts_nothing(text: str) -> None:
    """S-PHASE-56."""
    run = Phased(phase("A"), phase("R"), reviewed("B", after=["R"]))
    run.begin()
    run.complete("phase:R#0/r#0")
    run.complete("phase:B#0/b#0")
    run.exit("phase:A#0/a#0")
    assert instances(run.review("phase:B#0/check-B#0", text)) == []
    assert run.statuses == {"R": "completed", "A": "completed", "B": "completed"}


def test_cancelled_run_stops_what_runs() -> None:
    """S-SET-27: attempts and reviews; nothing else starts, and it ends when nothing runs."""
    run = Phased(phase("A", "x", "y"), reviewed("B"), phase("C", after=["A"]))
    run.begin()
    run.complete("phase:B#0/b#0")
    assert sorted(cancelled(run.cancel())) == ["phase:A#0/x#0", "phase:B#0/check-B#0"]
    run.stopped("phase:A#0/x#0")
    run.stopped("phase:B#0/check-B#0")
    assert run.end.state is RunState.CANCELLED
    assert run.statuses["C"] == "skipped"


def test_table_of_phases_is_complete() -> None:
    """S-PHASE-51: every state can be left or is an end; every event is used; every state is reached."""
    assert {event for _, event in PHASE_TRANSITIONS} == set(PhaseEvent)
    assert {PhaseState.WAITING, *PHASE_TRANSITIONS.values()} == set(PhaseState)
    ends = {PhaseState.FAILED, PhaseState.SKIPPED, PhaseState.CUT_SHORT}
    assert {state for state, _ in PHASE_TRANSITIONS} == set(PhaseState) - ends


@pytest.mark.parametrize(("has_output", "outputs"), [(True, ("x", "y")), (False, ("x",))])
def test_task_whose_gate_ends_the_run_is_among_the_outputs(has_output: bool, outputs: tuple[str, ...]) -> None:  # noqa: FBT001  a parameter
    """S-REV-32, S-REV-110, S-PHASE-56: what gave its output, and nothing else; no task and no phase follows."""
    run = Phased(phase("A", "x", "y", "z"), phase("B", after=["A"]))
    run.begin()
    run.complete("phase:A#0/x#0")
    run.exit("phase:A#0/y#0", has_output=has_output)
    assert run.results["A"].outputs == tuple(f"phase:A#0/{each}#0" for each in outputs)
    assert run.started == ["phase:A#0/x#0", "phase:A#0/y#0"]
    assert (run.statuses, run.end.exit_reason) == ({"A": "completed", "B": "skipped"}, ExitReason.USER_EXIT_EARLY)


@pytest.mark.parametrize("has_output", [True, False])
def test_exit_at_the_gates_of_a_review_ends_the_run_with_the_attempt(has_output: bool) -> None:  # noqa: FBT001  a parameter
    """S-REV-110, S-PHASE-56, S-PHASE-64: it has the outputs of its tasks, and the review is none of them."""
    run = Phased(reviewed("A"), phase("B", after=["A"]))
    run.begin()
    run.complete("phase:A#0/a#0")
    run.exit("phase:A#0/check-A#0", has_output=has_output)
    assert run.results["A"].outputs == ("phase:A#0/a#0",)
    assert (run.statuses, run.end.exit_reason) == ({"A": "completed", "B": "skipped"}, ExitReason.USER_EXIT_EARLY)
