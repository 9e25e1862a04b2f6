"""Attachments in team files: of tasks, and of items."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Audio, File, Image, MapEnsemble, OpenAIChatModel, Task
from ensemble_ray.teamfile.fields import AllItemsPrompt, ItemPrompt
from ensemble_ray.teamfile.targets import load_runnable
from tests.ensemble_ray.teamfile.conftest import Load, Refused

PNG = b"\x89PNG\r\n\x1a\n"


def test_task_has_the_attachments_of_its_section(load: Load, folder: Path) -> None:
    """S-ATT-13: paths are relative to the file; the suffix decides the kind; a model says what it reads."""
    team = load("""
llm: {model: m, reads: [image, file]}
tasks:
  look:
    description: Look
    attachments:
      - photos/{name}.png
      - https://example.com/call.mp3
      - {file: report.png, name: r.bin, media_type: application/x-report}
      - {image: "https://intranet/a", allow_private_hosts: true}
  one: {description: One, attachments: notes.md}
""")
    looking, one = team.tasks
    assert looking.attachments == (
        Image(folder / "photos/{name}.png"),
        Audio("https://example.com/call.mp3"),
        File(folder / "report.png", name="r.bin", media_type="application/x-report"),
        Image("https://intranet/a"),
    )
    assert [each.allow_private_hosts for each in looking.attachments] == [False, False, False, True]
    assert one.attachments == (File(folder / "notes.md"),)
    assert isinstance(team.llm, OpenAIChatModel)
    assert team.llm.reads == ("image", "file")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[{name: a}]", "must have one of the keys 'image', 'audio' and 'file'"),
        ("[{image: a.png, file: a.png}]", "must have one of the keys 'image', 'audio' and 'file'"),
        ("[{picture: a.png}]", "attachments[0].picture: unknown key of the attachment"),
        ("[7]", "must be text: put it in quotes"),
    ],
)
def test_wrong_attachment_is_named(refused: Refused, value: str, text: str) -> None:
    """S-ATT-13: with its place in the file."""
    lines = refused(f"llm: openai:m\ntasks:\n  look:\n    description: Look\n    attachments: {value}\n")
    assert any(text in line and "team.yaml:5" in line for line in lines), lines


def test_task_of_an_item_has_its_attachments() -> None:
    """S-ATT-18: named fields and the whole item; fields fill in paths."""
    prompt = ItemPrompt(Task("Describe {photo} of {id}", attachments=[File("{id}.txt")]))
    photo, other = Image(PNG, name="p.png"), Image(PNG, name="o.png")
    made = prompt({"id": 7, "photo": photo, "other": other})
    assert (made.description, made.attachments) == ("Describe p.png of 7", (File("7.txt"), photo))
    made = ItemPrompt(Task("Look: {item}"))({"a": photo, "b": [other]})
    assert (made.description, made.attachments) == ('Look: {"a": "p.png", "b": ["o.png"]}', (photo, other))
    made = ItemPrompt(Task("Look: {item}"))(photo)
    assert (made.description, made.attachments) == ("Look: p.png", (photo,))
    assert AllItemsPrompt(Task("Look"))([photo, {"x": other}]).attachments == (photo, other)


def test_map_over_rows_attaches_the_files_that_they_name(folder: Path) -> None:
    """S-ATT-18, S-ATT-13."""
    (folder / "rows.jsonl").write_text('{"id": "a"}\n', encoding="utf-8")
    (folder / "team.yaml").write_text(
        "llm: openai:m\nmap_reduce:\n  items: rows.jsonl\n  map: {description: Look, attachments: 'photos/{id}.png'}\n",
        encoding="utf-8",
    )
    team = load_runnable("team.yaml")
    assert isinstance(team, MapEnsemble)
    made = team.map_task({"id": "a"})  # type: ignore[call-arg, arg-type]
    assert isinstance(made, Task)
    assert made.attachments == (Image(folder / "photos/a.png"),)
