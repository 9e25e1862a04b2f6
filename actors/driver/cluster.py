"""How a driver comes to a cluster: joins one, or starts a local one; and whether the two fit together."""

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
from contextlib import nullcontext
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
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, last_line, patiently, reach
from ensemble_ray.errors import EnsembleError, ValidationError, message_of
from ensemble_ray.process.config import package_version, read_switch
from ensemble_ray.process.context import bounded_logger, notify
from ensemble_ray.process.forks import after_fork, is_ray_inherited, threads
from ensemble_ray.process.private_files import private_ray_directory, secure_token_file
from ensemble_ray.record.stores import resume_advice
from ensemble_ray.values.descriptions import ActorDescription, ClusterDescription, NodeDescription, load_actor
from ensemble_ray.values.ids import new_object_id

_log = bounded_logger(__name__)
_MODE = "RAY_AUTH_MODE"
#: How long a port of this machine may take to accept a connection, s.
_REACH_S = 5.0
#: Ray's parameter for the port of the raylet's agent.
_AGENT_PORT = "dashboard_agent_listen_port"
#: What the template is among the processes of Ray's node.
_TEMPLATE = "worker_template"


#: Instances that this process started.
_started: list[str] = []


def _instance() -> str:
    """Which instance this process is connected to."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address}/{context.get_node_id()}"


def is_started_here() -> bool:
    """Whether this process is connected to an instance that it started itself."""
    return ray.is_initialized() and _instance() in _started


def start_local(options: Mapping[str, object]) -> None:
    """Start an instance on this machine, on loopback unless the options name an address.

    Raises:
        EnsembleError: it cannot be kept from other users of this machine.
    """
    # Ray runs workers at niceness 15, which starves agents and heavy tools beside anything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Left unset where it is: Ray then turns it on itself, also for this process, which has read its settings by now.
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
    notify("Starting a local Ray (some seconds) ...")
    with (
        quiet(),
        _ended_on_exit(),
        _leave_out(_list_needless_starts(arguments)),
        _adapt_raylet(has_dashboard=arguments["include_dashboard"] is not False),
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


def _list_needless_starts(options: Mapping[str, object]) -> Sequence[str]:
    """Return what starts the processes of Ray that such an instance has no use for, as methods of its node.

    It has one machine, to which nobody adds another; its logs are read by no driver, and nobody looks at its page. With its page it is
    looked at as a cluster, and has all of them.
    """
    if options["include_dashboard"] is not False:
        return ()
    return ("start_monitor", "start_api_server", *(() if options.get("log_to_driver") else ("start_log_monitor",)))


@contextlib.contextmanager
def _leave_out(methods: Sequence[str]) -> Generator[None]:
    """Have Ray leave that out, for which it has no arguments: see docs/decisions/0013-local-ray.md."""

    def start_nothing(*_: object, **__: object) -> None:
        """Start nothing."""

    node = cast("Any", Node)
    kept = {name: getattr(node, name) for name in methods if hasattr(node, name)}
    for name in kept:
        setattr(node, name, start_nothing)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(node, name, method)


@contextlib.contextmanager
def _adapt_raylet(*, has_dashboard: bool) -> Generator[None]:
    """Have Ray start its raylet so that workers are forked and no port is waited for: docs/decisions/0014-worker-template.md.

    Without a dashboard the raylet has no agent that serves it: docs/decisions/0013-local-ray.md. Ray has no arguments for these. Where a version of Ray has other names, it starts as that version does.
    """
    node = cast("Any", Node)
    original = getattr(node, "start_raylet", None)
    if original is None:
        yield
        return

    def start_raylet(self: Any, *arguments: object, **options: object) -> None:
        parameters = self._ray_params
        # The raylet's agent would try its default port for seconds while another Ray on this machine has it.
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
            except (
                AttributeError,
                LookupError,
                OSError,
            ) as error:  # clients then find no socket, and start in Ray's own way
                _log.warning("Workers are started without a template: %s", error)

    node.start_raylet = start_raylet
    try:
        yield
    finally:
        node.start_raylet = original


@contextlib.contextmanager
def _replace_agent() -> Generator[None]:
    """Have Ray's raylet start the silent agent in place of the dashboard agent."""
    module = cast("Any", services)
    original = module.start_ray_process
    theirs = subprocess.list2cmdline([str(Path(str(ray.__file__)).parent / "dashboard" / "agent.py")])
    ours = subprocess.list2cmdline([silent_agent.__file__])

    def start_ray_process(command: Sequence[str], *arguments: object, **options: object) -> object:
        changed = [
            each.replace(theirs, ours, 1) if each.startswith("--dashboard_agent_command=") else each for each in command
        ]
        return original(changed, *arguments, **options)

    module.start_ray_process = start_ray_process
    try:
        yield
    finally:
        module.start_ray_process = original


