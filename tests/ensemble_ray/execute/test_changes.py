"""What rides on an order beside its task: another attempt, joined iterations, a text that the source reads."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pytest
from msgspec.structs import replace

from ensemble_ray import TaskHandlerContext, TaskOutput, TaskStartEvent
from ensemble_ray.execute.orders import Revision
from ensemble_ray.execute.runner import apply_changes
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.value import utc_of
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, writer

FEEDBACK = "Loop iteration 2 of 5. Prior iteration's final body output is shown above; revise based on it."


def output(raw: str) -> TaskOutput:
    """What a task gave."""
    return TaskOutput(
        raw=raw, task_description="d", agent_role="r", completed_at=utc_of(1.0), duration=timedelta(seconds=1)
    )


async def prompt_of(**changes: object) -> str:
    """Return what the model is asked with these changes of the order."""
    model = ScriptedModel("better")
    bench = Bench(agents={"draft": writer(model)})
    await bench.run(**changes)  # type: ignore[arg-type]  fields of an order
    return model.calls[0].text


async def test_feedback_and_earlier_output_stand_before_the_task() -> None:
    """S-LOOP-100, S-LOOP-102: the prompt of another attempt, numbered from one."""
    prompt = await prompt_of(revision=Revision(attempt=1, feedback=FEEDBACK, prior=output("the first draft")))
    assert prompt.index("## Revision Instructions (Attempt 2)") < prompt.index("## Task")
    assert prompt.index(f"### Feedback\n{FEEDBACK}") < prompt.index("### Previous Output\nthe first draft")


@pytest.mark.parametrize("prior", [None, output("  ")])
async def test_blank_earlier_output_is_left_out(prior: TaskOutput | None) -> None:
    """S-LOOP-102."""
    prompt = await prompt_of(revision=Revision(attempt=2, feedback="shorter", prior=prior))
    assert "## Revision Instructions (Attempt 3)" in prompt
    assert "### Previous Output" not in prompt


async def test_task_without_changes_is_asked_as_it_stands() -> None:
    """S-LOOP-104, S-LOOP-105: no section, and the order itself."""
    assert "Revision Instructions" not in await prompt_of()
    order = Bench(handlers={"draft": str}).order("draft", context=(output("a"),))
    assert apply_changes(order) is order


def test_each_attempt_is_made_of_the_task_itself() -> None:
    """S-LOOP-101: feedback does not pile up, and the output is found under the user's task."""
    order = Bench(handlers={"draft": str}).order("draft")
    changed = [apply_changes(replace(order, revision=Revision(attempt=n, feedback=f"f{n}"))).task for n in (1, 2)]
    assert [(each.revision_feedback, each.attempt_number) for each in changed] == [("f1", 1), ("f2", 2)]
    assert {each.object_id for each in changed} == {order.task.object_id}
    assert order.task.revision_feedback is None


async def test_handler_runs_unchanged() -> None:
    """S-LOOP-106, S-PHASE-95: its description has no word of the feedback."""
    seen: list[TaskHandlerContext] = []

    def handle(context: TaskHandlerContext) -> str:
        seen.append(context)
        return "done"

    await Bench(handlers={"draft": handle}).run(revision=Revision(attempt=1, feedback="shorter", prior=output("old")))
    assert [each.description for each in seen] == ["Do draft"]


async def test_iterations_arrive_as_one_output_in_their_place() -> None:
    """S-LOOP-72: beside the others, in the order of the task's context."""
    seen: list[tuple[str, ...]] = []

    def handle(context: TaskHandlerContext) -> str:
        seen.append(tuple(each.raw for each in context.context_outputs))
        return "done"

    context = [output(raw) for raw in ("a", "w1", "w2", "c1", "b")]
    await Bench(handlers={"draft": handle}).run(context=context, joined=((1, 3), (3, 4)))
    assert seen == [("a", "w1\n\n--- iteration 2 ---\n\nw2", "c1", "b")]


@pytest.mark.parametrize("wants", [True, False])
async def test_result_says_its_text_when_the_source_reads_it(wants: bool) -> None:  # noqa: FBT001  a parameter
    """S-PHASE-62: the answer of a review, and of no other task."""
    bench = Bench(handlers={"draft": lambda _: "APPROVE"})
    assert (await bench.run(wants_text=wants)).text == ("APPROVE" if wants else None)
    known = Bench(handlers={"draft": lambda _: "REJECT"}, known=bench.journal.facts())
    assert (await known.run(wants_text=wants, epoch=1)).text == ("APPROVE" if wants else None)


async def test_events_count_a_task_among_those_of_its_loop() -> None:
    """S-LOOP-47: and where it says nothing, among those of the run."""
    totals: Mapping[int | None, int] = {2: 2, None: RUN_CONTEXT.total_tasks}
    for total, shown in totals.items():
        bench = Bench(handlers={"draft": lambda _: "done"})
        await bench.run(total_tasks=total)
        (started,) = [each for each in bench.sink.events if isinstance(each, TaskStartEvent)]
        assert started.total_tasks == shown
