"""The coordinator of a run that goes on: what its machine was told is told again, what is recorded is used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from ensemble_ray import ExitReason, Plan, RecordError, RunState, StaleEpochError
from ensemble_ray.execute.orders import ResumePoint, TaskResult
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.plan.plan import PhaseUnit
from ensemble_ray.record.resume.planned import PlannedResumeReader
from ensemble_ray.schedule.instructions import UntilHolds
from ensemble_ray.schedule.stimuli import Begun, Completed, Evaluated, Exited, Failed, Stimulus
from tests.ensemble_ray.coordinator.planned_runs import PAIR, Failure, Result, conducting, done, ended_early, failed
from tests.ensemble_ray.schedule.graphs import edge, fork, graph_of
from tests.ensemble_ray.schedule.nesting import loop, nested, node
from tests.ensemble_ray.schedule.plans import plan_of


def resumed(
    stimuli: Sequence[Sequence[Stimulus]], *results: Result, is_restart: bool = False
) -> ResumePoint[str, Failure]:
    """What a record tells of a run that began at 50."""
    return ResumePoint(
        started_at=50.0,
        stimuli=stimuli,
        results={result.instance: result for result in results},
        is_restart=is_restart,
    )


def told_done(key: str) -> Completed:
    """The machine was told that the task completed."""
    return Completed(at=101.0, instance=f"{key}#0", duration_s=1.0, total_tokens=7)


BEGUN = (Begun(at=50.0),)


async def test_recorded_stimuli_are_told_again_when_a_run_goes_on() -> None:
    """S-DUR-30, S-DUR-16: what runs then is handed out under the new epoch; nothing is recorded a second time."""
    run = await conducting(PAIR, epoch=2, resumed=resumed([BEGUN, [told_done("a")]], done("a")))
    assert run.fact_lines == ["resume run"]
    assert run.journal.facts()[0].data.to_data() == {"is_restart": False}
    assert [(each.key, each.epoch) for each in run.executor.started] == [("b", 2)]
    assert run.executor.recorded == [["resume run"]]
    await run.report(done("b"))
    assert run.fact_lines[1:] == ["stimulus b#0 TaskCompleted"]
    assert run.executor.started[-1].context == ("output of b", "output of a")
    await run.report(done("c"))
    ended = run.ended()
    assert [instance for instance, _ in ended.completed] == ["a#0", "b#0", "c#0"]
    assert (ended.state, ended.started_at) == (RunState.COMPLETED, 50.0)
    assert {fact.epoch for fact in run.journal.facts()} == {2}


async def test_stimuli_of_one_group_are_told_together_when_a_run_goes_on() -> None:
    """S-DUR-30: the machine decided after both, so that the same tasks start in the same order as then."""
    capped = plan_of("parallel", {"a": (), "b": (), "c": (), "d": ("b",), "e": ("a",)}, cap=2)
    first = await conducting(capped)
    await first.report(done("a"), done("b"))
    groups = PlannedResumeReader.of(first.journal.facts()).stimuli
    assert [[type(each).__name__ for each in group] for group in groups] == [
        ["Begun"],
        ["Completed", "Completed"],
    ]
    again = await conducting(capped, epoch=1, resumed=resumed(groups, done("a"), done("b")))
    assert again.executor.keys == ["c", "e"]
    assert first.executor.keys == ["a", "b", "c", "e"]


async def test_group_is_told_as_far_as_it_is_recorded_when_its_end_is_lost() -> None:
    """S-DUR-9, S-DUR-30: the rest of the group was torn off; its task's output is recorded and is told anew."""
    first = await conducting(plan_of("parallel", {"a": (), "b": (), "c": ("a", "b")}))
    await first.report(done("a"), done("b"))
    groups = PlannedResumeReader.of(first.journal.facts()[:-1]).stimuli
    assert [len(group) for group in groups] == [1, 1]
    again = await conducting(first.plan, epoch=1, resumed=resumed(groups, done("a"), done("b")))
    assert again.fact_lines == ["resume run", "stimulus b#0 TaskCompleted"]
    assert again.executor.keys == ["c"]


