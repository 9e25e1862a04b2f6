"""FileReadTool: text below a directory, unmodified, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ensemble_ray import FileReadTool, ToolResult
from tests.ensemble_ray.tools.builtin.travel import travelled


def _read(tool: FileReadTool, path: str) -> ToolResult:
    return tool.execute(json.dumps({"path": path}))


def test_tool_is_refused_when_its_directory_or_limit_is_wrong(tmp_path: Path) -> None:
    """S-BIT-20, S-CONV-13: a missing argument counts as None."""
    with pytest.raises(ValueError, match=r"^base_dir must be an existing directory: "):
        FileReadTool(tmp_path / "missing")
    with pytest.raises(ValueError, match="base_dir"):
        FileReadTool()
    with pytest.raises(ValueError, match="max_bytes"):
        FileReadTool(tmp_path, max_bytes=0)


def test_approval_is_an_unknown_name_when_given(tmp_path: Path) -> None:
    """S-CONV-4, S-SET-41: the field appears with the issue that builds it."""
    with pytest.raises(TypeError):
        FileReadTool(tmp_path, require_approval=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("text", ["plain", "", "\ufeffé\r\nß\n\n", "  x  \t"])
def test_text_is_unmodified_when_read(tmp_path: Path, text: str) -> None:
    """S-BIT-23."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.txt").write_bytes(text.encode())
    result = _read(FileReadTool(tmp_path), "a/b.txt")
    assert (result.is_success, result.output) == (True, text)


def test_failure_says_what_is_there_when_it_is_no_readable_file(tmp_path: Path) -> None:
    """S-BIT-23: a named pipe is told apart without waiting for its writer."""
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    tool = FileReadTool(tmp_path)
    assert _read(tool, " ").error_message == "File path must not be blank"
    assert _read(tool, "no.txt").error_message == "File not found: no.txt"
    assert _read(tool, "file/x").error_message == "File not found: file/x"
    assert _read(tool, "dir").error_message == "Not a regular file: dir"
    assert _read(tool, "pipe").error_message == "Not a regular file: pipe"
    for path in ("a\0b", "x" * 300, "loop"):
        message = str(_read(tool, path).error_message)
        assert message.startswith("Failed to read file: ")
        assert str(tmp_path) not in message


def test_file_is_refused_when_too_large_or_not_utf8(tmp_path: Path) -> None:
    """S-BIT-23: exactly the limit is still read."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "ten").write_text("x" * 10)
    (tmp_path / "eleven").write_text("x" * 11)
    tool = FileReadTool(tmp_path, max_bytes=10)
    assert str(_read(tool, "bytes").error_message).startswith("Failed to read file: not UTF-8")
    assert _read(tool, "ten").output == "x" * 10
    assert _read(tool, "eleven").error_message == "Failed to read file: larger than 10 bytes"


def test_limit_is_ten_megabytes_when_none_is_given(tmp_path: Path) -> None:
    """S-BIT-23: a sparse file over the limit costs nothing here."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10 * 1024 * 1024 + 1)
    assert str(_read(FileReadTool(tmp_path), "large").error_message).startswith("Failed to read file: larger")


def test_access_is_denied_when_the_path_leads_outside(tmp_path: Path) -> None:
    """S-BIT-21, S-BIT-22."""
    base = tmp_path / "box"
    base.mkdir()
    (tmp_path / "secret").write_text("secret")
    (base / "link").symlink_to(tmp_path / "secret")
    tool = FileReadTool(base)
    outside = "Access denied: path is outside the sandbox directory"
    for path in ("../secret", "a/../../secret", str(tmp_path / "secret")):
        assert _read(tool, path).error_message == outside
    assert _read(tool, "link").error_message == "Access denied: path resolves outside the sandbox directory"


def test_missing_path_is_named_when_the_model_leaves_it_out(tmp_path: Path) -> None:
    """S-TOOL-51 for a built-in tool."""
    assert FileReadTool(tmp_path).execute("{}").error_message == (
        "Missing required parameter(s) for 'FileReadInput': path"
    )


def test_tool_travels_when_pickled(tmp_path: Path) -> None:
    """S-CONV-34."""
    (tmp_path / "a").write_text("x")
    copy = travelled(FileReadTool(tmp_path))
    assert (copy.name, _read(copy, "a").output) == ("file_read", "x")
