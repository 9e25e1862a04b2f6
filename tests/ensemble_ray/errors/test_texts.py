"""Texts about errors: bounded, on one line, with the class; tracebacks from user code on."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable
from typing import cast

import pytest
import yaml

from ensemble_ray import AgentExecutionError, EnsembleError, RateLimitInterruptedError, TaskExecutionError
from ensemble_ray.errors.texts import (
    REMOTE,
    agent_failure,
    brief,
    describe,
    format_with_class,
    remote_note,
    shorten_tracebacks,
    task_failure,
    tasks_failure,
    user_frames,
    user_line,
    user_traceback,
)
from ensemble_ray.process.concurrency import call_user


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("short", "short"),
        ("two\n  lines\t", "two lines"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "..."),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        (" " * 5000 + "late", "..."),
        ("", ""),
    ],
)
def test_text_is_one_line_of_bounded_length(text: str, told: str) -> None:
    """S-ERR-45: nothing in it that a terminal would obey."""
    assert brief(text) == told


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no key."), "no key (ValueError)"),
        (KeyError("zzz"), "'zzz' (KeyError)"),
        (ValueError(), "ValueError"),
        (ValueError("x" * 300), "x" * 200 + "... (ValueError)"),
        (RateLimitInterruptedError("y" * 300), "y" * 300 + " (RateLimitInterruptedError)"),
    ],
)
def test_error_is_described_with_its_class(error: Exception, told: str) -> None:
    """S-ERR-47, S-ERR-45: foreign texts are cut, our own are bounded where they are made."""
    assert describe(error) == told


def test_error_is_titled_as_python_prints_it() -> None:
    """S-ENG-51, S-ENG-61: whole, for a model; our own without their class."""
    assert format_with_class(KeyError("zzz")) == "KeyError: 'zzz'"
    assert format_with_class(ValueError("x" * 900)) == "ValueError: " + "x" * 900
    assert format_with_class(ValueError()) == "ValueError"
    assert format_with_class(EnsembleError("the worker died")) == "the worker died"


def test_failed_task_is_told_with_its_cause() -> None:
    """S-ENG-13, S-ENG-50, S-ERR-47: the class stands once."""
    agents = AgentExecutionError(agent_failure("Writer", ValueError("401 invalid key")))
    assert task_failure("facts", agents) == "Task 'facts' failed: Agent 'Writer': 401 invalid key (ValueError)"
    assert task_failure("facts", OSError("gone")) == "Task 'facts' failed: gone (OSError)"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Task 's1' failed: no disk", "Task 's1' failed: no disk"),
        ("Task 's1': context_budget 3 is too small", "Task 's1' failed: context_budget 3 is too small"),
        ("Task 's1' cannot be loaded", "Task 's1' failed: cannot be loaded"),
        ("Task 's10' failed: no disk", "Task 's1' failed: Task 's10' failed: no disk"),
    ],
)
def test_a_task_is_named_once(text: str, told: str) -> None:
    """S-ERR-53: alone, and among several."""
    error = AgentExecutionError(text)
    assert task_failure("s1", error) == told
    reason = told.removeprefix("Task 's1' failed: ")
    assert tasks_failure(1, 2, {"s1": error}) == f"1 of 2 tasks failed: 's1': {reason}"


async def test_tracebacks_begin_at_user_code() -> None:
    """S-ERR-51: of causes, too; only a foreign error of the library itself keeps its frames."""
    failed = TaskExecutionError("failed")
    failed.__cause__ = await caught(raised_by)
    failed.__cause__.__traceback__ = failed.__cause__.__traceback__.tb_next  # type: ignore[union-attr]  of `caught` itself
    shorten_tracebacks(failed)
    shown = [(each.filename, each.name) for each in traceback.extract_tb(failed.__cause__.__traceback__)]
    assert shown == [(__file__, "raised_by")]
    try:
        await call_user(None)  # type: ignore[arg-type]  so that the library raises
    except TypeError as error:
        of_library = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        shorten_tracebacks(of_library)
        assert of_library.__traceback__ is not None


def test_several_failed_tasks_are_told_up_to_three() -> None:
    """S-PAR-25: the others are counted, also those whose causes are not kept."""
    causes = {name: ValueError(name * 2) for name in "abcd"}
    assert tasks_failure(1, 5, {"a": causes["a"]}) == "1 of 5 tasks failed: 'a': aa (ValueError)"
    told = "'a': aa (ValueError); 'b': bb (ValueError); 'c': cc (ValueError)"
    assert tasks_failure(4, 5, causes) == f"4 of 5 tasks failed: {told}; and 1 more"
    assert tasks_failure(900, 900, causes).endswith("; and 897 more")


def raised_by(depth: int = 0) -> None:
    """Raise in a line of this file."""
    if depth:
        raised_by(depth - 1)
    raise ValueError("here")


async def caught(function: object, *args: object) -> BaseException:
    """What user code raises when it is called as the library calls it."""
    try:
        await call_user(function, *args)  # type: ignore[arg-type]  any function
    except Exception as error:  # noqa: BLE001  the test wants it
        return error
    raise AssertionError


async def test_traceback_begins_where_user_code_does() -> None:
    """S-ERR-42: no frame of the library that called it, of asyncio or of threading."""
    error = await caught(raised_by)
    error = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)  # of `caught` itself
    frames = user_frames(error)
    assert frames.startswith(f'  File "{__file__}", line {raised_by.__code__.co_firstlineno + 4}, in raised_by\n')
    assert frames.count("File ") == 1
    assert user_traceback(error) == f"Traceback (most recent call last):\n{frames}".rstrip()
    assert remote_note(error) == f"{REMOTE}\n{frames}".rstrip()


async def test_nothing_is_told_where_no_user_code_raised() -> None:
    """S-ERR-42: the library's own frames help nobody; nor does an error that was never raised."""
    assert remote_note(ValueError("made")) == ""
    try:
        await call_user(None)  # type: ignore[arg-type]  so that the library raises
    except TypeError as error:
        of_library = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)
        assert remote_note(of_library) == ""


