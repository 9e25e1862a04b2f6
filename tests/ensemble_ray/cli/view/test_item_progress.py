"""Progress of runs over many items: counts, pace, the time that is left, and what a log shows of it."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from ensemble_ray import BatchProgressEvent, TaskCompleteEvent, TaskFailedEvent, TaskMetrics, TaskOutput, TaskStartEvent
from ensemble_ray.cli.view.progress import Block, Display, ItemProgress, TaskProgress
from ensemble_ray.events.delivery import wanted_by
from ensemble_ray.values.value import utc_now


def _started(key: str) -> TaskStartEvent:
    return TaskStartEvent(instance=f"{key}#0", task_description="d", agent_role="r", task_index=1, total_tasks=0)


def _completed(key: str) -> TaskCompleteEvent:
    output = TaskOutput(
        raw="a", task_description="d", agent_role="r", completed_at=utc_now(), duration=timedelta(seconds=1),
        metrics=TaskMetrics(input_tokens=10, output_tokens=5),
    )  # fmt: skip
    return TaskCompleteEvent(
        instance=f"{key}#0", task_description="d", agent_role="r", task_index=1, total_tasks=0, task_output=output,
        duration=timedelta(seconds=1),
    )  # fmt: skip


def _failed(key: str, text: str = "no") -> TaskFailedEvent:
    return TaskFailedEvent(
        instance=f"{key}#0", task_description="d", agent_role="r", task_index=1, total_tasks=0, cause=OSError(text),
        duration=timedelta(seconds=1),
    )  # fmt: skip


def test_items_are_counted_and_the_time_that_is_left_is_told() -> None:
    """S-MR-185: items apart from reduces; at the pace since the first began."""
    progress = ItemProgress("", 10)
    progress.add_recorded(2, items=2)
    for number in range(4):
        progress.receive(_started(f"map-{number}"), 1.0)
    for number in range(2):
        progress.receive(_completed(f"map-{number}"), 3.0)
    progress.receive(_failed("map-2"), 3.0)
    progress.receive(_started("reduce-1-0"), 3.0)
    progress.receive(_completed("reduce-1-0"), 4.0)
    assert progress.counts() == "4/10 items, 1 failed, 1 reduced"
    assert progress.items_per_s(4.0) == pytest.approx(1.0), "recorded ones took no time"
    assert progress.left_s(4.0) == pytest.approx(5.0)
    assert progress.pace(4.0) == "1.0 items/s, 30 + 15 tokens, 5 s left"
    progress.receive(_completed("map-3"), 5.0)
    assert progress.left_s(5.0) is None, "nothing runs"


@dataclass
class Counts:
    """What a run counts."""

    completed_count: int = 0
    failed_count: int = 0


def test_items_of_several_tasks_are_counted_while_the_run_goes_on() -> None:
    """S-MR-185, S-MR-194: the tasks of a loop tell of no item's end; the run counts it, and nothing is counted twice."""
    progress, run = ItemProgress("", 4), Counts()
    progress.follow(run)
    progress.receive(_started("map-0"), 0.0)
    progress.receive(_completed("map-0#0/loop:refine#0/writer"), 1.0)
    assert progress.counts() == "0/4 items"
    run.completed_count = 1
    assert progress.counts() == "1/4 items"
    assert progress.block(2.0).bar == (1, 4)
    progress.receive(_completed("map-1"), 2.0)
    assert progress.counts() == "1/4 items", "the run may know of an item before its event is here, or behind it"
    run.completed_count, run.failed_count = 2, 1
    assert progress.counts() == "2/4 items, 1 failed"


def test_an_event_that_arrives_again_after_a_crash_counts_once() -> None:
    """S-MR-185: a task whose end was not yet known runs again, and tells of it again; the run counts items once."""
    progress, run = ItemProgress("", 4), Counts(completed_count=1, failed_count=1)
    progress.follow(run)
    for _ in range(2):
        progress.receive(_started("map-0"), 0.0)
        progress.receive(_failed("map-0"), 1.0)
        progress.receive(_completed("map-1"), 1.0)
    assert (progress.items_done, progress.items_failed) == (1, 1)


def test_a_resumed_run_counts_recorded_items_before_it_takes_them_again() -> None:
    """S-MR-185: the count does not begin again at 0."""
    progress, run = ItemProgress("", 10), Counts()
    progress.add_recorded(6, items=6)
    progress.follow(run)
    assert progress.counts() == "6/10 items"
    run.completed_count = 7
    assert progress.counts() == "7/10 items"


@pytest.mark.parametrize(("total", "shown"), [(2, "2/2 items"), (None, "2 items")])
def test_the_total_is_shown_where_it_is_known(total: int | None, shown: str) -> None:
    """S-MR-185: of how many, where that is known."""
    progress = ItemProgress("", total)
    for key in ("map-0", "map-1"):
        progress.receive(_started(key), 0.0)
        progress.receive(_completed(key), 1.0)
    assert progress.counts() == shown
    assert progress.left_s(1.0) is None


