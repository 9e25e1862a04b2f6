"""A folder with graphs and traces beside the recorded runs, over real HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, EnsembleDevTools, InlineRuntime, Task, ValidationError
from ensemble_ray.access.admission import Right, new_key
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.studio.server import StudioServer
from ensemble_ray.values.value import utc_now

from .conftest import Serve

API = "api/studio"


def small_team() -> Ensemble:
    """A team of two tasks."""
    first = Task(description="first", expected_output="x", handler=lambda _: "a")
    return Ensemble(
        tasks=[first, Task(description="second", expected_output="x", handler=lambda _: "b", context=[first])]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a graph, a trace, half a trace, what is neither, and what leads elsewhere."""
    files = tmp_path / "files"
    files.mkdir()
    EnsembleDevTools.build_dag(small_team()).to_json(files / "team.dag.json")
    output = small_team().run(runtime=InlineRuntime(home=tmp_path / "home"))
    assert output.trace is not None
    output.trace.to_json(files / "run.trace.json")
    (files / "half.trace.json").write_text('{"task_traces": [{"task_description": "half"}]}')
    (files / "else.json").write_text('{"a": 1}')
    (files / "torn.json").write_text('{"type": "dag", ')
    (files / "deep.json").write_text("[" * 100_000)
    (files / "notes.txt").write_text("no JSON, not listed")
    (files / "below").mkdir()
    (files / "below" / "inner.json").write_text('{"type": "dag"}')
    (tmp_path / "secret.json").write_text('{"type": "dag", "workflow": "sequential", "tasks": []}')
    (files / "link.json").symlink_to(tmp_path / "secret.json")
    os.mkfifo(files / "pipe.json")
    return files


def test_a_folder_is_listed_with_what_its_files_are(serve: Serve, folder: Path) -> None:
    """S-VIZ-70, S-VIZ-78: graphs and traces with what is in them, those that are wrong with why; a new file is there at once."""
    client = serve(files=folder)
    assert client.get(f"{API}/info").json()["has_files"] is True
    answer = client.get(f"{API}/files").json()
    assert (answer["folder"], answer["left_out"]) == (str(folder), 0)
    files = {each["name"]: each for each in answer["files"]}
    assert {name: each["kind"] for name, each in files.items()} == {
        "team.dag.json": "dag",
        "run.trace.json": "trace",
        "half.trace.json": "trace",
        "else.json": None,
        "torn.json": None,
        "deep.json": None,
        "link.json": None,
        "pipe.json": None,
    }
    for name, workflow in (("team.dag.json", "sequential"), ("run.trace.json", "sequential")):
        assert (files[name]["workflow"], files[name]["tasks"], files[name]["problem"]) == (workflow, 2, None), name
    assert files["run.trace.json"]["duration_ms"] >= 0
    for name, problem in (
        ("half.trace.json", "half.trace.json: TaskTrace: 'expected_output'"),
        ("else.json", "What to do"),
        ("torn.json", "is no JSON"),
        ("deep.json", "is no JSON"),
        ("link.json", "A link"),
        ("pipe.json", "A link, or no file"),
    ):
        assert problem in files[name]["problem"], name

    (folder / "else.json").write_text((folder / "team.dag.json").read_text())
    (folder / "torn.json").unlink()
    now = {each["name"]: each["kind"] for each in client.get(f"{API}/files").json()["files"]}
    assert now["else.json"] == "dag"
    assert "torn.json" not in now
    folder.rename(folder.with_name("elsewhere"))
    gone = client.get(f"{API}/files")
    assert (gone.status_code, gone.json()["code"]) == (409, "FOLDER_UNREADABLE")


def test_a_file_that_vanishes_while_the_folder_is_listed_is_passed_over(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-VIZ-89: the others are listed."""
    scan = os.scandir

    @contextmanager
    def vanishing(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan(path) as found:
            entries = list(found)
        if path == folder:
            (folder / "run.trace.json").unlink()
        yield iter(entries)

    client = serve(files=folder)
    monkeypatch.setattr("ensemble_ray.studio.documents.os.scandir", vanishing)
    answer = client.get(f"{API}/files")
    assert answer.status_code == 200, answer.text
    names = {each["name"] for each in answer.json()["files"]}
    assert ("team.dag.json" in names, "run.trace.json" in names) == (True, False)


def test_nothing_but_graphs_and_traces_of_the_folder_is_served(serve: Serve, folder: Path) -> None:
    """S-VIZ-89: whole, by their names; no link is followed, no other folder is reached, nothing else is given."""
    client = serve(files=folder)
    for name in ("team.dag.json", "run.trace.json", "half.trace.json"):
        answer = client.get(f"{API}/files/{name}")
        assert (answer.status_code, answer.content) == (200, (folder / name).read_bytes())
        assert answer.headers["content-type"] == "application/json"
    for name in (
        "link.json",
        "pipe.json",
        "notes.txt",
        "none.json",
        "below%2finner.json",
        "below/inner.json",
        "..%2fsecret.json",
        "%2e%2e/secret.json",
        "%00.json",
        "a%0a.json",
        "%ff.json",
        "below",
    ):
        answer = client.get(f"{API}/files/{name}")
        assert answer.status_code == 404, name
    for name in ("else.json", "torn.json"):
        answer = client.get(f"{API}/files/{name}")
        assert (answer.status_code, answer.json()["code"]) == (409, "NOT_SHOWN"), name


def test_without_a_folder_there_are_no_files(serve: Serve, tmp_path: Path) -> None:
    """S-VIZ-78: the page is told that there is none; a folder that is none is refused before anything is served."""
    client = serve()
    assert client.get(f"{API}/info").json()["has_files"] is False
    assert client.get(f"{API}/files").status_code == 404
    with pytest.raises(ValidationError, match=r"--files .*nowhere: there is no such folder"):
        StudioServer(StoreAddress.of(tmp_path), files=tmp_path / "nowhere")


def test_a_key_of_some_teams_sees_no_files(serve: Serve, folder: Path, tmp_path: Path) -> None:
    """S-VIZ-89: a file does not say whose it is, so that only a key of all teams opens the folder."""
    texts: list[str] = []
    for name, team in (("all", "*"), ("some", "teamx")):
        text, key = new_key(name, rights=frozenset([Right.READ]), teams=[team], rate=None, created_at=utc_now())
        KeyFile(tmp_path).add(key)
        texts.append(text)
    client = serve(files=folder, host="0.0.0.0")  # noqa: S104  beyond loopback
    codes = [client.get(f"{API}/files", headers={"authorization": f"Bearer {text}"}).status_code for text in texts]
    assert codes == [200, 404]
    told = [client.get(f"{API}/info", headers={"authorization": f"Bearer {text}"}).json() for text in texts]
    assert [each["has_files"] for each in told] == [True, False]
    assert client.get(f"{API}/files/team.dag.json").status_code == 401
