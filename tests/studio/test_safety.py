"""Who may ask, what their browser may do, and where studio listens."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from ensemble_ray import Ensemble, EnsembleError, InlineRuntime, Review, Task, ValidationError, WebDashboard
from ensemble_ray.access.admission import Right, new_key
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio import app as spooled_answer
from ensemble_ray.studio.app import Studio, studio_app
from ensemble_ray.studio.documents import FOLDER
from ensemble_ray.studio.reading import StudioReader
from ensemble_ray.studio.server import PORT, StudioServer

from .conftest import Serve

API = "api/studio"


def test_names_of_others_and_pages_of_others_are_refused(serve: Serve, runs: Path) -> None:
    """S-STU-70: hosts of loopback alone; changes from pages of this machine alone."""
    client = serve(runs)
    assert client.get(f"{API}/info", headers={"host": "evil.example"}).status_code == 403
    for origin in ("http://evil.example", "null", "http://localhost.evil.com", ""):
        answer = client.post(f"{API}/runs/flat/cancel", headers={"origin": origin})
        assert (answer.status_code, answer.json()["code"]) == (403, "ORIGIN_NOT_ALLOWED"), origin
        assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_step_that_no_program_can_be_told_is_refused(serve: Serve, runs: Path) -> None:
    """S-STU-77: NUL and halves of surrogate pairs, in addresses and in bodies."""
    client = serve(runs)
    asked = client.get(f"{API}/runs/flat/fork-preview?from=a%00b")
    assert (asked.status_code, asked.json()["code"]) == (422, "INVALID_REQUEST")
    for text in ('{"from": "a\\u0000b"}', '{"from": "a\\ud800b"}', '{"from": "a", "run_id": "b\\u0000"}'):
        answer = client.post(f"{API}/runs/flat/fork", content=text, headers={"content-type": "application/json"})
        assert answer.status_code in {400, 422}, (text, answer.text)


def test_a_body_that_is_too_long_is_refused(serve: Serve, runs: Path) -> None:
    """S-STU-176: of every route."""
    client = serve(runs)
    for path in ("reviews/graph/gate", "runs/graph/fork", "runs/graph/resume", "runs/graph/cancel"):
        refused = client.post(f"{API}/{path}", content=b"[" * 8_388_609, headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["code"]) == (413, "BODY_TOO_LARGE")


def test_a_dashboard_refuses_a_body_that_is_too_long() -> None:
    """S-STU-176: on the routes of studio and on its own."""
    with (
        WebDashboard(port=0) as dashboard,
        httpx.Client(base_url=f"http://127.0.0.1:{dashboard.actual_port}/", trust_env=False, timeout=60) as client,
    ):
        for path in (f"{API}/runs/none/cancel", "api/status"):
            taken, refused = (
                client.post(path, content=b"[" * length, headers={"content-type": "application/json"})
                for length in (8_388_608, 8_388_609)
            )
            assert taken.status_code in {404, 405, 422}
            assert (refused.status_code, refused.json()["code"]) == (413, "BODY_TOO_LARGE")


@pytest.mark.parametrize("form", ["json", "html"])
async def test_slow_readers_of_exports_hold_a_piece_each_and_are_few(
    runs: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """S-STU-175: from a file; more than four at a time are refused, until one has ended; who reads nothing is let go."""
    app = studio_app(Studio(reader=StudioReader(store_at(StoreAddress.of(runs)), can_decide=False), title="runs"))
    is_read, are_begun = asyncio.Event(), asyncio.Semaphore(0)
    pieces: list[int] = []

    async def nothing() -> Message:
        return await asyncio.Future()

    async def export(*, is_slow: bool) -> tuple[int, bytes]:
        status, body = 0, b""

        async def send(message: Message) -> None:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
                are_begun.release()
            else:
                pieces.append(len(message["body"]))
                body += message["body"]
                if is_slow:
                    await is_read.wait()

        path, query = "/api/studio/runs/graph/export", f"format={form}".encode()
        scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": []}
        await app(scope, nothing, send)
        return status, body

    slow = [asyncio.create_task(export(is_slow=True)) for _ in range(4)]
    for _ in slow:
        await are_begun.acquire()
    status, body = await export(is_slow=False)
    assert (status, json.loads(body)["code"]) == (429, "TOO_MANY_EXPORTS")
    is_read.set()
    sent = await asyncio.gather(*slow)
    status, body = await export(is_slow=False)
    assert status == 200
    assert [len(each) for _, each in sent] == [len(body)] * 4
    assert max(pieces) <= 65_536
    is_read.clear()
    monkeypatch.setattr(spooled_answer, "_STALLED_S", 0.01)
    assert [status for status, _ in [await export(is_slow=True) for _ in range(5)]] == [200] * 5


def test_only_files_of_the_page_can_be_had(serve: Serve, runs: Path) -> None:
    """S-STU-73, S-STU-74: by exactly their names; every answer has the policy; a tag saves the second answer."""
    client = serve(runs)
    for path in (
        "..%2fapp.py",
        "%2e%2e/app.py",
        "/../server.py",
        "js/..%2f..%2fapp.py",
        "js",
        "js/",
        "INDEX.HTML",
        "%00",
    ):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in (f"{API}/runs", f"{API}/nope"):
        policy = client.get(path).headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "*" not in policy
    for file in (path for path in FOLDER.rglob("*") if path.suffix in {".js", ".css", ".html", ".svg"}):
        answer = client.get(file.relative_to(FOLDER).as_posix())
        assert answer.content == file.read_bytes()
        again = client.get(file.relative_to(FOLDER).as_posix(), headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304


def test_a_failure_of_studio_itself_has_the_policy_too(
    serve: Serve, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-STU-40, S-STU-74: it is answered in the form of all failures, with all headers."""

    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(StudioReader, "compare", fail)
    answer = serve(runs).get(f"{API}/compare?a=flat&b=graph")
    assert (answer.status_code, answer.json()["code"]) == (500, "INTERNAL_ERROR")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    """S-STU-70, S-STU-71: with what to do; the usual one is 7328, on loopback."""
    assert PORT == 7328
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnsembleError, match=f"127.0.0.1:{port}.*Choose another port"):
            StudioServer(StoreAddress.of(tmp_path), port=port).start()
    with pytest.raises(ValidationError, match="0-65535"):
        StudioServer(StoreAddress.of(tmp_path), port=70_000)


