"""What a local Ray instance keeps in files: its token, and its directory of sockets, ports and logs. Package: process.

Ray itself makes the token with the mode that the umask gives, and its directories open to everybody. Both are therefore
made here, before Ray looks for them. Ray is not imported.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path

from ensemble_ray.process.private_files import create_private_file, private_directory, read_private_file

__all__ = ["private_ray_directory", "ray_base_directory", "secure_token_file", "token_file"]

#: A socket's path may have 107 characters (104 on macOS); Ray puts a session's name and a socket's below its directory.
_LONGEST_SOCKET = 103 if sys.platform == "darwin" else 107
_BELOW = "/ray/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_OF_OTHERS = 0o077


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
