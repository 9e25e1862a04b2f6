"""Texts about errors: short ones for messages and logs, and tracebacks of user code.

In: any error, any text. Out: one line of bounded length, or the frames of a traceback from the user's code on. Errors
keep their whole text; only what is said of them elsewhere is cut.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ensemble_ray.text.foreign_text import whole_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType, TracebackType

#: Characters of a text that somebody else wrote, in a message or a log line of ours.
LONGEST = 200
#: Characters of a message that this library wrote; what others wrote in it is cut already.
_LONGEST_OWN = 1500
#: First line of the note that holds the traceback of another process.
REMOTE = "Raised in another process (most recent call last):"
#: Frames of a traceback that are kept, the innermost ones.
_MOST_FRAMES = 30
#: Errors of an exception group that are told.
_MOST_OF_GROUP = 5
_MOST_CAUSES = 100
#: Failed tasks whose reasons stand in the message of a run.
_MOST_LISTED = 3
#: Packages whose messages are bounded where they are made: this library's, and the endpoint errors that it makes.
_BOUNDED = frozenset({"ensemble_ray", "actors", "serve", "openai"})
#: Packages that call user code, or are called by this library, beside the standard library; no user code themselves.
_CALLERS = frozenset({
    "ensemble_ray", "actors", "serve", "openai", "httpx", "httpx2", "httpcore", "aiohttp", "anyio", "pydantic",
    "pydantic_core", "ray", "loky", "cloudpickle",
})  # fmt: skip
#: Where files of no user lie: this library and Python here, and libraries of any process, which may be of another node.
_OWN_FILES = tuple(f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(os.__file__).parent))
_LIBRARY_FILE = re.compile(
    r"^<frozen |[\\/](?:site-packages|dist-packages|lib(?:64)?[\\/]python3\.\d+t?|ray[\\/]_private)[\\/]"
)


def message_of(error: BaseException) -> str:
    """Return the text of an error, or its class name where the text is empty or cannot be made (S-ENG-61)."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  the class may be of a user or of a library
        text = ""
    return whole_text(text) or type(error).__name__


def brief(text: str, length: int = LONGEST) -> str:
    """Return the text on one line, cut to that many characters, with `...` behind what was cut.

    Characters that a terminal would obey are replaced: the text may be of a model, a provider or a customer.
    """
    line = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text[: 4 * length].split()))
    return line if len(line) <= length and len(text) <= 4 * length else f"{line[:length].rstrip()}..."


def describe(error: BaseException) -> str:
    """Return the message and the class of an error on one line: `invalid key (AuthenticationError)`."""
    name, text = type(error).__name__, str(error)
    if not text.strip():
        return name
    is_bounded = type(error).__module__.partition(".")[0] in _BOUNDED
    line = brief(text, _LONGEST_OWN if is_bounded else LONGEST)
    return f"{line if line.endswith('...') else line.removesuffix('.')} ({name})"


def format_with_class(error: BaseException) -> str:
    """Return the class and the whole message of an error, as Python prints it: `KeyError: 'zzz'`.

    Of this library's own errors only the message: their class says nothing more.
    """
    name, text = type(error).__name__, str(error)
    if not text or type(error).__module__.partition(".")[0] == "ensemble_ray":
        return text or name
    return f"{name}: {text}"


def agent_failure(role: str, error: BaseException) -> str:
    """Return the message of a task whose agent failed with that error (S-ENG-50)."""
    return f"Agent '{brief(role)}': {describe(error)}"


def task_failure(label: str, error: BaseException) -> str:
    """Return what a failed task is told of with: its name or description, and why (S-ENG-13)."""
    return f"Task '{brief(label)}' failed: {reason_in(label, error)}"


def tasks_failure(count: int, total: int, causes: Mapping[str, BaseException]) -> str:
    """Return what a run is told of with that went on beside failed tasks: how many, and why the first of them did."""
    first = "; ".join(
        f"'{brief(label)}': {reason_in(label, error)}" for label, error in islice(causes.items(), _MOST_LISTED)
    )
    more = count - min(len(causes), _MOST_LISTED)
    return f"{count} of {total} tasks failed: {first}{f'; and {more} more' if more > 0 else ''}"


def reason_of(error: BaseException) -> str:
    """Return why a task failed. An agent's failure names the class behind it already."""
    if type(error).__name__ == "AgentExecutionError":
        return brief(message_of(error), _LONGEST_OWN)
    return describe(error)


def reason_in(label: str, error: BaseException) -> str:
    """Return why a task failed, behind its name: a reason that begins with the same name says it no second time."""
    reason, named = reason_of(error), f"Task '{brief(label)}'"
    for beginning in (f"{named} failed: ", f"{named}: ", f"{named} "):
        if reason.startswith(beginning):
            return reason.removeprefix(beginning)
    return reason


