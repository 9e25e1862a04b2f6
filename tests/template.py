"""Python programs that are forked from a template process, which has imported what most of them import.

In: a command, as `subprocess` takes it. Out: a child of this process in a session of its own. Never: user code or a Ray
connection in the template. A command that the template cannot run (another program, an option of the interpreter, another
value of a variable that is read at imports) starts plainly, as do all where there is no Linux.

A start costs 0.4 to 1.5 s of processor time, a fork a fiftieth. Two things differ in a forked program: its string hashes are
seeded as its siblings', and `/proc` shows the template's command line.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr, cast

_ROOT = Path(__file__).resolve().parents[1]
#: Settings of Ray, which reads them when it is imported. As in clusters that the runtime starts: workers at Ray's own
#: niceness starve beside other tests, and a driver finds no workers that were started for it in advance, since most have no use for
#: any. A head that is asked to end waits so long for actors that outlive their drivers, s.
RAY_SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
}
#: Variables that are read when an interpreter starts or a library is imported, except these.
_READ_AT_IMPORT = ("LANG", "LC_", "PYTHON", "RAY_")
_READ_LATER = {
    *(
        "PYTHONBREAKPOINT",
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPATH",
        "RAY_ADDRESS",
        "RAY_TMPDIR",
        "RAY_USAGE_STATS_ENABLED",
    ),
}
#: What the template imports, beside the modules of all commands.
_IMPORTED = (
    "ensemble_ray.actors.driver.cluster",
    "ensemble_ray.actors.driver.runtime",
    "ensemble_ray.runs.inline",
    "ensemble_ray.llm.openai",
    "ensemble_ray.testing",
    "openai.resources.chat.completions",
    "ray.dag",  # Ray imports it when a program ends
)
#: Of Linux's <sys/prctl.h>: whether orphans below this process become its children.
_PR_SET_CHILD_SUBREAPER = 36
#: Most bytes of a command and its environment.
_MOST_BYTES = 150_000


class ForkedProgram(subprocess.Popen[AnyStr]):
    """A `subprocess.Popen` of a Python program that is forked from the template where that can be."""

    is_forked = False

    def _execute_child(self, *given: object) -> None:
        """Fork; `subprocess` has opened the pipes, and waits for `self.pid` as for any child."""
        options: dict[str, Any] = dict(zip(inspect.signature(super()._execute_child).parameters, given, strict=True))  # type: ignore[misc]
        words = [options["args"]] if isinstance(options["args"], str | bytes | os.PathLike) else options["args"]
        request = _request([os.fsdecode(each) for each in words], options)
        if request is None:
            cast("Any", super())._execute_child(*given)
            return
        names = ("p2cread", "c2pwrite", "errwrite")
        self.pid = _template().fork(
            request, [number if options[name] == -1 else options[name] for number, name in enumerate(names)]
        )
        self.is_forked = self._child_created = True
        cast("Any", self)._close_pipe_fds(
            *(options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


def run_forked(
    command: Sequence[str | Path],
    *,
    input: Any = None,  # noqa: A002  as `subprocess.run` names it
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with ForkedProgram[Any](command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@contextlib.contextmanager
def forking(*modules: str) -> Iterator[None]:
    """Fork the Python programs that `subprocess` starts in the block; the template imports these modules, too."""
    if sys.platform == "linux":
        _template().load(modules)
    plain = subprocess.Popen
    subprocess.Popen = ForkedProgram  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = plain  # type: ignore[misc]


def _request(words: Sequence[str], options: Mapping[str, Any]) -> bytes | None:
    """What the template is asked, or None where the command starts plainly."""
    is_plain = (
        not any(options[name] for name in ("executable", "preexec_fn", "pass_fds", "shell")) and options["umask"] == -1
    )
    if not (is_plain and sys.platform == "linux" and words[0] == sys.executable and len(words) > 1):
        return None
    if words[1].startswith("-") and words[1] not in {"-c", "-m"}:
        return None
    environment = dict(os.environ if options["env"] is None else options["env"])
    own = _environment()
    for name, value in environment.items():
        # What Ray set in this process when it was connected matters only to a program that joins a cluster.
        is_ambient = "RAY_ADDRESS" not in environment and name.startswith("RAY_") and os.environ.get(name) == value
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER and own.get(name) != value and not is_ambient:
            return None
    folder = str(Path(os.fsdecode(options["cwd"] or os.curdir)).absolute())
    request = json.dumps([words[1:], environment, folder]).encode()
    return request if len(request) < _MOST_BYTES else None


@functools.cache
def _environment() -> Mapping[str, str]:
    """The environment of the template."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, **RAY_SETTINGS, "RAY_CLIENT_MODE": "0"}  # the last is what Ray sets when it is imported


