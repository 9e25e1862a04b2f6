"""What a loop is, and what it refuses to be."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pydantic
import pytest

from ensemble_ray import (
    IllegalStateError,
    Loop,
    LoopIterationContext,
    LoopMemoryMode,
    LoopOutputMode,
    MaxIterationsAction,
    TaskOutput,
    Until,
    ValidationError,
)
from ensemble_ray.values.value import utc_of
from tests.builders import task_after as task


class Report(pydantic.BaseModel):
    """A typed answer."""

    score: float


WRITE = task("Write", name="write")
CRITICISE = task("Criticise", WRITE, name="critic")


def loop(**fields: object) -> Loop:
    """A loop named `x`."""
    return Loop(**{"name": "x", "body": [WRITE], **fields})  # type: ignore[arg-type]


def refusal(**fields: object) -> str:
    """The text that a loop of these fields is refused with."""
    with pytest.raises(ValidationError) as caught:
        loop(**fields)
    return str(caught.value)


def test_fields_have_their_defaults_when_only_name_and_body_are_given() -> None:
    """S-LOOP-1."""
    made = loop()
    assert (made.name, made.body, made.until, made.max_iterations, made.context) == ("x", (WRITE,), None, 5, ())
    assert made.on_max_iterations is MaxIterationsAction.RETURN_LAST
    assert made.output_mode is LoopOutputMode.LAST_ITERATION
    assert (made.memory_mode, made.memory_window_size) == (LoopMemoryMode.ACCUMULATE, 0)
    assert (made.inject_feedback, made.max_tokens) == (True, None)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        made.name = "y"


def test_words_become_members_when_modes_are_written_as_text() -> None:
    """S-LOOP-1: the values of the modes."""
    made = loop(on_max_iterations="throw", output_mode="all_iterations", memory_mode="window", memory_window_size=3)
    assert made.on_max_iterations is MaxIterationsAction.THROW
    assert made.output_mode is LoopOutputMode.ALL_ITERATIONS
    assert made.memory_mode is LoopMemoryMode.WINDOW
    assert "Did you mean 'final_task_only'?" in refusal(output_mode="final_task")


NO_STOP = "Loop 'x' must declare either an 'until' predicate or a positive max_iterations (or both)"
OUTSIDE = (
    "Loop 'x' body task 'critic' declares context on a task outside the loop body. "
    "Outer dependencies must be declared with the Loop's own context."
)
TWICE = "Loop 'x' body has duplicate task name/description: 'write'. Body tasks must be uniquely identifiable."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"name": None}, "Loop name must be non-blank", id="S-LOOP-10-none"),
        pytest.param({"name": " "}, "Loop name must be non-blank", id="S-LOOP-10"),
        pytest.param({"body": []}, "Loop 'x' body must contain at least one task", id="S-LOOP-11"),
        pytest.param({"body": None}, "Loop 'x' body must contain at least one task", id="S-LOOP-11-none"),
        pytest.param({"max_iterations": 0}, "Loop 'x' max_iterations must be >= 1, got: 0", id="S-LOOP-12"),
        pytest.param({"max_iterations": None}, NO_STOP, id="S-LOOP-13"),
        pytest.param(
            {"memory_mode": "window"},
            "Loop 'x' has memory_mode=window but memory_window_size (0) must be >= 1",
            id="S-LOOP-14",
        ),
        pytest.param(
            {"memory_window_size": 2, "memory_mode": LoopMemoryMode.FRESH_PER_ITERATION},
            "Loop 'x' has memory_window_size=2 but memory_mode=fresh_per_iteration. "
            "memory_window_size is only meaningful with memory_mode=window",
            id="S-LOOP-15",
        ),
        pytest.param({"body": [WRITE, None]}, "Loop 'x' body must not contain None", id="S-LOOP-16"),
        pytest.param({"body": [WRITE, task("Other", name="write")]}, TWICE, id="S-LOOP-17"),
        pytest.param({"body": [WRITE, task("write")]}, TWICE, id="S-LOOP-21"),
        pytest.param({"body": [CRITICISE]}, OUTSIDE, id="S-LOOP-18"),
        pytest.param({"body": [WRITE.replace(), CRITICISE]}, OUTSIDE, id="S-LOOP-22"),
        pytest.param(
            {"body": [CRITICISE, WRITE]},
            "Loop 'x' body task 'critic' declares context on body task 'write', which does not come before it",
            id="S-LOOP-23",
        ),
        pytest.param({"max_tokens": 0}, "Loop 'x' max_tokens must be >= 1 when set, got: 0", id="S-LOOP-163"),
        pytest.param({"until": "done"}, "Loop 'x' until must be a callable, got: str", id="S-LOOP-164"),
        pytest.param(
            {"until": Until.parsed(bool)},
            "Loop 'x' until is Until.parsed, and its last body task 'write' has no output_type to parse",
            id="S-LOOP-165",
        ),
        pytest.param({"context": [None]}, "Loop 'x' context element at index 0 must not be None", id="context-none"),
        pytest.param(
            {"context": ["facts"]}, "Loop 'x' context element at index 0 must be a Task, got: str", id="context-text"
        ),
    ],
)
def test_loop_is_refused_when_a_check_fails(fields: dict[str, object], message: str) -> None:
    """S-LOOP-10 to S-LOOP-18, S-LOOP-21 to S-LOOP-23, S-LOOP-163 to S-LOOP-165: exact texts."""
    assert refusal(**fields) == message


def test_first_check_counts_when_several_fail() -> None:
    """S-LOOP-10 to S-LOOP-18 run in their order; S-LOOP-19: the range of the cap before its lack."""
    assert refusal(name="", body=[]) == "Loop name must be non-blank"
    assert refusal(body=[], max_iterations=0).endswith("at least one task")
    assert refusal(max_iterations=0, memory_mode="window") == "Loop 'x' max_iterations must be >= 1, got: 0"
    assert refusal(max_iterations=None, memory_mode="window") == NO_STOP
    assert "memory_window_size (0)" in refusal(memory_mode="window", body=[None])
    assert refusal(body=[None, WRITE, WRITE]) == "Loop 'x' body must not contain None"
    assert refusal(body=[WRITE, WRITE, CRITICISE.replace(context=[task("Else")])]) == TWICE


def test_cap_is_five_when_only_a_predicate_is_declared() -> None:
    """S-LOOP-20."""
    made = loop(max_iterations=None, until=Until.unchanged())
    assert (made.max_iterations, made.cap) == (None, 5)
    assert loop(max_iterations=2).cap == 2


def test_loop_is_refused_when_its_body_holds_a_loop_or_something_else() -> None:
    """S-LOOP-24."""
    assert refusal(body=[WRITE, loop(name="inner")]).startswith("Loop 'x' body must not contain a loop")
    assert refusal(body=["write"]) == "Loop 'x' body must contain Tasks only, got: str"
    assert refusal(body=[WRITE, task("Read", loop(name="inner").output)]).endswith("the Loop's own context.")


def test_task_is_refused_when_its_context_holds_a_loop_itself() -> None:
    """S-LOOP-5: the message names what to write instead."""
    with pytest.raises(ValidationError) as caught:
        task("Read", loop())  # type: ignore[arg-type]
    assert str(caught.value) == (
        "Task context element at index 0 must be a Task, got: Loop. Name what it gives: the .output of loop 'x'"
    )


def test_output_stands_for_the_loop_when_it_is_context() -> None:
    """S-LOOP-166: equal however often it is asked for, and found after pickling."""
    made = loop()
    reader = task("Read", WRITE, made.output)
    assert reader.context == (WRITE, made.output)
    assert (made.output.object_id, made.output.description) == (made.object_id, "output of loop 'x'")
    assert pickle.loads(pickle.dumps(reader)).context[1] == made.output  # noqa: S301  our own
    assert loop(name="later", context=[WRITE, made.output]).context == (WRITE, made.output)


def test_output_of_a_body_task_names_the_loop_and_the_task() -> None:
    """S-LOOP-173: equal however often it is asked for, found after pickling, and other than the whole output."""
    made = loop(body=[WRITE, CRITICISE])
    entry = made.output_of(WRITE)
    assert (entry.object_id, entry.task_id) == (made.object_id, WRITE.object_id)
    assert entry.description == f"output of task '{WRITE.name or WRITE.description}' of loop 'x'"
    assert pickle.loads(pickle.dumps(entry)) == made.output_of(pickle.loads(pickle.dumps(WRITE)))  # noqa: S301  our own
    assert len({entry, made.output, made.output_of(CRITICISE)}) == 3


@pytest.mark.parametrize(("given", "shown"), [(task("Other"), "'Other'"), ("Write", "str"), (None, "NoneType")])
def test_output_of_refuses_what_is_not_in_the_body(given: Any, shown: str) -> None:
    """S-LOOP-173."""
    with pytest.raises(ValidationError) as caught:
        loop(body=[task("Draft", name="draft"), task("Check")]).output_of(given)
    assert str(caught.value) == f"Loop 'x' output_of needs a task of its body ('draft', 'Check'), got: {shown}"


def test_loop_is_itself_alone_when_another_is_built_alike() -> None:
    """S-LOOP-169: two are two; a pickled copy is the same one."""
    made = loop()
    assert made != loop()
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301  our own
    assert len({made, loop(), made}) == 2


# Built-in predicates.


def output(raw: str, parsed: object = None) -> TaskOutput:
    """What a body task gave."""
    return TaskOutput(
        raw=raw, task_description="Write", agent_role="Writer", completed_at=utc_of(0), duration=timedelta(),
        tool_call_count=0, parsed_output=parsed, output_type=None if parsed is None else type(parsed),
    )  # fmt: skip


def after(*outputs: TaskOutput) -> LoopIterationContext:
    """What a predicate is given after that many iterations of one task."""
    history = [{"write": each} for each in outputs]
    return LoopIterationContext(
        iteration_number=len(outputs),
        last_iteration_outputs=history[-1],
        history=history,
        last_body_output=outputs[-1],
    )


def test_parsed_output_is_judged_when_the_condition_is_of_it() -> None:
    """S-LOOP-160, S-LOOP-165: an output type says what it is, or a handler returns it."""
    until = Until.parsed(lambda report: report.score > 0.8)
    assert until(after(output("{}", Report(score=0.9)))) is True
    assert until(after(output("{}", Report(score=0.7)))) is False
    with pytest.raises(IllegalStateError, match="No parsed output available"):
        until(after(output("no report")))
    assert loop(body=[task("Rate", output_type=Report)], until=until).until is until
    assert loop(body=[task("Rate", handler=len)], until=until).until is until
    with pytest.raises(ValidationError, match=r"Until\.parsed needs a callable, got: float"):
        Until.parsed(0.8)  # type: ignore[arg-type]


def test_text_is_found_when_the_last_output_contains_it() -> None:
    """S-LOOP-161."""
    until = Until.text_contains("APPROVED")
    assert until(after(output("approved"), output("It is APPROVED."))) is True
    assert until(after(output("APPROVED"), output("approved"))) is False
    assert Until.text_contains("APPROVED", ignore_case=True)(after(output("approved"))) is True
    with pytest.raises(ValidationError, match="needs a text that is not blank"):
        Until.text_contains(" ")


def test_loop_is_done_when_the_last_output_stays_the_same() -> None:
    """S-LOOP-162: never after the first iteration."""
    until = Until.unchanged()
    assert until(after(output("a"))) is False
    assert until(after(output("a"), output(" a\n"))) is True
    assert until(after(output("a"), output("b"), output("a"))) is False
    assert until == Until.unchanged()
