"""Errors as data of the record, and back."""

import json
from datetime import timedelta

import pytest

from ensemble_ray import (
    AgentExecutionError,
    CircuitOpenError,
    EnsembleError,
    OutputParsingError,
    RateLimit,
    RateLimitTimeoutError,
    TaskExecutionError,
    UnknownOutcomeError,
    ValidationError,
    errors,
)
from ensemble_ray.values.error_data import error_data, error_from
from tests.ensemble_ray.errors.every_error import EVERY as MOST

#: One of each class, with all its fields.
EVERY = [
    *(error for error in MOST if not isinstance(error, UnknownOutcomeError | CircuitOpenError)),
    UnknownOutcomeError("nobody knows", "facts#0/0/call-1", "mail"),
    CircuitOpenError("the endpoint fails", "http://localhost/v1 gpt"),
]
#: Left out: the run puts its own back.
LEFT_OUT = {"completed_task_outputs", "output_type", "trace", "failed_task_causes"}


def _trip(error: BaseException, **how: type[object]) -> BaseException:
    return error_from(json.loads(json.dumps(error_data(error))), **how)


def test_every_class_is_tried() -> None:
    """S-DUR-39: the list below leaves no class of the tree out."""
    public = {each for name in errors.__all__ if isinstance(each := getattr(errors, name), type)}
    assert public == {type(error) for error in EVERY}


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_error_comes_back_with_class_text_and_fields_when_it_was_recorded(error: BaseException) -> None:
    """S-DUR-39."""
    back = _trip(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back).keys() == vars(error).keys()
    for name in vars(error).keys() - LEFT_OUT:
        assert getattr(back, name) == getattr(error, name), name


def test_limit_comes_back_as_a_value_when_it_was_recorded() -> None:
    """S-DUR-39: fields that JSON has no type for."""
    back = _trip(RateLimitTimeoutError(RateLimit.per_minute(2), timedelta(seconds=1.5)))
    assert isinstance(back, RateLimitTimeoutError)
    assert (back.rate_limit, back.wait_timeout) == (RateLimit.per_minute(2), timedelta(seconds=1.5))


def test_causes_of_failed_tasks_come_back_when_a_parallel_run_failed() -> None:
    """S-DUR-39: with causes of their own."""
    inner = AgentExecutionError("Agent 'Writer' failed: no model", "Writer", "Write")
    inner.__cause__ = ValueError("no model")
    back = _trip(errors.ParallelExecutionError("1 of 2 tasks failed", (), {"Write": inner}))
    assert isinstance(back, errors.ParallelExecutionError)
    cause = back.failed_task_causes["Write"]
    assert isinstance(cause, AgentExecutionError)
    assert cause.agent_role == "Writer"
    assert (type(cause.__cause__).__name__, str(cause.__cause__)) == ("ValueError", "no model")


def test_type_is_put_back_when_the_task_names_it() -> None:
    """S-DUR-39: a type is no data; the task has it."""
    back = _trip(OutputParsingError("no JSON", "raw", dict, ["line 1"], 4), output_type=dict)
    assert isinstance(back, OutputParsingError)
    assert (back.output_type, back.parse_errors) == (dict, ("line 1",))


class ProviderError(Exception):
    """A class of somebody's library."""


def test_foreign_error_is_told_by_a_stand_in_when_it_was_recorded() -> None:
    """S-DUR-39: of the same name and text, in its place in the chain; its class is not imported."""
    error = TaskExecutionError("Task failed: Write", "Write", "Writer")
    error.__cause__ = ProviderError("out of credit")
    error.__cause__.__cause__ = ConnectionError()
    back = _trip(error)
    assert isinstance(back, TaskExecutionError)
    stand_in = back.__cause__
    assert type(stand_in) is not ProviderError
    assert (type(stand_in).__name__, str(stand_in)) == ("ProviderError", "out of credit")
    assert stand_in is not None
    assert type(stand_in.__cause__).__name__ == "ConnectionError"


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), KeyError("zzz"), OSError(2, "gone"), TimeoutError(), ZeroDivisionError("x", 3)],
    ids=lambda error: type(error).__name__,
)
def test_built_in_error_is_of_its_class_again_when_it_was_recorded(error: Exception) -> None:
    """S-ERR-41: with its arguments."""
    back = _trip(error)
    assert (type(back), back.args, str(back)) == (type(error), error.args, str(error))


