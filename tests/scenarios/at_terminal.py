"""The command line at a terminal of its own: `python -m tests.scenarios.at_terminal WORD...`; SIGUSR1 types Ctrl-C.

What is shown there is written to standard output; the exit code is the command's.
"""

from __future__ import annotations

import os
import pty
import signal
import sys

from tests.command_line import COMMAND


def main() -> None:
    """Run it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(COMMAND[0], [*COMMAND, *sys.argv[1:]])  # noqa: S606  a command of ours
    signal.signal(signal.SIGUSR1, lambda *_: os.write(terminal, b"\x03"))
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # it was closed
            break
        if not piece:
            break
        os.write(1, piece)
    _, status = os.waitpid(pid, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
