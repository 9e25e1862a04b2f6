"""The process that forks the workers of a local Ray. It imports Ray and this library once (docs/decisions/0014-worker-template.md).

A forked worker has the arguments, environment and standard streams of its client (`worker_client.py`). The process never
imports user code, has one thread, and ends with the raylet.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import wrapt
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Actors, modules of their first model call, and modules that Ray imports when a worker connects.
_IMPORTS = (
    "ensemble_ray.actors.scheduler.scheduler",
    "ensemble_ray.actors.worker.agent",
    "ensemble_ray.actors.worker.callable_host",
    "ensemble_ray.actors.link.events",
    "ensemble_ray.actors.shared.journal",
    "ensemble_ray.llm.openai",
    "ensemble_ray.llm.protocol.sdk_transport",
    "ensemble_ray.record.sqlite.store",
    "aiohttp",
    "pydantic.v1",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "starlette.datastructures",
)
#: The raylet sets these for each worker of the first driver. Ray reads them when it is imported.
_WORKER_VARIABLES = {"RAY_JOB_ID": "01000000", "RAY_LD_PRELOAD_ON_WORKERS": "0"}
_STREAMS = 3
_REQUEST_S = 5.0


class WorkerRequest(Struct, frozen=True, kw_only=True):
    streams: Sequence[int]
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    path: list[str]
    niceness: int


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    raylet = options["--raylet-pid"]
    # The file descriptor becomes readable when the raylet ends.
    raylet_end = os.pidfd_open(int(raylet))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(options["--socket"])
    listener.listen(128)  # clients wait from now on
    os.environ |= _WORKER_VARIABLES | {"RAY_RAYLET_PID": raylet}
    variables = _ray_variables(os.environ)
    worker_program = _import(options["--root"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended workers
    gc.collect()
    gc.freeze()  # workers share these objects' memory
    request = _serve(listener, raylet_end, variables)
    if request is None:
        return
    os.close(raylet_end)
    listener.close()
    _adopt(request)
    sys.argv = [worker_program, *request.arguments]
    sys.path[:] = [str(Path(worker_program).parent), *request.path]
    runpy.run_path(worker_program, run_name="__main__")


def _import(root: str) -> str:
    """Import what workers need, with this library from the driver's path. Return the path of Ray's program for workers."""
    path = list(sys.path)
    sys.path[0] = root  # it was this file's directory
    from ray._private.workers import default_worker

    for name in _IMPORTS:
        with contextlib.suppress(ImportError):  # an extra that is not installed, or another version of Ray
            importlib.import_module(name)
    with contextlib.suppress(ImportError, AttributeError):  # another version of Ray
        _postpone_arrow()
    sys.path[:] = path
    return str(default_worker.__file__)


def _ray_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("RAY_")}


def _postpone_arrow() -> None:
    """Ray imports an installed pyarrow, and numpy with it, in each worker: 0.2 s of processor time and 25 MB."""
    name = "_register_custom_datasets_serializers"
    arrow = importlib.import_module("ray._private.arrow_serialization")
    register = getattr(arrow, name)

    def postpone(context: object) -> None:
        wrapt.register_post_import_hook(lambda _module: register(context), "pyarrow")

    setattr(arrow, name, postpone)


def _serve(listener: socket.socket, raylet_end: int, variables: Mapping[str, str]) -> WorkerRequest | None:
    """Return the request in a forked worker, or None when the raylet has ended."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    waiting.register(raylet_end, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in waiting.poll()]
        if raylet_end in ready:
            return None
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, EOFError):  # a client that Ray stopped
            connection.settimeout(_REQUEST_S)
            request = _receive(connection)
            if _is_forkable(request, variables):
                if os.fork() == 0:
                    return request
                connection.sendall(b"y")
            for descriptor in request.streams:
                os.close(descriptor)


def _is_forkable(request: WorkerRequest, variables: Mapping[str, str]) -> bool:
    # A lock of another thread would stay locked in a worker.
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.stderr.write("Not forked: an import of this process started a thread\n")
        return False
    other = sorted({name for name, _ in _ray_variables(request.environment).items() ^ variables.items()})
    if other:
        sys.stderr.write(f"Not forked: other values of {', '.join(other)}\n")
    return not other


def _receive(connection: socket.socket) -> WorkerRequest:
    header, streams, _, _ = socket.recv_fds(connection, 8, _STREAMS)
    size = int.from_bytes(header, "big")
    with connection.makefile("rb") as stream:
        body = stream.read(size)
    if len(body) < size or len(streams) < _STREAMS:  # the client was stopped while it sent
        for descriptor in streams:
            os.close(descriptor)
        raise EOFError
    arguments, environment, directory, path, niceness = marshal.loads(body)  # noqa: S302  of the same user
    return WorkerRequest(
        streams=streams, arguments=arguments, environment=environment, directory=directory, path=path, niceness=niceness
    )


def _adopt(request: WorkerRequest) -> None:
    os.setpgid(0, 0)  # Ray ends a worker by its process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in enumerate(request.streams):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    os.nice(max(0, request.niceness - os.getpriority(os.PRIO_PROCESS, 0)))
    if "numpy" in sys.modules:  # Python's own generator is seeded again by the fork
        cast("Any", sys.modules["numpy"]).random.seed()


if __name__ == "__main__":
    main()
