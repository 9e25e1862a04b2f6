"""Runs one program and ends with the process that asked for it: a script of its own, started by `run.py`.

Package: built-in tools. Arguments: the numbers of two file descriptors, `1` where the program's environment has LC_CTYPE,
and the command. The first descriptor is the reading end of a pipe whose writing end only the asking process has: when that
process dies, by whatever signal, the pipe ends, and the whole process group is killed, this script included. To the second
one goes how the program ended: its return code, or `errno` and a number where it could not be started.

It leads a session and a group of their own, and stays until the call is over, so that the group's id
cannot pass to others while somebody may still kill it. Only the interpreter's library is imported, and little of it.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def supervise(control: int, status: int, command: list[str], environment: dict[str, str]) -> None:
    """Run the program; return when its call is over."""
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake_up)
    if select.select([control], [], [], 0)[0]:
        return  # nobody waits for it
    program = os.fork()
    if not program:
        _become(command, environment, control, status)
    _release_streams()
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if control in ready:
            if os.read(control, 1):
                return
            os.killpg(0, signal.SIGKILL)  # nobody waits for the program any more
        os.read(woken, 64)
        if status >= 0:
            ended, state = os.waitpid(program, os.WNOHANG)
            if ended:
                os.write(status, str(os.waitstatus_to_exitcode(state)).encode())
                os.close(status)
                status = -1


def _wake_up(_number: int, _frame: object) -> None:
    """Do nothing: a signal that is ignored would not wake who waits."""


def _become(command: list[str], environment: dict[str, str], control: int, status: int) -> None:
    """Turn this forked process into the program."""
    try:
        signal.set_wakeup_fd(-1)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, programs do not expect that
            signal.signal(ignored, signal.SIG_DFL)
        os.close(control)
        os.set_inheritable(status, False)  # noqa: FBT003  it takes no names
        os.execvpe(command[0], command, environment)  # noqa: S606  no shell; the command is the developer's own
    except OSError as error:
        os.write(status, f"errno {error.errno or 0}\n".encode())
    finally:
        os._exit(127)


def _release_streams() -> None:
    """Leave the three streams to the program: who reads them waits until all that have them are gone."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


if __name__ == "__main__":
    _environment = dict(os.environ)
    if sys.argv[3] == "0":
        _environment.pop("LC_CTYPE", None)  # the interpreter may have set it for itself
    supervise(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:], _environment)
