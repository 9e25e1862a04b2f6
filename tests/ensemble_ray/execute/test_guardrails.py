"""What guardrails see and say, and the error a failure means."""

import datetime as dt

import pytest

from ensemble_ray import (
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    GuardrailType,
    GuardrailViolationError,
    TaskOutput,
)
from ensemble_ray.execute.guardrails import check_verdict

FACTS = TaskOutput(
    raw="Five facts",
    task_description="Find facts",
    agent_role="Researcher",
    completed_at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    duration=dt.timedelta(seconds=1),
)


def test_input_is_frozen_and_keeps_its_own_context() -> None:
    """S-GRD-2: four fields; the caller's list may change later; S-GRD-16: outputs in the order given."""
    outputs = [FACTS, FACTS.replace(raw="More")]
    asked = GuardrailInput(
        task_description="Write", expected_output="Prose", context_outputs=outputs, agent_role="Writer"
    )
    outputs.clear()
    assert [output.raw for output in asked.context_outputs] == ["Five facts", "More"]
    assert isinstance(asked.context_outputs, tuple)
    assert (asked.task_description, asked.expected_output, asked.agent_role) == ("Write", "Prose", "Writer")
    with pytest.raises(Exception, match="frozen"):
        asked.agent_role = "Somebody"


def test_output_is_frozen_and_keeps_the_object() -> None:
    """S-GRD-2, S-GRD-5: four fields; the parsed object is the object, None without one."""
    parsed = {"a": 1}
    asked = GuardrailOutput(raw_response="{}", parsed_output=parsed, task_description="Write", agent_role="Writer")
    assert asked.parsed_output is parsed
    assert GuardrailOutput(raw_response="text", task_description="Write", agent_role="Writer").parsed_output is None
    with pytest.raises(Exception, match="frozen"):
        asked.raw_response = "other"


def test_result_is_made_by_its_factories() -> None:
    """S-GRD-3: success has an empty message, failure its reason, and a reason must be given."""
    assert (GuardrailResult.success().is_success, GuardrailResult.success().message) == (True, "")
    failure = GuardrailResult.failure("too long")
    assert (failure.is_success, failure.message) == (False, "too long")
    assert GuardrailResult.failure("").message == ""
    with pytest.raises(ValueError, match="reason must not be None"):
        GuardrailResult.failure(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("returned", [None, True, "fine", object()])
def test_return_value_is_refused_when_it_is_no_verdict(returned: object) -> None:
    """S-GRD-11: fails closed; the text names the guardrail and what it gave."""
    with pytest.raises(TypeError) as refused:
        check_verdict(returned, "draft/input/0")
    assert "'draft/input/0'" in str(refused.value)
    assert f"returned {type(returned).__name__}, expected GuardrailResult" in str(refused.value)


def test_verdict_passes_when_it_is_one() -> None:
    """S-GRD-1: what a guardrail returns is a GuardrailResult."""
    verdict = GuardrailResult.failure("no")
    assert check_verdict(verdict, "any") is verdict


@pytest.mark.parametrize(("kind", "word"), [(GuardrailType.INPUT, "INPUT"), (GuardrailType.OUTPUT, "OUTPUT")])
def test_failure_becomes_an_error_when_a_guardrail_says_no(kind: GuardrailType, word: str) -> None:
    """S-GRD-7, S-ERR-17: text and fields."""
    error = GuardrailViolationError(kind, "too long", "Write", "Writer")
    assert str(error) == f"{word} guardrail violation on agent 'Writer' task 'Write': too long"
    assert error.guardrail_type == kind == word.lower()
    assert (error.violation_message, error.task_description, error.agent_role) == ("too long", "Write", "Writer")
