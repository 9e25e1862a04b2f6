"""What is said of an error: what happened, where, what to do; each reason once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import cast

import pytest

from ensemble_ray import (
    AgentExecutionError,
    ConstraintViolationError,
    EnsembleError,
    ParallelExecutionError,
    PromptTemplateError,
    RecordError,
    RunExistsError,
    TaskExecutionError,
    ValidationError,
)
from ensemble_ray.cli.view.failures import advice_of, describe_error, exit_code_of


class AuthenticationError(Exception):
    """Stands for the class of that name of a model's SDK."""


def _task_error(cause: Exception) -> TaskExecutionError:
    error = TaskExecutionError("Task 'Write' failed", "Write", "Writer")
    error.__cause__ = cause
    return error


def test_the_task_the_reason_and_the_way_out_are_told_when_a_task_failed() -> None:
    """The agent's error repeats its cause; the SDK's own cause is a detail."""
    endpoint = AuthenticationError("Endpoint x refused the key")
    endpoint.__cause__ = OSError("HTTP 401")
    agent = AgentExecutionError("Agent 'Writer': Endpoint x refused the key (AuthenticationError)", "Writer", "Write")
    agent.__cause__ = endpoint
    assert describe_error(_task_error(agent)).splitlines() == [
        "Error: task 'Write' (agent 'Writer') failed:",
        "  Agent 'Writer': Endpoint x refused the key (AuthenticationError)",
        "  What to do: Look at the endpoint alone: ensemble-ray doctor --no-ray --llm openai:MODEL",
    ]


def test_file_and_line_are_told_when_user_code_raised() -> None:
    """S-ERR-46, S-ERR-42: of the innermost error, whether it was raised here or in another process; the reason once."""
    try:
        raise KeyError("zzz")  # noqa: TRY301  the traceback is what is tested
    except KeyError as raised:
        agent = AgentExecutionError("Deterministic task handler threw an exception: 'zzz' (KeyError)")
        agent.__cause__ = raised
    for cause in (agent, pickle.loads(pickle.dumps(agent))):  # noqa: S301  our own bytes
        lines = describe_error(_task_error(cause)).splitlines()
        assert lines[:2] == [
            "Error: task 'Write' (agent 'Writer') failed:",
            "  Deterministic task handler threw an exception: 'zzz' (KeyError)",
        ]
        assert lines[2].startswith(f'  File "{__file__}", line ')
        assert len(lines) == 3


def test_a_failed_task_is_named_by_its_name() -> None:
    """S-ERR-52: else by its description."""
    error = _task_error(OSError("no disk"))
    error.task_name = "s1"
    assert describe_error(error).startswith("Error: task 's1' (agent 'Writer') failed:")


def test_the_line_of_a_foreign_error_is_told() -> None:
    """S-ERR-52: that of user code, and not what called the command line."""
    names: dict[str, object] = {"__name__": "ensemble_ray.cli.app"}
    exec("def begin(call): return call()", names)  # noqa: S102  a frame of the command line
    begin = cast("Callable[[Callable[[], object]], object]", names["begin"])
    functions: tuple[tuple[Callable[[], object], bool], ...] = ((lambda: 1 // 0, True), (partial(int, "x"), False))
    for function, is_told in functions:
        with pytest.raises((ZeroDivisionError, ValueError)) as caught:
            begin(function)
        assert (f'  File "{__file__}", line ' in describe_error(caught.value)) is is_told


def test_every_failed_task_is_told_when_several_failed() -> None:
    """Under continue_on_error."""
    causes = {"one": OSError("no disk"), "two": ValueError("no value")}
    text = describe_error(ParallelExecutionError("2 of 3 tasks failed: 'one': no disk; 'two': no value", (), causes))
    assert text.splitlines() == ["Error: 2 of 3 tasks failed", "  'one': no disk", "  'two': no value"]


def test_the_class_is_told_when_an_error_is_not_ours() -> None:
    """And how to see the whole story."""
    text = describe_error(OSError("no disk"))
    assert text.startswith("Error: OSError: no disk\n")
    assert "--debug" in text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValidationError("x"), 2),
        (PromptTemplateError("x"), 2),
        (RunExistsError("x"), 2),
        (EnsembleError("x"), 1),
        (_task_error(OSError("x")), 1),
        (OSError("x"), 1),
    ],
)
def test_exit_codes_tell_a_wrong_command_from_a_failed_run(error: Exception, code: int) -> None:
    """2 for what the user wrote, 1 for what went wrong."""
    assert exit_code_of(error) == code


def test_the_directory_is_named_when_records_cannot_be_written() -> None:
    """What to do, by class."""
    assert "ENSEMBLE_RAY_HOME" in advice_of(RecordError("disk full", "/x"))
    assert "manager_llm" in advice_of(ConstraintViolationError(["Required worker 'W' was not delegated to"]))
    assert advice_of(ValueError("x")) == ""


def test_long_texts_of_causes_are_cut() -> None:
    """A provider may answer with a page."""
    assert len(describe_error(_task_error(OSError("x" * 100_000)))) < 3000
