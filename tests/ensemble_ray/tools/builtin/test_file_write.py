"""FileWriteTool: files below a directory, and the event each write fires."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ensemble_ray import Event, FileChangedEvent, FileWriteTool, ToolContext, ToolResult
from ensemble_ray.tools.tool import use_tool_context
from tests.ensemble_ray.tools.builtin.travel import travelled


def _write(tool: FileWriteTool, path: str, content: str) -> ToolResult:
    return tool.execute(json.dumps({"path": path, "content": content}))


def test_tool_is_refused_when_its_directory_is_wrong(tmp_path: Path) -> None:
    """S-BIT-20, S-CONV-13."""
    with pytest.raises(ValueError, match=r"^base_dir must be an existing directory: "):
        FileWriteTool(tmp_path / "missing")
    with pytest.raises(ValueError, match="base_dir"):
        FileWriteTool()


def test_file_is_written_with_its_parents_when_new(tmp_path: Path) -> None:
    """S-BIT-24: byte for byte, no translation of line ends."""
    result = _write(FileWriteTool(tmp_path), "a/b/c.txt", "é\r\n\n")
    assert result.output == "Successfully wrote to: a/b/c.txt"
    assert (tmp_path / "a/b/c.txt").read_bytes() == "é\r\n\n".encode()


def test_file_is_replaced_when_it_exists(tmp_path: Path) -> None:
    """S-BIT-24."""
    (tmp_path / "a.txt").write_text("a long old text")
    _write(FileWriteTool(tmp_path), "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"


def test_failure_says_why_when_it_cannot_be_written(tmp_path: Path) -> None:
    """S-BIT-24: and what cannot be encoded leaves no trace."""
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    tool = FileWriteTool(tmp_path)
    assert _write(tool, " ", "x").error_message == "Path must not be blank"
    for path, content in (("dir", "x"), (".", "x"), ("pipe", "x"), ("file/x", "x"), ("a\0", "x"), ("y" * 300, "x")):
        assert str(_write(tool, path, content).error_message).startswith("Failed to write file: ")
    half_a_pair = tool.execute_typed(tool.input_type.model_construct(path="new/half", content="\ud800"))
    assert str(half_a_pair.error_message).startswith("Failed to write file: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir", "file", "pipe"]


def test_nothing_is_made_outside_when_the_path_leads_there(tmp_path: Path) -> None:
    """S-BIT-21, S-BIT-22, S-BIT-25: not even a directory; a target that is a link to outside is refused."""
    base = tmp_path / "box"
    base.mkdir()
    target = tmp_path / "target"
    target.write_text("untouched")
    (base / "parent").symlink_to(tmp_path)
    (base / "file").symlink_to(target)
    (base / "dangling").symlink_to(tmp_path / "not-yet")
    tool = FileWriteTool(base)
    for path in ("../out/a.txt", str(tmp_path / "out" / "a.txt")):
        assert _write(tool, path, "x").error_message == "Access denied: path is outside the sandbox directory"
    for path in ("parent/out/a.txt", "file", "dangling"):
        assert _write(tool, path, "x").error_message == "Access denied: path resolves outside the sandbox directory"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["box", "target"]
    assert target.read_text() == "untouched"


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (None, "one\ntwo", ("created", 2, 0)),
        (None, "one\ntwo\n", ("created", 2, 0)),
        (None, "", ("created", 0, 0)),
        ("one\n", "one\ntwo\nthree\n", ("modified", 2, 0)),
        ("one\ntwo\nthree", "one", ("modified", 0, 2)),
        ("one", "two", ("modified", 0, 0)),
    ],
)
def test_event_fires_when_a_file_is_written(
    tmp_path: Path, before: str | None, after: str, change: tuple[str, int, int]
) -> None:
    """S-BIT-27, S-EVT-43."""
    if before is not None:
        (tmp_path / "a.txt").write_text(before)
    events: list[Event] = []
    context = ToolContext(
        tool_name="file_write", agent_role="Writer", run_id="run-1", instance="draft#0", emit=events.append
    )
    with use_tool_context(context):
        _write(FileWriteTool(tmp_path), "a.txt", after)
    [event] = events
    assert isinstance(event, FileChangedEvent)
    assert (event.change_type, event.lines_added, event.lines_removed) == change
    assert (event.file_path, event.agent_role, event.run_id, event.instance) == ("a.txt", "Writer", "run-1", "draft#0")
    assert event.timestamp.utcoffset() is not None


def test_no_event_fires_when_nothing_was_written(tmp_path: Path) -> None:
    """S-BIT-27."""
    events: list[Event] = []
    with use_tool_context(ToolContext(tool_name="file_write", emit=events.append)):
        _write(FileWriteTool(tmp_path), "../a.txt", "x")
    assert events == []


def test_tool_travels_when_pickled(tmp_path: Path) -> None:
    """S-CONV-34."""
    copy = travelled(FileWriteTool(tmp_path))
    assert (copy.name, _write(copy, "a", "x").is_success) == ("file_write", True)
