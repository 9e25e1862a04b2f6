"""Requests with attachments: contents as data URLs, and values that would choose files of the server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Ensemble, Image, MapEnsemble, Task
from ensemble_ray.teamfile.fields import ItemPrompt
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.serve.conftest import Connect

PNG = b"\x89PNG\r\n\x1a\n"
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def looking() -> ScriptedModel:
    """Answers with what it received."""

    def answer(asked: ScriptedCall) -> str:
        return ", ".join(
            f"{each.kind} {each.name} {len(each.data or b'')}"
            for message in asked.messages
            for each in message.attachments
        )

    return ScriptedModel(otherwise=answer, reads=("image", "audio", "file"))


async def test_input_may_be_an_attachment(connect: Connect) -> None:
    """S-ATT-15: an object with a data URL, and its name."""
    team = Ensemble(tasks=[Task("Compare {one} with {two}")], llm=looking())
    inputs = {"one": {"image": URL, "name": "a.png"}, "two": {"file": "data:,hello"}}
    async with connect(team) as client:
        done = (await client.post("/runs?wait=60", json={"inputs": inputs})).json()
    assert done["result"]["tasks"][-1]["text"] == "image a.png 8, file file.txt 5"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"image": "https://example.com/a.png"}, "inputs.one: the content of an attachment must be a data URL"),
        ({"file": "file:///etc/passwd"}, "inputs.one: the content of an attachment must be a data URL"),
        ({"image": "data:image/png;base64,?"}, "inputs.one: Image: the content of the data URL is not base64"),
        ({"image": "data:text/plain,hello"}, "inputs.one: Image 'image.txt' is of type text/plain"),
    ],
)
async def test_other_source_is_refused(connect: Connect, value: Any, text: str) -> None:
    """S-ATT-15: the server opens no file and no URL of a client."""
    async with connect(Ensemble(tasks=[Task("Look at {one}")], llm=looking())) as client:
        refused = await client.post("/runs", json={"inputs": {"one": value}})
    assert refused.status_code == 422
    assert text in refused.text


async def test_other_object_stays_a_value(connect: Connect) -> None:
    """S-ATT-15: it is written in the text, as before, and no file is opened."""
    model = ScriptedModel(otherwise=lambda asked: asked.text)
    async with connect(Ensemble(tasks=[Task("Look at {one}")], llm=model)) as client:
        done = (await client.post("/runs?wait=60", json={"inputs": {"one": {"file": "/etc/passwd"}}})).json()
    assert "Look at {'file': '/etc/passwd'}" in done["result"]["tasks"][-1]["text"]


@pytest.mark.parametrize("value", ["../a", "/etc/passwd", "..", "a/b", "c:d", "%2e"])
async def test_client_cannot_choose_a_file_of_the_server(connect: Connect, tmp_path: Path, value: str) -> None:
    """S-ATT-16: by an input, or by a field of an item."""
    (tmp_path / "a.png").write_bytes(PNG)
    template = Image(str(tmp_path / "{name}.png"))
    team = Ensemble(tasks=[Task("Look", attachments=template)], llm=looking())
    rows = MapEnsemble(items=iter([]), map_task=ItemPrompt(Task("Look at {item}", attachments=template)), llm=looking())
    async with connect(team) as client:
        refused = await client.post("/runs", json={"inputs": {"name": value}})
        done = (await client.post("/runs?wait=60", json={"inputs": {"name": "a"}})).json()
    assert refused.status_code == 422
    assert "Input 'name' is a part of the path or URL of an attachment" in refused.text
    assert done["result"]["tasks"][-1]["text"] == "image a.png 8"
    async with connect(rows) as client:
        refused = await client.post("/runs", json={"items": [{"name": value}]})
    assert refused.status_code == 422
    assert "Input 'name' is a part of the path or URL of an attachment" in refused.text
