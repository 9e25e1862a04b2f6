"""A Ray instance that the library starts itself: no other user of the machine gets at it (S-SEC-30 to S-SEC-35).

In: arguments for `ray.init`. Out: a running instance whose ports are on loopback, whose token and files are its user's own.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import psutil
import ray
from ray._private import ray_constants, services
from ray._private.node import Node

from ensemble_ray.actors.driver import silent_agent, worker_client, worker_template
from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.config import read_switch
from ensemble_ray.process.notices import notify
from ensemble_ray.process.ray_files import private_ray_directory, secure_token_file

__all__ = ["is_on_loopback_only", "is_started_here", "on_loopback", "quiet", "start_local"]

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
