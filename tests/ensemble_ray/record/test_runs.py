"""The runs of a home: their states, lists and names."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import ensemble_ray
from ensemble_ray import RecordError, RunState, ValidationError
from ensemble_ray.record.runs import RunDirectory, find_run, list_runs, read_facts
from ensemble_ray.values.value import utc_of
from tests.template import run_forked


def _run(home: Path, run_id: str, state: RunState = RunState.COMPLETED, at: float = 100.0) -> RunDirectory:
    directory = RunDirectory(home, run_id)
    directory.begin("team.yaml", clock=lambda: at)
    directory.write_state(state)
    return directory


@pytest.mark.parametrize(
    "state", [RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED, RunState.INTERRUPTED, RunState.WAITING]
)
def test_state_is_kept_and_the_owner_gone_when_a_run_ended(tmp_path: Path, state: RunState) -> None:
    """S-SET-14, S-REV-114: what lists show afterwards, from any process."""
    _run(tmp_path, "a", state)
    assert RunDirectory(tmp_path, "a").state() is state
    assert not RunDirectory(tmp_path, "a").ownership.is_held()


@pytest.mark.parametrize("state", [RunState.PENDING, RunState.RUNNING])
def test_run_is_interrupted_when_its_owner_is_gone(tmp_path: Path, state: RunState) -> None:
    """S-SET-14, S-SET-39: nobody can say so after a crash; the lock of the operating system tells."""
    owner = _run(tmp_path, "a", state)
    assert RunDirectory(tmp_path, "a").state() is state
    owner.ownership.release()
    assert RunDirectory(tmp_path, "a").state() is RunState.INTERRUPTED


@pytest.mark.program
def test_run_is_interrupted_when_its_process_was_killed(tmp_path: Path) -> None:
    """S-SET-14: no lock outlives its process."""
    code = (
        "import os, pathlib, signal, sys\n"
        "from ensemble_ray.values.outputs import RunState\n"
        "from ensemble_ray.record.runs import RunDirectory\n"
        "owner = RunDirectory(pathlib.Path(sys.argv[1]), 'a')\n"
        "owner.begin('')\n"
        "owner.write_state(RunState.RUNNING)\n"
        "print(RunDirectory(pathlib.Path(sys.argv[1]), 'a').state().value, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    home = Path(ensemble_ray.__file__).parents[1]
    done = run_forked(command, capture_output=True, text=True, cwd=home)
    assert done.stdout.strip() == "running"
    assert RunDirectory(tmp_path, "a").state() is RunState.INTERRUPTED


def test_state_is_written_whole(tmp_path: Path) -> None:
    """In its place, in one piece of one length, so that a full disk can hold it; it is JSON."""
    directory = _run(tmp_path, "a")
    assert sorted(path.name for path in directory.path.iterdir()) == ["meta.json", "owner.lock"]
    text = (directory.path / "meta.json").read_text()
    assert json.loads(text) == {
        "format": 5,
        "run": "a",
        "created_at": "1970-01-01T00:01:40+00:00",
        "origin": "team.yaml",
        "state": "completed",
    }


def test_meta_has_one_length(tmp_path: Path) -> None:
    """S-DUR-8: a state is written on a full disk too."""
    longest = max(map(len, RunState))
    sizes = {
        (_run(tmp_path, state.value.ljust(longest, "x"), state).path / "meta.json").stat().st_size for state in RunState
    }
    assert len(sizes) == 1


def test_creation_and_origin_stay_when_a_run_is_taken_over(tmp_path: Path) -> None:
    """A resumed run is the run it was."""
    _run(tmp_path, "a", RunState.CANCELLED)
    again = RunDirectory(tmp_path, "a")
    again.own()
    again.write_state(RunState.COMPLETED)
    assert (again.summary().created_at, again.summary().origin) == (utc_of(100), "team.yaml")


def test_error_says_where_when_the_state_cannot_be_written(tmp_path: Path) -> None:
    """Never silent."""
    directory = _run(tmp_path, "a", RunState.RUNNING)
    (directory.path / "meta.json").unlink()
    (directory.path / "meta.json").mkdir()
    with pytest.raises(RecordError, match=r"runs/a/meta\.json: Is a directory"):
        directory.write_state(RunState.RUNNING)
    directory.ownership.release()


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    """With what a person needs to tell them apart."""
    for number, name in enumerate(("old", "mid", "new")):
        _run(tmp_path, name, at=100.0 + number)
    assert [run.run_id for run in list_runs(tmp_path)] == ["new", "mid", "old"]
    newest = list_runs(tmp_path)[0]
    assert (newest.created_at, newest.origin, newest.state) == (
        utc_of(100) + timedelta(seconds=2),
        "team.yaml",
        RunState.COMPLETED,
    )
    assert newest.location == str(tmp_path / "runs" / "new")


def test_list_is_empty_when_there_is_no_home(tmp_path: Path) -> None:
    """Nothing is made by looking."""
    assert list_runs(tmp_path / "nowhere") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("meta", [None, "", "{", "[]", '{"state": "odd", "created_at": "x", "origin": ""}'])
def test_run_is_listed_when_its_meta_is_missing_or_damaged(tmp_path: Path, meta: str | None) -> None:
    """As interrupted: a list shows what there is."""
    path = tmp_path / "runs" / "a"
    path.mkdir(parents=True)
    (tmp_path / "runs" / "note.txt").write_text("not a run")
    if meta is not None:
        (path / "meta.json").write_text(meta)
    assert [(run.run_id, run.state) for run in list_runs(tmp_path)] == [("a", RunState.INTERRUPTED)]


def test_run_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    """If it is the only one; an exact id wins over longer ones."""
    for name in ("3f2a", "3f2a-long", "7777"):
        _run(tmp_path, name)
    assert find_run("77", tmp_path).run_id == "7777"
    assert find_run("3f2a", tmp_path).run_id == "3f2a"
    with pytest.raises(ValidationError, match=r"^Several runs begin with '3f': \[3f2a, 3f2a-long\]$"):
        find_run("3f", tmp_path)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("3f2b", "Unknown run '3f2b' in {runs}. Nearest: [3f2a]"),
        ("zzzzzz", "Unknown run 'zzzzzz' in {runs}. Newest: [7777, 3f2a]"),
        ("", "Unknown run '' in {runs}. Newest: [7777, 3f2a]"),
    ],
)
def test_nearest_runs_are_named_when_a_run_is_unknown(tmp_path: Path, asked: str, text: str) -> None:
    """What, where, what to do."""
    _run(tmp_path, "3f2a", at=1)
    _run(tmp_path, "7777", at=2)
    with pytest.raises(ValidationError) as caught:
        read_facts(asked, tmp_path)
    assert str(caught.value) == text.format(runs=tmp_path / "runs")


def test_unknown_run_is_told_when_there_are_none(tmp_path: Path) -> None:
    """Another home, perhaps: it is named."""
    with pytest.raises(ValidationError) as caught:
        read_facts("a", tmp_path)
    assert str(caught.value) == f"Unknown run 'a': there are no runs in {tmp_path / 'runs'}"


def test_half_removed_run_is_none(tmp_path: Path) -> None:
    """S-DUR-53: a run that is being deleted is in no list."""
    _run(tmp_path, "a").path.rename(tmp_path / "runs" / ".a.1.deleted")
    assert list_runs(tmp_path) == []


def test_run_without_facts_is_told(tmp_path: Path) -> None:
    """It is there, and says nothing."""
    _run(tmp_path, "a")
    with pytest.raises(RecordError, match="Run 'a' has recorded nothing"):
        read_facts("a", tmp_path)


def test_home_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """Not an empty list."""
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RecordError, match="Cannot read the records"):
        list_runs(tmp_path)
