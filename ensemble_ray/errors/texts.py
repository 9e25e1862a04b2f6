"""Texts about errors: short messages for logs, and tracebacks of user code."""

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

LONGEST = 200  # of a foreign text
_LONGEST_OWN = 1500  # of a message of this library, with foreign parts that are cut already
REMOTE = "Raised in another process (most recent call last):"
_MOST_FRAMES = 30
_MOST_OF_GROUP = 5
_MOST_CAUSES = 100
_MOST_LISTED = 3
_BOUNDED = frozenset({"ensemble_ray", "actors", "serve", "openai"})  # packages with short messages
#: Packages that are no user code, although they call it or this library calls them.
_CALLERS = frozenset({
    "ensemble_ray", "actors", "serve", "openai", "httpx", "httpx2", "httpcore", "aiohttp", "anyio", "pydantic",
    "pydantic_core", "ray", "loky", "cloudpickle",
})  # fmt: skip
#: Files of this library and Python here, and of libraries in any process on any node.
_OWN_FILES = tuple(f"{directory}{os.sep}" for directory in (Path(__file__).parents[1], Path(os.__file__).parent))
_LIBRARY_FILE = re.compile(
    r"^<frozen |[\\/](?:site-packages|dist-packages|lib(?:64)?[\\/]python3\.\d+t?|ray[\\/]_private)[\\/]"
)


def message_of(error: BaseException) -> str:
    """Return the class name if the text is empty or `str` fails (S-ENG-61)."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  the class may be the user's
        text = ""
    return whole_text(text) or type(error).__name__


def brief(text: str, length: int = LONGEST) -> str:
    """Return one line, with `...` if it is cut. Control characters are replaced: the author may be a model."""
    line = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text[: 4 * length].split()))
    return line if len(line) <= length and len(text) <= 4 * length else f"{line[:length].rstrip()}..."


def describe(error: BaseException) -> str:
    """Return one line: `invalid key (AuthenticationError)`."""
    name, text = type(error).__name__, str(error)
    if not text.strip():
        return name
    is_bounded = type(error).__module__.partition(".")[0] in _BOUNDED
    line = brief(text, _LONGEST_OWN if is_bounded else LONGEST)
    return f"{line if line.endswith('...') else line.removesuffix('.')} ({name})"


def format_with_class(error: BaseException) -> str:
    """Return the whole text as Python prints it: `KeyError: 'zzz'`; without the class for errors of this library."""
    name, text = type(error).__name__, str(error)
    if not text or type(error).__module__.partition(".")[0] == "ensemble_ray":
        return text or name
    return f"{name}: {text}"


def agent_failure(role: str, error: BaseException) -> str:
    return f"Agent '{brief(role)}': {describe(error)}"


def task_failure(label: str, error: BaseException) -> str:
    """`label` is the task's name or description (S-ENG-13)."""
    return f"Task '{brief(label)}' failed: {reason_in(label, error)}"


def tasks_failure(count: int, total: int, causes: Mapping[str, BaseException]) -> str:
    first = "; ".join(
        f"'{brief(label)}': {reason_in(label, error)}" for label, error in islice(causes.items(), _MOST_LISTED)
    )
    more = count - min(len(causes), _MOST_LISTED)
    return f"{count} of {total} tasks failed: {first}{f'; and {more} more' if more > 0 else ''}"


def reason_of(error: BaseException) -> str:
    """The message of an agent's failure contains the class of the cause."""
    if type(error).__name__ == "AgentExecutionError":
        return brief(message_of(error), _LONGEST_OWN)
    return describe(error)


def reason_in(label: str, error: BaseException) -> str:
    """Omit the task's name at the start of the reason."""
    reason, named = reason_of(error), f"Task '{brief(label)}'"
    for beginning in (f"{named} failed: ", f"{named}: ", f"{named} "):
        if reason.startswith(beginning):
            return reason.removeprefix(beginning)
    return reason


def user_frames(error: BaseException) -> str:
    """Return the frames from the first one of user code on, without a heading; "" without user code."""
    frames = list(traceback.walk_tb(error.__traceback__))
    first = next((index for index, (frame, _) in enumerate(frames) if not _is_caller(frame)), len(frames))
    kept = frames[first:][-_MOST_FRAMES:]
    return "".join(traceback.StackSummary.extract(iter(kept)).format())


def user_traceback(error: BaseException) -> str:
    """Return the traceback of this process, else of another one; "" without user code."""
    frames = user_frames(error)
    if frames:
        return f"Traceback (most recent call last):\n{frames}".rstrip("\n")
    notes: tuple[object, ...] = tuple(getattr(error, "__notes__", ()))
    return next((each for each in notes if isinstance(each, str) and each.startswith(REMOTE)), "")


def user_line(errors: Iterable[BaseException]) -> str:
    """Return the innermost line of user code, as `File "team.py", line 3, in handle` (S-ERR-52).

    Without user code it returns a line of a library, else "".
    """
    lines = [line for error in errors for line in reversed(_lines_of(error))]
    return next((line for line in lines if not is_library_file(line.split('"')[1])), lines[0] if lines else "")


def cause_chain(error: BaseException) -> list[BaseException]:
    """Return the causes that `from` named, nearest first, without duplicates."""
    found: list[BaseException] = []
    at, seen = error.__cause__, {id(error)}
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        found.append(at)
        at = at.__cause__
    return found


def list_causes(error: BaseException) -> list[BaseException]:
    """Return at most 100 causes, nearest first, without duplicates (S-ERR-70).

    A cause is the error named by `from`, else the error that was being handled, and the first members of a group.
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
    """Return the `user_line` of an error and its causes; "" for a line of a library (S-ERR-67)."""
    line = user_line((*reversed(list_causes(error)), error))
    return "" if not line or is_library_file(line.split('"')[1]) else line


def is_library_file(path: str) -> bool:
    """Whether a file belongs to this library, another installed package, or Python."""
    return path.startswith(_OWN_FILES) or _LIBRARY_FILE.search(path) is not None


def _lines_of(error: BaseException) -> list[str]:
    """Return lines outside this library, first of this process, then of another one."""
    found: list[str] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith("ensemble_ray.cli"):
            found.clear()  # the frames above it started the command line
        elif not _is_caller(frame):
            found.append(f'File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}')
    note = next(
        (each for each in getattr(error, "__notes__", ()) if isinstance(each, str) and each.startswith(REMOTE)), ""
    )
    # Headings begin the tracebacks of other errors.
    own = takewhile(lambda line: line.startswith(" "), note.splitlines()[1:])
    return [*found, *(line.strip() for line in own if line.startswith('  File "'))]


def shorten_tracebacks(error: BaseException) -> None:
    """Drop this library's frames above user code, also from the causes (S-ERR-51).

    A foreign error without user code keeps its traceback: it may be a defect of this library.
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
    """Return `exc_info` from the first frame of user code on, if any."""
    return type(error), error, _find_user_code(error) or error.__traceback__


def remote_note(error: BaseException) -> str:
    """Return a note for another process with the traceback in user code; "" without user code."""
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
    at = error.__traceback__
    while at is not None and _is_caller(at.tb_frame):
        at = at.tb_next
    return at


def _is_caller(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _CALLERS or package in sys.stdlib_module_names
