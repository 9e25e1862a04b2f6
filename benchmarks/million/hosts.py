"""Hosts made of network namespaces of one Linux machine, with addresses and links of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass

__all__ = ["Host", "NoHostsError", "hosts"]

_BRIDGE = "ensemble-bench"
#: Of 198.18.0.0/15, which is reserved for measurements between networks (RFC 2544).
_NETWORK = "198.18.77"


class NoHostsError(RuntimeError):
    """This machine cannot make network namespaces; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A namespace with its own address, connected to the others by a bridge."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs one on this host."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def pids(self) -> list[int]:
        """Return the ids of its processes."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def cut_off(self) -> None:
        """Take its link down: its processes go on and reach nobody."""
        _ip("link", "set", _link(self.name), "down")

    def kill(self) -> None:
        """Kill all its processes at once."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def hosts(names: Sequence[str]) -> Generator[list[Host]]:
    """Make hosts, and remove them with their processes at the end.

    Raises:
        NoHostsError: this machine cannot make them.
    """
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        raise NoHostsError("Network namespaces need Linux and the program 'ip' (package iproute2).")
    made = [Host(name=f"{_BRIDGE}-{name}", address=f"{_NETWORK}.{number}") for number, name in enumerate(names, 1)]
    try:
        _ip("link", "add", _BRIDGE, "type", "bridge")
    except subprocess.CalledProcessError as error:
        reason = str(error.stderr).strip()
        raise NoHostsError(
            f"No bridge '{_BRIDGE}' can be made; this needs root and no other such run: {reason}"
        ) from None
    try:
        _ip("addr", "add", f"{_NETWORK}.254/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        for host in made:
            _connect(host)
        yield made
    finally:
        for host in made:
            with contextlib.suppress(NoHostsError):  # it was not made
                host.kill()
                _ip("link", "del", _link(host.name))
                _ip("netns", "del", host.name)
        _ip("link", "del", _BRIDGE)


def _connect(host: Host) -> None:
    link, inside = _link(host.name), ["-n", host.name]
    _ip("netns", "add", host.name)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", link, "master", _BRIDGE, "up")
    _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "link", "set", "lo", "up")


def _link(name: str) -> str:
    """Return the bridge's end of a host's cable; names of links have at most 15 characters."""
    return f"eb-{name.removeprefix(_BRIDGE)[-12:].lstrip('-')}"


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607  a program of the system
    if done.returncode:
        raise NoHostsError(
            f"'ip {' '.join(arguments)}' failed, which needs root and no other such measurement: {done.stderr.strip()}"
        )
    return done.stdout
