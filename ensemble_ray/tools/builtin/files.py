"""Reads one file below a directory. Package: built-in tools. In: a relative path; out: the file's text, unmodified.

Never read: what lies outside the directory, what is no regular file (a pipe would block for ever), what is larger
than the limit, what is not UTF-8.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, Field

from ensemble_ray.errors import message_of
from ensemble_ray.events import FileChangedEvent
from ensemble_ray.tools.approval import approve_from_thread, preview
from ensemble_ray.tools.tool import AbstractTypedAgentTool, ToolResult
from ensemble_ray.values.value import utc_now


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


_OPEN_FLAGS_FILE_WRITE = (
    os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)
_CHUNK_BYTES = 1 << 20


class FileWriteInput(BaseModel):
    """Which file to write, and what."""

    path: str = Field(description="Path of the file, relative to the base directory, for example out/report.md")
    content: str = Field(description="The whole text of the file; an existing file is replaced")


class FileWriteTool(AbstractTypedAgentTool[FileWriteInput]):
    """Writes text files below `base_dir`, nothing else; makes parent directories and replaces existing files.

    Listeners get a `FileChangedEvent` for each write.

    Args:
        base_dir: An existing directory.
        require_approval: Whether the run's review handler is asked before a file is written.

    Raises:
        ValueError: `base_dir` is no existing directory.
    """

    name = "file_write"
    effect = "idempotent"
    description = (
        "Writes a text file: creates it with its parent directories, or replaces what it holds. "
        "Paths are relative to the base directory."
    )
    input_type = FileWriteInput

    def __init__(self, base_dir: str | os.PathLike[str] | None = None, *, require_approval: bool = False) -> None:
        self._sandbox = Sandbox(base_dir)
        self.require_approval = require_approval

    def execute_typed(self, arguments: FileWriteInput, /) -> ToolResult:
        """Write the file."""
        path = arguments.path
        if not path.strip():
            return ToolResult.failure("Path must not be blank")
        try:
            content = self._approve(path, arguments.content)
            if content is None:
                return ToolResult.failure(f"File write rejected by reviewer: {path}")
            data = content.encode("utf-8")
            lines_before = self._write(path, data)
        except AccessDeniedError as error:
            return ToolResult.failure(str(error))
        except OSError as error:
            return ToolResult.failure(f"Failed to write file: {error.strerror or message_of(error)}")
        except ValueError as error:
            return ToolResult.failure(f"Failed to write file: {message_of(error)}")
        self._emit_change(path, lines_before, _line_count([data]))
        return ToolResult.success(f"Successfully wrote to: {path}")

    def _approve(self, path: str, content: str) -> str | None:
        """Return the content that may be written; None: none. Nobody is asked about a path outside of the directory."""
        if not self.require_approval:
            return content
        self._sandbox.resolve(path)
        handler = self.context.review_handler
        return approve_from_thread(handler, self.name, f"Write file: {path}\nContent: {preview(content)}", content)

    def _write(self, path: str, data: bytes) -> int | None:
        """Write it; gives how many lines the file had, None where there was none."""
        real = self._sandbox.resolve(path)
        if real.exists():
            _ensure_regular_file_write(real.stat().st_mode)
        real.parent.mkdir(parents=True, exist_ok=True)
        # a parent may have become a link while it was made: what opens now is asked for again
        descriptor, is_new = _open(self._sandbox.resolve(path))
        with os.fdopen(descriptor, "r+b") as file:
            _ensure_regular_file_write(os.fstat(descriptor).st_mode)
            lines_before = None if is_new else _line_count(iter(lambda: file.read(_CHUNK_BYTES), b""))
            file.seek(0)
            file.truncate()
            file.write(data)
        return lines_before

    def _emit_change(self, path: str, lines_before: int | None, lines_after: int) -> None:
        context = self.context
        gained = lines_after - (lines_before or 0)
        context.emit(
            FileChangedEvent(
                run_id=context.run_id,
                instance=context.instance,
                agent_role=context.agent_role,
                file_path=path,
                change_type="created" if lines_before is None else "modified",
                lines_added=max(gained, 0),
                lines_removed=max(-gained, 0),
                timestamp=utc_now(),
            )
        )


def _open(real: Path) -> tuple[int, bool]:
    """Return a descriptor for reading and writing, and whether the file was made for it."""
    try:
        return os.open(real, _OPEN_FLAGS_FILE_WRITE), False
    except FileNotFoundError:
        return os.open(real, _OPEN_FLAGS_FILE_WRITE | os.O_CREAT | os.O_EXCL, 0o666), True


def _ensure_regular_file_write(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError("not a regular file")


def _line_count(chunks: Iterable[bytes]) -> int:
    """Lines as an editor shows them: a last line without its line feed counts, nothing after the last one does not."""
    line_feeds, last = 0, b"\n"
    for chunk in chunks:
        line_feeds += chunk.count(b"\n")
        last = chunk[-1:] or last
    return line_feeds + (last != b"\n")
