"""What another user of this machine finds of a program: its processes, ports, command lines and files. Linux only."""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Listener", "closed_above", "command_lines", "descendants", "files_with", "listeners"]

_LISTENS = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A port that a process listens on."""

    pid: int
    host: str
    port: int

    @property
    def is_on_loopback(self) -> bool:
        """Whether no other machine can reach it."""
        address = ipaddress.ip_address(self.host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback


def descendants(root: int) -> set[int]:
    """A process and all that it started, and these started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in brackets, may hold anything.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
    found, newest = {root}, {root}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest} - found
        found |= newest
    return found


def listeners(pids: Iterable[int]) -> list[Listener]:
    """What these processes listen on, of both families."""
    sockets: dict[str, int] = {}
    for pid in pids:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    sockets[target[8:-1]] = pid
        except OSError:
            continue  # it has just ended, or closed one
    found: set[Listener] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and rest[5] in sockets:
                host, _, port = local.rpartition(":")
                found.add(Listener(sockets[rest[5]], _host(host), int(port, 16)))
    return sorted(found, key=lambda each: (each.host, each.port))


def _host(text: str) -> str:
    """The address of the kernel's table: words of four bytes, each in this machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def command_lines(pids: Iterable[int]) -> Iterator[bytes]:
    """What `ps` shows to everybody."""
    for pid in pids:
        try:
            yield Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it has just ended


def files_with(secrets: Iterable[bytes], directory: Path) -> list[Path]:
    """Files below a directory that hold one of these."""
    wanted = tuple(secrets)
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in files if any(secret in path.read_bytes() for secret in wanted)]


def closed_above(path: Path) -> Path | None:
    """The nearest directory above that only its owner, this user, may enter."""
    for above in path.parents:
        found = above.stat()
        if found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077:
            return above
    return None
