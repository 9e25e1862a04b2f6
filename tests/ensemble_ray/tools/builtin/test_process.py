"""ProcessAgentTool: what a program is told, what its answer means, and how it is ended."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import ProcessAgentTool, ToolResult
from ensemble_ray.process.concurrency import library_loop
from tests.ensemble_ray.tools.builtin.travel import travelled
from tests.forking import Child

#: holds a lock with its child, says so, ends or waits as told
_LOCKING_PROGRAM = """
import fcntl, os, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
if os.fork() == 0:
    time.sleep(600)
open(sys.argv[1] + ".ready", "w").close()
if sys.argv[2] == "wait":
    time.sleep(600)
"""


def _python(program: str, *arguments: str, **options: Any) -> ProcessAgentTool:
    return ProcessAgentTool("prog", "Runs it", [sys.executable, "-I", "-S", "-c", program, *arguments], **options)


def _says(text: str) -> ToolResult:
    return _python("import sys; sys.stdout.write(sys.argv[1])", text).execute("x")


async def _is_released(lock: Path) -> bool:
    """Whether everybody who held the lock is gone within a minute."""
    with lock.open("w") as file:
        for _ in range(6000):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(0.01)
            else:
                return True
    return False


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": " "},
        {"name": None},
        {"description": None},
        {"command": None},
        {"command": []},
        {"command": [""]},
        {"command": "ls -l"},
        {"timeout": 0},
        {"timeout": timedelta(seconds=-1)},
        {"max_output_bytes": 0},
    ],
)
def test_tool_is_refused_when_an_argument_is_wrong(wrong: dict[str, Any]) -> None:
    """S-BIT-60, S-CONV-13: what is left out counts as None; one string is no list of arguments."""
    with pytest.raises(ValueError, match=r"^ProcessAgentTool "):
        ProcessAgentTool(**({"name": "prog", "description": "", "command": ["true"]} | wrong))
    with pytest.raises(ValueError, match="name"):
        ProcessAgentTool()


def test_outer_limit_comes_after_the_own_when_the_tool_is_made() -> None:
    """S-BIT-60, S-SET-34: so that the tool's own text is the one that is told."""
    assert ProcessAgentTool("prog", "d", ["true"]).timeout > 30  # type: ignore[operator]
    assert ProcessAgentTool("prog", "d", ["true"], timeout=timedelta(minutes=10)).timeout > 600  # type: ignore[operator]


@pytest.mark.program
def test_input_arrives_as_json_when_the_program_reads() -> None:
    """S-BIT-61: one object, then the end of the stream."""
    result = _python("import sys; print(sys.stdin.read())").execute('say "é"\n$(ls); \ud800')
    assert json.loads(result.output) == {"input": 'say "é"\n$(ls); \ud800'}


@pytest.mark.program
def test_program_is_fine_when_it_never_reads() -> None:
    """S-BIT-61: more input than any pipe holds."""
    assert _python("print('done')").execute("x" * 1_000_000).output == "done"


@pytest.mark.program
def test_arguments_are_no_shell_text_when_they_look_like_it() -> None:
    """S-BIT-60: the command is a list of arguments, whatever is in them."""
    assert _says("$HOME `ls`; exit 3").output == "$HOME `ls`; exit 3"


@pytest.mark.program
@pytest.mark.parametrize(
    ("stdout", "output", "structured"),
    [
        (" \n", "", None),
        (" plain text\n", "plain text", None),
        ('{"output": "text", "structured": {"n": 1}}', "text", {"n": 1}),
        ('{"output": "", "success": true}', "", None),
        ('{"output": {"a": 1}}', '{"a":1}', None),
        ('{"other": 1}', '{"other": 1}', None),
        ('{"structured": [1]}', '{"structured": [1]}', [1]),
        ("[1, 2]", "[1, 2]", None),
        ("{broken", "{broken", None),
    ],
)
def test_answer_is_read_when_the_program_ends_well(stdout: str, output: str, structured: object) -> None:
    """S-BIT-62."""
    result = _says(stdout)
    assert (result.is_success, result.output, result.structured_output) == (True, output, structured)


@pytest.mark.program
def test_failure_is_told_when_the_program_says_so() -> None:
    """S-BIT-62."""
    assert _says('{"success": false, "error": "no such city"}').error_message == "no such city"
    assert _says('{"success": false}').error_message == "Process returned success=false"


