"""FilesFolder: graphs and traces in a folder, for the page to open.

In: a folder that somebody named. Out: its files with what they are, and their content. Rules: a file is had by exactly the name that it
has in the folder itself; no link is followed, nothing but a file is opened, and what is no graph, trace or exported run is not served
(S-VIZ-89). What a file is, is read once, until it changes. Never: a change of a file.
"""

from __future__ import annotations

import os
import stat
from http import HTTPStatus
from pathlib import Path
from typing import cast

import pydantic_core

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.process.forks import threads
from ensemble_ray.studio.refusals import StudioRefusal, not_found
from ensemble_ray.studio.schemas.files import FileEntry, FileKind, FileList
from ensemble_ray.visualization.dev_tools import parse_dag, parse_trace

#: Files that are listed, those that were changed last.
_MOST_FILES = 1000
#: Larger ones are not read, bytes.
_LARGEST_BYTES = 268_435_456
_MIB = 1_048_576
_WHAT_TO_DO = "What to do: put here what 'plan --dag', 'export_dag', 'export_trace' or 'Export' wrote"

#: Tells one state of a file from another.
_Stamp = tuple[int, int, int]


class FilesFolder:
    """The files of one folder; thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Choose a folder.

        Raises:
            ValidationError: there is no such folder.
        """
        if not folder.is_dir():
            raise ValidationError(f"--files {folder}: there is no such folder. Name one that has graphs or traces")
        self._folder = folder.resolve()
        self._known: dict[str, tuple[_Stamp, FileEntry]] = {}

    async def files(self) -> FileList:
        """Return the folder's files as they are now, those that were changed last first.

        Raises:
            StudioRefusal: the folder cannot be read any more.
        """
        return await threads.run(self._list)

    async def content(self, name: str) -> bytes:
        """Return a file whole.

        Raises:
            StudioRefusal: there is none of that name, or it is nothing that is shown.
        """
        return await threads.run(self._content, name)

    def _list(self) -> FileList:
        try:
            with os.scandir(self._folder) as found:
                meant = [each for each in found if _is_meant(each.name)]
                entries = [(each.name, state) for each in meant if (state := _state_of(each)) is not None]
        except OSError as error:
            raise StudioRefusal(
                HTTPStatus.CONFLICT, "FOLDER_UNREADABLE", f"{self._folder}: {error.strerror or error}"
            ) from error
        entries = [(name, state) for name, state in entries if not stat.S_ISDIR(state.st_mode)]
        entries.sort(key=lambda each: (-each[1].st_mtime_ns, each[0]))
        kept, left_out = entries[:_MOST_FILES], len(entries[_MOST_FILES:])
        before = self._known
        self._known = {name: (_stamp(state), self._entry(name, state, before)) for name, state in kept}
        files = [entry for _, entry in self._known.values()]
        return FileList(folder=str(self._folder), files=files, left_out=left_out)

    def _entry(self, name: str, state: os.stat_result, known: dict[str, tuple[_Stamp, FileEntry]]) -> FileEntry:
        """Return what a file is; what is known of one that has not changed is taken again."""
        found = known.get(name)
        if found is not None and found[0] == _stamp(state):
            return found[1]
        entry = FileEntry(name=name, kind=None, size_bytes=state.st_size, modified_at=state.st_mtime_ns // 1_000_000)
        if not stat.S_ISREG(state.st_mode):
            return entry.model_copy(
                update={"problem": "A link, or no file: only files of the folder itself are opened"}
            )
        try:
            return entry.model_copy(update=_describe(name, self._read(name)))
        except OSError as error:
            return entry.model_copy(update={"problem": error.strerror or str(error)})
        except ValidationError as error:
            return entry.model_copy(update={"problem": message_of(error)})

    def _content(self, name: str) -> bytes:
        if not _is_meant(name) or "/" in name:
            raise not_found("file", name)
        try:
            content = self._read(name)
            _kind_of(name, content)
        except OSError as error:  # none, a link, a folder
            raise not_found("file", name) from error
        except ValidationError as error:
            raise StudioRefusal(HTTPStatus.CONFLICT, "NOT_SHOWN", message_of(error)) from error
        return content

    def _read(self, name: str) -> bytes:
        """Return a file's content.

        Raises:
            OSError: there is none, it cannot be read, or it is a link, a folder, a pipe.
            ValidationError: it is too large.
        """
        # Neither followed nor waited for: a link leads out of the folder, a pipe without a writer blocks.
        opened = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(opened, "rb") as file:  # noqa: PTH123  a descriptor
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise OSError("it is no file")
            if state.st_size > _LARGEST_BYTES:
                raise ValidationError(f"{name} is larger than {_LARGEST_BYTES // _MIB} MiB")
            return file.read(_LARGEST_BYTES)


def _state_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return what is known of a file of the folder; None: it is gone since the folder was listed."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_meant(name: str) -> bool:
    """Whether a file may be one of ours by its name, which has to be a name that an address can have."""
    return name.endswith(".json") and name.isprintable()


def _stamp(state: os.stat_result) -> _Stamp:
    return state.st_mtime_ns, state.st_size, state.st_ino


def _kind_of(name: str, content: bytes) -> tuple[FileKind, dict[str, object]]:
    """Return what a file is by what is in it, and its fields.

    Raises:
        ValidationError: it is nothing that the page shows.
    """
    try:
        data = cast("object", pydantic_core.from_json(content))
    except ValueError as error:
        raise ValidationError(f"{name} is no JSON: {error}") from error
    fields = cast("dict[str, object]", data) if isinstance(data, dict) else {}
    if fields.get("type") == "dag":
        return "dag", fields
    if isinstance(fields.get("task_traces"), list):
        return "trace", fields
    if isinstance(fields.get("run"), dict) and "steps" in fields and "flows" in fields:
        return "run", fields
    raise ValidationError(f"{name} is neither a graph nor a trace nor an exported run. {_WHAT_TO_DO}")


def _describe(name: str, content: bytes) -> dict[str, object]:
    """Return what is told of a file: what it is, how many tasks it has, and what is wrong with it.

    Raises:
        ValidationError: it is nothing that the page shows.
    """
    kind, fields = _kind_of(name, content)
    told: dict[str, object] = {"kind": kind}
    try:  # one that lacks something is shown as far as it goes (S-VIZ-77), with what it lacks
        match kind:
            case "dag":
                graph = parse_dag(content, name=name)
                told |= {"workflow": graph.workflow, "tasks": len(graph.tasks)}
            case "trace":
                trace = parse_trace(content, name=name)
                told |= {"workflow": trace.workflow, "tasks": len(trace.task_traces)}
                told |= {"duration_ms": round(trace.total_duration.total_seconds() * 1000)}
            case "run":
                run, steps = cast("dict[str, object]", fields["run"]), fields["steps"]
                told |= {
                    "workflow": str(run.get("workflow", "")),
                    "tasks": len(steps) if isinstance(steps, list) else 0,
                }
                spent = run.get("duration_ms")
                told |= {"duration_ms": spent if isinstance(spent, int) else None}
    except ValidationError as error:
        told["problem"] = message_of(error)
    return told