@functools.cache
def _template() -> _Template:
    return _Template()


class _Template:
    """The template of this process, which ends with it: then nobody has the other end of its socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in _environment().items() if name != "PYTHONPATH"}
        pipe = subprocess.PIPE  # what Python makes for a pipe serves files and terminals, too; not the other way round
        with other:
            self._process = subprocess.Popen(  # noqa: S603  this file
                [sys.executable, "-m", "tests.template", str(other.fileno())], pass_fds=[other.fileno()], env=environment,
                cwd=_ROOT, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe,
            )  # fmt: skip

    def load(self, modules: Sequence[str]) -> None:
        """Have it import more."""
        with self._lock:
            self._socket.send(json.dumps(modules).encode())
            self._socket.recv(64)

    def fork(self, request: bytes, descriptors: Sequence[int]) -> int:
        """Return the id of a new process, which is a child of this one.

        It is born as the child of a process that ends, and its next ancestor that asks for orphans is this one.
        """
        with self._lock:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [request], descriptors)
                pid = int(self._socket.recv(64))
                self._socket.recv(64)  # its parent has ended
            except (OSError, ValueError):  # it is a defect of what it imports
                self._process.kill()
                raise AssertionError(self._process.communicate()[1].decode()) from None
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return pid


def _serve(control: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork a process for each request; return in that process, with what it runs."""
    from ensemble_ray.cli.app import COMMANDS, GROUPS

    for name in (*(place.partition(":")[0] for place in (*COMMANDS.values(), *GROUPS.values())), *_IMPORTED):
        importlib.import_module(name)
    del sys.modules["tests"]
    sys.path.remove(str(_ROOT))  # that of `-m`
    gc.collect()
    gc.freeze()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 2 * _MOST_BYTES, 3)
        if not request:
            os._exit(0)
        if not descriptors:
            for name in json.loads(request):
                importlib.import_module(name)
            gc.freeze()
            control.send(b"done")
            continue
        ready, go = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                control.send(str(pid).encode())
                os._exit(0)
            os.close(go)
            os.read(ready, 1)  # until the process between has ended, and this one has its parent
            os.close(ready)
            control.close()
            for standard, given in enumerate(descriptors):
                os.dup2(given, standard)
                os.close(given)
            return cast("tuple[list[str], dict[str, str], str]", tuple(json.loads(request)))
        for given in (ready, *descriptors):
            os.close(given)
        os.waitpid(between, 0)
        os.close(go)
        control.send(b"done")


def _become(words: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Be an interpreter that was started with these words, and run its program."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    cast("Any", sys.stdout).reconfigure(line_buffering=os.isatty(1))
    kind, *rest = words if words[0] in {"-c", "-m"} else ["", *words]
    place = {"-c": "", "-m": folder, "": str(Path(rest[0]).resolve().parent)}[kind]
    more = environment.get("PYTHONPATH", "")
    sys.path[:0] = [place, *(more.split(os.pathsep) if more else ())]
    sys.argv[:] = [kind or rest[0], *rest[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # the module is run, not what the template imported
        cast("Any", runpy)._run_module_as_main(rest[0])  # what `python -m` calls; it runs in `__main__`
        return
    if not kind:
        main.__file__ = rest[0]
    source = rest[0] if kind else Path(rest[0]).read_bytes()
    exec(compile(source, rest[0] if not kind else "<string>", "exec", dont_inherit=True), vars(main))  # noqa: S102  a program of a test


def _end(code: int) -> None:
    """Do what an interpreter does at its end, without the destruction of all modules, which takes 0.1 s."""
    cast("Any", threading)._shutdown()
    cast("Any", atexit)._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):
        sys.exit(code)  # the interpreter says so
    os._exit(code & 0xFF)


if __name__ == "__main__":
    try:
        _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as exit_of_program:
        if not isinstance(exit_of_program.code, int | None):
            raise
        _end(exit_of_program.code or 0)
    _end(0)
