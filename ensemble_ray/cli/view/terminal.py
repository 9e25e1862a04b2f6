"""Where words go: results to standard output, everything else to standard error.

In: text of ours with foreign text in it. Out: the same on a stream, with nothing in it that a terminal would obey.
Never: another module of the command line that writes to a stream by itself.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any, TextIO

from ensemble_ray.text.foreign_text import escape_controls, escape_json, escape_surrogates

#: Exit codes. Partly: it completed, and items that failed were left out. Waiting: reviews are open.
FINE, FAILED, USAGE, PARTLY, WAITING, INTERRUPTED = 0, 1, 2, 3, 4, 130
#: Where results go once standard output is kept for them alone.
_reserved: list[TextIO] = []
#: Has the mark of results in the environment of a command that runs as a job, whose log has both streams.
MARK_VARIABLE = "ENSEMBLE_RAY_RESULT_MARK"
#: What stands before each result then.
_marks: list[str] = []


def show(text: str) -> None:
    """Write a result; foreign text in it is made safe, wherever it goes (S-SEC-60)."""
    _write(escape_controls(text))


def show_answer(text: str) -> None:
    """Write the answer of a run: data where a pipe or a file takes it, safe text on a terminal (S-SEC-61)."""
    _write(escape_controls(text) if _results().isatty() else escape_surrogates(text))


def show_json(data: object) -> None:
    """Write a result as JSON; a number that JSON does not have is a text."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # NaN, or a value of the user's program that has no JSON form
        from ensemble_ray.values.trace import jsonable  # most results do not need it

        plain = json.loads(json.dumps(jsonable(data)), parse_constant=str)
        text = json.dumps(plain, indent=2, ensure_ascii=False)
    show_json_text(text)


def show_json_text(text: str) -> None:
    """Write a result that is JSON already; the data is the same, whatever a terminal would obey or cannot show is escaped."""
    _write(escape_json(text, _results().encoding))


def say(text: str) -> None:
    """Write progress, a note or an error; foreign text in it is made safe (S-SEC-60)."""
    flush_results()  # so that a log that takes both streams has them in order
    _put(sys.stderr, f"{escape_controls(text)}\n")  # in one piece, since several threads speak
    _put(sys.stderr)


def say_piece(text: str) -> None:
    """Write a part of a line of progress; the rest follows. Foreign text in it is made safe."""
    flush_results()
    _put(sys.stderr, escape_controls(text))
    _put(sys.stderr)


def _results() -> TextIO:
    return _reserved[-1] if _reserved else sys.stdout


def _write(text: str) -> None:
    line = f"{_marks[-1]}{json.dumps(text)}" if _marks else text
    _put(_results(), f"{line}\n")


def _put(stream: TextIO, text: str = "") -> None:
    """Write a text, or hand on what was written; from when nobody reads a pipe any more it goes nowhere (S-SEC-66)."""
    try:
        if text:
            stream.write(text)
        else:
            stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


# The streams of a program.


def guard_streams() -> None:
    """Make this process's streams safe: what cannot be encoded, log lines, warnings and uncaught errors (S-SEC-64)."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # it was closed when the program was started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  for as long as the process lives
        else:
            # What the stream cannot encode is shown as an escape such as `\u2026`: not lost, and no reason to fail (S-LLM-34).
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(SafeFormatter())
    warnings.formatwarning = _safe_warning
    sys.excepthook = lambda error_type, error, trace: say(_format_error(error_type, error, trace))
    threading.excepthook = lambda found: say(
        f"Exception in thread {'' if found.thread is None else found.thread.name}:\n"
        f"{_format_error(found.exc_type, found.exc_value, found.exc_traceback)}"
    )
    sys.unraisablehook = lambda found: say(
        f"{found.err_msg or 'Exception ignored in'}: {found.object!r}\n"
        f"{_format_error(found.exc_type, found.exc_value, found.exc_traceback)}"
    )


class SafeFormatter(logging.Formatter):
    """Formats log records as safe text."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one, with its traceback."""
        return escape_controls(super().format(record))


_format_warning = warnings.formatwarning


def _safe_warning(*arguments: Any, **keywords: Any) -> str:
    return escape_controls(_format_warning(*arguments, **keywords))


def _format_error(*uncaught: Any) -> str:
    return "".join(traceback.format_exception(*uncaught)).rstrip()


def reserve_stdout() -> None:
    """Keep standard output for results, to the end of this process (S-SEC-63).

    Everything else that is written to it goes to standard error: by modules of a team, by tools, by libraries that know
    the descriptor only, and by processes that are started from now on.
    """
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    # A copy is not handed on to other programs, and nobody else knows its number.
    _reserved.append(open(os.dup(1), "w", encoding=encoding, errors=errors))  # noqa: PTH123, SIM115  to the end of the process
    os.dup2(2, 1)


def frame_results() -> None:
    """Write results as lines of JSON behind the mark that the environment names, where it does (S-CLU-14).

    The mark is for this process alone: commands that tools start write as ever.
    """
    mark = os.environ.pop(MARK_VARIABLE, "")
    if mark:
        if not _reserved:
            reserve_stdout()
        _marks.append(mark)


def flush_results() -> None:
    """Hand on what was written as results."""
    for stream in (*_reserved, sys.stdout):
        _put(stream)


def own_command() -> str:
    """Return how the user can call this program again: by its name where that finds it, else by its path."""
    program = Path(sys.argv[0])
    found = shutil.which("ensemble-ray")
    if program.name != "ensemble-ray":  # `python -m`, or a program that uses us
        return "ensemble-ray" if found else f"{sys.executable} -m ensemble_ray.cli"
    if found and Path(found).resolve() == program.resolve():
        return "ensemble-ray"
    here = program.absolute()
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


def is_terminal() -> bool:
    """Whether somebody watches standard error on a terminal that can redraw."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb" and not os.environ.get("CI")


def screen_line(text: str, length: int) -> str:
    """Return a text on one line, cut to a length, without characters that a terminal would obey."""
    # Cut first: an answer may be as large as a book.
    clean = escape_controls(" ".join(text[: 4 * length].split()))
    return clean if len(clean) <= length else f"{clean[: length - 1].rstrip()}\u2026"


def count_noun(number: int, noun: str) -> str:
    """Return a number with its noun: `1 task`, `2 tasks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