def user_frames(error: BaseException) -> str:
    """Return the traceback of an error from the first frame of user code on, without a heading; "" without any."""
    frames = list(traceback.walk_tb(error.__traceback__))
    first = next((index for index, (frame, _) in enumerate(frames) if not _is_caller(frame)), len(frames))
    kept = frames[first:][-_MOST_FRAMES:]
    return "".join(traceback.StackSummary.extract(iter(kept)).format())


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error in user code, for a log: that of this process, else of another; "" without any."""
    frames = user_frames(error)
    if frames:
        return f"Traceback (most recent call last):\n{frames}".rstrip("\n")
    notes: tuple[object, ...] = tuple(getattr(error, "__notes__", ()))
    return next((each for each in notes if isinstance(each, str) and each.startswith(REMOTE)), "")


def user_line(errors: Iterable[BaseException]) -> str:
    """Return the innermost line of user code of errors and their causes: `File "team.py", line 3, in handle` (S-ERR-52).

    It is a line of a library where no other is known; "" without any.

    Args:
        errors: The innermost one first.
    """
    lines = [line for error in errors for line in reversed(_lines_of(error))]
    return next((line for line in lines if not is_library_file(line.split('"')[1])), lines[0] if lines else "")


def list_causes(error: BaseException) -> list[BaseException]:
    """Return what caused an error, nearest first, each once, 100 at most (S-ERR-70).

    That is the error it was raised from, else the one that was being handled then, and the first members of a group.
    """
    found, seen = [error], {id(error)}
    for at in found:  # it grows
        near = [at.__cause__ or (None if at.__suppress_context__ else at.__context__)]
        if isinstance(at, BaseExceptionGroup):
            near += cast("BaseExceptionGroup[BaseException]", at).exceptions[:_MOST_OF_GROUP]
        for each in near:
            if each is not None and id(each) not in seen and len(found) <= _MOST_CAUSES:
                seen.add(id(each))
                found.append(each)
    return found[1:]


def own_line(error: BaseException) -> str:
    """Return `user_line` of an error and its causes; "" where only code of libraries is known (S-ERR-67)."""
    line = user_line((*reversed(list_causes(error)), error))
    return "" if not line or is_library_file(line.split('"')[1]) else line


def is_library_file(path: str) -> bool:
    """Whether a file of source code is of this library, of another installed one, or of Python itself."""
    return path.startswith(_OWN_FILES) or _LIBRARY_FILE.search(path) is not None


def _lines_of(error: BaseException) -> list[str]:
    """Return the lines of a traceback outside this library, here and then in another process."""
    found: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith("ensemble_ray.cli"):
            found.clear()  # what is above it started the command line
        elif not _is_caller(frame):
            found.append(f'File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}')
    note = next(
        (each for each in getattr(error, "__notes__", ()) if isinstance(each, str) and each.startswith(REMOTE)), ""
    )
    # Headings, and what is below them, tell of other errors.
    own = takewhile(lambda line: line.startswith(" "), note.splitlines()[1:])
    return [*found, *(line.strip() for line in own if line.startswith('  File "'))]


def shorten_tracebacks(error: BaseException) -> None:
    """Drop the frames of this library above user code from the tracebacks of an error and of what caused it (S-ERR-51).

    A foreign error that no task is behind, and that has no user code, keeps its traceback: that may be a defect of this library.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        user = _find_user_code(at)
        if user is not None or at is not error or type(at).__module__.partition(".")[0] in _CALLERS:
            at.__traceback__ = user
        at = at.__cause__ or at.__context__


def user_exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Return `exc_info` for a log line: with the traceback from the first frame of user code on, where there is one."""
    return type(error), error, _find_user_code(error) or error.__traceback__


def remote_note(error: BaseException) -> str:
    """Return the note that tells another process where user code raised the error; "" where no user code did."""
    frames = user_frames(error)
    if not frames:
        return ""
    parts = [f"{REMOTE}\n{frames}"]
    handled = error.__context__ if error.__cause__ is None and not error.__suppress_context__ else None
    if handled is not None:
        parts.append(f"while handling: {describe(handled)}\n{user_frames(handled)}")
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        parts += [f"of the group: {describe(each)}\n{user_frames(each)}" for each in group.exceptions[:_MOST_OF_GROUP]]
    return "".join(parts).rstrip("\n")


def _find_user_code(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of user code on; None without any."""
    at = error.__traceback__
    while at is not None and _is_caller(at.tb_frame):
        at = at.tb_next
    return at


def _is_caller(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _CALLERS or package in sys.stdlib_module_names
