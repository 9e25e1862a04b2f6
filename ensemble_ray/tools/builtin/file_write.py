"""Writes one file below a directory. Package: built-in tools. In: a relative path and text; out: the file, and an event.

The sandbox is asked before anything is created, parents included (S-BIT-25). The text is encoded before the file is
touched: what cannot be written leaves no trace.
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
from ensemble_ray.tools.builtin.sandbox import AccessDeniedError, Sandbox
from ensemble_ray.tools.tool import ToolResult
from ensemble_ray.tools.typed import AbstractTypedAgentTool
from ensemble_ray.values.value import utc_now

__all__ = ["FileWriteTool"]

_OPEN_FLAGS = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
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
            _ensure_regular(real.stat().st_mode)
        real.parent.mkdir(parents=True, exist_ok=True)
        # a parent may have become a link while it was made: what opens now is asked for again
        descriptor, is_new = _open(self._sandbox.resolve(path))
        with os.fdopen(descriptor, "r+b") as file:
            _ensure_regular(os.fstat(descriptor).st_mode)
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
        return os.open(real, _OPEN_FLAGS), False
    except FileNotFoundError:
        return os.open(real, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o666), True


def _ensure_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError("not a regular file")


def _line_count(chunks: Iterable[bytes]) -> int:
    """Lines as an editor shows them: a last line without its line feed counts, nothing after the last one does not."""
    line_feeds, last = 0, b"\n"
    for chunk in chunks:
        line_feeds += chunk.count(b"\n")
        last = chunk[-1:] or last
    return line_feeds + (last != b"\n")
