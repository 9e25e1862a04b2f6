"""Predicates and edge conditions where they live: what they see, what is sent, what they raise."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import Graph, GraphEdge, GraphRoutingContext, Loop, LoopIterationContext, Task, TaskOutput
from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart
from ensemble_ray.plan.plan import GraphUnit, LoopUnit, StateEntry
from ensemble_ray.runs.unit_evaluations import LocalPredicates, build_announcement, list_predicates
from ensemble_ray.schedule.instructions import ContextPart, EdgeMatches, IterationEnded, StepEnded, UntilHolds
from ensemble_ray.values.value import utc_of


def output(raw: str) -> TaskOutput:
    """What a task gave."""
    return TaskOutput(
        raw=raw, task_description="d", agent_role="r", completed_at=utc_of(1.0), duration=timedelta(seconds=1)
    )


def iteration(*raws: str) -> HistoryPart[TaskOutput]:
    """An iteration of a writer and a critic."""
    return HistoryPart(names=("writer", "critic"), outputs=tuple(map(output, raws)))


def step(state: str, raw: str) -> HistoryPart[TaskOutput]:
    """A step of a graph."""
    return HistoryPart(names=(state,), outputs=(output(raw),))


def until(number: int, unit: str = "loop:refine") -> UntilHolds:
    """The question after an iteration."""
    return UntilHolds(unit=unit, iteration=number)


def asked(predicate: Callable[..., object]) -> LocalPredicates:
    """The predicate of a loop."""
    return LocalPredicates({"loop:refine/until/0": predicate})


async def test_predicate_sees_this_iteration_and_all_before_it() -> None:
    """S-LOOP-50, S-LOOP-51: by body key in body order, in views that cannot be written."""
    seen: list[LoopIterationContext] = []
    predicates = asked(lambda context: seen.append(context) or len(seen) == 2)
    assert await predicates.holds(until(1), sent_count=0, new=[iteration("w1", "c1")]) is False
    assert await predicates.holds(until(2), sent_count=1, new=[iteration("w2", "c2")]) is True
    first, second = seen
    assert [each.iteration_number for each in seen] == [1, 2]
    assert [(key, each.raw) for key, each in second.last_iteration_outputs.items()] == [
        ("writer", "w2"),
        ("critic", "c2"),
    ]
    assert [[each.raw for each in past.values()] for past in second.history] == [["w1", "c1"], ["w2", "c2"]]
    assert [[each.raw for each in past.values()] for past in second.history[1:]] == [["w2", "c2"]]
    assert (first.last_body_output.raw, len(first.history), second.history[-1]["writer"].raw) == ("c1", 1, "w2")
    written: Any = second.last_iteration_outputs
    with pytest.raises(TypeError):
        written["writer"] = None
    assert not hasattr(second.history, "append")


async def test_condition_sees_the_step_and_the_visits_of_each_state() -> None:
    """S-GRAPH-44, S-GRAPH-42: an edge is found by its place, and a second edge of a step is sent nothing."""
    seen: list[GraphRoutingContext] = []

    async def condition(context: GraphRoutingContext) -> bool:
        seen.append(context)
        await asyncio.sleep(0)
        return context.current_state == "b"

    predicates = LocalPredicates({"graph:g/edge/0": lambda _: False, "graph:g/edge/2": condition})
    ask = predicates.holds
    assert await ask(EdgeMatches(unit="graph:g", step=1, edge=0), sent_count=0, new=[step("a", "1")]) is False
    assert await ask(EdgeMatches(unit="graph:g", step=1, edge=2), sent_count=1, new=[]) is False
    assert (
        await ask(EdgeMatches(unit="graph:g", step=3, edge=2), sent_count=1, new=[step("b", "2"), step("a", "3")])
        is False
    )
    assert await ask(EdgeMatches(unit="graph:g", step=4, edge=2), sent_count=3, new=[step("b", "4")]) is True
    last = seen[-1]
    assert (last.current_state, last.last_output.raw, last.step_number) == ("b", "4", 4)
    visits = {state: [each.raw for each in outputs] for state, outputs in last.state_history.items()}
    assert visits == {"a": ["1", "3"], "b": ["2", "4"]}


async def test_whole_history_is_wanted_where_it_is_not_known() -> None:
    """S-LOOP-54: of a process that was replaced, and of a unit that was forgotten."""
    predicates = asked(lambda context: len(context.history) == 2)
    assert await predicates.holds(until(2), sent_count=1, new=[iteration("w2", "c2")]) is None
    both = [iteration("w1", "c1"), iteration("w2", "c2")]
    assert await predicates.holds(until(2), sent_count=0, new=both) is True
    predicates.drop("loop:refine")
    assert await predicates.holds(until(3), sent_count=2, new=[iteration("w3", "c3")]) is None


async def test_question_that_comes_twice_adds_its_iteration_once() -> None:
    """S-LOOP-143: an answer that was lost on its way is asked for again."""
    predicates = asked(lambda context: len(context.history) == 2)
    await predicates.holds(until(1), sent_count=0, new=[iteration("w1", "c1")])
    for _ in range(2):
        assert await predicates.holds(until(2), sent_count=1, new=[iteration("w2", "c2")]) is True


async def test_executions_of_a_loop_have_histories_of_their_own() -> None:
    """S-LOOP-52: the same predicate, and nothing of another visit."""
    predicates = asked(lambda context: len(context.history) == 1)
    for visit in (1, 2):
        question = until(1, f"graph:g#{visit}/loop:refine")
        assert await predicates.holds(question, sent_count=0, new=[iteration("w", "c")]) is True


async def test_error_of_a_predicate_is_logged_and_returned(caplog: pytest.LogCaptureFixture) -> None:
    """S-LOOP-53, S-GRAPH-46: with its own type and message."""

    def predicate(_: object) -> bool:
        raise RuntimeError("boom")

    failed = await asked(predicate).holds(until(1), sent_count=0, new=[iteration("w", "c")])
    assert isinstance(failed, EvaluationFailed)
    assert (failed.error_type, failed.message, type(failed.error)) == ("RuntimeError", "boom", RuntimeError)
    (note,) = getattr(failed.error, "__notes__", ())
    assert note.startswith("raised by the predicate 'loop:refine/until/0', asked about ")
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "loop:refine/until/0" in record.message


def test_predicates_are_found_by_unit_and_place() -> None:
    """S-LOOP-54: of loops and edges; an edge without a condition has none."""
    task = Task.of("write")
    loop = Loop(name="refine", body=[task], until=os.path.exists)
    edges = [
        GraphEdge(from_state="a", to_state="b", condition=os.path.isdir),
        GraphEdge(from_state="a", to_state="b"),
        GraphEdge(from_state="b", to_state=Graph.END),
    ]
    graph = Graph(name="g", states={"a": Task.of("a"), "b": Task.of("b")}, edges=edges, start="a")
    capped = Loop(name="capped", body=[task], max_iterations=2)
    found = list_predicates({"loop:refine": loop, "graph:g": graph, "loop:capped": capped})
    assert found == {"loop:refine/until/0": os.path.exists, "graph:g/edge/0": os.path.isdir}


def test_event_of_an_iteration_has_the_outputs_by_body_key() -> None:
    """S-LOOP-108."""
    unit = LoopUnit(key="loop:refine", name="Refine", body=("w", "c"), body_names=("writer", "critic"))
    ended = IterationEnded(unit="phase:p#1/loop:refine", iteration=3, instances=("x#2/w#0", "x#2/c#0"), duration_s=1.5)
    event: Any = build_announcement("run", unit, ended, [output("w"), output("c")])
    assert (event.run_id, event.instance) == ("run", "phase:p#1/loop:refine#2")
    assert (event.loop_name, event.iteration_number, event.max_iterations) == ("Refine", 3, 5)
    assert [(key, each.raw) for key, each in event.iteration_outputs.items()] == [("writer", "w"), ("critic", "c")]
    assert event.iteration_duration == timedelta(seconds=1.5)


def test_event_of_a_step_says_where_the_graph_goes() -> None:
    """S-GRAPH-75."""
    unit = GraphUnit(key="graph:g", name="G", states=(StateEntry(name="a", member="a"),), edges=(), start="a")
    place = "graph:g#3/a#0"
    ended = StepEnded(
        unit="graph:g",
        step=4,
        state="a",
        instance=place,
        output=ContextPart((place,)),
        next_state="__END__",
        duration_s=2.0,
    )
    event: Any = build_announcement("run", unit, ended, [output("x")])
    assert (event.graph_name, event.state_name, event.step_number, event.max_steps) == ("G", "a", 4, 50)
    assert (event.output.raw, event.next_state, event.step_duration) == ("x", "__END__", timedelta(seconds=2))
    assert event.instance == "graph:g#3"
    with pytest.raises(TypeError, match="is nothing that"):
        build_announcement("run", LoopUnit(key="l", name="L", body=(), body_names=()), ended, [output("x")])
