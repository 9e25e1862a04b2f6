"""The coordinator: journal first, then act; reports in batches; what is known when a run ends."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from ensemble_ray import ExitReason, IllegalStateError, Node, Plan, RunState
from ensemble_ray.facts.reading import read_fact
from tests.ensemble_ray.coordinator.planned_runs import (
    PAIR,
    Conducting,
    Failure,
    Result,
    conducting,
    done,
    ended_early,
    failed,
)
from tests.ensemble_ray.schedule.plans import plan_of


async def test_plan_is_the_first_fact() -> None:
    """The record format: the header with its start, before any stimulus and any task."""
    run = await conducting(PAIR)
    first, second = run.journal.facts()
    assert (first.kind, first.name, first.at) == ("plan", "run", 100.0)
    assert first.data.to_data() == {"workflow": "parallel", "started_at": 100.0}
    assert (second.kind, second.name, second.data.to_data()) == ("stimulus", "run", {"type": "RunStarted", "at": 100.0})
    assert run.executor.recorded == [["plan run", "stimulus run RunStarted"]]


async def test_effects_of_before_the_run_stand_behind_the_plan() -> None:
    """S-SET-46: those of a synthesizer, before scheduling."""
    preamble = read_fact(run="run", kind="model", name="run/0/model", at=99.0, data={"text": "role"})
    run = await conducting(PAIR, preamble=[preamble])
    assert run.fact_lines == ["plan run", "model run/0/model", "stimulus run RunStarted"]


async def test_facts_carry_the_epoch_of_the_run() -> None:
    """S-CONV-35: so do the tasks that are started."""
    run = await conducting(PAIR, epoch=3)
    assert {fact.epoch for fact in run.journal.facts()} == {3}
    assert {order.epoch for order in run.executor.started} == {3}


async def test_report_is_in_the_journal_before_it_is_acted_on() -> None:
    """The design's first rule: a scheduler that dies in between finds what it was told."""
    run = await conducting(PAIR)
    await run.report(done("a"), done("b"))
    assert run.executor.recorded[-1][-2:] == ["stimulus a#0 TaskCompleted", "stimulus b#0 TaskCompleted"]
    fact = run.journal.facts()[-1]
    assert (fact.at, fact.data.to_data()["key"], fact.data.to_data()["total_tokens"]) == (101.0, "b", 7)


async def test_nothing_is_done_when_the_journal_refuses() -> None:
    """What is not recorded does not happen."""
    run = await conducting(PAIR)
    await run.journal.close()
    with pytest.raises(IllegalStateError):
        await run.report(done("a"), done("b"))
    assert run.executor.keys == ["a", "b"]
    assert "end run" not in run.fact_lines


async def test_context_comes_in_the_order_of_the_context_list() -> None:
    """S-PAR-13, S-ENG-11: whatever finished first."""
    run = await conducting(PAIR)
    await run.report(done("a"))
    await run.report(done("b"))
    order = run.executor.started[-1]
    assert order.context == ("output of b", "output of a")
    assert (order.instance, order.missing_context) == ("c#0", None)


async def test_reports_that_come_meanwhile_are_taken_together() -> None:
    """S-PAR-14: in the order in which they came, in one step of the machine."""
    run = await conducting(plan_of("parallel", dict.fromkeys("abc", ())))
    run.journal.free.clear()
    await run.report(done("b"))
    await run.report(done("c"))
    await run.report(done("a"))
    run.journal.free.set()
    await run.settled()
    assert run.journal.batches[2:] == [
        ["stimulus b#0 TaskCompleted"],
        ["stimulus c#0 TaskCompleted", "stimulus a#0 TaskCompleted"],
        ["end run"],
    ]
    assert [instance for instance, _ in run.ended().completed] == ["b#0", "c#0", "a#0"]


# Missing context.


@pytest.mark.parametrize(
    ("node", "missing"),
    [
        ({"context": ("b",), "context_outside": ("Elsewhere",)}, "Do b"),
        ({"context": ("a",), "context_outside": ("Elsewhere",)}, "Elsewhere"),
        ({"context": ("a",)}, None),
    ],
)
async def test_missing_context_is_named_in_sequential_runs(node: dict[str, tuple[str, ...]], missing: str) -> None:
    """S-ENG-11: by the context task's description; in the plan or not."""
    plan = plan_of("sequential", {"a": (), "x": (), "b": ()})
    asking = Node(key="x", index=2, description="Do x", expected_output="", agent_role="W", agent_key="w", **node)  # type: ignore[arg-type]  fields of a Node
    run = await conducting(Plan(workflow="sequential", nodes=(plan.nodes[0], asking, plan.nodes[2])))
    await run.report(done("a"))
    assert run.executor.keys == ["a", "x"]
    assert run.executor.started[-1].missing_context == missing


