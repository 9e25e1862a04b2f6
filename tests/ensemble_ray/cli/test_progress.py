"""Progress: counts folded from events, shown as lines or as a block."""

from __future__ import annotations

import io
import logging
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray.cli.display import Display
from ensemble_ray.cli.progress import Tally
from ensemble_ray.events import (
    EnsembleStartedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
    ToolCallEvent,
)
from ensemble_ray.outputs import TaskOutput
from ensemble_ray.values import utc_of


def _task(key: str, role: str = "Writer") -> dict[str, Any]:
    return {"instance": f"{key}#0", "task_description": key, "agent_role": role, "task_index": 1, "total_tasks": 3}


def _started(key: str, role: str = "Writer") -> TaskStartEvent:
    return TaskStartEvent(**_task(key, role))


def _completed(key: str) -> TaskCompleteEvent:
    output = TaskOutput(
        raw="x", task_description=key, agent_role="W", completed_at=utc_of(0), duration=timedelta(seconds=2)
    )
    return TaskCompleteEvent(**_task(key), task_output=output, duration=timedelta(seconds=2))


def _failed(key: str, error: Exception) -> TaskFailedEvent:
    return TaskFailedEvent(**_task(key), cause=error, duration=timedelta(seconds=1))


def _asked() -> LlmIterationStartedEvent:
    return LlmIterationStartedEvent(agent_role="W", task_description="d", iteration_index=0, messages=())


def _answered(tokens: int) -> LlmIterationCompletedEvent:
    return LlmIterationCompletedEvent(
        agent_role="W",
        task_description="d",
        iteration_index=0,
        response_type="final_answer",
        response_text="x",
        tool_requests=(),
        input_tokens=100,
        output_tokens=tokens,
        latency=timedelta(seconds=1),
    )


BEGIN = EnsembleStartedEvent(ensemble_id="r", workflow="parallel", total_tasks=3)
TOOL = ToolCallEvent(
    tool_name="t",
    tool_arguments="{}",
    tool_result="x",
    agent_role="W",
    duration=timedelta(),
    task_index=1,
    outcome="success",
)


def test_counts_follow_the_events() -> None:
    """Done, failed, running, model calls in flight, tokens, tool calls; a handler's task is no agent's."""
    tally = Tally()
    events = [BEGIN, _started("a"), _started("b"), _asked(), _asked(), _answered(30), TOOL, _completed("a")]
    for at, event in enumerate(events):
        tally.take(event, float(at))
    assert (tally.total_tasks, tally.done, tally.failed) == (3, 1, 0)
    assert [(task.label, task.started_at) for task in tally.running] == [("b", 2.0)]
    assert (tally.model_calls, tally.calls_open, tally.tool_calls) == (1, 1, 1)
    assert (tally.input_tokens, tally.output_tokens) == (100, 30)
    tally.take(_started("c", "(deterministic)"), 8.0)
    assert tally.agents == 1


def test_tokens_per_second_count_from_the_first_model_call() -> None:
    """While calls are open until now, afterwards until the last answer, so that the figure does not fade."""
    tally = Tally()
    assert tally.tokens_per_s(5.0) == 0
    for at, event in ((2.0, _asked()), (4.0, _answered(40)), (4.0, _asked())):
        tally.take(event, at)
    assert tally.tokens_per_s(6.0) == 10
    tally.take(_answered(40), 6.0)
    assert tally.tokens_per_s(60.0) == 20


def test_no_call_stays_open_when_all_tasks_have_ended() -> None:
    """A model call that failed has no event of its own."""
    tally = Tally()
    for event in (BEGIN, _started("a"), _asked(), _failed("a", OSError("gone"))):
        tally.take(event, 1.0)
    assert (tally.calls_open, tally.failed) == (0, 1)


class Seconds:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_are_written_when_nobody_watches_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per start and end, with the time since the beginning."""
    clock = Seconds()
    with Display("team.yaml", clock=clock, is_live=False) as display:
        display.listener.on_ensemble_started("r", "parallel", 3)
        clock.now += 1.5
        display.listener.on_task_start(_started("a"))
        clock.now += 2
        display.listener.on_task_complete(_completed("a"))
        display.listener.on_task_failed(_failed("b", OSError("no\nwire")))
    assert capsys.readouterr().err.splitlines() == [
        "    0.0 s  team.yaml: 3 tasks, parallel",
        "    1.5 s  started  a (Writer)",
        "    3.5 s  done     1/3  a (Writer) in 2.0 s; 0 model calls, 0 + 0 tokens, 0 tokens/s",
        "    3.5 s  failed   2/3  b (Writer): no wire",
    ]
    assert display.summary() == "1 of 3 tasks, 1 failed in 3.5 s: 0 model calls, 0 + 0 tokens, 0 tokens/s"


def test_nothing_is_written_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """But counts are kept."""
    with Display("t", is_quiet=True) as display:
        display.listener.on_ensemble_started("r", "parallel", 1)
        display.listener.on_task_failed(_failed("a", OSError("x")))
        display.note("starting")
    assert capsys.readouterr().err == ""
    assert display.tally.failed == 1


def test_warnings_of_the_library_stand_among_the_lines_when_they_are_news(capsys: pytest.CaptureFixture[str]) -> None:
    """What the command line tells of a failure anyway is not told twice."""
    log = logging.getLogger("ensemble_ray.anything")
    with Display("t", is_live=False):
        log.warning("Agent '%s' is idle", "B")
        log.error("Run failed: %s", "x")
        log.info("not for here")
    log.warning("nobody listens any more")
    assert capsys.readouterr().err.splitlines()[0] == "  warning: Agent 'B' is idle"


def test_the_block_shows_what_is_going_on() -> None:
    """On a terminal: tasks done, running and in all, agents, model calls, tokens per second, time."""
    from rich.console import Console

    clock = Seconds()
    display = Display("demo on ray", clock=clock, is_live=True)
    for number in range(12):
        display.listener.on_task_start(_started(f"read-{number}", f"Reader {number % 2}"))
    display.listener.on_ensemble_started("r", "parallel", 14)
    display.listener.on_llm_iteration_started(_asked())
    clock.now += 4
    console = Console(file=io.StringIO(), width=100)
    console.print(display._block())
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "demo on ray" in shown
    assert "0/14 tasks, 12 running, 4 s" in shown
    assert "2 agents, 0 model calls (+1 open)" in shown
    assert "read-0  Reader 0  4 s" in shown
    assert "and 4 more" in shown


def test_what_the_record_has_counts_as_done_when_a_run_goes_on() -> None:
    """S-DUR-50, S-DUR-51: `2 of 3 tasks` are those of the whole run."""
    tally = Tally()
    tally.is_recorded(2)
    tally.take(BEGIN, 0.0)
    assert (tally.done, tally.total_tasks) == (2, 3)