def test_beyond_loopback_everything_but_files_needs_a_key(runs: Path, tmp_path: Path) -> None:
    """S-STU-72: no key at all: it does not start; a key has its rights and its teams, and no other."""
    address = StoreAddress.of(tmp_path)
    with pytest.raises(ValidationError, match="ensemble-ray keys add"):
        StudioServer(address, host="0.0.0.0", port=0)  # noqa: S104  that is what is asked about
    made = datetime(2026, 1, 1, tzinfo=UTC)
    texts: dict[str, str] = {}
    for name, rights, teams in (("reads", [Right.READ], "*"), ("other", [Right.READ], "teamx")):
        texts[name], key = new_key(name, rights=frozenset(rights), teams=[teams], rate=None, created_at=made)
        KeyFile(runs).add(key)
    server = StudioServer(StoreAddress.of(runs), host="0.0.0.0", port=0)  # noqa: S104
    server.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}/", trust_env=False) as client:
            reads, other = ({"authorization": f"Bearer {texts[name]}"} for name in ("reads", "other"))
            assert client.get(f"{API}/runs").status_code == 401
            assert client.get(f"{API}/runs", headers={"authorization": "Bearer erk_x"}).status_code == 401
            assert len(client.get(f"{API}/runs", headers=reads).json()["runs"]) == 7
            assert client.get(f"{API}/runs", headers=other).json()["runs"] == []
            assert client.get(f"{API}/runs/flat", headers=other).status_code == 404
            assert client.post(f"{API}/runs/flat/cancel", headers=reads).status_code == 403
            assert client.get("nothing.js").status_code == 404
    finally:
        server.stop()


def test_who_follows_a_run_is_let_go_when_the_key_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-STU-76: the stream ends without saying that the run did; what is asked after that is refused."""
    monkeypatch.setattr("ensemble_ray.studio.app._ADMITTED_S", 0.0)
    task = Task(name="a", description="a", expected_output="x", handler=lambda _: "b", review=Review.required("Well?"))
    Ensemble(tasks=[task], review_wait="detach").run(runtime=InlineRuntime(home=tmp_path), run_id="asks")
    text, key = new_key(
        "reads", rights=frozenset([Right.READ]), teams=["*"], rate=None, created_at=datetime(2026, 1, 1, tzinfo=UTC)
    )
    KeyFile(tmp_path).add(key)
    server = StudioServer(StoreAddress.of(tmp_path), host="0.0.0.0", port=0)  # noqa: S104  beyond loopback
    server.start()
    try:
        headers = {"authorization": f"Bearer {text}"}
        with (
            httpx.Client(base_url=f"http://127.0.0.1:{server.port}/", trust_env=False, timeout=60) as client,
            client.stream("GET", f"{API}/runs/asks/live", headers=headers) as stream,
        ):
            lines = stream.iter_lines()
            assert "event: steps" in (next(lines), next(lines))
            KeyFile(tmp_path).revoke("reads")
            # Heartbeats come for as long as the stream is open, so that no wait for the next line ends by itself.
            deadline, told = time.monotonic() + 60, list[str]()
            for line in lines:
                told.append(line)
                assert time.monotonic() < deadline, told
            assert "event: end" not in told
            assert client.get(f"{API}/runs/asks", headers=headers).status_code == 401
    finally:
        server.stop()
