"""Pictures, audio and files of runs: what a step shows of them, and what a client receives."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from ensemble_ray import Audio, Ensemble, File, Image, InlineRuntime, tool
from ensemble_ray.access.admission import Right, new_key
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.media import PNG, SVG, WAV

from .conftest import Serve

_LARGE = b"\x89PNG\r\n\x1a\n" + bytes(2_000_000)


@tool(effect="none")
def draw() -> list[object]:
    """Draw."""
    return ["the plot:", Image(_LARGE, name="plot.png")]


def _record(home: Path, run_id: str = "seen") -> None:
    model = ScriptedModel(call("draw"), "seen", reads=("image", "audio", "file"))
    attached = [
        Image(PNG, name="dot.png"),
        Image(SVG, name="evil.png", media_type="image/png"),
        Audio(WAV, name="call.wav"),
        File(b"<script>alert(1)</script>", name="page.html"),
    ]
    team = Ensemble(tasks=[task("look", agent(model, tools=[draw]), name="look", attachments=attached)])
    team.run(runtime=InlineRuntime(home=home), run_id=run_id)


def _content(client: httpx.Client, data: bytes, run: str = "seen") -> httpx.Response:
    return client.get(f"api/studio/runs/{run}/attachments/{sha256(data).hexdigest()}")


def test_step_lists_attachments_when_its_run_has_some(serve: Serve, tmp_path: Path) -> None:
    """S-ATT-70: of the prompt and of tools, with name, type, size and hash; an export has no contents."""
    _record(tmp_path)
    client = serve()
    found = client.get("api/studio/runs/seen/steps/look%230").json()
    system, user = found["prompt"]
    assert system["attachments"] == []
    assert [each["name"] for each in user["attachments"]] == ["dot.png", "evil.png", "call.wav", "page.html"]
    (called,) = found["tool_calls"]
    assert called["attachments"] == [
        {
            "kind": "image",
            "name": "plot.png",
            "media_type": "image/png",
            "size_bytes": len(_LARGE),
            "sha256": sha256(_LARGE).hexdigest(),
        }
    ]
    exported = client.get("api/studio/runs/seen/export?format=json").json()
    assert exported["details"]["look#0"]["tool_calls"][0]["attachments"] == called["attachments"]


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (PNG, "image/png"),
        (_LARGE, "image/png"),
        (WAV, "audio/wav"),
        (SVG, "application/octet-stream"),
        (b"<script>alert(1)</script>", "application/octet-stream"),
    ],
)
def test_content_has_the_type_of_its_bytes_when_it_is_requested(
    serve: Serve, tmp_path: Path, data: bytes, media_type: str
) -> None:
    """S-ATT-71: whatever type was declared; all but pictures and audio are downloads; no script can run in any of them."""
    _record(tmp_path)
    answer = _content(serve(), data)
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, data, media_type)
    is_download = answer.headers.get("content-disposition") == "attachment"
    assert is_download == (media_type == "application/octet-stream")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert answer.headers["cache-control"] == "no-store"


def test_content_is_refused_when_the_run_does_not_contain_it(serve: Serve, tmp_path: Path) -> None:
    """S-ATT-72: another run's content, an unknown hash, a name that is no hash, an unknown run."""
    _record(tmp_path)
    Ensemble(tasks=[task("t", agent(ScriptedModel("a")))]).run(runtime=InlineRuntime(home=tmp_path), run_id="other")
    client = serve()
    assert _content(client, PNG, "other").json()["code"] == "ATTACHMENT_NOT_FOUND"
    assert _content(client, b"unknown").status_code == 404
    assert client.get("api/studio/runs/seen/attachments/..%2F..%2Fetc").status_code in {404, 422}
    assert _content(client, PNG, "none").json()["code"] == "RUN_NOT_FOUND"


def test_content_needs_the_rights_of_its_run_when_keys_are_needed(tmp_path: Path) -> None:
    """S-ATT-72: no key, a key of another team, a key that may read the run."""
    _record(tmp_path)
    made = datetime(2026, 1, 1, tzinfo=UTC)
    texts: dict[str, str] = {}
    for name, team in (("reads", "*"), ("other", "teamx")):
        texts[name], key = new_key(name, rights=frozenset({Right.READ}), teams=[team], rate=None, created_at=made)
        KeyFile(tmp_path).add(key)
    server = StudioServer(StoreAddress.of(tmp_path), host="0.0.0.0", port=0)  # noqa: S104
    server.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}/", trust_env=False) as client:
            assert _content(client, PNG).status_code == 401
            client.headers["authorization"] = f"Bearer {texts['other']}"
            assert _content(client, PNG).json()["code"] == "RUN_NOT_FOUND"
            client.headers["authorization"] = f"Bearer {texts['reads']}"
            assert _content(client, PNG).content == PNG
    finally:
        server.stop()