def _prepare_template(node: Any) -> bool:
    """Have a node's raylet run the client in place of Ray's program for workers; return False if there can be no template."""
    if sys.platform != "linux" or not read_switch("ENSEMBLE_RAY_WORKER_TEMPLATE", default=True):
        return False
    parameters = node._ray_params  # noqa: SLF001
    if Path(str(getattr(parameters, "worker_path", ""))).name != "default_worker.py" or not node.kernel_fate_share:
        return False
    directory = Path(node.get_session_dir_path()) / worker_client.DIRECTORY
    directory.mkdir(mode=0o700)
    # A worker that the raylet starts before there is a driver belongs to no job, and cannot be forked.
    parameters.env_vars = {"RAY_prestart_worker_first_driver": "0", **(parameters.env_vars or {})}
    parameters.worker_path = worker_client.__file__
    return True


def _start_template(node: Any) -> None:
    """Start the process that forks a node's workers; it ends with the raylet, and with this process."""
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
    """End what was started inside if this process exits meanwhile, as it does on Ctrl-C (S-SET-54).

    Ray ends only an instance that is up. Exits by a signal are not seen here; on Linux the kernel ends its processes then.
    """
    before = frozenset(psutil.Process().children())

    def end() -> None:
        for child in psutil.Process().children():
            if child not in before and _is_of_ray(child):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    atexit.register(end)
    try:
        yield
    finally:
        atexit.unregister(end)


def _is_of_ray(process: psutil.Process) -> bool:
    """Whether that runs a program of Ray's package."""
    package = str(Path(str(ray.__file__)).parent)
    try:
        return any(package in argument for argument in process.cmdline())
    except psutil.Error:
        return False  # it has gone, or is not ours


@contextlib.contextmanager
def on_loopback() -> Generator[None]:
    """Have Ray take the loopback address for that of this machine, as it does on macOS and Windows.

    Ray has no argument for it: `_node_ip_address="127.0.0.1"` is replaced by the machine's address. It has a setting,
    `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0`, which it reads when it is imported, often before this module.
    """
    constants = cast("Any", ray_constants)
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def is_on_loopback_only(host: str, port: int) -> bool:
    """Whether that is the address of an instance that listens on loopback alone: Ray would look for it elsewhere."""
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


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keep Ray's start-up remarks (not on the main thread, token mode) from the user's terminal."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


Reply = TypeVar("Reply")

#: Address that means: start one on this machine.
LOCAL = "local"
#: This process, as a cluster knows it: its runs may share processes there.
PROGRAM = new_object_id()


#: How often a driver that waits looks whether the cluster is still there, s, and how often in vain before it gives up.
_LOOK_S = 2.0
_MOST_MISSES = 3
#: For how long the answer that one run had is good for the others, s.
_FRESH_S = 1.0


def join_or_start(address: str, init_options: Mapping[str, object]) -> bool:
    """Join the cluster at that address, or start a local one; return False if this process is connected already.

    Raises:
        EnsembleError: the cluster cannot be joined or started; the message says what to look at.
    """
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
    except Exception as error:  # Ray raises no less than that itself, where its own processes take more than 30 s
        raise EnsembleError(_cannot_connect(address, error)) from error
    return True


