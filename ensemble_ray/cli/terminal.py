"""Where words go: results to standard output, everything else to standard error. Room: cli."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["FAILED", "FINE", "INTERRUPTED", "PARTLY", "USAGE", "is_terminal", "one_line", "own_command", "say", "show"]

#: Exit codes. Partly: it completed, and items that failed were left out.
FINE, FAILED, USAGE, PARTLY, INTERRUPTED = 0, 1, 2, 3, 130


def show(text: str) -> None:
    """A result."""
    print(text)


def say(text: str) -> None:
    """Progress, a note, an error."""
    sys.stdout.flush()  # so that a log that takes both streams has them in order
    sys.stderr.write(f"{text}\n")  # in one piece, since several threads speak
    sys.stderr.flush()


def own_command() -> str:
    """How the user can call this program again: by its name where that finds it, else by its path."""
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


def one_line(text: str, length: int) -> str:
    """A text on one line, cut to a length, without characters that a terminal would obey."""
    words = " ".join(text[: 4 * length].split())
    clean = "".join(char if char.isprintable() else "\ufffd" for char in words)
    return clean if len(clean) <= length else f"{clean[: length - 1].rstrip()}\u2026"