@pytest.mark.parametrize(("total", "shown"), [(5, "5 items in one task"), (None, "all items in one task")])
def test_all_items_are_told_of_where_one_task_had_them(total: int | None, shown: str) -> None:
    """S-MR-185, S-MR-82: the short-circuit's task is not one item of five."""
    progress = ItemProgress("", total)
    progress.receive(_started("direct"), 0.0)
    progress.receive(_completed("direct"), 1.0)
    assert progress.counts() == shown


def test_recorded_reduces_are_no_items() -> None:
    """S-MR-185: a resumed run has both on record."""
    progress = ItemProgress("", 10)
    progress.add_recorded(8, items=6)
    assert progress.counts() == "6/10 items, 2 reduced"


def test_a_log_shows_a_line_every_ten_seconds_and_the_first_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """S-MR-185: not one per item."""
    now = 0.0
    display = Display(ItemProgress("many", 1000), clock=lambda: now, is_live=False)
    listener = display.listener
    with display:
        listener.on_ensemble_started("r", "map", 1000)
        for number in range(60):
            now += 0.5
            listener.on_task_start(_started(f"map-{number}"))
            listener.on_task_complete(_completed(f"map-{number}"))
        for number in range(60, 100):
            listener.on_task_start(_started(f"map-{number}"))
            listener.on_task_failed(_failed(f"map-{number}", f"no {number}"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "    0.0 s  many: 1,000 items"
    assert [line.split()[0] for line in lines[1:4]] == ["10.0", "20.0", "30.0"]
    assert lines[1].startswith("   10.0 s  20/1,000 items, 0 running; ")
    assert lines[4] == "   30.0 s  failed   map-60: no 60"
    assert lines[-1].endswith("map-79: no 79; further ones are only counted")
    assert len(lines) == 24
    assert display.summary().startswith("60/1,000 items, 40 failed in 30.0 s")


def test_how_many_there_were_is_told_at_the_end_although_their_file_is_still_looked_through() -> None:
    """S-MR-185: a run that took all items knows how many there were."""
    goes_on, looking = threading.Event(), queue.SimpleQueue[threading.Thread]()

    def look() -> int:
        looking.put(threading.current_thread())
        goes_on.wait()
        return 9

    with Display(ItemProgress("a file", is_scanned=True), count=look, is_live=False) as display:
        for key in ("map-0", "map-1"):
            display.listener.on_task_start(_started(key))
            display.listener.on_task_complete(_completed(key))
    assert display.summary().startswith("2 items in ")
    assert display.summary(is_complete=True).startswith("2/2 items in ")
    goes_on.set()
    looking.get(timeout=60).join()
    assert display.summary(is_complete=True).startswith("2/2 items in ")


def test_the_block_shows_items_pace_and_a_bar_when_their_number_is_known() -> None:
    """S-MR-185: on a terminal; without a total there is no bar, and before the first end no pace."""
    progress = ItemProgress("many", 4)
    progress.receive(_started("map-0"), 0.0, is_live=True)
    assert progress.block(1.0) == Block(counts="0/4 items, 1 running", bar=(0, 4))
    assert progress.receive(_completed("map-0"), 2.0, is_live=True) is None
    assert progress.block(2.0) == Block(counts="1/4 items, 0 running", bar=(1, 4), pace="0.5 items/s, 10 + 5 tokens")
    assert ItemProgress("many").block(0.0) == Block(counts="0 items, 0 running", bar=None, is_idle=True)


def test_batches_are_shown_while_no_item_is_done() -> None:
    """S-BAT-42: a line per change in a log, their sum on a terminal."""
    progress = ItemProgress("many", 4)
    first = BatchProgressEvent(batch="a", state="planned", status="", total=3, answered=0, failed=0)
    assert progress.receive(first, 0.0) == "batch    a: planned, 0 of 3 answered"
    waiting = replace(first, state="submitted", status="in_progress", answered=2, provider_batch="batch_1")
    assert progress.receive(waiting, 1.0) == "batch    batch_1: in_progress, 2 of 3 answered"
    assert (
        progress.receive(replace(first, batch="b", state="collected", total=1, answered=1), 2.0, is_live=True) is None
    )
    assert progress.block(2.0) == Block(
        counts="0/4 items, 0 running", bar=(0, 4), lines=("  1 of 2 batches open, 3 of 4 requests answered",)
    )


def test_events_of_model_calls_are_not_sent_when_a_run_is_over_many_items() -> None:
    """Of a hundred thousand items only the beginnings and ends of tasks are shown."""
    shown = {"on_ensemble_started", "on_task_start", "on_task_complete", "on_task_failed"}
    assert wanted_by(Display(ItemProgress()).listener) == {*shown, "on_batch_progress"}
    assert wanted_by(Display(TaskProgress()).listener) == shown | {
        "on_tool_call",
        "on_delegation_started",
        "on_delegation_completed",
        "on_delegation_failed",
        "on_llm_iteration_started",
        "on_llm_iteration_completed",
        "on_loop_iteration_completed",
        "on_graph_state_completed",
    }