def check_fork() -> None:
    """Refuse a process that was forked from one with a connection to a cluster.

    Raises:
        EnsembleError: it was; Ray's threads and sockets are its parent's.
    """
    if is_ray_inherited():
        raise EnsembleError(
            f"Process {os.getpid()} was forked from a process that was connected to Ray, and cannot use that connection or open "
            "another one. Use Ray first after the fork (Celery: worker_process_init; gunicorn: post_fork, without --preload), "
            "start processes with multiprocessing's 'spawn', or run here with runtime='inline'"
        )


@after_fork
def _leave_instance() -> None:
    """Have Ray end none of its parent's processes when the child ends."""
    if is_ray_inherited():
        worker = cast("Any", ray)._private.worker  # noqa: SLF001  Ray has no other way
        atexit.unregister(worker.shutdown)
        if worker._global_node is not None:  # noqa: SLF001
            worker._global_node.all_processes.clear()  # noqa: SLF001


def _join(address: str, options: Mapping[str, object]) -> None:
    """Join a cluster. The port of a plain `host:port` address is tried first; other forms are Ray's own business."""
    host, _, port = address.rpartition(":")
    is_plain = bool(host) and port.isdigit() and "/" not in address
    if is_plain:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    is_local = is_plain and is_on_loopback_only(host.strip("[]"), int(port))
    with quiet(), on_loopback() if is_local else nullcontext():
        cast("Callable[..., object]", ray.init)(**options)


