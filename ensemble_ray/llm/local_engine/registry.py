"""Who holds the embedded model's server: a file per server, shared by all processes of this machine. Package: llm.

The file is locked while it is read and changed; it names the server and the processes that use it. A process is
named by its id and its start, so that an id that came round again is not taken for the dead. Nobody is ever counted
who is not alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Generator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

from ensemble_ray.process.config import home_directory

__all__ = ["EngineProcess", "LocalSpec", "ServerRecord", "locked_record", "registry_file"]

#: Position of the state and of the start time behind the command's name in `/proc/PID/stat`.
_STATE, _START = 0, 19


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSpec:
    """What a server runs; equal ones are one server."""

    path: str
    context_tokens: int
    slots: int
    threads: int


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process of this machine, told apart from a later one of the same id."""

    pid: int
    #: start in clock ticks since boot; 0 where the platform does not tell
    started: int

    @classmethod
    def current(cls) -> EngineProcess:
        """Name this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> EngineProcess:
        """Return the process that has that id now."""
        found = _stat(pid)
        return cls(pid, int(found[_START]) if found else 0)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        found = _stat(self.pid)
        if found is not None:
            return found[_STATE] not in {"Z", "X"} and int(found[_START]) == self.started
        if Path("/proc/self/stat").exists():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


@dataclass(slots=True, kw_only=True)
class ServerRecord:
    """What the file says; changes are written when the lock is given back."""

    server: EngineProcess | None = None
    url: str = ""
    #: what requests must carry; only who can read the file can call the server
    key: str = ""
    holders: list[EngineProcess] = field(default_factory=list[EngineProcess])

    @property
    def is_serving(self) -> bool:
        """Whether there is a server that can be called."""
        return self.server is not None and bool(self.url) and self.server.is_alive

    def forget_dead(self) -> None:
        """Only the living hold."""
        self.holders = [holder for holder in self.holders if holder.is_alive]

    def add(self, holder: EngineProcess) -> None:
        """Note that the process uses the server from now on."""
        if holder not in self.holders:
            self.holders.append(holder)

    def remove(self, holder: EngineProcess) -> None:
        """Note that the process uses it no more."""
        self.holders = [other for other in self.holders if other != holder]

    def clear_server(self) -> None:
        """There is no server."""
        self.server, self.url, self.key = None, "", ""


def registry_file(spec: LocalSpec) -> Path:
    """Return the file of that server; it names the machine, since machines may share a home."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = platform.node() + (boot.read_text(encoding="ascii").strip() if boot.exists() else "")
    identity = [machine, spec.path, spec.context_tokens, spec.slots, spec.threads]
    digest = sha256(json.dumps(identity).encode()).hexdigest()[:12]
    return home_directory() / "models" / f"{Path(spec.path).stem}-{digest}.json"


@contextlib.contextmanager
def locked_record(file: Path) -> Generator[ServerRecord]:
    """Hold the file's lock for the block; what the block changes is written, also when it fails."""
    import fcntl  # not on Windows, where the rest of the package must load all the same

    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # given back when the file is closed, also by a process that dies
        record = _read(stream)
        try:
            yield record
        finally:
            _write(stream, record)
            fcntl.flock(stream, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too


def _read(stream: IO[str]) -> ServerRecord:
    text = stream.read()
    try:
        data = cast("dict[str, Any]", json.loads(text)) if text.strip() else {}
        server = data.get("server")
        return ServerRecord(
            server=None if server is None else EngineProcess(*server),
            url=data.get("url", ""),
            key=data.get("key", ""),
            holders=[EngineProcess(*holder) for holder in data.get("holders", ())],
        )
    except (ValueError, TypeError, AttributeError):
        # Half written by a process that died: whoever lives will enter itself again.
        return ServerRecord()


def _write(stream: IO[str], record: ServerRecord) -> None:
    data = {
        "server": None if record.server is None else [record.server.pid, record.server.started],
        "url": record.url,
        "key": record.key,
        "holders": [[holder.pid, holder.started] for holder in record.holders],
    }
    stream.seek(0)
    stream.truncate()
    stream.write(json.dumps(data))
    stream.flush()
