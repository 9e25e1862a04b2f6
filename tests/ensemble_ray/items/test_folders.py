"""Files of a folder as items: which of them, in which order, and what is said of those that cannot be read."""

from __future__ import annotations

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import Audio, DeadLetters, File, Files, Image, TaskOutput, ValidationError
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.items.results import DeadLetterFile, ResultsFile
from ensemble_ray.items.sources import source_of
from ensemble_ray.record.identity.definition import item_digest
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.outputs import FailedItem, ItemResult
from ensemble_ray.values.value import utc_of
from tests.ensemble_ray.items.reading import entries_of
from tests.media import JPEG, PNG, WAV


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures in a folder and below it, beside other files."""
    found = tmp_path / "photos"
    for name, data in {
        "b.png": PNG,
        "a/x.jpg": JPEG,
        "a/c/z.jpg": JPEG + b"2",
        "a.jpg": JPEG,
        "notes.txt": b"seen",
        "call.wav": WAV,
        ".hidden/q.jpg": JPEG,
        ".DS_Store": b"\0",
    }.items():
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_bytes(data)
    return found


async def names_of(items: object) -> list[str]:
    entries = await entries_of(items)
    assert [entry[0] if isinstance(entry, tuple) else entry.index for entry in entries] == list(range(len(entries)))
    return [entry[1].name for entry in entries if isinstance(entry, tuple) and isinstance(entry[1], Attachment)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["a/c/z.jpg", "a/x.jpg", "a.jpg", "b.png", "call.wav", "notes.txt"]),
        ("*.jpg", ["a.jpg"]),
        ("**/*.jpg", ["a/c/z.jpg", "a/x.jpg", "a.jpg"]),
        ("**", ["a/c/z.jpg", "a/x.jpg", "a.jpg", "b.png", "call.wav", "notes.txt"]),
        ("a/**/?.jpg", ["c/z.jpg", "x.jpg"]),
        ("*/*.jpg", ["a/x.jpg"]),
        ("[ab].*", ["a.jpg", "b.png"]),
    ],
)
async def test_files_come_in_the_order_of_their_paths_when_a_pattern_names_them(
    folder: Path, pattern: str, names: list[str]
) -> None:
    """S-ATT-80: a folder means all files below it; names with a dot are left out; a name is below the fixed part."""
    assert await names_of(Files(folder / pattern)) == names
    assert await names_of(folder / pattern) == names
    assert await names_of(str(folder / pattern)) == names


async def test_item_is_of_the_kind_of_its_content_when_a_file_is_read(folder: Path) -> None:
    """S-ATT-81: a reference with the path, the size and the hash, and without the content."""
    (folder / "photo.txt").write_bytes(PNG)
    entries = [entry[1] for entry in await entries_of(folder) if isinstance(entry, tuple)]
    found = {entry.name: entry for entry in entries if isinstance(entry, Attachment)}
    kinds = {name: type(item) for name, item in found.items()}
    assert kinds["b.png"] is kinds["photo.txt"] is kinds["a.jpg"] is Image
    assert (kinds["call.wav"], kinds["notes.txt"]) == (Audio, File)
    image = found["b.png"]
    assert (image.source, image.data, image.size_bytes) == (str(folder / "b.png"), None, len(PNG))
    assert image.sha256 == Image(PNG).sha256
    assert image.read().data == PNG
    (folder / "b.png").write_bytes(JPEG)
    with pytest.raises(ValidationError, match="another content than its hash"):
        image.read()


async def test_folder_is_meant_when_its_name_looks_like_a_pattern(tmp_path: Path) -> None:
    """S-ATT-80: what is a folder is no pattern."""
    (tmp_path / "day [1]").mkdir()
    (tmp_path / "day [1]" / "a.png").write_bytes(PNG)
    assert await names_of(tmp_path / "day [1]") == ["a.png"]


async def test_links_are_read_when_they_lead_to_files(folder: Path) -> None:
    """S-ATT-80: a link to a file is a file; a link to a folder may lead in a circle, and is not followed."""
    (folder / "a" / "again").symlink_to(folder, target_is_directory=True)
    (folder / "a" / "link.jpg").symlink_to(folder / "a.jpg")
    assert await names_of(folder / "a") == ["c/z.jpg", "link.jpg", "x.jpg"]


async def test_file_is_refused_with_its_reason_when_it_cannot_be_read(folder: Path) -> None:
    """S-ATT-82: an empty file, a link to nothing, a pipe: each is a failed item, and the others are read."""
    (folder / "a" / "empty.jpg").touch()
    (folder / "a" / "gone.jpg").symlink_to(folder / "nothing")
    os.mkfifo(folder / "a" / "pipe")
    entries = await entries_of(folder / "a")
    refused = {each.text: str(each.error) for each in entries if isinstance(each, RefusedItem)}
    assert {
        name: text.partition("'")[0] + text.rpartition("'")[2].partition(".")[0] for name, text in refused.items()
    } == {
        "empty.jpg": "File  is empty",
        "gone.jpg": "File  cannot be read: No such file or directory",
        "pipe": "File  cannot be read: it is not a file",
    }
    assert all(name in text for name, text in refused.items())
    assert [entry[0] for entry in entries if isinstance(entry, tuple)] == [0, 4]


async def test_folder_is_refused_with_its_reason_when_it_cannot_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-ATT-82: a folder below the named one is one failed item."""
    real = os.scandir

    def scan(path: Path | int) -> object:
        if str(path).endswith("/c"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scan)
        entries = await entries_of(folder / "a")
    (refused,) = [each for each in entries if isinstance(each, RefusedItem)]
    assert str(refused.error) == f"items folder '{folder / 'a'}', folder 'c' cannot be read: Permission denied"
    assert await names_of(folder / "a" / "*.jpg") == ["x.jpg"]


