"""A loop for each item of a map: what an item gives, what is told and recorded of it, and how its run goes on."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ensemble_ray import (
    ExitEarlyError,
    ExitReason,
    Graph,
    GraphEdge,
    Loop,
    LoopIterationCompletedEvent,
    LoopIterationContext,
    MapEnsemble,
    MapReduceEnsemble,
    MaxLoopIterationsExceededError,
    Phase,
    Review,
    ReviewDecision,
    ReviewRequest,
    Runtime,
    Task,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskHandlerContext,
    TaskStartEvent,
    UnitOutput,
    ValidationError,
    resume,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import task
from tests.scenarios.comparing import as_data
from tests.scenarios.mapping import counts, raws, trace_of
from tests.scenarios.teams import PATIENCE_S, Watcher, task_of, until, wait_for


def drafted(asked: ScriptedCall) -> str:
    """What the model gives: its task, and how often it revised."""
    return f"{task_of(asked)}: {'again' if 'Loop iteration' in asked.text else 'first'}"


class Refining:
    """Makes the loop of an item: item N needs N + 1 iterations, and gives what its writer wrote last."""

    def __init__(self, until: Callable[[int, LoopIterationContext], bool] | None = None, **fields: Any) -> None:
        self.asked: Counter[int] = Counter()
        self._until = until or (lambda item, context: context.iteration_number > item)
        self._fields = fields

    def loop(self, item: int) -> tuple[Loop, Task]:
        """The loop and its writer."""

        def until(context: LoopIterationContext) -> bool:
            self.asked[item] += 1
            return self._until(item, context)

        writer = Task(name="writer", description=f"write {item}", expected_output="a line")
        critic = Task(name="critic", description=f"judge {item}", expected_output="a line", context=[writer])
        return Loop(**{"name": "refine", "body": [writer, critic], "until": until, **self._fields}), writer

    def __call__(self, item: int) -> UnitOutput:
        """What the map task returns."""
        loop, writer = self.loop(item)
        return loop.output_of(writer)


def mapped(map_task: Callable[..., Any], count: int = 3, **fields: Any) -> MapEnsemble:
    """A map over numbers whose model says what it was asked."""
    return MapEnsemble(
        **{"items": range(count), "map_task": map_task, "llm": ScriptedModel(otherwise=drafted), **fields}
    )


INSTANCES = [
    f"map-{item}#0/loop:refine#{iteration}/{name}#0"
    for item in range(3)
    for iteration in range(item + 1)
    for name in ("writer", "critic")
]


def test_each_item_gives_what_one_task_of_its_loop_gave_last() -> None:
    """S-MR-190, S-MR-194: one output for an item, and the trace and metrics of every execution."""
    refining, watcher = Refining(), Watcher()
    told: list[LoopIterationCompletedEvent] = []
    output = mapped(refining, listeners=[watcher], on_loop_iteration_completed=told.append).run(runtime="inline")
    assert raws(output) == ["write 0: first", "write 1: again", "write 2: again"]
    assert refining.asked == {0: 1, 1: 2, 2: 3}
    assert [each.metadata["instance"] for each in trace_of(output).task_traces] == INSTANCES
    assert {each.node_type for each in trace_of(output).task_traces} == {"map"}
    assert (counts(output), output.metrics.total_llm_call_count) == ([3], 12)
    assert sorted(each.instance for each in watcher.of(TaskStartEvent)) == sorted(INSTANCES)
    assert {(each.instance, each.iteration_number) for each in told} == {
        (f"map-{item}#0/loop:refine#{number}", number + 1) for item in range(3) for number in range(item + 1)
    }


def test_an_iteration_of_an_item_is_told_between_its_tasks_and_the_next_ones(runtime: Runtime) -> None:
    """S-MR-195, S-LOOP-107: of each item; items among each other are told in any order."""
    told: list[tuple[str, str]] = []

    class Ordered:
        """Keeps what it hears, in order: what, and of which iteration of which item."""

        def on_task_start(self, event: TaskStartEvent) -> None:
            told.append(("start", event.instance.rpartition("/")[0]))

        def on_task_complete(self, event: TaskCompleteEvent) -> None:
            told.append(("complete", event.instance.rpartition("/")[0]))

        def on_loop_iteration_completed(self, event: LoopIterationCompletedEvent) -> None:
            told.append(("iteration", event.instance))

    mapped(Refining(), listeners=[Ordered()]).run(runtime=runtime)
    for item in range(3):
        of_item = [each for each in told if each[1].startswith(f"map-{item}#")]
        assert of_item == [
            (what, f"map-{item}#0/loop:refine#{number}")
            for number in range(item + 1)
            for what in ("start", "complete", "start", "complete", "iteration")
        ]


@pytest.mark.parametrize(
    ("mode", "raw"),
    [
        ("last_iteration", "judge 1: first"),
        ("final_task_only", "judge 1: first"),
        ("all_iterations", "judge 1: first\n\n--- iteration 2 ---\n\njudge 1: first"),
    ],
)
def test_item_of_a_loop_gives_the_last_output_that_the_loop_shows(mode: str, raw: str) -> None:
    """S-MR-190: by its output mode; reduces get it like any other."""
    seen: list[str] = []

    def join(group: list[Task]) -> Task:
        seen.extend(each.description for each in group)
        return Task(description="join", expected_output="a line", context=group)

    team = MapReduceEnsemble(
        items=iter(range(2)),
        map_task=lambda item: Refining(output_mode=mode).loop(item)[0],
        reduce_task=join,
        llm=ScriptedModel(otherwise=drafted),
    )
    assert team.run(runtime="inline").raw == "join: first"
    assert seen == ["judge 0: first", raw]


def test_recorded_items_are_given_again() -> None:
    """S-MR-193, S-SET-39: nothing is asked, outputs and traces are the same, joined iterations too."""
    refining = Refining(output_mode="all_iterations")
    team = mapped(lambda item: refining.loop(item)[0])
    first = team.run(runtime="inline", run_id="once")
    calls = refining.asked.total()
    second = team.run(runtime="inline", run_id="once")
    assert (raws(second), refining.asked.total()) == (raws(first), calls)
    assert [each.metadata["instance"] for each in trace_of(second).task_traces] == INSTANCES
    assert second.metrics.total_llm_call_count == 12


@pytest.mark.parametrize("held", ["write 1", "judge 1", "until"])
@pytest.mark.parametrize("iteration", [1, 2])
def test_cut_run_asks_nothing_again_that_is_recorded(held: str, iteration: int) -> None:
    """S-MR-193: no model call and no predicate of an iteration that was done."""
    reached, let_go = threading.Event(), threading.Event()
    asked: Counter[str] = Counter()
    holding = [True]

    def hold(name: str) -> None:
        asked[name] += 1
        if holding[0] and name == held and asked[name] == iteration:
            reached.set()
            wait_for(let_go)

    def answer(call: ScriptedCall) -> str:
        hold(task_of(call))
        return drafted(call)

    def until(item: int, context: LoopIterationContext) -> bool:
        if item == 1:
            hold("until")
        return context.iteration_number > item + 1

    refining = Refining(until)
    team = mapped(refining, 2, llm=ScriptedModel(otherwise=answer), max_parallel_tasks=1)
    run = team.start(run_id="cut", runtime="inline")
    wait_for(reached)
    run.cancel()
    assert run.result(PATIENCE_S).exit_reason is ExitReason.CANCELLED
    holding[0] = False
    let_go.set()
    output = resume("cut", team, runtime="inline")
    assert raws(output) == ["write 0: again", "write 1: again"]
    expected = Counter({"write 0": 2, "judge 0": 2, "write 1": 3, "judge 1": 3, "until": 3})
    expected[held] += 1  # what had no answer when the run was cut
    assert asked == expected
    assert refining.asked[0] == 2
    assert [len(trace_of(output).task_traces), output.metrics.total_llm_call_count] == [10, 10]


@pytest.mark.parametrize("policy", ["collect", "skip"])
def test_loop_that_throws_is_a_failed_item(policy: str) -> None:
    """S-MR-192: the others go on, and what it did is in the trace."""
    refining = Refining(max_iterations=2, on_max_iterations="throw")
    output = mapped(refining, on_item_error=policy).run(runtime="inline", run_id="threw")
    assert raws(output) == ["write 0: first", "write 1: again"]
    failed = [(each.index, each.error_type, each.attempts) for each in output.failed_items]
    assert failed == ([(2, "MaxLoopIterationsExceededError", 0)] if policy == "collect" else [])
    assert len(trace_of(output).task_traces) == 10
    again = mapped(refining, on_item_error=policy).run(runtime="inline", run_id="threw")
    assert [each.index for each in again.failed_items] == [each[0] for each in failed]
    assert len(trace_of(again).task_traces) == 10


def test_failing_task_or_predicate_fails_its_item() -> None:
    """S-MR-192: with what it raised."""

    def until(item: int, context: LoopIterationContext) -> bool:
        if item == 0:
            raise ValueError("undecided")
        return True

    def answer(asked: ScriptedCall) -> object:
        return TimeoutError("down") if task_of(asked) == "judge 1" else drafted(asked)

    team = mapped(Refining(until), on_item_error="collect", llm=ScriptedModel(otherwise=answer), retry=None)
    output = team.run(runtime="inline")
    assert raws(output) == ["write 2: first"]
    predicate, judge = output.failed_items
    assert (predicate.index, predicate.error_type, predicate.message) == (0, "ValueError", "undecided")
    assert (judge.index, judge.attempts) == (1, 1)
    assert "down (TimeoutError)" in judge.message


def test_failed_loop_is_tried_again_where_it_ended_the_run() -> None:
    """S-MR-192, S-MR-163: from its first iteration, as another execution of the item."""
    team = mapped(Refining(max_iterations=2, on_max_iterations="throw"), max_parallel_tasks=1)
    with pytest.raises(TaskExecutionError) as caught:
        team.run(runtime="inline", run_id="failed")
    assert isinstance(caught.value.__cause__, MaxLoopIterationsExceededError)
    watcher = Watcher()
    easier = team.replace(map_task=Refining(lambda *_: True, max_iterations=2), listeners=[watcher])
    assert raws(resume("failed", easier, runtime="inline", allow_changes=True))[2] == "write 2: first"
    assert [each.instance for each in watcher.of(TaskStartEvent)] == [
        "map-2#1/loop:refine#0/writer#0",
        "map-2#1/loop:refine#0/critic#0",
    ]


def test_early_exit_in_a_loop_ends_the_run_early() -> None:
    """S-MR-192, S-PAR-30."""

    def leave(context: TaskHandlerContext) -> str:
        raise ExitEarlyError("enough")

    output = mapped(
        lambda _: Loop(name="x", body=[task("leave", handler=leave)], max_iterations=2), max_parallel_tasks=1
    ).run(runtime="inline")
    assert (output.exit_reason, raws(output)) == (ExitReason.USER_EXIT_EARLY, [])


@pytest.mark.parametrize("mode", ["last_iteration", "all_iterations"])
def test_gate_in_a_loop_ends_the_run_with_what_the_item_has(mode: str) -> None:
    """S-MR-192, S-REV-32, S-LOOP-112, S-SET-39: the reviewed output is kept, and the record gives it again."""

    def decide(request: ReviewRequest) -> ReviewDecision:
        return ReviewDecision.ExitEarly() if request.task_output == "draft 1.2" else ReviewDecision.Continue()

    def looped(item: int) -> Loop:
        drafts = itertools.count(1)
        writer = task("write", handler=lambda _: f"draft {item}.{next(drafts)}", review=Review.required())
        body = [writer, task("judge", handler=lambda _: "judged")]
        return Loop(name="x", body=body, max_iterations=2, output_mode=mode)

    team = mapped(looped, review_handler=decide, max_parallel_tasks=1)
    output = team.run(runtime="inline", run_id="left")
    kept = {"last_iteration": "draft 1.2", "all_iterations": "judged"}[mode]
    whole = {"last_iteration": "judged", "all_iterations": "judged\n\n--- iteration 2 ---\n\njudged"}[mode]
    assert (output.exit_reason, raws(output)) == (ExitReason.USER_EXIT_EARLY, [whole, kept])
    again = team.run(runtime="inline", run_id="left")
    assert (again.exit_reason, raws(again)) == (output.exit_reason, raws(output))
    assert as_data(again.trace) == as_data(output.trace)


@pytest.mark.parametrize("is_loop", [False, True])
def test_gate_behind_an_item_keeps_what_it_gave(*, is_loop: bool) -> None:
    """S-REV-32, S-MR-192: of a task and of a loop alike; a run that goes on behind it starts nothing more."""

    def decide(request: ReviewRequest) -> ReviewDecision:
        return ReviewDecision.ExitEarly() if request.task_output == "out 1" else ReviewDecision.Continue()

    def made(item: int) -> Task | UnitOutput:
        one = task("write", handler=lambda _: f"out {item}", review=Review.required())
        judge = task("judge", handler=lambda _: "fine")
        return Loop(name="x", body=[one, judge], max_iterations=1).output_of(one) if is_loop else one

    team = mapped(made, review_handler=decide, max_parallel_tasks=1)
    output = team.run(runtime="inline", run_id="left")
    assert (output.exit_reason, raws(output)) == (ExitReason.USER_EXIT_EARLY, ["out 0", "out 1"])
    again = team.run(runtime="inline", run_id="left")
    assert (again.exit_reason, raws(again)) == (output.exit_reason, raws(output))


def test_early_exit_at_a_gate_holds_when_its_run_was_cut_behind_it() -> None:
    """S-REV-32, S-MR-163: the run was cancelled while another item ran; it starts nothing new when it goes on."""
    held, let_go = threading.Event(), threading.Event()
    begun: list[int] = []

    def work(item: int) -> str:
        begun.append(item)
        if item == 1 and not let_go.is_set():
            held.set()
            wait_for(let_go)
        return f"out {item}"

    def decide(_: ReviewRequest) -> ReviewDecision:
        wait_for(held)
        return ReviewDecision.ExitEarly()

    def made(item: int) -> Task:
        return task("write", handler=lambda _: work(item), review=None if item else Review.required())

    team = mapped(made, 4, review_handler=decide, max_parallel_tasks=2)
    run = team.start(run_id="cut", runtime="inline")
    until(lambda: run.completed_count, "the first item")
    run.cancel()
    assert run.result(PATIENCE_S).exit_reason is ExitReason.CANCELLED
    let_go.set()
    output = resume("cut", team, runtime="inline")
    assert (output.exit_reason, raws(output)[0]) == (ExitReason.USER_EXIT_EARLY, "out 0")
    assert set(begun) == {0, 1}


def test_unit_that_is_no_loop_is_refused() -> None:
    """S-MR-191: the message names what is possible."""
    one = task("one", name="one", handler=lambda _: "done")
    phase = Phase(name="p", tasks=[one])
    graph = Graph(name="g", start="a", states={"a": one}, edges=[GraphEdge(from_state="a", to_state=Graph.END)])
    for made, name in ((phase, "Phase"), (graph, "Graph"), (phase.output, "UnitOutput")):
        with pytest.raises(ValidationError) as caught:
            mapped(lambda _, made=made: made).run(runtime="inline")
        assert str(caught.value) == f"map_task must return a Task, a Loop or the output_of(task) of a Loop, got: {name}"


def test_loop_of_an_item_waits_for_nothing() -> None:
    """S-MR-191."""
    one, other = task("one", handler=lambda _: "done"), task("other")
    with pytest.raises(ValidationError) as caught:
        mapped(lambda _: Loop(name="x", body=[one], context=[other])).run(runtime="inline")
    assert str(caught.value) == (
        "Loop 'x' has the context 'other': the loop of an item has no context. Put what it needs into the item"
    )


def test_tree_that_is_made_at_construction_holds_no_loops() -> None:
    """S-MR-191."""
    with pytest.raises(ValidationError) as caught:
        MapReduceEnsemble(items=[1], map_task=lambda item: Refining().loop(item)[0], reduce_task=lambda group: group[0])
    assert str(caught.value) == (
        "map_task returned the loop 'refine', and over a list in static mode all tasks are made at construction. "
        "Give items that are no list, such as iter(items), or set on_item_error"
    )
