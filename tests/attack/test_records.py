"""Records that were damaged, cut or removed, by the disk or by hand: nothing of it is silent, and nothing is done twice."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.runs import RunDirectory
from tests.command_line import COMMAND, Call, calling
from tests.processes import own_environment
from tests.template import run_forked

RUN = "tea"
RECORD, LOG = "record.sqlite", "record.sqlite-wal"
HEADER_BYTES, FRAME_BYTES = 32, 24 + 4096
TIMEOUT_S = 120
TEAM = '''
import os
from pathlib import Path
from ensemble_ray import Agent, Ensemble, Task, ToolCall, tool
from ensemble_ray.testing import ScriptedModel

@tool(effect="once")
def order(item: str) -> str:
    """Order an item."""
    with Path("ordered").open("a") as file:
        file.write(item + "\\n")
    return f"{item} is ordered"

@tool(effect="none")
def look(place: str) -> str:
    """Look somewhere."""
    if Path("frail").exists() and place == "shelf":
        os._exit(9)
    return "empty"

def answer(call):
    told = [message.content for message in call.messages if message.role == "tool"]
    with Path("asked").open("a") as file:
        file.write(f"{len(told)}\\n")
    if len(told) == 0:
        return ToolCall("1", "look", '{"place": "counter"}')
    if len(told) == 1:
        return ToolCall("2", "order", '{"item": "tea"}')
    if len(told) == 2:
        return ToolCall("3", "order", '{"item": "milk"}')
    if len(told) == 3:
        return ToolCall("4", "look", '{"place": "shelf"}')
    return "said: " + told[2]

buyer = Agent(role="Buyer", goal="Buy", tools=[order, look], llm=ScriptedModel(otherwise=answer))
team = Ensemble(tasks=[Task(name="tea", description="Order tea", expected_output="A receipt", agent=buyer)])
'''


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a team, whose run died behind its second order, which is in its log alone."""
    folder = tmp_path_factory.mktemp("died")
    (folder / "shop_of_attack.py").write_text(TEAM, encoding="utf-8")
    (folder / "frail").touch()
    done = run_forked(
        [*COMMAND, "run", "shop_of_attack:team", "--run-id", RUN, "--quiet", "--runtime", "inline"],
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=own_environment(folder),
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    (folder / "frail").unlink()
    return folder


@pytest.fixture
def folder(died: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of that directory, which is the current one and has the home."""
    shutil.copytree(died, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(tmp_path / "records"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("shop_of_attack", None)


@pytest.fixture
def directory(folder: Path) -> Path:
    """The run's directory."""
    return folder / "records" / "runs" / RUN


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command of the program; gives its exit code, what it printed and what it said."""
    return calling(capsys)


def frames(directory: Path) -> int:
    """How many frames the log has."""
    return ((directory / LOG).stat().st_size - HEADER_BYTES) // FRAME_BYTES


def flip(directory: Path, frame: int) -> None:
    """Flip one bit in a frame of the log."""
    at = HEADER_BYTES + frame * FRAME_BYTES + 1000
    with (directory / LOG).open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _frame_of_the_second_order(directory: Path) -> int:
    """A frame whose loss takes the answer that asked for milk, and all behind it."""
    run = RunDirectory(directory.parents[1], RUN)
    assert _orders(run.facts()) == ["tea", "milk"]
    log = (directory / LOG).read_bytes()
    found = []
    for frame in range(frames(directory)):
        os.truncate(directory / LOG, HEADER_BYTES + frame * FRAME_BYTES)
        (directory / f"{RECORD}-shm").unlink(missing_ok=True)
        left = run.facts(is_partial=True)
        (directory / LOG).write_bytes(log)
        if sum(fact.kind == "model" for fact in left) == 2:
            assert _orders(left) == ["tea"]
            found.append(frame)
    (directory / f"{RECORD}-shm").unlink(missing_ok=True)
    return found[0]


def _orders(facts: Sequence[Fact]) -> list[str]:
    begun = [
        fact.data.to_data()
        for fact in facts
        if fact.kind == "tool_intent" and fact.data.to_data()["tool_name"] == "order"
    ]
    return [json.loads(str(data["arguments"]))["item"] for data in begun]


def test_one_flipped_bit_of_the_log_is_told_and_nothing_goes_on_silently(
    folder: Path, directory: Path, command: Call
) -> None:
    """S-DUR-80, S-DUR-81: exit codes, the file, the facts; the files stay as they are."""
    flip(directory, _frame_of_the_second_order(directory))
    before = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != f"{RECORD}-shm"}
    for arguments in (["trace", RUN], ["resume", RUN, "--quiet"], ["fork", RUN, "--from", "tea"], ["runs"]):
        code, printed, said = command(*arguments)
        assert code == 1, (arguments, printed, said)
        assert f"missing in {directory / RECORD}; its log {LOG} is damaged at byte " in said, (arguments, said)
        assert "--allow-loss" in said
        assert "Choose another directory" not in said
        if arguments[0] == "trace":
            assert "Run tea" in printed
            assert 'order({"item": "tea"})' in printed
            assert "milk" not in printed
    code, printed, _ = command("trace", RUN, "--json")
    assert (code, printed[0]) == (1, "{")
    assert {name: (directory / name).read_bytes() for name in before} == before
    assert (folder / "ordered").read_text() == "tea\nmilk\n"


def test_lost_order_is_not_repeated_when_the_loss_is_allowed(folder: Path, directory: Path, command: Call) -> None:
    """S-DUR-83, S-DUR-86: the model is told that its outcome is unknown, and the trace shows it; nobody is asked twice."""
    flip(directory, _frame_of_the_second_order(directory))
    asked = len((folder / "asked").read_text().split())
    code, printed, said = command("resume", RUN, "--allow-loss", "--runtime", "inline", "--quiet")
    assert code == 0, said
    assert printed.startswith("said: Outcome unknown: a part of this run's record is lost")
    assert (folder / "ordered").read_text() == "tea\nmilk\n"
    # The first two answers are on record, and are not asked for again.
    assert (folder / "asked").read_text().split()[asked:] == ["2", "3", "4"]
    code, printed, said = command("trace", RUN)
    assert code == 0, said
    assert printed.count("[unknown]") == 2  # the result of the first order is lost too
    assert "part of its record is lost" in printed
    code, printed, said = command("resume", RUN, "--quiet")
    assert (code, printed[:21]) == (0, "said: Outcome unknown"), said


@pytest.mark.parametrize("name", [RECORD, LOG, ""])
def test_record_that_is_removed_in_the_middle_of_a_run_is_told(
    folder: Path, command: Call, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """S-DUR-85: the run ends with an error that names the file; the exit code is 1."""
    record = folder / "records" / "runs" / "gone"
    team = f"""
import shutil
from pathlib import Path
from ensemble_ray import Ensemble, Task
from ensemble_ray.testing import ScriptedModel

def answer(call):
    path = Path({str(record / name)!r})
    path.unlink() if path.is_file() else shutil.rmtree(path)
    return "done"

team = Ensemble(tasks=[Task.of("Say it")], llm=ScriptedModel("one", answer, otherwise="more"))
team = team.replace(tasks=[Task.of("First"), Task.of("Second"), Task.of("Third")])
"""
    (folder / "gone_of_attack.py").write_text(team, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "gone_of_attack", raising=False)
    try:
        code, printed, said = command(
            "run", "gone_of_attack:team", "--run-id", "gone", "--quiet", "--runtime", "inline"
        )
    finally:
        sys.modules.pop("gone_of_attack", None)
    assert code == 1, (printed, said)
    assert f"The run's record was removed: {record / RECORD}" in said


SPOILT = """
import os
import subprocess
from ensemble_ray import Ensemble, Task
from ensemble_ray.record.sqlite import file as sqlite_file
from ensemble_ray.testing import ScriptedModel

sqlite_file.LOOK_S = 0.0  # each commit looks: what is spoilt between a look and its commit cannot be noticed
INDEX = {index!r}

def answer(call):
    {spoil}
    return "done"

team = Ensemble(tasks=[Task.of("First"), Task.of("Second"), Task.of("Third")], llm=ScriptedModel("one", answer, "three"))
"""


def _may_make_immutable(folder: Path) -> bool:
    probe = folder / "probe"
    probe.touch()
    done = [subprocess.run(["chattr", sign, str(probe)], check=False, capture_output=True) for sign in ("+i", "-i")]  # noqa: S603, S607  where it is differs
    return not any(each.returncode for each in done)


@pytest.mark.parametrize("how", ["short", "read_only"])
def test_log_index_that_is_spoilt_in_the_middle_of_a_run_is_an_error(tmp_path: Path, how: str) -> None:
    """S-DUR-85, S-DUR-89: and does not end the process with SIGBUS; the exit code is 1."""
    if how == "read_only" and not (shutil.which("chattr") and os.geteuid() == 0 and _may_make_immutable(tmp_path)):
        pytest.skip("files can be made immutable by root on some file systems only")
    directory = tmp_path / "records" / "runs" / "spoilt"
    index = str(directory / f"{RECORD}-shm")
    # Written out first: the system looks again whether memory may be written when its page is clean.
    spoil = {
        "short": "os.truncate(INDEX, 0)",
        "read_only": 'subprocess.run(["sync", INDEX], check=True); subprocess.run(["chattr", "+i", INDEX], check=True)',
    }
    (tmp_path / "spoilt.py").write_text(SPOILT.format(index=index, spoil=spoil[how]), encoding="utf-8")
    try:
        done = run_forked(
            [*COMMAND, "run", "spoilt:team", "--run-id", "spoilt", "--quiet", "--runtime", "inline"],
            cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, env=own_environment(tmp_path),
        )  # fmt: skip
    finally:
        if how == "read_only":
            subprocess.run(["chattr", "-i", index], check=True)  # noqa: S603, S607  as above
    assert done.returncode == 1, (done.returncode, done.stderr)
    told = "The run's record was removed" if how == "short" else "it has become read-only while it was written to"
    assert told in done.stderr
    assert str(directory / RECORD) in done.stderr


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("plan", {"plan": [], "inputs": 7}),
        ("model", {"text": {"a": 1}, "tool_calls": "none", "started_at": "yesterday"}),
        ("tool_result", {"outcome": 5, "started_at": 1e300}),
        ("stimulus", [1, 2]),
    ],
)
def test_altered_fact_is_told_with_its_file(directory: Path, command: Call, kind: str, data: object) -> None:
    """S-DUR-90: by every command that reads it, with exit code 1; never a traceback."""
    connection = sqlite3.connect(directory / RECORD, isolation_level=None)
    (seq,) = connection.execute("SELECT min(seq) FROM facts WHERE kind = ?", (kind,)).fetchone()
    connection.execute("UPDATE facts SET data = ? WHERE seq = ?", (json.dumps(data), seq))
    connection.close()
    for arguments in (
        ["trace", RUN],
        ["resume", RUN, "--quiet", "--runtime", "inline"],
        ["fork", RUN, "--from", "tea"],
    ):
        code, _, said = command(*arguments)
        assert code == 1, (arguments, said)
        assert f"The record is damaged: fact {seq} in {directory / RECORD} cannot be read" in said
        assert "Traceback" not in said