def test_items_are_refused_when_no_file_is_meant(tmp_path: Path, folder: Path) -> None:
    """S-ATT-83: no such folder, no such file, an attachment in place of a list: told at construction."""
    with pytest.raises(ValidationError) as gone:
        source_of(Files(tmp_path / "gone"))
    assert str(gone.value) == f"items folder '{tmp_path / 'gone'}' cannot be read: No such file or directory"
    with pytest.raises(ValidationError) as none:
        source_of(folder / "*.tiff")
    assert str(none.value) == f"items folder '{folder}' has no file '*.tiff'"
    with pytest.raises(ValidationError, match=r"^items is Image: pass a list .* For one item pass a list with it"):
        source_of(Image(PNG))


async def test_folder_is_the_same_when_the_working_folder_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-ATT-80: a path is taken from where the source was made, and counted on request."""
    monkeypatch.chdir(folder.parent)
    source = source_of("photos/*.jpg")
    monkeypatch.chdir("/")
    assert source.identity == {"kind": "files", "path": str(folder / "*.jpg")}
    assert source.count is None
    assert source.look is not None
    assert source.look() == 1


async def test_item_is_the_same_when_its_folder_moves(folder: Path) -> None:
    """S-ATT-84: a resumed run compares name and content of a file, and not its place."""
    before = [item_digest(entry[1]) for entry in await entries_of(folder) if isinstance(entry, tuple)]
    moved = Path(shutil.move(folder, folder.parent / "moved"))
    after = [item_digest(entry[1]) for entry in await entries_of(moved) if isinstance(entry, tuple)]
    assert before == after
    assert len(set(before)) == len(before) == 6
    (moved / "b.png").write_bytes(PNG + b"changed")
    changed = [item_digest(entry[1]) for entry in await entries_of(moved) if isinstance(entry, tuple)]
    assert [old == new for old, new in zip(before, changed, strict=True)] == [True, True, True, False, True, True]
    unread = {item_digest(Image(path)) for path in ("a.png", "b.png")}
    assert len(unread) == 2
    assert "" not in unread


async def test_row_names_the_file_when_a_result_is_written(folder: Path, tmp_path: Path) -> None:
    """S-ATT-85: the item of a row is the reference."""
    (entry,) = await entries_of(folder / "b.png*")
    assert isinstance(entry, tuple)
    output = TaskOutput(
        raw="a dot", task_description="d", agent_role="Reader", completed_at=utc_of(1), duration=timedelta(seconds=1)
    )
    file = await ResultsFile.open(tmp_path / "rows.jsonl", is_resumed=False)
    await file.write([ItemResult(index=0, item=entry[1], output=output)])
    await file.close()
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["item"] == {
        "kind": "image",
        "name": "b.png",
        "media_type": "image/png",
        "size_bytes": len(PNG),
        "sha256": Image(PNG).sha256,
    }


async def test_dead_letter_is_read_again_when_a_file_failed(folder: Path, tmp_path: Path) -> None:
    """S-ATT-86: the line names the path; a file that is whole now is an item, one that is not fails again."""
    (folder / "a" / "empty.jpg").touch()
    entries = await entries_of(folder / "a")
    dead = await DeadLetterFile.open(tmp_path / "dead.jsonl", run_id="r", is_resumed=False)
    for entry in entries:
        index, item = (entry.index, entry.item) if isinstance(entry, RefusedItem) else entry
        failed = FailedItem(index=index, item=item, error_type="ValidationError", message="it failed", attempts=0)
        await dead.write([failed])
    await dead.close()
    line = json.loads((tmp_path / "dead.jsonl").read_text().splitlines()[1])
    assert (line["is_file"], line["item"]["source"]) == (True, str(folder / "a" / "empty.jpg"))
    again = await entries_of(DeadLetters(tmp_path / "dead.jsonl"))
    assert [isinstance(each, RefusedItem) for each in again] == [False, True, False]
    assert again[0] == entries[0]
    (folder / "a" / "empty.jpg").write_bytes(JPEG)
    mended = await entries_of(DeadLetters(tmp_path / "dead.jsonl"))
    assert [each[1].name for each in mended if isinstance(each, tuple)] == ["c/z.jpg", "empty.jpg", "x.jpg"]  # type: ignore[attr-defined]
