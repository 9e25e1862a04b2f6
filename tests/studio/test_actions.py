"""Runs that are seen while they go on, and what is done with them from the page: real programs, real HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ensemble_ray import Ensemble, InlineRuntime, Review, RunState, Task, resume
from ensemble_ray.cli.app import invoke
from tests.command_line import COMMAND, environment_of
from tests.template import ForkedProgram, run_forked

from .conftest import Serve

API = "api/studio"
PATIENCE_S = 120
TEAM = """
import os, time
from pathlib import Path
from ensemble_ray import Ensemble, Task

HERE = Path(os.environ["TEAM_PLACE"])


def write(context):
    if context.description == "wait":
        (HERE / "waits").write_text("yes")
        while not (HERE / "go").exists():
            time.sleep(0.02)
    return f"text of {context.description}"


first = Task(name="first", description="first", expected_output="x", handler=write)
waits = Task(name="waits", description="wait", expected_output="x", handler=write, context=[first], effect="idempotent")
last = Task(name="last", description="last", expected_output="x", handler=write, context=[waits])
team = Ensemble(tasks=[first, waits, last])
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a team whose second task waits for a file, and everything that leads programs there."""
    (tmp_path / "team.py").write_text(TEAM)
    monkeypatch.chdir(tmp_path)
    for name, value in environment_of(tmp_path, TEAM_PLACE=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def begin(place: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Begins a run in a program of its own, and gives that when the second task waits; none outlives its test."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(run_id: str) -> subprocess.Popen[bytes]:
        command = [*COMMAND, "run", "team:team", "--run-id", run_id, "--quiet"]
        program = ForkedProgram[bytes](command, cwd=place, start_new_session=True)
        begun.append(program)
        until(lambda: (place / "waits").exists() or program.poll() is not None)
        assert program.poll() is None
        return program

    yield start
    (place / "go").touch()
    for program in begun:
        if program.poll() is None:
            program.send_signal(signal.SIGKILL)
        program.wait(PATIENCE_S)


def until(holds: Callable[[], object]) -> None:
    """Return when it holds."""
    woken = threading.Event()
    for _ in range(PATIENCE_S * 20):
        if holds():
            return
        woken.wait(0.05)
    raise AssertionError("It did not happen in time")


def home_of(place: Path) -> Path:
    """Where programs of that place record their runs."""
    return Path(os.environ["ENSEMBLE_RAY_HOME"])


def events_of(client: httpx.Client, run_id: str, seen: Callable[[dict[str, Any]], object], after: int = 0) -> list[str]:
    """Follow a run to its end; give the types of what came."""
    kinds: list[str] = []
    with client.stream("GET", f"{API}/runs/{run_id}/live", params={"after": after}, timeout=PATIENCE_S) as stream:
        for line in stream.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kinds.append(value)
            if name == "data" and kinds[-1] == "steps":
                seen(json.loads(value))
    return kinds


@pytest.mark.program
def test_a_run_is_seen_while_it_goes_on(
    place: Path, begin: Callable[[str], subprocess.Popen[bytes]], serve: Serve
) -> None:
    """S-STU-30, S-STU-31: what changes comes as it does, nothing twice; who comes back misses nothing; it ends with the run."""
    begin("live")
    client = serve(home_of(place))
    states: dict[str, str] = {}
    told: list[tuple[int, set[str]]] = []

    def see(data: dict[str, Any]) -> None:
        told.append((data["cursor"], {step["id"] for step in data["steps"]}))
        states.update({step["id"]: step["status"] for step in data["steps"]})
        if states.get("waits#0") == "running":
            (place / "go").touch()

    kinds = events_of(client, "live", see)
    assert states == {"first#0": "completed", "waits#0": "completed", "last#0": "completed"}
    assert kinds[-1] == "end"
    assert kinds.count("steps") >= 2
    cursors = [cursor for cursor, _ in told]
    assert cursors == sorted(cursors)
    assert told[0][1] == {"first#0", "waits#0", "last#0"}

    again: list[dict[str, Any]] = []
    assert events_of(client, "live", again.append, after=told[0][0]) == ["steps", "end"]
    assert {step["id"] for step in again[0]["steps"]} == {"waits#0", "last#0"}


@pytest.mark.program
def test_a_run_that_was_killed_is_shown_and_resumed(
    place: Path, begin: Callable[[str], subprocess.Popen[bytes]], serve: Serve
) -> None:
    """S-STU-12, S-STU-51, S-STU-52: interrupted steps; what is used and what is done again; the run goes on by itself."""
    program = begin("torn")
    program.send_signal(signal.SIGKILL)
    program.wait(PATIENCE_S)
    client = serve(home_of(place))
    run = client.get(f"{API}/runs/torn").json()
    steps = client.get(f"{API}/runs/torn/steps").json()["steps"]
    assert run["status"] == "interrupted"
    assert [step["status"] for step in steps] == ["completed", "interrupted", "pending"]
    preview = client.get(f"{API}/runs/torn/resume-preview").json()
    assert [step["step"] for step in preview["reused"]] == ["first#0"]
    assert [step["step"] for step in preview["asked_again"]] == ["waits#0", "last#0"]
    assert preview["blocked"] is None

    (place / "go").touch()
    answer = client.post(f"{API}/runs/torn/resume")
    assert (answer.status_code, answer.json()) == (202, {"run_id": "torn"})
    until(lambda: client.get(f"{API}/runs/torn").json()["status"] == "completed")
    assert client.get(f"{API}/runs/torn/steps/last%230").json()["output"] == "text of last"
    refused = client.post(f"{API}/runs/torn/resume")
    assert (refused.status_code, refused.json()["code"]) == (409, "CANNOT_RESUME")


@pytest.mark.program
def test_a_run_is_forked_with_a_word_before(
    place: Path, begin: Callable[[str], subprocess.Popen[bytes]], serve: Serve
) -> None:
    """S-STU-51, S-STU-52, S-STU-177: what comes from the record, what is done again; the fork names its origin."""
    (place / "go").touch()
    begin_done = [*COMMAND, "run", "team:team", "--run-id", "whole", "--quiet"]
    run_forked(begin_done, cwd=place, check=True, timeout=PATIENCE_S, capture_output=True)
    client = serve(home_of(place))
    preview = client.get(f"{API}/runs/whole/fork-preview", params={"from": "waits"}).json()
    assert [step["step"] for step in preview["reused"]] == ["first"]
    assert [step["step"] for step in preview["asked_again"]] == ["waits", "last"]
    assert client.get(f"{API}/runs/whole/fork-preview", params={"from": "nope"}).json()["blocked"]
    elsewhere = client.get(
        f"{API}/runs/whole/fork-preview", params={"from": "waits"}, headers={"sec-fetch-site": "cross-site"}
    )
    assert elsewhere.status_code == 403

    forked = client.post(f"{API}/runs/whole/fork", json={"from": "waits", "run_id": "again"})
    assert (forked.status_code, forked.json()) == (202, {"run_id": "again"})
    until(lambda: client.get(f"{API}/runs/again").json()["status"] == "completed")
    run = client.get(f"{API}/runs/again").json()
    assert run["forked_from"] == {"run_id": "whole", "step": "waits"}
    client.get(f"{API}/runs")
    assert client.get(f"{API}/runs/whole").json()["forks"] == ["again"]
    assert client.post(f"{API}/runs/whole/fork", json={"from": "waits", "run_id": "again"}).status_code == 409
    assert client.post(f"{API}/runs/whole/fork", json={"from": "waits", "run_id": "../x"}).status_code == 400
    assert client.post(f"{API}/runs/whole/fork", json={"from": "waits", "run_id": ""}).status_code == 422
    refused = client.post(f"{API}/runs/whole/fork", json={"from": "nope"})
    assert (refused.status_code, refused.json()["code"]) == (409, "COMMAND_REFUSED")
    assert "nope" in refused.json()["message"]


@pytest.mark.program
def test_a_run_is_cancelled(
    place: Path,
    begin: Callable[[str], subprocess.Popen[bytes]],
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """S-STU-32, S-STU-38, S-STU-50, S-STU-237: its process is shown, with what its run is about; whoever owns it ends it; one that has ended is refused."""
    program = begin("long")
    client = serve(home_of(place))
    (node,) = client.get(f"{API}/actors").json()["nodes"]
    (process,) = node["processes"]
    assert (process["pid"], [run["run_id"] for run in process["runs"]]) == (program.pid, ["long"])
    (run,), row = process["runs"], client.get(f"{API}/runs/long").json()
    assert (run["ensemble"], run["subject"], "first") == (row["ensemble"], row["subject"], row["subject"])
    (task,) = process["in_flight"]
    assert (task["step"], task["since"] is None) == ("waits#0", False)
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(home_of(place)))
    assert invoke(["actors", "long"]) == 0
    printed = capsys.readouterr()
    assert re.search(
        rf"^  driver  process {program.pid} on \S+ +{program.pid} +- +waits#0 +0 +-", printed.out, re.MULTILINE
    )
    assert "only the processes that own active runs are known" in printed.err
    assert process["memory_mb"] > 1
    refused = client.delete(f"{API}/runs/long")
    assert (refused.status_code, refused.json()["code"]) == (409, "RUN_ACTIVE")
    assert client.post(f"{API}/runs/long/cancel").status_code == 202
    program.wait(PATIENCE_S)
    assert client.get(f"{API}/runs/long").json()["status"] == "cancelled"
    assert client.get(f"{API}/runs/long/actors").json()["nodes"] == []
    assert client.post(f"{API}/runs/long/cancel").status_code == 400


def waiting_team() -> Ensemble:
    """A team with a gate behind its task."""

    def write(context: object) -> str:
        return "a draft"

    task = Task(
        name="draft", description="Draft", expected_output="x", handler=write, review=Review.required("Polite?")
    )
    return Ensemble(tasks=[task], review_wait="detach")


def test_reviews_are_listed_and_decided_once(serve: Serve, tmp_path: Path) -> None:
    """S-STU-53, S-STU-54: with what is asked; the first decision counts, the second is told of it; the run takes it."""
    output = waiting_team().run(runtime=InlineRuntime(home=tmp_path), run_id="asks")
    assert output.exit_reason.value == "waiting"
    client = serve()
    assert client.get(f"{API}/runs").json()["runs"][0]["open_reviews"] == 1
    (review,) = client.get(f"{API}/reviews").json()["reviews"]
    assert (review["run_id"], review["step"], review["prompt"], review["decidable"]) == (
        "asks",
        "draft#0",
        "Polite?",
        True,
    )
    assert (review["task_output"], review["on_timeout"]) == ("a draft", "exit_early")
    path = f"{API}/reviews/asks/{review['gate_id']}"
    assert client.post(path, json={"decision": "maybe"}).status_code == 422
    taken = client.post(path, json={"decision": "edit", "text": "a better draft", "comment": "shorter"})
    assert taken.status_code == 200
    assert (taken.json()["decision"], taken.json()["text"], taken.json()["comment"]) == (
        "edit",
        "a better draft",
        "shorter",
    )
    second = client.post(path, json={"decision": "approve"})
    assert (second.status_code, second.json()["error"]) == (409, "ReviewDecidedError")
    assert client.get(f"{API}/reviews").json() == {"reviews": []}
    assert client.get(f"{API}/runs/asks").json()["reviews"][0]["decided_by"]
    assert resume("asks", waiting_team(), runtime=InlineRuntime(home=tmp_path)).raw == "a better draft"
    assert client.get(f"{API}/runs/asks").json()["status"] == RunState.COMPLETED.value


def test_a_run_is_deleted_with_the_output_of_its_process(serve: Serve, tmp_path: Path) -> None:
    """S-STU-234: it is gone from lists and by its id, immediately; an unknown run is refused."""
    for name in ("old", "new"):
        waiting_team().run(runtime=InlineRuntime(home=tmp_path), run_id=name)
    log = tmp_path / "studio" / "old.log"
    log.parent.mkdir()
    log.write_text("It said something.")
    client = serve()
    assert len(client.get(f"{API}/runs").json()["runs"]) == 2
    assert client.delete(f"{API}/runs/old").json() == {"run_id": "old"}
    assert [run["run_id"] for run in client.get(f"{API}/runs").json()["runs"]] == ["new"]
    assert not log.exists()
    for path in ("old", "..%2F..%2Fold"):
        assert client.delete(f"{API}/runs/{path}").status_code == 404
        assert client.get(f"{API}/runs/{path}").status_code == 404


def test_a_page_without_actions_only_shows(serve: Serve, tmp_path: Path) -> None:
    """S-STU-1, S-STU-55: it says so, and refuses with the reason."""
    waiting_team().run(runtime=InlineRuntime(home=tmp_path), run_id="asks")
    client = serve(has_actions=False)
    info = client.get(f"{API}/info").json()
    assert (info["actions"], info["read_only_reason"]) == ([], "Studio was started with --no-actions")
    (review,) = client.get(f"{API}/reviews").json()["reviews"]
    assert review["decidable"] is False
    answer = client.delete(f"{API}/runs/asks")
    assert (answer.status_code, answer.json()["code"]) == (403, "READ_ONLY")
    for path in ("runs/asks/cancel", "runs/asks/resume", f"reviews/asks/{review['gate_id']}"):
        answer = client.post(f"{API}/{path}", json={"decision": "approve"})
        assert (answer.status_code, answer.json()["code"]) == (403, "READ_ONLY")
    assert client.get(f"{API}/runs/asks").json()["status"] == "waiting"
