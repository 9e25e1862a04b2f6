"""Reads one file below a directory. Package: built-in tools. In: a relative path; out: the file's text, unmodified.

Never read: what lies outside the directory, what is no regular file (a pipe would block for ever), what is larger
than the limit, what is not UTF-8.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pydantic import BaseModel, Field

from ensemble_ray.errors import message_of
from ensemble_ray.tools.builtin.sandbox import AccessDeniedError, Sandbox
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.typed import AbstractTypedAgentTool

__all__ = ["FileReadTool"]

_DEFAULT_MAX_BYTES = 10 * 1024 * 1024
#: Windows has neither flag; there the resolved path and the check of the opened file have to do
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FileReadInput(BaseModel):
    """Which file to read."""

    path: str = Field(description="Path of the file, relative to the base directory, for example notes/today.md")


class FileReadTool(AbstractTypedAgentTool[FileReadInput]):
    """Reads text files below `base_dir`, nothing else.

    Args:
        base_dir: An existing directory.
        max_bytes: Larger files are refused.

    Raises:
        ValueError: `base_dir` is no existing directory, or `max_bytes` is not positive.
    """

    name = "file_read"
    effect = "none"
    description = "Reads a text file and returns its content. Paths are relative to the base directory."
    input_type = FileReadInput

    def __init__(self, base_dir: str | os.PathLike[str] | None = None, *, max_bytes: int = _DEFAULT_MAX_BYTES) -> None:
        self._sandbox = Sandbox(base_dir)
        if max_bytes <= 0:
            raise ValueError(f"max_bytes must be > 0, got: {max_bytes}")
        self._max_bytes = max_bytes

    def execute_typed(self, arguments: FileReadInput, /) -> ToolResult:
        """Give the file's text."""
        path = arguments.path
        if not path.strip():
            return ToolResult.failure("File path must not be blank")
        try:
            return ToolResult.success(self._read(self._sandbox.resolve(path), path))
        except (AccessDeniedError, _NotReadableError) as error:
            return ToolResult.failure(str(error))
        except (FileNotFoundError, NotADirectoryError):
            return ToolResult.failure(f"File not found: {path}")
        except UnicodeDecodeError as error:
            return ToolResult.failure(f"Failed to read file: not UTF-8 text (byte {error.start})")
        except (OSError, ValueError) as error:
            return ToolResult.failure(f"Failed to read file: {_reason(error)}")

    def _read(self, real: Path, path: str) -> str:
        # asked before opening, since opening may have effects (a device), and after, since it may have been swapped
        _ensure_regular(real.stat().st_mode, path)
        descriptor = os.open(real, _OPEN_FLAGS)
        with os.fdopen(descriptor, "rb") as file:
            _ensure_regular(os.fstat(descriptor).st_mode, path)
            data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise ValueError(f"larger than {self._max_bytes} bytes")
        return data.decode("utf-8")


class _NotReadableError(ValueError):
    """Something is there, but no file."""


def _ensure_regular(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        raise _NotReadableError(f"Not a regular file: {path}")


def _reason(error: Exception) -> str:
    """Return why, without the machine's own path, which does not belong in a prompt."""
    return (error.strerror or message_of(error)) if isinstance(error, OSError) else message_of(error)
