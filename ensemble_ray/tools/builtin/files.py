"""Built-in tools that read and write text files below one directory."""

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
from ensemble_ray.values.attachments import Attachment, picture_in
from ensemble_ray.values.value import utc_now

_DEFAULT_MAX_BYTES = 10 * 1024 * 1024
_CHUNK_BYTES = 1 << 20
#: Links are not followed, and a pipe does not block.
_SAFE_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class AccessDeniedError(ValueError): ...


class Sandbox:
    def __init__(self, base_dir: str | os.PathLike[str] | None) -> None:
        if base_dir is None:
            raise ValueError("base_dir must not be None")
        if not Path(base_dir).is_dir():
            raise ValueError(f"base_dir must be an existing directory: {os.fspath(base_dir)}")
        #: a later change of the working directory has no effect
        self._base = os.path.abspath(base_dir)  # noqa: PTH100  Path.absolute leaves `..` in

    @property
    def base_dir(self) -> Path:
        return Path(self._base)

    def resolve(self, path: str) -> Path:
        """Return the real location of a path, or raise `AccessDeniedError` (S-BIT-21, S-BIT-22)."""
        # on another machine the base may be a link to another place
        base = os.path.realpath(self._base)
        written = os.path.normpath(os.path.join(self._base, path))  # noqa: PTH118  normpath folds `..` by text alone
        if not (_is_inside(written, self._base) or _is_inside(written, base)):
            raise AccessDeniedError("Access denied: path is outside the sandbox directory")
        real = os.path.realpath(written)
        if not _is_inside(real, base):
            raise AccessDeniedError("Access denied: path resolves outside the sandbox directory")
        return Path(real)


def _is_inside(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip(os.sep) + os.sep)


class FileReadInput(BaseModel):
    """Arguments of `FileReadTool`."""

    path: str = Field(description="Path of the file, relative to the base directory, for example notes/today.md")


class FileReadTool(AbstractTypedAgentTool[FileReadInput]):
    """Reads UTF-8 text files and pictures below `base_dir` only.

    Args:
        base_dir: An existing directory.
        max_bytes: Larger files are refused.

    Raises:
        ValueError: `base_dir` is not an existing directory, or `max_bytes` is not positive.
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
        path = arguments.path
        if not path.strip():
            return ToolResult.failure("File path must not be blank")
        try:
            return ToolResult.success(self._read(self._sandbox.resolve(path)))
        except AccessDeniedError as error:
            return ToolResult.failure(str(error))
        except _NotAFileError:
            return ToolResult.failure(f"Not a regular file: {path}")
        except (FileNotFoundError, NotADirectoryError):
            return ToolResult.failure(f"File not found: {path}")
        except UnicodeDecodeError as error:
            return ToolResult.failure(f"Failed to read file: not UTF-8 text (byte {error.start})")
        except (OSError, ValueError) as error:
            return ToolResult.failure(f"Failed to read file: {_reason(error)}")

    def _read(self, real: Path) -> str | Attachment:
        # before opening, which may have an effect (a device), and after it, as the file may have been replaced
        _ensure_regular(real.stat().st_mode)
        descriptor = os.open(real, os.O_RDONLY | _SAFE_FLAGS)
        with os.fdopen(descriptor, "rb") as file:
            _ensure_regular(os.fstat(descriptor).st_mode)
            data = file.read(self._max_bytes + 1)
        if len(data) > self._max_bytes:
            raise ValueError(f"larger than {self._max_bytes} bytes")
        return picture_in(data, name=real.name) or data.decode("utf-8")


class FileWriteInput(BaseModel):
    """Arguments of `FileWriteTool`."""

    path: str = Field(description="Path of the file, relative to the base directory, for example out/report.md")
    content: str = Field(description="The whole text of the file; an existing file is replaced")


class FileWriteTool(AbstractTypedAgentTool[FileWriteInput]):
    """Writes text files below `base_dir` only. It creates parent directories and replaces existing files.

    Listeners receive a `FileChangedEvent` for each write.

    Args:
        base_dir: An existing directory.
        require_approval: Whether the tool asks the run's review handler before each write.

    Raises:
        ValueError: `base_dir` is not an existing directory.
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
        path = arguments.path
        if not path.strip():
            return ToolResult.failure("Path must not be blank")
        try:
            content: str | None = arguments.content
            if self.require_approval:
                self._sandbox.resolve(path)  # no request for a path outside
                request = f"Write file: {path}\nContent: {preview(arguments.content)}"
                content = approve_from_thread(self.context.review_handler, self.name, request, arguments.content)
            if content is None:
                return ToolResult.failure(f"File write rejected by reviewer: {path}")
            data = content.encode("utf-8")
            lines_before = self._write(path, data)
        except AccessDeniedError as error:
            return ToolResult.failure(str(error))
        except (OSError, ValueError) as error:
            return ToolResult.failure(f"Failed to write file: {_reason(error)}")
        context, gained = self.context, _line_count([data]) - (lines_before or 0)
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
        return ToolResult.success(f"Successfully wrote to: {path}")

    def _write(self, path: str, data: bytes) -> int | None:
        real = self._sandbox.resolve(path)
        if real.exists():
            _ensure_regular(real.stat().st_mode)
        real.parent.mkdir(parents=True, exist_ok=True)
        real = self._sandbox.resolve(path)  # a parent may have become a link meanwhile
        flags = os.O_RDWR | _SAFE_FLAGS
        try:
            descriptor, is_new = os.open(real, flags), False
        except FileNotFoundError:
            descriptor, is_new = os.open(real, flags | os.O_CREAT | os.O_EXCL, 0o666), True
        with os.fdopen(descriptor, "r+b") as file:
            _ensure_regular(os.fstat(descriptor).st_mode)
            lines_before = None if is_new else _line_count(iter(lambda: file.read(_CHUNK_BYTES), b""))
            file.seek(0)
            file.truncate()
            file.write(data)
        return lines_before


class _NotAFileError(ValueError):
    pass


def _ensure_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _NotAFileError("not a regular file")


def _reason(error: Exception) -> str:
    """Return the reason without the machine's own path."""
    return (error.strerror or message_of(error)) if isinstance(error, OSError) else message_of(error)


def _line_count(chunks: Iterable[bytes]) -> int:
    """Count lines like an editor."""
    line_feeds, last = 0, b"\n"
    for chunk in chunks:
        line_feeds += chunk.count(b"\n")
        last = chunk[-1:] or last
    return line_feeds + (last != b"\n")
