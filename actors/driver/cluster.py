"""Connects a driver to a cluster: joins or starts one, notices its death, and describes it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ipaddress
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import ray
import ray.exceptions
from ray._private import ray_constants, services, state
from ray._private.node import Node

from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver import silent_agent, worker_client, worker_template
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, last_line, living_nodes, patiently, reach, run_error
from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.process.concurrency import after_fork, is_ray_inherited, threads
from ensemble_ray.process.config import package_version, read_switch
from ensemble_ray.process.context import bounded_logger, notify
from ensemble_ray.process.private_files import private_ray_directory, secure_token_file
from ensemble_ray.record.stores import resume_advice
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.metrics import ActorDescription, ClusterDescription, NodeDescription, load_actor

_log = bounded_logger(__name__)
_MODE = "RAY_AUTH_MODE"
#: How long a port may take to accept a connection, s.
_REACH_S = 5.0
_AGENT_PORT = "dashboard_agent_listen_port"
_TEMPLATE = "worker_template"
_started: list[str] = []
#: Interval of a waiting driver's checks, s, and how many may fail.
_LOOK_S = 2.0
_MOST_MISSES = 3
_FRESH_S = 1.0
#: How long one actor may take, s: a scheduler first asks its processes.
_ANSWER_S = 5.0
_LIST_S = 10.0
Reply = TypeVar("Reply")
LOCAL = "local"
#: Runs of this process may share processes of a cluster.
PROGRAM = new_object_id()


def join_or_start(address: str, init_options: Mapping[str, object]) -> bool:
    """Return False if this process is already connected."""
    check_fork()
    if ray.is_initialized():
        return False
    options: dict[str, object] = {
        "address": address,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "configure_logging": False,
    }
    options.update(init_options)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if options["address"] == LOCAL:
            start_local(options)
        else:
            _join(str(options["address"]), options)
    except Exception as error:  # Ray raises a bare Exception if its processes take more than 30 s
        text = (
            f"The Ray cluster at '{address}' cannot be joined: {message_of(error)}. Check RAY_ADDRESS or address=, that the "
            "cluster runs, and its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH); without an address a local one is started"
        )
        if address == LOCAL:
            text = f"Ray cannot be started on this machine: {message_of(error)}. Look with 'ensemble-ray doctor'"
        raise EnsembleError(text) from error
    return True


def check_fork() -> None:
    if is_ray_inherited():
        raise EnsembleError(
            f"Process {os.getpid()} was forked from a process that was connected to Ray, and cannot use that connection or open "
            "another one. Use Ray first after the fork (Celery: worker_process_init; gunicorn: post_fork, without --preload), "
            "start processes with multiprocessing's 'spawn', or run here with runtime='inline'"
        )


@after_fork
def _leave_instance() -> None:
    if is_ray_inherited():
        worker = cast("Any", ray)._private.worker  # noqa: SLF001  Ray has no other way
        atexit.unregister(worker.shutdown)
        if worker._global_node is not None:  # noqa: SLF001
            worker._global_node.all_processes.clear()  # noqa: SLF001


def _join(address: str, options: Mapping[str, object]) -> None:
    """Test the port of a plain `host:port` address first; Ray handles other forms."""
    host, _, port = address.rpartition(":")
    is_plain = bool(host) and port.isdigit() and "/" not in address
    if is_plain:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    is_local = is_plain and is_on_loopback_only(host.strip("[]"), int(port))
    with quiet(), on_loopback() if is_local else nullcontext():
        cast("Callable[..., object]", ray.init)(**options)


class ClusterHeartbeat:
    """Notices the death of a run's cluster within seconds. Ray itself needs a minute."""

    def __init__(self, run_id: str, origin: str) -> None:
        self._run_id, self._origin = run_id, origin
        self._misses = 0

    @property
    def is_gone(self) -> bool:
        return self._misses >= _MOST_MISSES

    async def wait_for(self, reference: Awaitable[Reply]) -> Reply:
        waiting = asyncio.ensure_future(reference)
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0]:
                await self.check()
        finally:
            waiting.cancel()  # no effect if it is done
        return await waiting

    async def reach(self, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """Retry while the scheduler restarts."""
        is_noted = False

        async def note() -> None:
            nonlocal is_noted
            if not is_noted:
                _log.warning("Run %s: the scheduler's process died; the run continues when it is back", self._run_id)
                is_noted = True
            await self.check()

        return await reach(lambda: self.wait_for(call()), patiently(), before_retry=note)

    async def check(self) -> None:
        """Calls to a dead cluster may fail faster than any check during them."""
        self._misses = 0 if await _is_alive() else self._misses + 1
        if self.is_gone:
            advice = resume_advice(self._run_id, self._origin)
            raise run_error(self._run_id, f"the cluster is gone. What was recorded is kept; continue the run: {advice}")


#: When the cluster's head last answered each connection, s.
_answered_at: dict[str, float] = {}


async def _is_alive() -> bool:
    connection, now = connection_id(), time.monotonic()
    if now - _answered_at.get(connection, -math.inf) < _FRESH_S:
        return True
    is_there = await _answers()
    if is_there:
        _answered_at.clear()
        _answered_at[connection] = now
    return is_there


async def _answers() -> bool:
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _LOOK_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def connection_id() -> str:
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    # A driver's own id contains its job's number, which is the same in every new cluster.
    return f"{context.get_node_id()}/{context.get_worker_id()}"


async def check_version(scheduler: Any) -> None:
    """The scheduler outlives its drivers, so it may be older than this process."""
    theirs, ours_ = await reach(scheduler.version.remote, RESTART_PAUSES_S), package_version()
    if theirs != ours_:
        raise ValidationError(
            f"The cluster's scheduler runs ensemble-ray {theirs}, this process {ours_}. "
            "Install the same version on all nodes and restart the cluster, or join another one"
        )


async def describe_cluster() -> ClusterDescription:
    if not ray.is_initialized():
        raise EnsembleError("This process is connected to no cluster")
    try:
        async with asyncio.timeout(_LIST_S):
            nodes, shared = await asyncio.gather(threads.run(_nodes), threads.run(spawn.existing_shared))
    except TimeoutError:
        raise EnsembleError(f"The cluster did not answer within {_LIST_S:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise EnsembleError(f"The cluster cannot be reached: {last_line(error)}") from None
    names = sorted(shared)
    found = await asyncio.gather(*(_ask(name, shared[name]) for name in names))
    return ClusterDescription(
        address=str(ray.get_runtime_context().gcs_address),
        nodes=tuple(nodes),
        actors=tuple(each for each in found if isinstance(each, ActorDescription)),
        notes=tuple(each for each in found if isinstance(each, str) and each),
    )


async def _ask(name: str, actor: Any) -> ActorDescription | str:
    """Return an actor's description, or why there is none; empty if none is expected."""
    ask = getattr(actor, "describe", None)
    if ask is None:
        if not name.rpartition("/")[2].startswith(spawn.SCHEDULER):
            return ""
        return (
            f"The scheduler '{name}' is of an older version and does not say what its processes do: restart the cluster"
        )
    try:
        async with asyncio.timeout(_ANSWER_S):
            described = load_actor(await ask.remote())
            # Ray's public function asks the dashboard, which a cluster may not have.
            listed = await threads.run(cast("Any", state).actors, actor_id=actor._actor_id.hex())  # noqa: SLF001
            restarts = int(listed["NumRestarts"]) if listed else None
        return replace(described, process=replace(described.process, restarts=restarts))
    except TimeoutError:
        return f"'{name}' did not answer within {_ANSWER_S:.0f} s"
    except ray.exceptions.RayError as error:
        return f"'{name}' cannot be reached: {last_line(error)}"
    except ValueError as error:  # pydantic's, for an actor of another version
        return f"'{name}' says what this version does not understand: {message_of(error).splitlines()[0]}"


def _nodes() -> list[NodeDescription]:
    return [
        NodeDescription(
            node_id=node["NodeID"],
            name=node.get("NodeManagerHostname") or node.get("NodeName") or node["NodeID"][:8],
            address=node.get("NodeManagerAddress") or "",
        )
        for node in living_nodes()
    ]


def start_local(options: Mapping[str, object]) -> None:
    """The instance listens on loopback unless the options name an address."""
    # Ray runs workers at niceness 15, which starves agents and heavy tools on a busy machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # An unset mode stays unset: Ray then enables tokens, even for this process, which has already read its settings.
    if os.environ.get(_MODE, "token").lower() == "token":
        secure_token_file()
    else:
        _log.warning(
            "%s=%s: the local Ray instance demands no token; every user of this machine can run programs in it as you",
            _MODE,
            os.environ[_MODE],
        )
    has_address = "_node_ip_address" in options
    arguments = {"include_dashboard": False, "_temp_dir": str(private_ray_directory()), **options}
    has_dashboard = arguments["include_dashboard"] is not False
    notify("Starting a local Ray (some seconds) ...")
    with (
        quiet(),
        _ended_on_exit(),
        nullcontext() if has_dashboard else _leave_out(has_log_monitor=bool(arguments.get("log_to_driver"))),
        _adapt_raylet(has_dashboard=has_dashboard),
        nullcontext() if has_address else on_loopback(),
    ):
        cast("Callable[..., object]", ray.init)(**arguments)
    address = str(ray.get_runtime_context().gcs_address)
    if not has_address and not _is_loopback(address.rpartition(":")[0].strip("[]")):
        ray.shutdown()
        raise EnsembleError(
            f"Ray {ray.__version__} listens at {address} and not on loopback alone. Use another version of Ray, start a "
            "cluster yourself and name its address, or allow it: RayRuntime(init_options={'_node_ip_address': ...})"
        )
    _started.append(_instance())


def is_started_here() -> bool:
    return ray.is_initialized() and _instance() in _started


def _instance() -> str:
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_node_id()}"


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Hide Ray's remarks at start from the user's terminal."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _replace(target: Any, values: Mapping[str, object]) -> Generator[None]:
    """Replace attributes of Ray for a while."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def on_loopback() -> AbstractContextManager[None]:
    """Let Ray use the loopback address as this machine's address, as it does on macOS and Windows.

    Ray replaces `_node_ip_address="127.0.0.1"` by the machine's address, and reads its setting at import.
    """
    return _replace(ray_constants, {"ENABLE_RAY_CLUSTER": False})


def is_on_loopback_only(host: str, port: int) -> bool:
    """Ray would look for such an instance at another address."""
    if not _is_loopback(host):
        return False
    here = str(cast("Any", ray.util).get_node_ip_address())
    if _is_loopback(here):
        return False
    try:
        socket.create_connection((here, port), timeout=_REACH_S).close()
    except OSError:
        return True
    return False


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _leave_out(*, has_log_monitor: bool) -> AbstractContextManager[None]:
    """Start no processes without use for one machine: docs/decisions/0013-local-ray.md."""

    def start_nothing(*_: object, **__: object) -> None:
        pass

    methods = ("start_monitor", "start_api_server", *(() if has_log_monitor else ("start_log_monitor",)))
    return _replace(Node, {name: start_nothing for name in methods if hasattr(Node, name)})


def _adapt_raylet(*, has_dashboard: bool) -> AbstractContextManager[None]:
    """Start the raylet so that workers are forked and it waits for no port: docs/decisions/0014-worker-template.md.

    Without a dashboard it gets no dashboard agent. A version of Ray with other internal names starts unchanged.
    """
    original = getattr(cast("Any", Node), "start_raylet", None)
    if original is None:
        return nullcontext()

    def start_raylet(self: Any, *arguments: object, **options: object) -> None:
        parameters = self._ray_params
        # While another Ray on this machine uses the default port, the raylet's agent would retry it for seconds.
        if getattr(parameters, _AGENT_PORT, None) == ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT:
            setattr(parameters, _AGENT_PORT, 0)
        has_template = False
        try:
            has_template = _prepare_template(self)
        except (AttributeError, OSError) as error:
            _log.warning("Workers are started without a template: %s", error)
        with nullcontext() if has_dashboard else _replace_agent():
            original(self, *arguments, **options)
        if has_template:
            try:
                _start_template(self)
            # Without a socket, clients start in Ray's own way.
            except (AttributeError, LookupError, OSError) as error:
                _log.warning("Workers are started without a template: %s", error)

    return _replace(Node, {"start_raylet": start_raylet})


def _replace_agent() -> AbstractContextManager[None]:
    original = cast("Any", services).start_ray_process
    theirs = subprocess.list2cmdline([str(Path(str(ray.__file__)).parent / "dashboard" / "agent.py")])
    ours = subprocess.list2cmdline([silent_agent.__file__])

    def start_ray_process(command: Sequence[str], *arguments: object, **options: object) -> object:
        changed = [
            each.replace(theirs, ours, 1) if each.startswith("--dashboard_agent_command=") else each for each in command
        ]
        return original(changed, *arguments, **options)

    return _replace(services, {"start_ray_process": start_ray_process})


def _prepare_template(node: Any) -> bool:
    """Let a node's raylet run the client instead of Ray's program for workers. Return False if there can be no template."""
    if sys.platform != "linux" or not read_switch("ENSEMBLE_RAY_WORKER_TEMPLATE", default=True):
        return False
    parameters = node._ray_params  # noqa: SLF001
    if Path(str(getattr(parameters, "worker_path", ""))).name != "default_worker.py" or not node.kernel_fate_share:
        return False
    directory = Path(node.get_session_dir_path()) / worker_client.DIRECTORY
    directory.mkdir(mode=0o700)
    # A worker that starts before the first driver belongs to no job, and cannot be forked.
    parameters.env_vars = {"RAY_prestart_worker_first_driver": "0", **(parameters.env_vars or {})}
    parameters.worker_path = worker_client.__file__
    return True


def _start_template(node: Any) -> None:
    """The process ends with the raylet, and with this process."""
    address = Path(node.get_session_dir_path()) / worker_client.DIRECTORY / worker_client.SOCKET
    raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid
    root = Path(__file__).parents[3]  # of this copy of the library
    with (Path(node.get_logs_dir_path()) / "worker_template.log").open("ab") as log:
        started = cast("Any", services).start_ray_process(
            [
                sys.executable,
                worker_template.__file__,
                f"--socket={address}",
                f"--raylet-pid={raylet}",
                f"--root={root}",
            ],
            _TEMPLATE,
            fate_share=True,
            env_updates=node._ray_params.env_vars,  # noqa: SLF001
            stdout_file=log,
            stderr_file=log,
        )
    node.all_processes[_TEMPLATE] = [started]


@contextlib.contextmanager
def _ended_on_exit() -> Generator[None]:
    """End the processes that were started inside if this process exits meanwhile, as on Ctrl-C (S-SET-54).

    Ray ends only an instance that is up. On Linux the kernel ends the processes if a signal ends this one.
    """
    before = frozenset(psutil.Process().children())
    package = str(Path(str(ray.__file__)).parent)

    def end() -> None:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it is gone, or belongs to another user
                if child not in before and any(package in argument for argument in child.cmdline()):
                    child.kill()

    atexit.register(end)
    try:
        yield
    finally:
        atexit.unregister(end)