@pytest.mark.parametrize(
    "told",
    [
        {"type": "UnicodeDecodeError", "text": "x", "args": ["x"]},
        {"type": "ValueError", "text": "x", "args": ["y"]},
        {"type": "SystemExit", "text": "3", "args": [3]},
        {"type": "eval", "text": "1", "args": ["1"]},
    ],
)
def test_what_is_no_built_in_error_stays_a_stand_in(told: dict[str, object]) -> None:
    """S-ERR-41: nothing else of that module is called, and no text is made up."""
    back = error_from(told)
    assert type(back).__name__ == told["type"]
    assert type(back).__bases__ == (Exception,)
    assert str(back) == told["text"]


def test_traceback_of_user_code_is_a_note_when_it_was_recorded() -> None:
    """S-ERR-43: whichever runtime it was raised on; once, also when it is recorded again."""
    try:
        raise ValueError("here")  # noqa: TRY301  the traceback is what is tested
    except ValueError as raised:
        back = _trip(_trip(raised))
    (note,) = back.__notes__
    assert "test_traceback_of_user_code_is_a_note_when_it_was_recorded" in note


def test_status_is_kept_on_a_stand_in() -> None:
    """S-ERR-31: of a provider that is not listed."""
    error = ProviderError("out of credit")
    vars(error).update(status_code=402, client=object())
    back = _trip(error)
    assert (type(back).__name__, vars(back)) == ("ProviderError", {"status_code": 402})


def test_foreign_class_is_not_taken_for_ours_when_it_has_the_same_name() -> None:
    """S-DUR-39: a pydantic ValidationError is none of ours."""
    foreign = type("ValidationError", (Exception,), {})("1 error for Model")
    back = _trip(foreign)
    assert not isinstance(back, ValidationError)
    assert (type(back).__name__, str(back)) == ("ValidationError", "1 error for Model")


def test_class_that_the_record_names_is_never_imported() -> None:
    """S-DUR-39, S-DUR-6: a record is data, whoever wrote it."""
    back = error_from({"type": "os.system", "text": "echo", "args": ["echo"], "fields": {}})
    assert type(back).__name__ == "os.system"
    assert type(back).__bases__ == (Exception,)


@pytest.mark.parametrize(
    "damage", [{"args": 3}, {"fields": None}, {"fields": {"rate_limit": 3}}, {"args": [], "fields": {"rate_limit": {}}}]
)
def test_damaged_error_is_told_by_a_stand_in(damage: dict[str, object]) -> None:
    """S-DUR-39: what is not readable still tells its name and text."""
    data = {**error_data(RateLimitTimeoutError(RateLimit.per_minute(2), timedelta(seconds=1))), **damage}
    back = error_from(data)
    assert type(back).__name__ == "RateLimitTimeoutError"
    assert "Rate limit exceeded" in str(back)


def test_circle_of_causes_ends() -> None:
    """S-DUR-39: an error that is its own cause's cause."""
    first, second = EnsembleError("first"), EnsembleError("second")
    first.__cause__, second.__cause__ = second, first
    back = _trip(first)
    assert str(back.__cause__) == "second"
    assert back.__cause__ is not None
    assert back.__cause__.__cause__ is None


def test_field_without_json_form_is_told_as_text() -> None:
    """S-DUR-6: data only; what a caller hung onto an error must not stop the record."""
    error = EnsembleError("odd")
    error.run_id = "r"
    vars(error)["handle"] = object()
    back = _trip(error)
    assert "object object at" in str(vars(back)["handle"])