class ClusterHeartbeat:
    """Notices the death of the cluster of a run; Ray itself does after a minute only."""

    def __init__(self, run_id: str, origin: str) -> None:
        self._run_id, self._origin = run_id, origin
        self._misses = 0

    @property
    def is_gone(self) -> bool:
        """Whether it was found to be dead."""
        return self._misses >= _MOST_MISSES

    async def wait_for(self, reference: Any) -> Any:
        """Return the reply of a call, as long as the cluster lives.

        Raises:
            EnsembleError: nobody answers at the cluster's address any more.
        """
        waiting = asyncio.ensure_future(reference)
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0]:
                await self.check()
        finally:
            waiting.cancel()  # of no effect where it is done
        return await waiting

    async def reach(self, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """Make a call to the scheduler, also where it is just being started again, as long as the cluster lives.

        Raises:
            EnsembleError: nobody answers at the cluster's address any more.
        """
        is_noted = False

        async def ask() -> Reply:
            reply: Reply = await self.wait_for(call())
            return reply

        async def note() -> None:
            nonlocal is_noted
            if not is_noted:
                _log.warning("Run %s: the scheduler's process died; the run goes on when it is back", self._run_id)
                is_noted = True
            await self.check()

        return await reach(ask, patiently(), before_retry=note)

    async def check(self) -> None:
        """Check that it is there; calls to a dead cluster may fail faster than anybody checks during them.

        Raises:
            EnsembleError: nobody answered, again and again.
        """
        self._misses = 0 if await _head_liveness.within(_FRESH_S) else self._misses + 1
        if self.is_gone:
            gone = EnsembleError(
                f"Run {self._run_id}: the cluster is gone. What was recorded is kept; continue the run: "
                f"{resume_advice(self._run_id, self._origin)}"
            )
            gone.run_id = self._run_id
            raise gone


class _HeadLiveness:
    """When the cluster's head answered last. Many runs wait at the same time, and one of them asks for all."""

    def __init__(self) -> None:
        self._answered_at: dict[str, float] = {}

    async def within(self, seconds: float) -> bool:
        """Return whether it answered so short a time ago, or answers now."""
        connection, now = connection_id(), time.monotonic()
        if now - self._answered_at.get(connection, -math.inf) < seconds:
            return True
        is_there = await _answers()
        if is_there:
            self._answered_at = {connection: now}
        return is_there


_head_liveness = _HeadLiveness()


async def _answers() -> bool:
    """Return whether anybody listens at the address of the cluster's head."""
    host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _LOOK_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def connection_id() -> str:
    """Return which connection of this process to a cluster this is; empty when there is none."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    # A driver's own id is made of its job's number, which is the same in every new cluster.
    return f"{context.get_node_id()}/{context.get_worker_id()}"


async def check_version(scheduler: Any) -> None:
    """Refuse a scheduler of another version: it outlives its drivers, so it may be older than this process."""
    theirs, ours_ = await reach(scheduler.version.remote, RESTART_PAUSES_S), package_version()
    if theirs != ours_:
        raise ValidationError(
            f"The cluster's scheduler runs ensemble-ray {theirs}, this process {ours_}. "
            "Install the same version on all nodes and restart the cluster, or join another one"
        )


def _cannot_connect(address: str, error: Exception) -> str:
    """Return what to say when Ray refuses: what, where, what to do."""
    if address == "local":
        return f"Ray cannot be started on this machine: {message_of(error)}. Look with 'ensemble-ray doctor'"
    return (
        f"The Ray cluster at '{address}' cannot be joined: {message_of(error)}. Check RAY_ADDRESS or address=, that the "
        "cluster runs, and its token (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH); without an address a local one is started"
    )


#: How long one actor may take to answer, s: a scheduler asks its processes first.
_ANSWER_S = 5.0
#: How long Ray may take to say which nodes and actors there are, s.
_LOOK_S_CLUSTER_DESCRIPTION = 10.0


async def describe_cluster() -> ClusterDescription:
    """Return what the actors of the cluster say of themselves, and who did not answer.

    Raises:
        EnsembleError: this process is connected to no cluster, or the cluster does not say which nodes and actors it has.
    """
    if not ray.is_initialized():
        raise EnsembleError("This process is connected to no cluster")
    try:
        async with asyncio.timeout(_LOOK_S_CLUSTER_DESCRIPTION):
            nodes, shared = await asyncio.gather(threads.run(_nodes), threads.run(spawn.existing_shared))
    except TimeoutError:
        raise EnsembleError(f"The cluster did not answer within {_LOOK_S_CLUSTER_DESCRIPTION:.0f} s") from None
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
    """Return what an actor says, or why it says nothing; empty where nothing is expected of it."""
    ask = getattr(actor, "describe", None)
    if ask is None:
        is_old = name.rpartition("/")[2].startswith(spawn.SCHEDULER)
        text = (
            f"The scheduler '{name}' is of an older version and does not say what its processes do: restart the cluster"
        )
        return text if is_old else ""
    try:
        async with asyncio.timeout(_ANSWER_S):
            described = load_actor(await ask.remote())
            restarts = await threads.run(_restarts_of, actor)
        return replace(described, process=replace(described.process, restarts=restarts))
    except TimeoutError:
        return f"'{name}' did not answer within {_ANSWER_S:.0f} s"
    except ray.exceptions.RayError as error:
        return f"'{name}' cannot be reached: {last_line(error)}"
    except ValueError as error:  # pydantic's, of an actor of another version
        return f"'{name}' says what this version does not understand: {message_of(error).splitlines()[0]}"


def _restarts_of(actor: Any) -> int | None:
    """Return how often Ray started an actor again; None: it does not know the actor."""
    # Ray's own public way to it asks a dashboard, which a cluster need not have.
    found = cast("dict[str, Any]", cast("Any", state).actors(actor_id=actor._actor_id.hex()))  # noqa: SLF001  it has no other
    return int(found["NumRestarts"]) if found else None


def _nodes() -> list[NodeDescription]:
    listed = cast("list[dict[str, Any]]", cast("Any", ray.nodes)())
    return [
        NodeDescription(
            node_id=node["NodeID"],
            name=node.get("NodeManagerHostname") or node.get("NodeName") or node["NodeID"][:8],
            address=node.get("NodeManagerAddress") or "",
        )
        for node in listed
        if node["Alive"]
    ]