@pytest.mark.parametrize("report", [done("a"), failed("a"), ended_early("a", "exited")])
async def test_recorded_end_is_told_when_the_machine_never_heard_of_it(report: Result) -> None:
    """S-DUR-30, S-DUR-37: the scheduler died before the report came; the task does not run again."""
    run = await conducting(plan_of("sequential", {"a": (), "b": ()}), epoch=1, resumed=resumed([BEGUN], report))
    assert "a" not in run.executor.keys
    told = {"completed": "TaskCompleted", "failed": "TaskFailed", "exited": "TaskExited"}[report.status]
    assert run.fact_lines[:2] == ["resume run", f"stimulus a#0 {told}"]
    assert run.executor.keys == (["b"] if report.status == "completed" else [])
    assert run.end.done() == (report.status != "completed")


async def test_recorded_ends_of_tasks_that_had_not_started_are_told_when_they_would() -> None:
    """S-DUR-30: several stimuli are lost; each recorded task is told when its turn comes, none is handed out."""
    plan = plan_of("sequential", {"a": (), "b": (), "c": ()})
    run = await conducting(plan, epoch=1, resumed=resumed([BEGUN], done("b"), done("a")))
    assert run.fact_lines[1:] == ["stimulus a#0 TaskCompleted", "stimulus b#0 TaskCompleted"]
    assert run.executor.keys == ["c"]


async def test_run_begins_when_nothing_was_told_to_its_machine() -> None:
    """S-DUR-30: its owner died between the first fact and the first stimulus."""
    run = await conducting(PAIR, epoch=1, resumed=resumed([]))
    assert run.fact_lines == ["resume run", "stimulus run RunStarted"]
    assert run.journal.facts()[1].data.to_data()["at"] == 50.0
    assert run.executor.keys == ["a", "b"]


async def test_run_ends_when_its_owner_died_before_the_record_of_the_end() -> None:
    """S-DUR-30: the last stimulus is recorded, the end is not; nothing is done again."""
    plan = plan_of("sequential", {"a": ()})
    run = await conducting(plan, epoch=1, resumed=resumed([BEGUN, [told_done("a")]], done("a")))
    assert run.fact_lines == ["resume run", "end run"]
    assert run.ended().completed == [("a#0", "output of a")]
    assert run.executor.keys == []


async def test_failed_run_ends_with_its_failure_when_only_the_end_was_lost() -> None:
    """S-DUR-30, S-DUR-39: with what was completed before it, as its first owner would have told."""
    plan = plan_of("parallel", dict.fromkeys("ab", ()))
    stimuli = [BEGUN, [told_done("a"), Failed(at=101.0, instance="b#0", error_type="ValueError", message="b broke")]]
    run = await conducting(plan, epoch=1, resumed=resumed(stimuli, done("a"), failed("b")))
    ended = run.ended()
    assert [(each.instance, each.failure.body, each.completed_before) for each in ended.failures] == [
        ("b#0", "failure of b", 1)
    ]
    assert run.journal.facts()[-1].data.to_data()["errors"] == [
        {"key": "b", "error_type": "ValueError", "message": "b broke"}
    ]


async def test_task_runs_again_when_its_completion_is_recorded_and_its_output_is_not() -> None:
    """S-DUR-2, S-DUR-30: durability `run` may lose an output whose stimulus another process committed."""
    plan = plan_of("sequential", {"a": (), "b": ()})
    run = await conducting(plan, epoch=1, resumed=resumed([BEGUN, [told_done("a")]]))
    assert run.executor.keys == ["a"]
    await run.report(done("a"))
    await run.report(done("b"))
    assert [instance for instance, _ in run.ended().completed] == ["a#0", "b#0"]


async def test_recorded_task_is_used_in_its_turn_when_the_plan_was_changed() -> None:
    """S-DUR-36: what is recorded is used; tasks that the plan has no more are not told of."""
    swapped = plan_of("sequential", {"new": (), "a": ()})
    stimuli = [BEGUN, [told_done("gone")], [told_done("a")]]
    run = await conducting(swapped, epoch=1, resumed=resumed(stimuli, done("gone"), done("a")))
    assert run.executor.keys == ["new"]
    await run.report(done("new"))
    assert run.executor.keys == ["new"]
    assert [instance for instance, _ in run.ended().completed] == ["new#0", "a#0"]


