"""Private files and directories of this user, Ray's among them, and the Ray cluster of a process.

A private file gets its name after its content and its mode. Checks use the open file, because a path may lead to
another file a moment later. Systems without file owners, such as Windows, skip them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.context import bounded_logger

_log = bounded_logger(__name__)
_MOST_BYTES = 65_536  # secrets are short
_FILE, _DIRECTORY = 0o600, 0o700
_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022
_HAS_OWNERS = hasattr(os, "geteuid")
#: Follow no symbolic link, and do not wait for the writer of a pipe.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
#: Ray adds the names of a session and of a socket to its directory.
_LONGEST_SOCKET = 103 if sys.platform == "darwin" else 107
_BELOW = "/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_ADDRESS = re.compile(r"--gcs-address=(\S+)")
_RAYLET = "raylet"
_RAYLET_OF_TEMPLATE = re.compile(r"--raylet-pid=(\d+)")
_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # Ray's processes authenticate with these
_MOST_PARENTS = 4


def create_private_file(path: Path, content: bytes) -> bool:
    if os.path.lexists(path):
        return False
    draft = _draft_path(path)
    try:
        _write_draft(draft, content)
        os.link(draft, path)  # unlike a rename it replaces no file: only one of two creators wins
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def replace_private_file(path: Path, content: bytes) -> None:
    draft = _draft_path(path)
    try:
        _write_draft(draft, content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_private_file(path: Path, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """If other users can read the file, change its mode and log a warning.

    Refuse a link, another user's file, and one that other users could replace.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _unsafe_error(path, "is a symbolic link") from None
        raise
    try:
        exposed = _exposed_bits(path, os.fstat(descriptor))
        _secure_directory(path.parent)
        if exposed:
            os.fchmod(descriptor, _FILE)
            _log.warning(
                "%s was open to other users of this machine (mode %03o); its mode is 600 now. They may know its "
                "content: delete it, and a new one is created",
                path,
                _FILE | exposed,
            )
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def exposed_bits(path: Path) -> int:
    """Return the mode's bits for other users; refuse files as `read_private_file` does."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise _unsafe_error(path, "is a symbolic link")
    return _exposed_bits(path, found)


def private_directory(base: Path, name: str) -> Path:
    """Return a directory that only this user may enter.

    The name is random if another user has taken `name`, which is possible in a directory like `/tmp`.
    """
    path = base / name
    base.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_DIRECTORY, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or (_HAS_OWNERS and found.st_uid != os.geteuid()):
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    if _HAS_OWNERS and found.st_mode & _OTHERS:
        path.chmod(_DIRECTORY)
    return path


def _draft_path(path: Path) -> Path:
    path.parent.mkdir(mode=_DIRECTORY, parents=True, exist_ok=True)
    _secure_directory(path.parent)
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _write_draft(draft: Path, content: bytes) -> None:
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _exposed_bits(path: Path, found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise _unsafe_error(path, "is not a regular file")
    if not _HAS_OWNERS:
        return 0
    if found.st_uid != os.geteuid():
        raise _unsafe_error(path, f"belongs to user {found.st_uid}, and this process is of user {os.geteuid()}")
    return found.st_mode & _OTHERS


def _secure_directory(path: Path) -> None:
    """Ensure that other users cannot replace files in a directory."""
    found = path.stat()
    if not _HAS_OWNERS or not found.st_mode & _WRITABLE_BY_OTHERS or found.st_mode & stat.S_ISVTX:
        return
    if found.st_uid != os.geteuid():
        raise _unsafe_error(path, f"can be written to by others, and belongs to user {found.st_uid}")
    path.chmod(stat.S_IMODE(found.st_mode) & ~_WRITABLE_BY_OTHERS)
    _log.warning("%s could be written to by other users of this machine; only its owner may now", path)


def _unsafe_error(path: Path, reason: str) -> EnsembleError:
    return EnsembleError(
        f"{path} {reason}, so other users could know or choose the secret in it. Remove it, and a new one is made"
    )


def token_file() -> Path | None:
    """Return None if the environment contains the token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    chosen = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(chosen) if chosen else Path.home() / ".ray" / "auth_token"


def secure_token_file() -> None:
    """Create or secure Ray's token file; a missing file that the environment names is not created."""
    path = token_file()
    if path is None:
        return
    if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        create_private_file(path, secrets.token_hex(32).encode())
    with contextlib.suppress(FileNotFoundError):  # Ray's error says what to do
        read_private_file(path)


def ray_base_directory() -> Path:
    chosen = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None)
    default = "/tmp" if os.name == "posix" else tempfile.gettempdir()  # noqa: S108  Ray's default
    return Path(chosen or default)


def private_ray_directory() -> Path:
    """Return a directory for a local instance's sockets, ports and logs.

    Ray makes its directory accessible to all users, so it needs a private one above it.
    """
    base = ray_base_directory()
    if not hasattr(os, "geteuid"):
        return base / "ray"  # a temporary directory of Windows belongs to its user
    with contextlib.suppress(FileNotFoundError):
        found = base.stat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS:
            return base / "ray"
    name = f"ensemble-ray-{os.geteuid()}"
    if len(str(base / name) + _BELOW) > _LONGEST_SOCKET:
        base = Path("/tmp")  # noqa: S108  the directory in it is private
    return private_directory(base, name) / "ray"


@dataclass(frozen=True, slots=True)
class FoundCluster:
    address: str
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def find_cluster(pid: int) -> FoundCluster | None:
    """Return None if the process has no cluster, or is another user's."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            return None
        for parent in process.parents()[:_MOST_PARENTS]:
            raylet = _RAYLET_OF_TEMPLATE.search(" ".join(parent.cmdline()))
            found = _cluster_of(parent) or (raylet and _cluster_of(psutil.Process(int(raylet[1]))))
            if found:
                return found
        return next(filter(None, map(_cluster_of, process.children())), None)
    except psutil.Error:
        return None  # the process has ended


def _cluster_of(process: psutil.Process) -> FoundCluster | None:
    try:
        if process.name() != _RAYLET or process.uids().real != os.getuid():
            return None
        line = " ".join(process.cmdline())
        environment = process.environ()
    except psutil.Error:
        return None
    address = _ADDRESS.search(line)
    if address is None:
        return None
    return FoundCluster(address[1], tuple((name, environment[name]) for name in _TOKENS if name in environment))
