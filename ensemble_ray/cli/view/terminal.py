"""Results go to standard output, other text to standard error.

Only this module writes to the streams. It escapes foreign text, so that terminals do not obey it.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ensemble_ray.text.foreign_text import escape_controls, escape_json, escape_surrogates

# PARTLY: the run completed without the items that failed. WAITING: reviews are open.
FINE, FAILED, USAGE, PARTLY, WAITING, INTERRUPTED = 0, 1, 2, 3, 4, 130
_reserved: list[TextIO] = []  # the stream of results after `reserve_stdout`
# With the mark of results, for a command that runs as a job: its log contains both streams.
MARK_VARIABLE = "ENSEMBLE_RAY_RESULT_MARK"
_marks: list[str] = []  # the prefix of results after `frame_results`


_reveal: Callable[[str], str] | None = None


@contextmanager
def revealing(restore: Callable[[str], str] | None) -> Generator[None]:
    """Change the texts of all results that are shown inside the block."""
    global _reveal  # noqa: PLW0603  a process runs one command
    _reveal = restore
    try:
        yield
    finally:
        _reveal = None


def show(text: str) -> None:
    """Escape foreign text (S-SEC-60)."""
    _write(escape_controls(text if _reveal is None else _reveal(text)))


def show_answer(text: str) -> None:
    """Escape foreign text on a terminal, and leave it unchanged in a pipe or file (S-SEC-61)."""
    _write(escape_controls(text) if _results().isatty() else escape_surrogates(text))


def show_json(data: object) -> None:
    """Numbers that JSON lacks become strings."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # NaN, or a user's value without a JSON form
        from ensemble_ray.values.trace import jsonable

        plain = json.loads(json.dumps(jsonable(data)), parse_constant=str)
        text = json.dumps(plain, indent=2, ensure_ascii=False)
    show_json_text(text)


def show_result(data: object, lines: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        show_json(data)
    else:
        show("\n".join(lines))


def show_json_text(text: str) -> None:
    """Control and unencodable characters become JSON escapes, which keeps the data."""
    if _reveal is not None:
        from ensemble_ray.text.redaction import map_texts

        text = json.dumps(map_texts(json.loads(text), _reveal), indent=2, ensure_ascii=False)
    _write(escape_json(text, _results().encoding))


def write_note(text: str) -> None:
    """Write progress, a note or an error with foreign text escaped (S-SEC-60)."""
    write_part(f"{text}\n")


def write_part(text: str) -> None:
    """Write a part of a line."""
    flush_results()  # keeps the order in a log of both streams
    _put(sys.stderr, escape_controls(text))  # one write, because several threads call this
    _put(sys.stderr)


def _results() -> TextIO:
    return _reserved[-1] if _reserved else sys.stdout


def _write(text: str) -> None:
    line = f"{_marks[-1]}{json.dumps(text)}" if _marks else text
    _put(_results(), f"{line}\n")


def _put(stream: TextIO, text: str = "") -> None:
    """Flush without a text. After the reader of a pipe has left, output is discarded (S-SEC-66)."""
    try:
        if text:
            stream.write(text)
        else:
            stream.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def guard_streams() -> None:
    """Escape unencodable and foreign text of output, log lines, warnings and uncaught errors (S-SEC-64)."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed when the program was started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  open until the process ends
        else:
            # Escapes such as `\u2026` instead of an error (S-LLM-34).
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(SafeFormatter())
    format_plainly = warnings.formatwarning

    def format_warning(*found: Any, **more: Any) -> str:
        return escape_controls(format_plainly(*found, **more))

    warnings.formatwarning = format_warning
    sys.excepthook = lambda error_type, error, trace: write_note(_format_error(error_type, error, trace))
    threading.excepthook = lambda found: write_note(
        f"Exception in thread {'' if found.thread is None else found.thread.name}:\n"
        f"{_format_error(found.exc_type, found.exc_value, found.exc_traceback)}"
    )
    sys.unraisablehook = lambda found: write_note(
        f"{found.err_msg or 'Exception ignored in'}: {found.object!r}\n"
        f"{_format_error(found.exc_type, found.exc_value, found.exc_traceback)}"
    )


class SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def _format_error(*uncaught: Any) -> str:
    return "".join(traceback.format_exception(*uncaught)).rstrip()


def reserve_stdout() -> None:
    """Keep standard output for results until the process ends (S-SEC-63).

    Other output goes to standard error: of a team's modules, tools, libraries that write to the descriptor, and processes
    that are started later.
    """
    sys.stdout.flush()
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    # Other programs do not inherit the copied descriptor.
    _reserved.append(open(os.dup(1), "w", encoding=encoding, errors=errors))  # noqa: PTH123, SIM115  open until the process ends
    os.dup2(2, 1)


def frame_results() -> None:
    """If the environment has a mark, write each result as a line of JSON after it (S-CLU-14).

    Commands that tools start write normally, because the mark is removed.
    """
    mark = os.environ.pop(MARK_VARIABLE, "")
    if mark:
        if not _reserved:
            reserve_stdout()
        _marks.append(mark)


def flush_results() -> None:
    for stream in (*_reserved, sys.stdout):
        _put(stream)


def role_option(role: str | None) -> str:
    """Return the option of `ensemble-ray review` for a gate that requires a role, after a blank; empty without a role."""
    return "" if role is None else f" --role {shlex.quote(role)}"


def own_command() -> str:
    """Return the program's name if PATH finds it, else its path."""
    program = Path(sys.argv[0])
    found = shutil.which("ensemble-ray")
    if program.name != "ensemble-ray":  # `python -m`, or another program that imports this package
        return "ensemble-ray" if found else f"{sys.executable} -m ensemble_ray.cli"
    if found and Path(found).resolve() == program.resolve():
        return "ensemble-ray"
    here = program.absolute()
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)


def is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "") != "dumb" and not os.environ.get("CI")


def screen_line(text: str, length: int) -> str:
    """Escape control characters and cut to a length."""
    # Cut first: an answer can be very long.
    clean = escape_controls(" ".join(text[: 4 * length].split()))
    return clean if len(clean) <= length else f"{clean[: length - 1].rstrip()}\u2026"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def count_noun(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