async def test_early_exit_is_used_in_its_turn_when_the_plan_was_changed() -> None:
    """S-DUR-36, S-PAR-30: the task that ended the run comes later now; it ends it there."""
    swapped = plan_of("sequential", {"new": (), "a": (), "b": ()})
    stimuli = [BEGUN, [Exited(at=101.0, instance="a#0")]]
    run = await conducting(swapped, epoch=1, resumed=resumed(stimuli, ended_early("a", "exited")))
    await run.report(done("new"))
    ended = run.ended()
    assert (ended.exit_reason, ended.unfinished) == (ExitReason.USER_EXIT_EARLY, (("a#0", Failure("trace of a")),))
    assert run.executor.keys == ["new"]


async def test_early_exit_keeps_its_trace_when_the_run_goes_on() -> None:
    """S-DUR-38, S-PAR-30: nothing more starts; the task that ran beside it goes on."""
    stimuli = [BEGUN, [Exited(at=101.0, instance="a#0", reason=ExitReason.TIMEOUT)]]
    run = await conducting(
        PAIR, epoch=1, resumed=resumed(stimuli, ended_early("a", "exited", reason=ExitReason.TIMEOUT))
    )
    assert run.executor.keys == ["b"]
    await run.report(done("b"))
    ended = run.ended()
    assert (ended.exit_reason, ended.unfinished) == (ExitReason.TIMEOUT, (("a#0", Failure("trace of a")),))


async def test_cancelled_run_goes_on_when_somebody_resumes_it() -> None:
    """S-DUR-35: the cancellation is forgotten; what it stopped runs again, what was completed does not."""
    first = await conducting(PAIR)
    await first.report(done("a"))
    await first.cancel()
    await first.report(ended_early("b", "cancelled"))
    assert first.ended().state is RunState.CANCELLED
    stimuli = PlannedResumeReader.of(first.journal.facts()).stimuli
    run = await conducting(PAIR, epoch=1, resumed=resumed(stimuli, done("a")))
    assert run.executor.keys == ["b"]
    await run.report(done("b"))
    await run.report(done("c"))
    assert run.ended().state is RunState.COMPLETED


async def test_cancelled_run_ends_when_its_scheduler_is_replaced() -> None:
    """S-DUR-32, S-SET-27: a restart is nobody's wish to go on; what ran stopped with its process and is not started."""
    first = await conducting(plan_of("parallel", {"a": (), "b": (), "c": ("a", "b")}))
    await first.report(done("a"))
    await first.cancel()
    stimuli = PlannedResumeReader.of(first.journal.facts(), is_resumed=False).stimuli
    run = await conducting(first.plan, epoch=1, resumed=resumed(stimuli, done("a"), is_restart=True))
    assert run.executor.keys == []
    assert run.fact_lines == ["resume run", "stimulus b#0 TaskCancelled", "end run"]
    ended = run.ended()
    assert (ended.state, ended.exit_reason) == (RunState.CANCELLED, ExitReason.CANCELLED)
    assert ended.completed == [("a#0", "output of a")]


async def test_late_output_counts_when_a_cancelled_runs_scheduler_is_replaced() -> None:
    """S-DUR-30, S-SET-27: a task that was completed before it could be stopped is completed."""
    first = await conducting(plan_of("parallel", {"a": (), "b": ()}))
    await first.cancel()
    stimuli = PlannedResumeReader.of(first.journal.facts(), is_resumed=False).stimuli
    run = await conducting(first.plan, epoch=1, resumed=resumed(stimuli, done("b"), is_restart=True))
    assert run.ended().state is RunState.CANCELLED
    assert [instance for instance, _ in run.ended().completed] == ["b#0"]


async def test_conducting_ends_when_a_task_was_refused_for_its_epoch() -> None:
    """S-DUR-16, S-DUR-17: somebody else has the run; nothing more is started here, nothing more is recorded."""
    run = await conducting(plan_of("sequential", {"a": (), "b": ()}))
    refused = TaskResult(key="a", instance="a#0", status="failed", at=101.0, failure=Failure("f", newer_epoch=12))
    with pytest.raises(StaleEpochError, match="'a' is written by epoch 12, epoch 0 must stop"):
        await run.report(refused)
    assert run.executor.keys == ["a"]
    assert run.fact_lines == ["plan run", "stimulus run RunStarted"]


