"""Progress: counts folded from events, shown as lines or as a block."""

from __future__ import annotations

import io
import logging
import threading
from datetime import timedelta
from typing import Any

import pytest

from ensemble_ray import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationRequest,
    DelegationResponse,
    DelegationStartedEvent,
    DelegationStatus,
    EnsembleStartedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskOutput,
    TaskStartEvent,
    ToolCallEvent,
)
from ensemble_ray.cli.view.progress import Display, TaskProgress
from ensemble_ray.values.value import utc_of


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
    progress = TaskProgress()
    events = [BEGIN, _started("a"), _started("b"), _asked(), _asked(), _answered(30), TOOL, _completed("a")]
    for at, event in enumerate(events):
        progress.receive(event, float(at))
    assert (progress.total_tasks, progress.done, progress.failed) == (3, 1, 0)
    assert [(task.label, task.started_at) for task in progress.running] == [("b", 2.0)]
    assert (progress.model_calls, progress.calls_open, progress.tool_calls) == (1, 1, 1)
    assert (progress.input_tokens, progress.output_tokens) == (100, 30)
    progress.receive(_started("c", "(deterministic)"), 8.0)
    assert progress.agents == 1


def test_an_end_that_arrives_again_after_a_crash_counts_once() -> None:
    """S-MR-185: an end that arrives twice is one end, in a planned run too."""
    progress = TaskProgress()
    for _ in range(2):
        progress.receive(_started("draft"), 0.0)
        progress.receive(_completed("draft"), 1.0)
        progress.receive(_failed("check", ValueError("no")), 1.0)
    assert (progress.done, progress.failed, len(progress.running)) == (1, 1, 0)


def test_tokens_per_second_count_from_the_first_model_call() -> None:
    """While calls are open until now, afterwards until the last answer, so that the figure does not fade."""
    progress = TaskProgress()
    assert progress.tokens_per_s(5.0) == 0
    for at, event in ((2.0, _asked()), (4.0, _answered(40)), (4.0, _asked())):
        progress.receive(event, at)
    assert progress.tokens_per_s(6.0) == 10
    progress.receive(_answered(40), 6.0)
    assert progress.tokens_per_s(60.0) == 20


def test_no_call_stays_open_when_all_tasks_have_ended() -> None:
    """A model call that failed has no event of its own."""
    progress = TaskProgress()
    for event in (BEGIN, _started("a"), _asked(), _failed("a", OSError("gone"))):
        progress.receive(event, 1.0)
    assert (progress.calls_open, progress.failed) == (0, 1)


class Seconds:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_are_written_when_nobody_watches_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """S-ERR-46: one line per start and end, with the time since the beginning; why one failed, the run's error tells."""
    clock = Seconds()
    with Display(TaskProgress("team.yaml"), clock=clock, is_live=False) as display:
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
        "    3.5 s  failed   2/3  b (Writer)",
    ]
    assert display.summary() == "1 of 3 tasks, 1 failed in 3.5 s: 0 model calls, 0 + 0 tokens, 0 tokens/s"


