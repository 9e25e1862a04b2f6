"""Loops: what repeats, what ends it, what the caller gets. What is the same code on both runtimes is run in one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    ExitEarlyError,
    ExitReason,
    Graph,
    GraphEdge,
    Loop,
    LoopIterationCompletedEvent,
    LoopIterationContext,
    MaxLoopIterationsExceededError,
    ParallelExecutionError,
    Phase,
    Runtime,
    Task,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskHandlerContext,
    TaskStartEvent,
    Until,
    Workflow,
    resume,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task
from tests.scenarios.teams import Marks, prompt_of, told_by_us

Handler = Callable[[TaskHandlerContext], object]


class Drafts:
    """A handler that counts its calls."""

    def __init__(self, name: str = "draft") -> None:
        self.name = name
        self.calls = 0

    def __call__(self, context: TaskHandlerContext) -> str:
        """Return the next draft."""
        self.calls += 1
        return f"{self.name}#{self.calls}"


def handled(handler: Handler, name: str, **fields: object) -> Task:
    """A task that a handler does."""
    return task(f"do {name}", name=name, handler=handler, **fields)


class ThirdTime:
    """A predicate that counts its questions, and holds at the third."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, context: LoopIterationContext) -> bool:
        """Take note of what there is, and answer."""
        self.seen.append(context.last_body_output.raw)
        assert [each["writer"].raw for each in context.history] == self.seen
        return len(self.seen) == 3


def test_loop_repeats_until_its_predicate_holds(runtime: Runtime) -> None:
    """S-LOOP-54, S-LOOP-55, S-LOOP-80, S-LOOP-81: one copy of handler and predicate has the whole run; inline it is the caller's own."""
    drafts, enough = Drafts(), ThirdTime()
    heard: list[str] = []

    def hear(event: TaskStartEvent | TaskCompleteEvent | LoopIterationCompletedEvent) -> None:
        heard.append(f"{event.method} {event.instance}")

    output = Ensemble(
        loops=[Loop(name="refine", body=[handled(drafts, "writer")], until=enough, max_iterations=9)],
        on_task_start=hear,
        on_task_complete=hear,
        on_loop_iteration_completed=hear,
    ).run(runtime=runtime)
    assert output.raw == "draft#3"
    assert [each["writer"].raw for each in output.get_loop_history("refine")] == ["draft#1", "draft#2", "draft#3"]
    assert output.get_loop_termination_reason("refine") == "predicate"
    is_here = runtime.name == "inline"
    assert (drafts.calls, len(enough.seen)) == ((3, 3) if is_here else (0, 0))
    # S-LOOP-107: the event of an iteration comes before the tasks of the next.
    assert heard == [
        line
        for number in range(3)
        for line in (
            f"on_task_start loop:refine#{number}/writer#0",
            f"on_task_complete loop:refine#{number}/writer#0",
            f"on_loop_iteration_completed loop:refine#{number}",
        )
    ]


def test_event_and_predicate_alternate() -> None:
    """S-LOOP-107, S-LOOP-108: an iteration is told of before its predicate is asked, also where the listener is slow."""
    heard: list[str] = []
    asked = [threading.Event() for _ in range(3)]

    def tell(event: LoopIterationCompletedEvent) -> None:
        assert not asked[event.iteration_number].wait(0.05)  # until all have heard of it, nobody is asked
        heard.append(
            f"event {event.iteration_number} of {event.max_iterations}: {event.iteration_outputs['writer'].raw}"
        )

    def until(context: LoopIterationContext) -> bool:
        heard.append(f"predicate {context.iteration_number}")
        asked[context.iteration_number].set()
        return context.iteration_number == 2

    loop = Loop(name="refine", body=[handled(Drafts(), "writer")], until=until)
    Ensemble(loops=[loop], on_loop_iteration_completed=tell).run(runtime="inline")
    assert heard == ["event 1 of 5: draft#1", "predicate 1", "event 2 of 5: draft#2", "predicate 2"]


def test_predicate_sees_the_loop_and_its_history() -> None:
    """S-LOOP-50: outputs in body order, this iteration included."""
    seen: list[tuple[int, list[str], int, str]] = []

    def until(context: LoopIterationContext) -> bool:
        last = [f"{key}={output.raw}" for key, output in context.last_iteration_outputs.items()]
        seen.append((context.iteration_number, last, len(context.history), context.last_body_output.raw))
        return False

    body = [handled(Drafts("w"), "writer"), handled(Drafts("c"), "critic")]
    Ensemble(loops=[Loop(name="refine", body=body, until=until, max_iterations=2)]).run(runtime="inline")
    assert seen == [(1, ["writer=w#1", "critic=c#1"], 1, "c#1"), (2, ["writer=w#2", "critic=c#2"], 2, "c#2")]


