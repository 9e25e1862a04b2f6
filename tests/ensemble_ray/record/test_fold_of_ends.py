"""Tasks that did not complete, as the fold of a run's facts tells of them."""

from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.view.exporters import recorded_spans

from .facts_of_runs import begun, ended, fact, model, node

READ = node("read", "Read Ray")


def test_handler_that_ended_the_run_has_no_unknown_outcome() -> None:
    """S-DUR-138, S-DET-10: it asked for that; one that never came back has."""
    asked = fact("tool_intent", "read#0/0/handler", 102, tool_name="handler", arguments="", effect="once")
    left = fact("task_exited", "read#0", 103, reason="user_exit_early")
    (exited,) = fold_trace([*begun(READ), asked, left, ended(108)]).task_traces
    (lost,) = fold_trace([*begun(READ), asked]).task_traces
    assert ("outcome" in exited.metadata, lost.metadata["outcome"]) == (False, "unknown")


def test_tasks_that_did_not_complete_stand_in_the_order_of_their_ends() -> None:
    """S-DUR-138: as the run tells them; one that was stopped says so, whatever became of the run."""
    told = [
        fact("stimulus", f"{key}#0", at, type=kind, key=key, at=at)
        for key, at, kind in (("b", 105.0, "TaskCancelled"), ("a", 106.0, "TaskCancelled"))
    ]
    facts = [*begun(node("a", "A"), node("b", "B")), model("a#0", 0, 102), model("b#0", 0, 103), *told, ended(108)]
    traces = fold_trace(facts).task_traces
    assert [(each.task_description, each.metadata["state"]) for each in traces] == [
        ("B", "cancelled"),
        ("A", "cancelled"),
    ]


def test_span_of_delegated_work_has_the_role_of_its_agent_when_it_did_not_end() -> None:
    """S-INT-39: as live, however the model wrote the role."""
    agents = [{"key": "w", "role": "Writer", "goal": "Write"}]
    facts = [
        *begun(plan={"workflow": "sequential", "nodes": [READ], "agents": agents}),
        model("read#0", 0, 102, calls=["delegate"]),
        fact(
            "delegation",
            "read#0/0/call-0",
            103,
            request={"agent_role": "writer ", "task_description": "write"},
            worker="w",
        ),
        model("read#0/0/call-0/delegate#0", 0, 104),
    ]
    assert "invoke_agent Writer" in {span.name for span in recorded_spans(facts)}
