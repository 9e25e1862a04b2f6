"""A map over a folder of pictures: both runtimes, a resume, the command line and a team file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ensemble_ray import (
    DeadLetters,
    ExitReason,
    Files,
    Image,
    MapEnsemble,
    Runtime,
    Task,
    ValidationError,
    resume,
)
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.teamfile.team import load_team_file
from ensemble_ray.testing import ModelServer, ScriptedCall, ScriptedModel, ServedRequest, assert_attached
from ensemble_ray.testing.model_server import Answer
from tests.builders import answer
from tests.command_line import call_command, environment_of
from tests.media import PNG, WAV, make_png
from tests.processes import own_directory

_SAND = make_png((230, 200, 120))


def _make_folder(place: Path) -> Path:
    folder = place / "photos"
    (folder / "day 2").mkdir(parents=True)
    (folder / "sea.png").write_bytes(PNG)
    (folder / "day 2" / "sand.png").write_bytes(_SAND)
    (folder / "empty.png").touch()
    (folder / "call.wav").write_bytes(WAV)
    return folder


def _look(photo: Image) -> Task:
    return Task(description=f"Describe {photo.name}", expected_output="t", attachments=[photo])


def _seen(asked: ScriptedCall) -> object:
    (picture,) = asked.attachments
    return answer(f"{picture.name} has {len(picture.data or b'')} bytes", 900, 100)


def test_each_picture_is_an_item_when_a_folder_is_mapped(runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-ATT-82, S-ATT-85, S-ATT-86, S-ATT-87: the others are dead letters with the reason, and can be tried again."""
    folder = _make_folder(tmp_path)
    model = ScriptedModel(otherwise=_seen, reads=["image"])
    photos = MapEnsemble(
        items=folder, map_task=_look, llm=model, on_item_error="collect",
        results=tmp_path / "rows.jsonl", dead_letters=tmp_path / "dead.jsonl", key="name", columns="raw",
    )  # fmt: skip
    output = photos.run(runtime=runtime, run_id="photos")
    size = {"day 2/sand.png": len(_SAND), "sea.png": len(PNG)}
    assert [each.raw for each in output.task_outputs] == [f"{name} has {size[name]} bytes" for name in size]
    failed = {each.item.name: each.message for each in output.failed_items}
    assert list(failed) == ["call.wav", "empty.png"]
    assert "does not read Audio" in failed["call.wav"]
    assert failed["empty.png"] == "File 'empty.png' is empty"
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["name"]: row["raw"] for row in rows} == {name: f"{name} has {size[name]} bytes" for name in size}
    store = store_at(StoreAddress.of(home))
    assert run_blocking(store.read_content("photos", Image(_SAND).sha256)) == _SAND
    (folder / "empty.png").write_bytes(PNG)
    again = MapEnsemble(items=DeadLetters(tmp_path / "dead.jsonl"), map_task=_look, llm=model, on_item_error="collect")
    mended = again.run(runtime=runtime)
    assert [each.raw for each in mended.task_outputs] == [f"empty.png has {len(PNG)} bytes"]


def test_folder_is_read_again_when_its_run_is_resumed(tmp_path: Path) -> None:
    """S-ATT-84: in the same order, with one request per picture; a changed folder is told before a request."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.png").write_bytes(make_png((number, 0, 0)))
    model = ScriptedModel(otherwise=_seen, reads=["image"])
    photos = MapEnsemble(items=Files(folder / "*.png"), map_task=_look, llm=model, max_concurrency=1)
    cut = photos.run(runtime="inline", run_id="cut", max_tokens=4000)
    assert cut.exit_reason is ExitReason.BUDGET_EXHAUSTED
    done = len(model.calls)
    assert 0 < done < 6
    (folder / "0.png").write_bytes(PNG)
    with pytest.raises(ValidationError, match="items changed: item 0"):
        resume("cut", photos, runtime="inline", max_tokens=100_000)
    assert len(model.calls) == done
    (folder / "0.png").write_bytes(make_png((0, 0, 0)))
    whole = resume("cut", photos, runtime="inline", max_tokens=100_000)
    assert [each.raw.partition(" ")[0] for each in whole.task_outputs] == [f"{number}.png" for number in range(6)]
    assert len(model.calls) == 6


def _script(request: ServedRequest) -> Answer:
    return f"{request.text.partition('picture ')[2].split()[0]}: {len(request.attachments)}"


def test_folder_is_mapped_when_a_command_names_it() -> None:
    """S-ATT-88, S-ATT-40: a folder or a pattern in place of a file; a prompt need not name the item to show it."""
    with own_directory() as place, ModelServer(_script) as server:
        _make_folder(place)
        environment = environment_of(place, server)
        prompt = ["--prompt", "Describe the picture {name}"]
        dry = call_command(place, environment, "map", "photos", *prompt, "--dry-run")
        assert "4 items in the folder" in dry.stdout
        assert re.search(r"About 2,[0-9]{3} tokens", dry.stdout)  # of two pictures; an empty one has none
        done = call_command(place, environment, "map", "photos/**/*.png", *prompt, "-o", "rows.jsonl")
        assert done.returncode == 3, done.stderr
        rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
        assert {row["item"]["name"]: row["raw"] for row in rows} == {
            "day 2/sand.png": "day: 1",
            "sea.png": "sea.png: 1",
        }
        contents = {each.sha256 for request in server.requests for each in request.attachments}
        assert contents == {Image(PNG).sha256, Image(_SAND).sha256}
        none = call_command(place, environment, "map", "photos/*.tiff", *prompt, "-o", "none.jsonl")
        assert none.returncode == 2
        assert "has no file '*.tiff'" in none.stderr


def test_folder_is_mapped_when_a_team_file_names_it(tmp_path: Path) -> None:
    """S-ATT-88: relative to the file; the picture is attached whether the prompt names it or not."""
    _make_folder(tmp_path)
    (tmp_path / "team.yaml").write_text(
        "map_reduce:\n  items: photos/*/*.png\n  map: {description: Describe it, expected_output: a line}\n"
    )
    model = ScriptedModel(otherwise=_seen, reads=["image"])
    team = load_team_file(str(tmp_path / "team.yaml"), llm=model)
    assert [each.raw for each in team.run(runtime="inline").task_outputs] == [f"day 2/sand.png has {len(_SAND)} bytes"]
    assert_attached(model.calls[0], _SAND)