async def test_predicate_may_be_async() -> None:
    """S-LOOP-54, S-CONV-16."""

    async def until(context: LoopIterationContext) -> bool:
        return context.iteration_number == 2

    output = await Ensemble(loops=[Loop(name="refine", body=[handled(Drafts(), "writer")], until=until)]).arun(
        runtime="inline"
    )
    assert output.raw == "draft#2"


def test_first_task_is_shown_the_last_output_of_the_iteration_before(inline_runtime: Runtime) -> None:
    """S-LOOP-84, S-LOOP-100, S-LOOP-102, S-LOOP-103, S-LOOP-105: the critic gets this iteration's draft, and no revision section."""
    model = ScriptedModel("first draft", "too long", "second draft", "good")
    writer = task("write", name="writer", agent=agent(llm=model))
    critic = task("criticise", name="critic", agent=agent(llm=model), context=[writer])
    output = Ensemble(loops=[Loop(name="refine", body=[writer, critic], max_iterations=2)]).run(runtime=inline_runtime)
    assert [each.raw for each in output.task_outputs] == ["second draft", "good"]
    assert output[writer].raw == "second draft"
    finals = ["first draft", "too long", "second draft", "good"]
    assert [trace.final_output for trace in output.trace.task_traces] == finals
    assert output.metrics.total_llm_call_count == 4
    prompts = [prompt_of(call) for call in model.calls]
    assert "Revision Instructions" not in prompts[0]
    assert prompts[2].startswith("## Revision Instructions (Attempt 2)")
    assert "Loop iteration 2 of 2. Prior iteration's final body output is shown above" in prompts[2]
    assert "too long" in prompts[2]
    assert ("first draft" in prompts[1], "second draft" in prompts[3]) == (True, True)
    assert ("first draft" in prompts[3], "Revision" in prompts[3]) == (False, False)


class UndecidedError(LookupError):
    """A class of the user's own."""


def refuse(context: LoopIterationContext) -> bool:
    """Raise."""
    raise UndecidedError(f"boom {context.iteration_number}")