async def test_context_outside_the_plan_is_left_out_of_parallel_runs() -> None:
    """S-PAR-13."""
    node = Node(
        key="a", index=1, description="Do a", expected_output="", agent_role="W", agent_key="w", context_outside=("E",)
    )
    run = await conducting(Plan(workflow="parallel", nodes=(node,)))
    assert run.executor.started[0].missing_context is None


# Ends.


async def test_completed_run_tells_its_outputs() -> None:
    """S-PAR-14: in completion order; the end is a fact before anybody hears of it."""
    run = await conducting(PAIR)
    run.clock.advance(2.0)
    await run.report(done("b"), done("a"))
    await run.report(done("c"))
    ended = run.ended()
    assert ended.completed == [("b#0", "output of b"), ("a#0", "output of a"), ("c#0", "output of c")]
    assert (ended.state, ended.exit_reason) == (RunState.COMPLETED, ExitReason.COMPLETED)
    assert (ended.started_at, ended.completed_at) == (100.0, 102.0)
    end = run.journal.facts()[-1]
    assert (end.kind, end.name, end.at) == ("end", "run", 102.0)
    assert end.data.to_data() == {"state": "completed", "exit_reason": "completed", "errors": []}


async def test_failure_knows_how_many_were_completed_before_it() -> None:
    """S-PAR-22, S-PAR-23: those that came later do not count; the first failure stays the first."""
    run = await conducting(plan_of("parallel", dict.fromkeys("abcd", ())))
    await run.report(done("a"), failed("b"), done("c"), failed("d", at=102.0))
    ended = run.ended()
    assert [(each.instance, each.at, each.failure.body, each.completed_before) for each in ended.failures] == [
        ("b#0", 101.0, "failure of b", 1),
        ("d#0", 102.0, "failure of d", 2),
    ]
    assert [instance for instance, _ in ended.completed] == ["a#0", "c#0"]
    assert ended.state is RunState.FAILED
    assert run.journal.facts()[-1].data.to_data() == {
        "state": "failed",
        "exit_reason": "error",
        "errors": [
            {"key": "b", "error_type": "ValueError", "message": "b broke"},
            {"key": "d", "error_type": "ValueError", "message": "d broke"},
        ],
    }


async def test_skipped_tasks_are_a_line_at_debug_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """S-PAR-28: never handed to a process."""
    run = await conducting(plan_of("parallel", {"a": (), "b": ("a",)}, error_strategy="continue_on_error"))
    with caplog.at_level(logging.DEBUG, logger="ensemble_ray.runs.coordinator"):
        await run.report(failed("a"))
    assert [record.getMessage() for record in caplog.records] == [
        "Task 'b' is skipped: context task 'a' did not complete"
    ]
    assert run.executor.keys == ["a"]


async def test_early_exit_keeps_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    """S-ENG-17, S-PAR-30: no error; the trace of the task that asked is kept beside the outputs."""
    run = await conducting(plan_of("sequential", {"a": (), "b": (), "c": ()}))
    await run.report(done("a"))
    await run.report(ended_early("b", "exited", reason=ExitReason.TIMEOUT))
    ended = run.ended()
    assert (ended.state, ended.exit_reason) == (RunState.COMPLETED, ExitReason.TIMEOUT)
    assert (ended.completed, ended.failures) == ([("a#0", "output of a")], ())
    assert ended.unfinished == (("b#0", Failure("trace of b")),)
    assert not caplog.records


async def test_cancelled_run_ends_when_its_tasks_have_stopped() -> None:
    """S-SET-27: the wish is a fact before processes hear of it; completed outputs are kept."""
    run = await conducting(PAIR)
    await run.report(done("a"))
    await run.cancel()
    assert run.executor.stopped == ["b#0"]
    assert run.executor.recorded[-1][-1] == "stimulus run CancelRequested"
    assert not run.end.done()
    await run.report(ended_early("b", "cancelled"))
    ended = run.ended()
    assert (ended.state, ended.exit_reason) == (RunState.CANCELLED, ExitReason.CANCELLED)
    assert (ended.completed, ended.unfinished) == ([("a#0", "output of a")], (("b#0", Failure("trace of b")),))


