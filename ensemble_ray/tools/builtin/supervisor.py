"""Run one program and end with the process that started this script (`process.py`).

Arguments: two file descriptors, `1` if the program's environment contains LC_CTYPE, and the command. When the first one ends,
whose writing end only the calling process has, the script kills its process group. The second one receives the exit code, or
`errno` and a number. The script stays until the call is over, so that the group's id is not reused. It imports little, to
start fast.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def supervise(control: int, status: int, command: list[str], environment: dict[str, str]) -> None:
    woken, waker = os.pipe()
    for end in (woken, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake_up)
    if select.select([control], [], [], 0)[0]:
        return  # the call is over already
    program = os.fork()
    if not program:
        _become(command, environment, control, status)
    # Readers of the streams wait until every process has closed them.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if control in ready:
            if os.read(control, 1):
                return
            os.killpg(0, signal.SIGKILL)  # the calling process is dead
        os.read(woken, 64)
        if status >= 0:
            ended, state = os.waitpid(program, os.WNOHANG)
            if ended:
                os.write(status, str(os.waitstatus_to_exitcode(state)).encode())
                os.close(status)
                status = -1


def _wake_up(_number: int, _frame: object) -> None:
    """An ignored signal would not interrupt `select`."""


def _become(command: list[str], environment: dict[str, str], control: int, status: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, programs expect the default
            signal.signal(ignored, signal.SIG_DFL)
        os.close(control)
        os.set_inheritable(status, False)  # noqa: FBT003  it takes no names
        os.execvpe(command[0], command, environment)  # noqa: S606  no shell; the command is the developer's own
    except OSError as error:
        os.write(status, f"errno {error.errno or 0}\n".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    _environment = dict(os.environ)
    if sys.argv[3] == "0":
        _environment.pop("LC_CTYPE", None)  # the interpreter may have set it
    supervise(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:], _environment)