def test_lines_are_few_when_tasks_are_many(capsys: pytest.CaptureFixture[str]) -> None:
    """S-MR-161: of a run over many items; how many there are need not be known."""
    clock = Seconds()
    with Display(TaskProgress("many"), clock=clock, is_live=False) as display:
        display.listener.on_ensemble_started("r", "map", 0)
        for number in range(1100):
            display.listener.on_task_complete(_completed(f"map-{number}"))
        clock.now += 5
        display.listener.on_task_complete(_completed("map-1100"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("many: map")
    assert len(lines) == 1002
    assert "done     1101  map-1100" in lines[-1]
    assert display.summary().startswith("1101 tasks in 5.0 s")


def test_nothing_is_written_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """But counts are kept."""
    progress = TaskProgress("t")
    with Display(progress, is_quiet=True) as display:
        display.listener.on_ensemble_started("r", "parallel", 1)
        display.listener.on_task_failed(_failed("a", OSError("x")))
        display.note("starting")
    assert capsys.readouterr().err == ""
    assert progress.failed == 1


def test_warnings_of_the_library_stand_among_the_lines_when_they_are_news(capsys: pytest.CaptureFixture[str]) -> None:
    """What the command line tells of a failure anyway is not told twice."""
    log = logging.getLogger("ensemble_ray.anything")
    with Display(TaskProgress("t"), is_live=False):
        log.warning("Agent '%s' is idle", "B")
        log.warning("Run %s: %s failed and is left out%s", "r", "map-1", ": x")
        log.info("not for here")
    log.warning("nobody listens any more")
    assert capsys.readouterr().err.splitlines()[0] == "  warning: Agent 'B' is idle"


def test_the_block_shows_what_is_going_on() -> None:
    """On a terminal: tasks done, running and in all, agents, model calls, tokens per second, time."""
    from rich.console import Console

    clock = Seconds()
    display = Display(TaskProgress("demo on ray"), clock=clock, is_live=True)
    for number in range(12):
        display.listener.on_task_start(_started(f"read-{number}", f"Reader {number % 2}"))
    display.listener.on_ensemble_started("r", "parallel", 14)
    display.listener.on_llm_iteration_started(_asked())
    clock.now += 4
    console = Console(file=io.StringIO(), width=100)
    console.print(display._render())
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "demo on ray" in shown
    assert "0/14 tasks, 12 running, 4 s" in shown
    assert "2 agents, 0 model calls (+1 open)" in shown
    assert "read-0  Reader 0  4 s" in shown
    assert "and 4 more" in shown


def test_what_the_record_has_counts_as_done_when_a_run_goes_on() -> None:
    """S-DUR-50, S-DUR-51: `2 of 3 tasks` are those of the whole run."""
    progress = TaskProgress()
    progress.add_recorded(2)
    progress.receive(BEGIN, 0.0)
    assert (progress.done, progress.total_tasks) == (2, 3)


def test_what_the_record_has_is_told_before_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    """S-DUR-51: events come on a thread of their own, and may come before the run's handle does."""
    with Display(TaskProgress("t"), clock=Seconds(), is_live=False) as display:
        listener = display.listener
        happening = threading.Thread(
            target=lambda: (
                listener.on_ensemble_started("r", "parallel", 3),
                listener.on_task_complete(_completed("c")),
            )
        )
        with display.hold():
            happening.start()
            happening.join(0.1)
            assert capsys.readouterr().err == ""
            display.add_recorded(2)
        happening.join()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["2 tasks from the record", "    0.0 s  t: 3 tasks, parallel"]
    assert lines[2].startswith("    0.0 s  done     3/3  c ")


def _asks(
    worker: str, number: int = 1, *, instance: str = "manager#0", asker: str = "Manager"
) -> DelegationStartedEvent:
    request = DelegationRequest(task_id=f"d{number}", agent_role=worker, task_description="Find\nfacts")
    return DelegationStartedEvent(
        instance=instance,
        delegation_id=f"d{number}",
        delegating_agent_role=asker,
        worker_role=worker,
        task_description=request.task_description,
        delegation_depth=1,
        request=request,
    )


def _answers(asked: DelegationStartedEvent, text: str) -> DelegationCompletedEvent:
    response = DelegationResponse(
        task_id=asked.delegation_id, status=DelegationStatus.SUCCESS, worker_role=asked.worker_role, raw_output=text
    )
    return DelegationCompletedEvent(
        instance=asked.instance,
        delegation_id=asked.delegation_id,
        delegating_agent_role=asked.delegating_agent_role,
        worker_role=asked.worker_role,
        response=response,
        duration=timedelta(seconds=2),
    )


def _fails(asked: DelegationStartedEvent, why: str, cause: Exception | None = None) -> DelegationFailedEvent:
    response = DelegationResponse(
        task_id=asked.delegation_id, status=DelegationStatus.FAILURE, worker_role=asked.worker_role, errors=[why]
    )
    return DelegationFailedEvent(
        instance=asked.instance,
        delegation_id=asked.delegation_id,
        delegating_agent_role=asked.delegating_agent_role,
        worker_role=asked.worker_role,
        failure_reason=why,
        cause=cause,
        response=response,
        duration=timedelta(seconds=2),
    )


def test_delegations_are_counted_by_what_came_of_them() -> None:
    """S-DEL-51, S-DEL-52: what a worker raised has a cause and failed; the rest was refused. Workers are agents too."""
    progress = TaskProgress()
    asked, again = _asks("Researcher", 1), _asks("Researcher", 2)
    progress.receive(BEGIN, 0.0)
    progress.receive(_started("manager", "Manager"), 0.0)
    for event in (
        asked,
        _answers(asked, "gold"),
        again,
        _fails(again, "no", OSError("no")),
        _fails(_asks("W", 3), "cap"),
    ):
        progress.receive(event, 1.0)
    assert progress.pace(1.0).endswith(", 2 delegations (1 refused, 1 failed)")
    assert progress.agents == 2
    (task,) = progress.running
    assert progress.list_delegations(task) == ()


def test_who_works_for_a_task_is_known_until_that_ends() -> None:
    """Nested ones belong to the task of the plan above them; who is stopped with it has no event of its own."""
    progress = TaskProgress()
    inner = _asks("Writer", 2, instance="draft#0/1/call-0/delegate#0", asker="Editor")
    for event in (BEGIN, _started("draft"), _started("other"), _asks("Editor", 1, instance="draft#0"), inner):
        progress.receive(event, 1.0)
    draft, other = progress.running
    assert [(each.asker_role, each.worker_role, each.depth) for each in progress.list_delegations(draft)] == [
        ("Manager", "Editor", 1),
        ("Editor", "Writer", 2),
    ]
    assert progress.list_delegations(other) == ()
    progress.receive(_failed("draft", OSError("x")), 2.0)
    assert progress.list_delegations(draft) == ()


def test_lines_tell_who_asks_whom_and_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Indented by depth, each on one line; the library's own warning of a failed delegation is not told twice."""
    inner = _asks("Writer", 2, instance="manager#0/0/call-0/delegate#0", asker="Editor")
    asked = _asks("Editor")
    with Display(TaskProgress("t"), clock=Seconds(), is_live=False) as display:
        listener = display.listener
        listener.on_delegation_failed(_fails(_asks("Writer", 3), "Delegation rejected by policy: stage 1"))
        listener.on_delegation_started(asked)
        listener.on_delegation_started(inner)
        listener.on_delegation_failed(_fails(inner, "no wire", OSError("no wire")))
        logging.getLogger("ensemble_ray.execute").warning(
            "Delegation by '%s' to '%s' failed: %s", "Editor", "Writer", "no wire"
        )
        listener.on_delegation_completed(_answers(asked, "A\ntext"))
    assert [line.removeprefix("    0.0 s  ") for line in capsys.readouterr().err.splitlines()] == [
        "refused    Manager -> Writer: Delegation rejected by policy: stage 1",
        "asks       Manager -> Editor: Find facts",
        "asks         Editor -> Writer: Find facts",
        "failed       Editor -> Writer: no wire",
        "answered   Manager <- Editor in 2.0 s: A text",
    ]


def test_the_block_shows_workers_below_the_task_that_waits_for_them() -> None:
    """On a terminal, the first eight of each task."""
    from rich.console import Console

    clock = Seconds()
    display = Display(TaskProgress("t"), clock=clock, is_live=True)
    display.listener.on_task_start(_started("manager", "Manager"))
    for number in range(9):
        display.listener.on_delegation_started(_asks(f"Reader {number}", number))
    display.listener.on_ensemble_started("r", "hierarchical", 1)
    clock.now += 3
    console = Console(file=io.StringIO(), width=100)
    console.print(display._render())
    shown = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]  # a StringIO
    at = next(place for place, line in enumerate(shown) if "manager  Manager" in line)
    assert shown[at + 1] == "    \u21b3 Manager asks Reader 0  3 s"
    assert shown[at + 9] == "      and 1 more"
    assert "9 delegations" in shown[1]