async def test_run_never_begins_when_it_is_cancelled_while_its_first_fact_is_on_its_way() -> None:
    """S-SET-27: nothing starts, and the machine is not told of a beginning after its end."""
    run = Conducting(PAIR)
    run.journal.free.clear()
    starting = asyncio.create_task(run.start())
    await asyncio.sleep(0)  # it has begun, and waits for the journal
    cancelling = run.coordinator.cancel()
    run.journal.free.set()
    await asyncio.gather(starting, cancelling)
    await run.settled()
    assert run.executor.started == []
    assert run.ended().state is RunState.CANCELLED
    assert "stimulus run RunStarted" not in run.fact_lines


async def test_ended_run_stays_as_it_is_when_it_is_cancelled() -> None:
    """S-SET-27: neither an error nor a fact."""
    run = await conducting(plan_of("sequential", {"a": ()}))
    await run.report(done("a"))
    await run.journal.close()
    await run.cancel()
    assert run.ended().state is RunState.COMPLETED
    assert run.fact_lines[-1] == "end run"


async def test_run_ends_once_when_it_is_cancelled_while_it_ends() -> None:
    """S-SET-27: a wish that comes while the last report is taken comes too late."""
    run = await conducting(plan_of("sequential", {"a": ()}))
    await asyncio.gather(run.report(done("a")), run.cancel())
    assert run.journal.batches[-2:] == [["stimulus a#0 TaskCompleted"], ["end run"]]
    assert run.ended().state is RunState.COMPLETED


@pytest.mark.parametrize("late", [failed("a"), done("a"), ended_early("a", "exited")])
@pytest.mark.parametrize("first", [failed("a"), done("a")])
async def test_late_report_changes_nothing(first: Result, late: Result) -> None:
    """S-PAR-12: the first one counts, also in what the run's end tells."""
    told_twice = await conducting(plan_of("parallel", {"a": (), "b": ()}))
    told_once = await conducting(plan_of("parallel", {"a": (), "b": ()}))
    await told_twice.report(first, late)
    await told_twice.report(late)
    await told_twice.report(failed("b"))
    await told_once.report(first)
    await told_once.report(failed("b"))
    assert told_twice.ended() == told_once.ended()
    assert told_twice.journal.facts()[-1].data.to_data() == told_once.journal.facts()[-1].data.to_data()


async def test_outputs_of_workers_come_in_the_order_in_which_they_were_done() -> None:
    """Whatever became of the tasks that asked for them; those of one task do not take each other's place."""
    run = await conducting(PAIR)
    await run.report(replace(done("a"), delegated=(("Digger", "d1"), ("Painter", "p")), output="A"))
    await run.report(replace(done("b"), delegated=(("Digger", "d2"),), output="B"))
    await run.report(done("c"))
    ended = run.ended()
    assert [output for _, output in ended.delegated] == ["d1", "p", "d2"]
    assert list(ended.completed) == [("a#0", "A"), ("b#0", "B"), ("c#0", "output of c")]


async def test_a_run_looks_for_decisions_before_it_waits() -> None:
    """S-REV-124: what was decided goes on, and it waits where nothing was."""
    found: list[list[str]] = [["b#0"], []]
    run = Conducting(PAIR, find_decided=lambda: _value(found.pop(0)))
    await run.start()
    await run.report(ended_early("a", "waiting"), ended_early("b", "waiting"))
    assert run.executor.keys == ["a", "b", "b"]
    await run.report(done("b"))
    assert (run.ended().state, found) == (RunState.WAITING, [])


async def test_a_wish_to_cancel_is_heard_while_it_looks_for_decisions() -> None:
    """S-REV-119: such a run ends as cancelled, and does not wait."""
    looked = asyncio.Event()

    async def look() -> list[str]:
        await looked.wait()
        return []

    run = Conducting(PAIR, find_decided=look)
    await run.start()
    await run.report(ended_early("a", "waiting"), ended_early("b", "waiting"))
    asking = run.coordinator.cancel()
    looked.set()
    await run.settled()
    assert (asking.done(), run.ended().state) == (True, RunState.CANCELLED)


async def _value(found: list[str]) -> list[str]:
    return found
