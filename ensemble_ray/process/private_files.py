"""Files with secrets, which only their owner may read. In: a path. Out: its content, or an error that says what is wrong.

A file gets its name when it has its content and its mode, so no other user can read it at any moment. One that exists is
checked on the open file and not by its path, since a path may lead elsewhere a moment later. Systems without owners of
files (Windows) keep to their own rules.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.context import bounded_logger

_log = bounded_logger(__name__)
#: Secrets are short.
_MOST_BYTES = 65_536
_FILE, _DIRECTORY = 0o600, 0o700
_OF_OTHERS = 0o077
_WRITTEN_BY_OTHERS = 0o022
_HAS_OWNERS = hasattr(os, "geteuid")
#: Not through a symbolic link, and never waiting for the writer of a pipe.
_OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def create_private_file(path: Path, content: bytes) -> bool:
    """Create a file that only its owner may read, with its content; return False when there is one already.

    Raises:
        EnsembleError: other users could put another file in its place.
        OSError: it cannot be written.
    """
    if os.path.lexists(path):
        return False
    half = _half_of(path)
    try:
        _write_half(half, content)
        os.link(half, path)  # unlike a rename it replaces nothing: of two that create it, one wins
    except FileExistsError:
        return False
    finally:
        half.unlink(missing_ok=True)
    return True


def replace_private_file(path: Path, content: bytes) -> None:
    """Put a file that only its owner may read in the place of the one that is there, in one step.

    Raises:
        EnsembleError: other users could put another file in its place.
        OSError: it cannot be written.
    """
    half = _half_of(path)
    try:
        _write_half(half, content)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def read_private_file(path: Path, *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the content of a file that only its owner may read; a wider one is narrowed, with a warning.

    Args:
        path: The file.
        most_bytes: What it has beyond that is not read.

    Raises:
        FileNotFoundError: there is none.
        EnsembleError: it is a link, not a file, or of another user, or other users could replace it.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, _OPEN)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _make_error(path, "is a symbolic link") from None
        raise
    try:
        wide = _find_exposed_bits(path, os.fstat(descriptor))
        _narrow_directory(path.parent)
        if wide:
            os.fchmod(descriptor, _FILE)
            _log.warning(
                "%s was open to other users of this machine (mode %03o); its mode is 600 now. What it holds may be "
                "known to them: delete it, and a new one is made",
                path,
                _FILE | wide,
            )
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def exposed_bits(path: Path) -> int:
    """Return what a file's mode grants to other users, 0 for nothing; change nothing.

    Raises:
        FileNotFoundError: there is none.
        EnsembleError: `read_private_file` would refuse it.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise _make_error(path, "is a symbolic link")
    return _find_exposed_bits(path, found)


def private_directory(base: Path, name: str) -> Path:
    """Return a directory in `base` that only its owner may enter; one is created when there is none.

    Where another user has taken the name, it is one of a random name: in a directory that all may write to, anybody
    can take a name first.
    """
    path = base / name
    base.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_DIRECTORY, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or (_HAS_OWNERS and found.st_uid != os.geteuid()):
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
    if _HAS_OWNERS and found.st_mode & _OF_OTHERS:
        path.chmod(_DIRECTORY)
    return path


