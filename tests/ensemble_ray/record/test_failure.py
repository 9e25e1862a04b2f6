"""What is said of a failed run, and what to do next."""

from __future__ import annotations

from ensemble_ray.facts.runs import RecordedCause, RecordedError
from ensemble_ray.record.failure import FailedAttempt, NextStep, RunFailure, remedy_for


def test_the_lines_say_what_why_where_how_often_and_what_to_do() -> None:
    """S-STU-210, S-STU-211: causes that add nothing are left out, and so are control characters."""
    causes = [RecordedCause("ValueError", "no total"), RecordedCause("KeyError", "'total'")]
    failure = RunFailure(
        what="Task 'read' failed",
        error=RecordedError("read", "OutputParsingError", "no total", place='File "team.py", line 3, in pick', causes=causes),
        step="read#0",
        others=2,
        answer="\x1b[31m{}",
        refusal="'total': Field required",
        attempts=[FailedAttempt(10.0, 12.5, 2.0), FailedAttempt(20.0, 20.5)],
        requests=5,
        remedy="Raise max_output_retries.",
        next=NextStep("Reuse its results", "ensemble-ray fork run-1 --from read"),
        fork_from="read",
    )  # fmt: skip
    lines = failure.lines()
    assert "\x1b" not in "".join(lines)
    assert [*lines[:4], *lines[5:]] == [
        "Task 'read' failed",
        "OutputParsingError: no total",
        "caused by KeyError: 'total'",
        'File "team.py", line 3, in pick',
        "Refused: 'total': Field required",
        "2 attempts: 2.50 s, 2.00 s of it for a rate limit, 500 ms; its last model call: 5 requests",
        "and 2 more errors",
        "What to do: Raise max_output_retries.",
        "Reuse its results: ensemble-ray fork run-1 --from read",
    ]


def test_the_remedy_is_that_of_the_innermost_class_that_has_one() -> None:
    """The outer errors name the place, the inner ones the reason."""
    assert "max_output_retries" in remedy_for(["TaskExecutionError", "OutputParsingError", "ValueError"])
    assert "doctor" in remedy_for(["OutputParsingError", "AuthenticationError"])
    assert not remedy_for(["ValueError"])
