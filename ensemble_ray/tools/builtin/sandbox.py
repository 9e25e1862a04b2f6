"""The directory that file tools may not leave. Package: tools. In: a path as a model wrote it; out: a real path inside.

Nothing is created or opened here. A path is judged twice: as written, after `..` is folded, and as the file system
resolves it, every symbolic link followed, also those of parents and of a target that does not exist yet (S-BIT-25).
What is handed out is the resolved path, so that whoever opens it follows no link that was not judged.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["AccessDeniedError", "Sandbox"]


class AccessDeniedError(ValueError):
    """The path leads out of the sandbox; the text is for the model."""


class Sandbox:
    """One existing directory, and the paths inside it.

    Raises:
        ValueError: the directory is None, does not exist or is none.
    """

    def __init__(self, base_dir: str | os.PathLike[str] | None) -> None:
        if base_dir is None:
            raise ValueError("base_dir must not be None")
        if not Path(base_dir).is_dir():
            raise ValueError(f"base_dir must be an existing directory: {os.fspath(base_dir)}")
        #: as the user wrote it, made absolute now, so that a later change of directory moves nothing
        self._base = os.path.abspath(base_dir)  # noqa: PTH100  Path.absolute leaves `..` in

    @property
    def base_dir(self) -> Path:
        """The directory, absolute."""
        return Path(self._base)

    def resolve(self, path: str) -> Path:
        """Where that path really lies; it need not exist.

        Raises:
            AccessDeniedError: outside as written (S-BIT-21), or outside once links are followed (S-BIT-22).
            ValueError: no file system takes such a path.
        """
        # followed anew each time: on another machine the same base may be a link to somewhere else
        base = os.path.realpath(self._base)
        written = os.path.normpath(os.path.join(self._base, path))  # noqa: PTH118  normpath folds `..` by text alone
        if not (_is_inside(written, self._base) or _is_inside(written, base)):
            raise AccessDeniedError("Access denied: path is outside the sandbox directory")
        real = os.path.realpath(written)
        if not _is_inside(real, base):
            raise AccessDeniedError("Access denied: path resolves outside the sandbox directory")
        return Path(real)


def _is_inside(path: str, directory: str) -> bool:
    """Whether it is the directory or lies in it; a sibling of a longer name does not."""
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)
