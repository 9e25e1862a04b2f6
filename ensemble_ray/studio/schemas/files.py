"""Files of a folder, as the page lists them. Pure."""

from __future__ import annotations

from typing import Literal

from ensemble_ray.studio.schemas.wire import Millis, StudioSchema, Text

#: A graph, a trace, or what `Export` wrote.
FileKind = Literal["dag", "trace", "run"]


class FileEntry(StudioSchema):
    """A file.

    Attributes:
        kind: What it is; null: nothing that the page shows, and `problem` says why.
        problem: What is wrong with it; one of a kind is shown as far as it goes.
        tasks: How many tasks it has; null: nobody knows.
    """

    name: Text
    kind: FileKind | None
    problem: Text | None = None
    size_bytes: int
    modified_at: Millis
    workflow: Text = ""
    tasks: int | None = None
    duration_ms: int | None = None


class FileList(StudioSchema):
    """Answer to `GET api/studio/files`: those that were changed last first.

    Attributes:
        folder: Where they lie.
        left_out: How many more there are.
    """

    folder: Text
    files: list[FileEntry]
    left_out: int = 0
