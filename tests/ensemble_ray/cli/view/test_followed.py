"""Messages of a record as the events that progress is made of."""

from __future__ import annotations

from collections.abc import Mapping

from ensemble_ray.cli.view.followed import event_of
from ensemble_ray.cli.view.progress import ItemProgress, TaskProgress
from ensemble_ray.events.messages import WireEvent

TASK = {"instance": "draft#0", "task_description": "d", "agent_role": "Writer", "task_index": 1, "total_tasks": 2}
ANSWER = {"instance": "draft#0", "agent_role": "Writer", "input_tokens": 10, "output_tokens": 5, "latency_ms": 500}
ASKED = {"instance": "draft#0", "delegation_id": "1", "delegating_agent_role": "Writer", "worker_role": "Reader"}


def _lines(progress: TaskProgress | ItemProgress, *messages: tuple[str, Mapping[str, object]]) -> list[str]:
    found = [event_of(WireEvent(type=name, data=data)) for name, data in messages]
    received = [progress.receive(event, at) for at, event in enumerate(found) if event is not None]
    return [line for line in received if line is not None]


def test_a_run_is_shown_as_its_record_tells_it() -> None:
    """S-CLU-21: with the counts and the lines of a run that is driven here."""
    progress = TaskProgress("r")
    lines = _lines(
        progress,
        ("ensemble_started", {"ensemble_id": "r", "workflow": "sequential", "total_tasks": 2}),
        ("task_started", TASK),
        ("delegation_started", {**ASKED, "task_description": "read"}),
        ("delegation_failed", {**ASKED, "duration_ms": 3, "reason": "blind"}),
        ("delegation_failed", {**ASKED, "duration_ms": 0, "reason": "not allowed"}),
        ("llm_iteration_completed", ANSWER),
        ("tool_called", {**TASK, "tool_name": "t", "duration_ms": 1, "outcome": "success"}),
        ("token", {"token": "a"}),
        ("task_completed", {**TASK, "duration_ms": 1500}),
        ("task_failed", {**TASK, "instance": "final#0", "reason": "no disk"}),
    )
    assert lines[0] == "r: 2 tasks, sequential"
    assert [line.split()[0] for line in lines[1:]] == ["started", "asks", "failed", "refused", "done", "failed"]
    assert "draft (Writer) in 1.5 s; 1 model call, 10 + 5 tokens, 1 tool call" in lines[5]  # their pace is not known
    assert progress.counts() == "1 of 2 tasks, 1 failed"
    assert (progress.tool_calls, progress.refusals, progress.failed_delegations) == (1, 1, 1)


def test_loops_and_graphs_have_their_lines() -> None:
    """S-CLU-21."""
    loop = {"loop_name": "refine", "iteration_number": 1, "max_iterations": 3, "iteration_duration_ms": 1000}
    step = {"graph_name": "g", "state_name": "a", "next_state": "b", "step_number": 1, "max_steps": 9}
    lines = _lines(TaskProgress("r"), ("loop_iteration_completed", loop), ("graph_state_completed", step))
    assert lines == [
        "loop     refine: iteration 1 of at most 3 in 1.0 s",
        "graph    g: a -> b, step 1 of at most 9 in 0.0 s",
    ]


def test_items_are_counted_with_the_tokens_of_their_answers() -> None:
    """S-CLU-21, S-MET-38: also of those that fail; a message about a task's end has no input and output tokens."""
    progress = ItemProgress("r")
    item = {**TASK, "instance": "map-1#0"}
    again = {**ANSWER, "instance": "map-1#0"}
    _lines(progress, ("task_started", item), *[("llm_iteration_completed", again)] * 2, ("task_completed", item))
    assert (progress.items_done, progress.input_tokens, progress.output_tokens) == (1, 20, 10)
    other = {"instance": "map-2#0"}
    _lines(progress, ("llm_iteration_completed", {**again, **other}), ("task_failed", {**item, **other, "reason": "x"}))
    assert (progress.items_failed, progress.input_tokens, progress.output_tokens) == (1, 30, 15)
