"""Text that tries to take a terminal over, and a real terminal that notes all that reaches it.

In: a command line. Out: what it wrote, and which characters of it a terminal would obey.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import sys
import threading
import tty
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import pytest

from ensemble_ray.cli.app import invoke

#: Sets the title, clears the screen, hides what follows, and again by single characters; reverses and splits the line.
STEERING = (
    "\x1b]0;owned\x07\x1b[2J\x1b[8m\x9b2J\x9d0;x\x9c\x7f\x08\u202evil\u2066\u2028\u2029\u200b\ufeff\U000e0041\rFAKE"
)
#: Markup of the library that draws on terminals.
MARKUP = "[red]PLANTED[/red] [link=http://127.0.0.1:9/]x[/link] :bomb:"
#: What is planted everywhere. A part of it stands first, so that it survives where a text is cut.
HOSTILE = f"PLANTED\x1b[2J\u202e{STEERING}{MARKUP}"

#: What the command line writes itself: colours and weights, and how a block is drawn again.
_OWN = re.compile(
    r"\x1b\[(?:0|1|2|3[0-9]|38;5;[0-9]+|38;2;[0-9;]+|1;3[0-9])?m|\x1b\[\?25[lh]|\r?\x1b\[1A\x1b\[2K|\r\x1b\[2K"
)


def intruders(written: str) -> set[str]:
    """The characters that a terminal would obey and that the command line did not write itself."""
    rest = _OWN.sub("", written)
    return {char for char in rest if not (char.isprintable() or char == "\n")}


@dataclass
class Shown:
    """What a command wrote to its terminal."""

    arguments: Sequence[str]
    code: int = -1
    chunks: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it; a byte that is no UTF-8 fails here."""
        return b"".join(self.chunks).decode("utf-8")


@contextlib.contextmanager
def terminal(shown: Shown, monkeypatch: pytest.MonkeyPatch, *, typed: str = "") -> Generator[Shown]:
    """Inside, this process's standard streams are a terminal; somebody types that."""
    controller, end = pty.openpty()
    tty.setraw(end)  # so that what arrives is what was written

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while chunk := os.read(controller, 65_536):
                shown.chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with (
            open(end, "w", encoding="utf-8", closefd=True) as stream,  # noqa: PTH123  a descriptor
            monkeypatch.context() as patch,
        ):
            patch.setenv("TERM", "xterm-256color")
            patch.setenv("COLUMNS", "4000")
            for name in ("CI", "NO_COLOR", "FORCE_COLOR"):
                patch.delenv(name, raising=False)
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, stream)
            patch.setattr(sys, "stdin", _Typed(typed))
            yield shown
    finally:
        reader.join()
        os.close(controller)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str, typed: str = "") -> Shown:
    """Call a command of the command line at a terminal."""
    root = logging.getLogger()
    with terminal(Shown(arguments), monkeypatch, typed=typed) as shown:
        handlers = list(root.handlers)
        shown.code = invoke(arguments)
        for handler in set(root.handlers) - set(handlers):  # of `--debug`: it holds on to this terminal
            root.removeHandler(handler)
    return shown


class _Typed(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True
