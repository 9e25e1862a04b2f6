"""Outputs of iterations as one."""

from __future__ import annotations

from datetime import timedelta

from ensemble_ray import TaskOutput
from ensemble_ray.values.task_output import join_iterations
from ensemble_ray.values.value import utc_of


def output(raw: str, at: float, parsed: object = None) -> TaskOutput:
    """What an iteration gave."""
    return TaskOutput(
        raw=raw,
        task_description="write",
        agent_role="Writer",
        completed_at=utc_of(at),
        duration=timedelta(seconds=at),
        parsed_output=parsed,
    )


def test_texts_of_iterations_are_joined_with_headers_from_the_second_on() -> None:
    """S-LOOP-72, S-LOOP-73: also where a text is empty; all else is of the first one, and nothing is parsed."""
    first = output("one", 1.0, {"n": 1})
    joined = join_iterations([first, output("", 2.0, {"n": 2}), output("three", 3.0)])
    assert joined.raw == "one\n\n--- iteration 2 ---\n\n\n\n--- iteration 3 ---\n\nthree"
    assert joined == first.model_copy(update={"raw": joined.raw, "parsed_output": None})


def test_single_iteration_keeps_its_text() -> None:
    """S-LOOP-74: as `last_iteration` gives it; S-LOOP-73: what is parsed is no part of it."""
    joined = join_iterations([output("one", 1.0, {"n": 1})])
    assert (joined.raw, joined.parsed_output) == ("one", None)