@pytest.mark.program
def test_failure_is_told_when_the_exit_code_is_not_zero() -> None:
    """S-BIT-63: standard error trimmed, else the code; what it wrote to standard output does not count."""
    failing = _python("import sys; print('out'); print(' bad luck ', file=sys.stderr); sys.exit(3)")
    assert failing.execute("x").error_message == "bad luck"
    assert _python("raise SystemExit(7)").execute("x").error_message == "Process exited with code 7"


@pytest.mark.program
async def test_program_and_children_are_killed_when_time_is_up(tmp_path: Path) -> None:
    """S-BIT-64: also a child whose parent ended long ago; the limit is told as it was given."""
    waits = _python(_LOCKING_PROGRAM, str(tmp_path / "wait"), "wait", timeout=1)
    leaves = _python(_LOCKING_PROGRAM, str(tmp_path / "leave"), "leave", timeout=0.75)
    whole, part = await asyncio.gather(waits.aexecute("x"), leaves.aexecute("x"))
    assert whole.error_message == f"Process timed out after 1 seconds: {sys.executable}"
    assert part.error_message == f"Process timed out after 0.75 seconds: {sys.executable}"
    assert await _is_released(tmp_path / "wait")
    assert await _is_released(tmp_path / "leave")


@pytest.mark.program
async def test_program_and_children_are_killed_when_the_call_is_cancelled(tmp_path: Path) -> None:
    """S-BIT-64, S-SET-27: a cancelled run leaves no process behind."""
    lock = tmp_path / "lock"
    call = asyncio.ensure_future(_python(_LOCKING_PROGRAM, str(lock), "wait").aexecute("x"))
    while not (tmp_path / "lock.ready").exists():  # noqa: ASYNC110  another process sets it
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await _is_released(lock)


@pytest.mark.program
def test_failure_is_told_when_the_program_cannot_start(tmp_path: Path) -> None:
    """S-BIT-64."""
    (tmp_path / "not-executable").touch()
    for command in (["/nonexistent/program"], [str(tmp_path / "not-executable")], ["a\0b"]):
        result = ProcessAgentTool("prog", "d", command).execute("x")
        assert str(result.error_message).startswith("Failed to start process: ")


@pytest.mark.program
def test_output_is_cut_when_longer_than_kept() -> None:
    """S-BIT-65: both streams far beyond what pipes hold, at once; exactly the limit is not cut."""
    program = (
        "import sys; [(sys.stdout.write('o' * 999), sys.stderr.write('e' * 999)) for _ in range(999)]; sys.exit({})"
    )
    kept = _python(program.format(0), max_output_bytes=10).execute("x")
    assert kept.output == "o" * 10 + "\n[output truncated at 10 bytes]"
    failed = _python(program.format(1), max_output_bytes=10).execute("x")
    assert failed.error_message == "e" * 10 + "\n[output truncated at 10 bytes]"
    assert _python("print('o' * 10, end='')", max_output_bytes=10).execute("x").output == "o" * 10


@pytest.mark.program
def test_half_a_character_is_dropped_when_output_is_cut() -> None:
    """S-BIT-65."""
    tool = _python("import sys; sys.stdout.buffer.write('éé'.encode())", max_output_bytes=3)
    assert tool.execute("x").output == "é\n[output truncated at 3 bytes]"


@pytest.mark.program
def test_tool_travels_when_pickled() -> None:
    """S-CONV-34."""
    copy = travelled(_python("print(1)"))
    assert (copy.name, copy.execute("x").output) == ("prog", "1")


@pytest.mark.program
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_program_ends_with_its_process_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    """S-ENG-81, S-BIT-64: the child keeps no pipe of its parent's programs open."""
    lock = tmp_path / "lock"
    reading, writing = os.pipe()

    async def begin_and_fork() -> None:
        _calls.append(asyncio.ensure_future(_python(_LOCKING_PROGRAM, str(lock), "wait").aexecute("x")))
        while not (tmp_path / "lock.ready").exists():  # noqa: ASYNC110  another process sets it
            await asyncio.sleep(0.01)
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)

    Child(lambda: asyncio.run_coroutine_threadsafe(begin_and_fork(), library_loop()).result()).result()
    try:
        assert await _is_released(lock)
    finally:
        os.close(writing)
        os.close(reading)


#: Keeps calls of a child from being collected.
_calls: list[object] = []