async def test_conducting_ends_when_a_house_could_not_write_its_facts() -> None:
    """S-DUR-8, S-ERR-69: the task has not failed, so that the run can be resumed when the fault is mended; why is on record."""
    run = await conducting(plan_of("sequential", {"a": (), "b": ()}))
    unwritten = TaskResult(
        key="a",
        instance="a#0",
        status="failed",
        at=101.0,
        failure=Failure("f", "RecordError", "The disk is full"),
    )
    with pytest.raises(RecordError, match="The disk is full"):
        await run.report(unwritten)
    assert run.fact_lines == ["plan run", "stimulus run RunStarted", "interruption run"]


async def test_run_is_interrupted_when_the_account_has_no_credit() -> None:
    """S-DUR-151, S-DUR-152: what runs is stopped, nothing starts; neither failure nor end is recorded, but the reason."""
    run = await conducting(plan_of("parallel", {"a": (), "b": (), "c": ("b",)}))
    broke = Failure("f", "AgentExecutionError", "no credit", interrupts_run=True)
    await run.report(TaskResult(key="a", instance="a#0", status="failed", at=101.0, failure=broke))
    assert run.executor.stopped == ["b#0"]
    await run.report(done("b"))
    ended = run.ended()
    assert ended.state is RunState.INTERRUPTED
    assert [each.failure for each in ended.failures] == [broke]
    assert [instance for instance, _ in ended.completed] == ["b#0"]
    assert run.executor.keys == ["a", "b"]
    assert run.fact_lines == ["plan run", "stimulus run RunStarted", "interruption run"]
    assert run.journal.facts()[-1].data.to_data() == {
        "key": "a", "error_type": "AgentExecutionError", "message": "no credit"
    }  # fmt: skip


async def test_effects_of_before_the_run_stand_behind_the_note_when_it_goes_on() -> None:
    """S-SET-46, S-DUR-37: those that were not recorded before, such as of a task that the changed plan has anew."""
    preamble = read_fact(run="run", kind="model", name="run/1/model", at=99.0, data={"text": "role"})
    run = await conducting(PAIR, epoch=1, preamble=[preamble], resumed=resumed([BEGUN]))
    assert run.fact_lines[:2] == ["resume run", "model run/1/model"]


async def test_answer_of_user_code_is_committed_before_anything_follows_from_it() -> None:
    """S-LOOP-54: work that another process records must not follow from a verdict that is lost."""
    run = await conducting(nested({"a": ()}, loop()))
    question = UntilHolds(unit="loop:refine", iteration=1)
    run.coordinator.notify(Evaluated(at=101.0, question=question, answer=True))
    await run.settled()
    assert run.journal.committed[-1] == "stimulus run Evaluated"


@pytest.mark.parametrize("has_fork", [True, False])
async def test_completion_is_committed_where_branches_run_side_by_side(*, has_fork: bool) -> None:
    """S-DUR-136: steps are numbered as they start, so that a lost one would have others numbered anew. Else nobody waits."""
    leaving = fork("a", "b", "c") if has_fork else edge("a", "b")
    graph = graph_of(leaving, edge("b"), edge("c"), members={"a": "loop:refine"})
    nodes = tuple(node(key) for key in ("writer", "critic", "b", "c"))
    run = await conducting(Plan(workflow="sequential", nodes=nodes, units=(loop(), graph)))
    written = "graph:g#0/loop:refine#0/writer#0"
    await run.report(replace(done("writer"), instance=written))
    assert (f"stimulus {written} TaskCompleted" in run.journal.committed) is has_fork
    assert run.executor.keys == ["writer", "critic"]


async def test_completion_is_committed_where_there_are_several_phases() -> None:
    """S-DUR-136: what a phase is sent back with, and in which order, follows from it."""
    phases = [PhaseUnit(key=f"phase:{key}", name=key, members=(key,)) for key in "ab"]
    for count in (1, 2):
        nodes = tuple(node(key) for key in "ab"[:count])
        run = await conducting(Plan(workflow="sequential", nodes=nodes, units=tuple(phases[:count])))
        await run.report(replace(done("a"), instance="phase:a#0/a#0"))
        assert ("stimulus phase:a#0/a#0 TaskCompleted" in run.journal.committed) is (count == 2)
