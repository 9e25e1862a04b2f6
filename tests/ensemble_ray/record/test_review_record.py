"""Review gates in a record: in the trace, and for a run that goes on."""

from __future__ import annotations

from ensemble_ray import ExitReason
from ensemble_ray.record.resume.planned import PlannedResumeReader
from ensemble_ray.record.trace import fold_trace
from tests.ensemble_ray.record.facts_of_runs import begun, fact, node, output
from tests.ensemble_ray.record.test_recovery import resumed

READ, EDIT = node("read", "Read Ray"), node("edit", "Edit")


def test_exit_behind_a_task_is_told_with_its_output_when_its_process_died_before_it_could() -> None:
    """S-REV-83: the run does not go on as if the task had only completed."""
    ends = [
        fact("output", "read#0", 104, output=output("Read Ray", "x")),
        fact("task_exited", "read#0", 104, reason="timeout"),
    ]
    kept = resumed(PlannedResumeReader.of([*begun(READ, EDIT), *ends])).results["read#0"]
    assert (kept.status, kept.exit_reason, kept.failure) == ("exited", ExitReason.TIMEOUT, None)


def test_gates_of_an_unfinished_task_stand_in_its_trace() -> None:
    """S-REV-85: one that is open waits; what was decided is told with who and when."""
    asked = {
        "review_id": "g",
        "timing": "before_execution",
        "task_description": "Read Ray",
        "on_timeout": "fail",
        "ends_run": True,
    }
    facts = [*begun(READ), fact("review", "read#0/0/before-review", 103, **asked)]
    (trace,) = fold_trace(facts).task_traces
    waiting = {
        "review_id": "g",
        "timing": "before_execution",
        "asked_at": "1970-01-01T00:01:43+00:00",
        "verdict": "waiting",
    }
    assert trace.metadata["reviews"] == [waiting]
    facts.append(
        fact("review_decision", "read#0/0/before-review", 104, verdict="edit", text="New", by="Ann", comment="why")
    )
    (trace,) = fold_trace(facts).task_traces
    assert trace.metadata["reviews"] == [
        {
            **waiting,
            "verdict": "edit",
            "by": "Ann",
            "decided_at": "1970-01-01T00:01:44+00:00",
            "comment": "why",
            "original": "",
            "text": "New",
        }
    ]