def test_what_a_predicate_raises_leaves_the_run(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-LOOP-53: with its own type and message, in sequence; in parallel it is the cause; it is logged where it was asked."""
    with pytest.raises(UndecidedError) as raised:
        Ensemble(loops=[Loop(name="refine", body=[handled(Drafts(), "writer")], until=refuse)]).run(runtime=runtime)
    assert str(raised.value) == "boom 1"
    assert vars(raised.value)["run_id"]  # S-ERR-50
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(
            loops=[Loop(name="refine", body=[handled(Drafts(), "writer")], until=refuse)], workflow=Workflow.PARALLEL
        ).run(runtime=runtime)
    assert repr(caught.value.__cause__) == "UndecidedError('boom 1')"
    if runtime.name == "inline":
        assert [record.levelname for record in told_by_us(caplog.records, logging.ERROR)] == ["ERROR"] * 2


def test_loops_side_by_side_and_what_becomes_of_them(inline_runtime: Runtime) -> None:
    """S-LOOP-53, S-LOOP-62, S-LOOP-122: a raising predicate and a cap are causes of the run's error; who waits for a failed task is skipped."""

    def fail(_: TaskHandlerContext) -> str:
        raise ValueError("broken")

    source = handled(fail, "source")
    loops = [
        Loop(name="asks", body=[handled(Drafts(), "a")], until=refuse),
        Loop(name="capped", body=[handled(Drafts(), "b")], max_iterations=2, on_max_iterations="throw"),
        Loop(name="waits", body=[handled(Drafts(), "c")], context=[source]),
        Loop(name="good", body=[handled(Drafts(), "d")], max_iterations=2),
    ]
    team = Ensemble(
        tasks=[source], loops=loops, workflow=Workflow.PARALLEL, parallel_error_strategy="continue_on_error"
    )
    with pytest.raises(ParallelExecutionError) as caught:
        team.run(runtime=inline_runtime)
    causes = {name: type(error) for name, error in caught.value.failed_task_causes.items()}
    assert causes.pop("asks") is UndecidedError
    assert causes.pop("capped") is MaxLoopIterationsExceededError
    assert list(causes) == ["source"]
    assert [each.raw for each in caught.value.completed_task_outputs] == ["draft#2"]


def test_independent_loops_overlap(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-LOOP-121: each waits for the other's iteration, which a loop that ran alone would do for ever."""
    marks = Marks(tmp_path / "marks")

    def meet(own: str, other: str) -> Handler:
        def work(_: TaskHandlerContext) -> str:
            marks.add(own)
            marks.wait(other)
            return own

        return work

    loops = [
        Loop(name="left", body=[handled(meet("l", "r"), "left task")], max_iterations=1),
        Loop(name="right", body=[handled(meet("r", "l"), "right task")], max_iterations=1),
    ]
    output = Ensemble(loops=loops, workflow=Workflow.PARALLEL).run(runtime=inline_runtime)
    assert [each.raw for each in output.task_outputs] == ["l", "r"]


def test_what_loops_write_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """S-LOOP-132: how each ended, when it did, and the start of each iteration."""
    caplog.set_level(logging.DEBUG, "ensemble_ray")
    loops = [
        Loop(name="asked", body=[handled(Drafts(), "a")], until=lambda context: context.iteration_number == 2),
        Loop(name="capped", body=[handled(Drafts(), "b")], max_iterations=1),
    ]
    Ensemble(loops=loops).run(runtime="inline")
    ours = [record for record in told_by_us(caplog.records) if record.getMessage().startswith("Loop ")]
    assert [(record.levelname, record.getMessage()) for record in ours] == [
        ("DEBUG", "Loop 'asked' starts iteration 1/5"),
        ("DEBUG", "Loop 'asked' starts iteration 2/5"),
        ("INFO", "Loop 'asked' stopped by predicate after iteration 2/5"),
        ("DEBUG", "Loop 'capped' starts iteration 1/1"),
        ("INFO", "Loop 'capped' reached its cap of 1 iterations: return_last"),
    ]


def test_cap_that_raises() -> None:
    """S-LOOP-61, S-LOOP-62."""
    loop = Loop(name="refine", body=[handled(Drafts(), "writer")], max_iterations=2, on_max_iterations="throw")
    with pytest.raises(
        MaxLoopIterationsExceededError, match=r"(?m)^Loop 'refine' did not converge after 2 iterations$"
    ):
        Ensemble(loops=[loop]).run(runtime="inline")


def test_cap_that_is_flagged() -> None:
    """S-LOOP-63."""
    loop = Loop(
        name="refine", body=[handled(Drafts(), "writer")], max_iterations=2, on_max_iterations="return_with_flag"
    )
    output = Ensemble(loops=[loop]).run(runtime="inline")
    assert output.was_loop_terminated_by_max_iterations("refine")
    assert output.get_loop_termination_reason("refine") == "max_iterations"


def report_of(context: TaskHandlerContext) -> str:
    return f"report of {', '.join(output.raw for output in context.context_outputs)}"


def test_task_waits_for_a_loop_by_its_output(runtime: Runtime) -> None:
    """S-LOOP-75, S-LOOP-76, S-LOOP-146, S-LOOP-168: it runs behind the loop, is given what it projects, and comes last."""
    loop = Loop(name="refine", body=[handled(Drafts(), "writer")], max_iterations=2, output_mode="all_iterations")
    team = Ensemble(
        tasks=[
            handled(report_of, "report", context=[loop.output]),
            handled(lambda _: "facts", "facts"),
        ],
        loops=[loop],
    )
    joined = "draft#1\n\n--- iteration 2 ---\n\ndraft#2"
    expected = ["facts", joined, f"report of {joined}"]
    output = team.run(runtime=runtime, run_id="r")
    assert [each.raw for each in output.task_outputs] == expected
    assert output.raw == output.last_completed_output.raw == expected[-1]
    assert output.get_loop_termination_reason("refine") == "max_iterations"
    again = resume("r", team, runtime=runtime)
    assert ([each.raw for each in again.task_outputs], again.raw) == (expected, expected[-1])


def test_one_task_of_a_loop_can_be_waited_for_alone() -> None:
    """S-LOOP-174: its output of the last iteration, in its place, whatever the loop projects; by a loop too."""
    given: dict[str, list[str]] = {}

    def keep(name: str) -> Handler:
        def report(context: TaskHandlerContext) -> str:
            given[name] = [output.raw for output in context.context_outputs]
            return name

        return report

    writer, critic = handled(Drafts(), "writer"), handled(Drafts("note"), "critic")
    loop = Loop(name="refine", body=[writer, critic], max_iterations=2, output_mode="all_iterations")
    later = Loop(
        name="later", body=[handled(keep("later"), "polish")], max_iterations=1, context=[loop.output_of(writer)]
    )
    first = handled(lambda _: "facts", "facts")
    report = handled(keep("report"), "report", context=[first, loop.output_of(critic), loop.output_of(writer)])
    Ensemble(tasks=[first, report], loops=[loop, later]).run(runtime="inline")
    assert given == {"report": ["facts", "note#2", "draft#2"], "later": ["draft#2"]}


def test_one_task_of_a_loop_in_a_phase_or_a_state_can_be_waited_for() -> None:
    """S-LOOP-174: from within the phase, from a later one, and from another state."""
    given: list[str] = []

    def report(context: TaskHandlerContext) -> str:
        given.extend(output.raw for output in context.context_outputs)
        return "done"

    def refining() -> tuple[Loop, Task]:
        writer = handled(Drafts(), "writer")
        return Loop(name="refine", body=[writer, handled(Drafts("note"), "critic")], max_iterations=2), writer

    loop, writer = refining()
    inner = Phase(name="draft", tasks=[handled(report, "inner", context=[loop.output_of(writer)])], loops=[loop])
    outer = Phase(name="print", tasks=[handled(report, "outer", context=[loop.output_of(writer)])], after=[inner])
    Ensemble(phases=[inner, outer]).run(runtime="inline")
    loop, writer = refining()
    states = {"refine": loop, "print": handled(report, "print", context=[loop.output_of(writer)])}
    edges = [GraphEdge(from_state="refine", to_state="print"), GraphEdge(from_state="print", to_state=Graph.END)]
    Ensemble(graph=Graph(name="desk", start="refine", states=states, edges=edges)).run(runtime="inline")
    assert given == ["draft#2"] * 3


def test_loop_stops_when_nothing_changes_any_more() -> None:
    """S-LOOP-162."""
    loop = Loop(name="refine", body=[handled(lambda _: "same", "writer")], until=Until.unchanged())
    output = Ensemble(loops=[loop]).run(runtime="inline")
    assert len(output.get_loop_history("refine")) == 2


def test_failing_task_ends_the_loop_and_the_run() -> None:
    """S-LOOP-110: no further iteration."""
    drafts = Drafts()

    def fail(_: TaskHandlerContext) -> str:
        raise ValueError("broken")

    with pytest.raises(TaskExecutionError):
        Ensemble(loops=[Loop(name="refine", body=[handled(drafts, "writer"), handled(fail, "critic")])]).run(
            runtime="inline"
        )
    assert drafts.calls == 1


def test_exit_in_a_body_ends_the_run_with_what_completed() -> None:
    """S-LOOP-112: the unfinished iteration is in the history; later loops do not run."""
    later = Drafts()

    def leave(_: TaskHandlerContext) -> str:
        raise ExitEarlyError("enough")

    loops = [
        Loop(name="refine", body=[handled(Drafts(), "writer"), handled(leave, "critic")]),
        Loop(name="later", body=[handled(later, "other")]),
    ]
    output = Ensemble(loops=loops).run(runtime="inline")
    assert output.exit_reason is ExitReason.USER_EXIT_EARLY
    assert [list(each) for each in output.get_loop_history("refine")] == [["writer"]]
    assert output.get_loop_termination_reason("refine") == "exit_early"
    assert (later.calls, output.get_loop_history("later")) == (0, [])


@pytest.mark.parametrize("iterations", [10, 200])
def test_loop_does_what_its_iterations_are(iterations: int) -> None:
    """S-LOOP-43, S-LOOP-145: as many executions as iterations, and one predicate each."""
    drafts, asked = Drafts(), list[int]()

    def until(context: LoopIterationContext) -> bool:
        asked.append(len(context.history))
        return False

    loop = Loop(name="refine", body=[handled(drafts, "writer")], until=until, max_iterations=iterations)
    output = Ensemble(loops=[loop]).run(runtime="inline")
    assert (drafts.calls, asked) == (iterations, list(range(1, iterations + 1)))
    assert len(output.get_loop_history("refine")) == iterations