def _half_of(path: Path) -> Path:
    """Return the name under which a file is written, in a directory that others cannot change."""
    path.parent.mkdir(mode=_DIRECTORY, parents=True, exist_ok=True)
    _narrow_directory(path.parent)
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def _write_half(half: Path, content: bytes) -> None:
    descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _find_exposed_bits(path: Path, found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise _make_error(path, "is not a regular file")
    if not _HAS_OWNERS:
        return 0
    if found.st_uid != os.geteuid():
        raise _make_error(path, f"belongs to user {found.st_uid}, and this process is of user {os.geteuid()}")
    return found.st_mode & _OF_OTHERS


def _narrow_directory(path: Path) -> None:
    """See to it that no other user can put another file in the place of one in there."""
    found = path.stat()
    if not _HAS_OWNERS or not found.st_mode & _WRITTEN_BY_OTHERS or found.st_mode & stat.S_ISVTX:
        return
    if found.st_uid != os.geteuid():
        raise _make_error(path, f"can be written to by others, and belongs to user {found.st_uid}")
    path.chmod(stat.S_IMODE(found.st_mode) & ~_WRITTEN_BY_OTHERS)
    _log.warning("%s could be written to by other users of this machine; only its owner may now", path)


def _make_error(path: Path, reason: str) -> EnsembleError:
    return EnsembleError(
        f"{path} {reason}, so other users could know or choose the secret in it. Remove it, and a new one is made"
    )


#: A socket's path may have 107 characters (104 on macOS); Ray puts a session's name and a socket's below its directory.
_LONGEST_SOCKET = 103 if sys.platform == "darwin" else 107
_BELOW = "/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def token_file() -> Path | None:
    """Return the file that Ray reads its token from; None where the environment holds the token itself."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    chosen = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(chosen) if chosen else Path.home() / ".ray" / "auth_token"


def secure_token_file() -> None:
    """See to it that Ray finds a token that no other user can read; a file that the environment names is not made.

    Raises:
        EnsembleError: the file is a link, or of another user, or in a directory that others may change.
        OSError: it cannot be read or written.
    """
    path = token_file()
    if path is None:
        return
    if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        create_private_file(path, secrets.token_hex(32).encode())
    with contextlib.suppress(FileNotFoundError):  # one that is named and missing: Ray's own error says what to do
        read_private_file(path)


def ray_base_directory() -> Path:
    """Return the directory that Ray would put its own into."""
    chosen = os.environ.get("RAY_TMPDIR") or (os.environ.get("TMPDIR") if sys.platform == "linux" else None)
    default = "/tmp" if os.name == "posix" else tempfile.gettempdir()  # noqa: S108  Ray's own; what is put there is private
    return Path(chosen or default)


def private_ray_directory() -> Path:
    """Return a directory for a local instance's sockets, ports and logs below one that only this user may enter.

    Ray opens its directory, and all below it, to everybody; so there is one above it. A base that is private already
    is that one.
    """
    base = ray_base_directory()
    if not hasattr(os, "geteuid"):
        return base / "ray"  # Windows: a temporary directory there is its user's own
    if _is_private(base):
        return base / "ray"
    name = f"ensemble-ray-{os.geteuid()}"
    if len(str(base / name) + _BELOW) > _LONGEST_SOCKET:
        base = Path("/tmp")  # noqa: S108  as above
    return private_directory(base, name) / "ray"


def _is_private(path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OF_OTHERS


_ADDRESS = re.compile(r"--gcs-address=(\S+)")
_RAYLET = "raylet"
_RAYLET_OF_TEMPLATE = re.compile(r"--raylet-pid=(\d+)")
#: How such a program is let into its cluster; who asks there needs the same.
_TOKENS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
#: How many programs are looked at upwards.
_MOST_PARENTS = 4


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """A cluster that a process belongs to."""

    address: str
    #: variables with which its programs were let in
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def find_cluster(pid: int) -> FoundCluster | None:
    """Return the cluster of a process of this machine; None where it is in none, or is not this user's."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            return None
        for each in _around(process):
            found = _cluster_of(each)
            if found is not None:
                return found
    except psutil.Error:
        pass  # it has gone: nothing is to be found any more
    return None


def _around(process: psutil.Process) -> Iterator[psutil.Process]:
    """Yield the programs that started it, and those that it started."""
    for parent in process.parents()[:_MOST_PARENTS]:
        yield parent
        if raylet := _RAYLET_OF_TEMPLATE.search(" ".join(parent.cmdline())):
            yield psutil.Process(int(raylet[1]))
    yield from process.children()


def _cluster_of(process: psutil.Process) -> FoundCluster | None:
    """Return the cluster of a raylet; None: it is none."""
    try:
        if process.name() != _RAYLET or process.uids().real != os.getuid():
            return None
        line = " ".join(process.cmdline())
        given = process.environ()
    except psutil.Error:
        return None
    found = _ADDRESS.search(line)
    if found is None:
        return None
    return FoundCluster(found[1], tuple((name, given[name]) for name in _TOKENS if name in given))