def test_traceback_of_another_process_is_told_from_its_note() -> None:
    """S-ERR-42: for a log line of this process."""
    error = ValueError("there")
    error.add_note("of the user")
    assert user_traceback(error) == ""
    error.add_note(f"{REMOTE}\n  File ...")
    assert user_traceback(error) == f"{REMOTE}\n  File ..."


def at(*files: str, note: str = "") -> Exception:
    """An error that went through frames in these files, the last one raised it; a note tells of another process."""
    error, names = ValueError("raised"), dict[str, object]()
    for file in reversed(files):
        body = "inner()" if names else "raise error"
        names = {"__name__": "shop", "inner": names.get("run"), "error": error}
        exec(compile(f"def run(): {body}", file, "exec"), names)  # noqa: S102  a frame of that file
    with contextlib.suppress(ValueError, KeyError):
        cast("Callable[[], object]", names["run"])()
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # of this function
    if note:
        error.add_note(note)
    return error


LIBRARY = "/venv/lib/python3.11/site-packages/yaml/parser.py"
NOTE = f"""{REMOTE}
  File "/shop/team.py", line 3, in handle
    json.loads(text)
  File "/node/lib/python3.11/json/decoder.py", line 355, in raw_decode
    raise JSONDecodeError("Expecting value", s, err.value) from None
while handling: other (KeyError)
  File "/shop/other.py", line 9, in look
    names[key]"""


@pytest.mark.parametrize(
    ("errors", "line"),
    [
        ([at("/shop/team.py", LIBRARY)], 'File "/shop/team.py", line 1, in run'),
        ([at(note=NOTE)], 'File "/shop/team.py", line 3, in handle'),
        ([at("/shop/main.py", note=NOTE)], 'File "/shop/team.py", line 3, in handle'),
        ([at(LIBRARY), at("/shop/team.py", LIBRARY)], 'File "/shop/team.py", line 1, in run'),
        ([at("/shop/team.py", json.__file__, yaml.__file__)], 'File "/shop/team.py", line 1, in run'),
        ([at("/venv/lib/python3.11/site-packages/shop.py", LIBRARY)], f'File "{LIBRARY}", line 1, in run'),
        ([ValueError("made")], ""),
    ],
)
def test_the_line_that_is_told_is_of_user_code(errors: list[Exception], line: str) -> None:
    """S-ERR-52: raised here or elsewhere; a line of a library only where there is no other."""
    assert user_line(errors) == line


async def test_deep_traceback_is_bounded() -> None:
    """S-ERR-42: the innermost frames of a recursion."""
    frames = user_frames(await caught(raised_by, 500))
    assert frames.count("in raised_by") <= 30
    assert len(frames) < 6000


async def test_group_tells_of_its_errors() -> None:
    """S-ERR-42: what a task group raises says nothing by itself."""
    inner = await caught(raised_by)

    def grouped() -> None:
        raise ExceptionGroup("two things", [inner, KeyError("k")])

    note = remote_note(await caught(grouped))
    assert "of the group: here (ValueError)\n" in note
    assert note.count("in raised_by") == 1
    assert "of the group: 'k' (KeyError)" in note
