"""Files of a run's record: who writes them, when, and what happens when they cannot be written."""

import asyncio
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ensemble_ray
from ensemble_ray.errors import RecordError, RunExistsError, ValidationError
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import RunState
from ensemble_ray.record.journal_file import FileJournal, join_run, new_writer_name, open_run, read_facts

RUN = "run-1"
HOME_OF_CODE = Path(ensemble_ray.__file__).parents[1]


def _fact(name: str = "facts#0/0/model", at: float = 1.0, **data: object) -> Fact:
    return Fact(run=RUN, kind="model", name=name, at=at, data=data)


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def test_record_of_a_run_has_its_files(tmp_path: Path) -> None:
    """A segment of facts and one of bodies per writer, and what lists need; for their owner only."""
    run = open_run(tmp_path, RUN, writer="w", origin="team.yaml")
    await run.journal.append([_fact(text="x" * 2000)])
    await run.journal.close()
    run.directory.write_state(RunState.COMPLETED)
    directory = tmp_path / "runs" / RUN
    assert sorted(path.name for path in directory.iterdir()) == [
        "bodies-w.jsonl",
        "facts-w.jsonl",
        "meta.json",
        "owner.lock",
    ]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE((directory / f"{kind}-w.jsonl").stat().st_mode) for kind in ("facts", "bodies")} == {0o600}
    assert _lines(directory / "facts-w.jsonl")[0] == {"format": 1, "run": RUN, "writer": "w"}


async def test_long_text_is_kept_once_per_writer(tmp_path: Path) -> None:
    """However many facts hold it; each writer has its own copy."""
    run = open_run(tmp_path, RUN, writer="a")
    other = join_run(tmp_path, RUN, writer="b")
    for journal in (run.journal, other):
        for turn in range(3):
            await journal.append([_fact(f"t#0/{turn}/model", text="x" * 2000, again=["x" * 2000])])
        await journal.close()
    for writer in ("a", "b"):
        assert len(_lines(run.directory.path / f"bodies-{writer}.jsonl")) == 1
    assert {fact.data["text"] for fact in read_facts(RUN, tmp_path)} == {"x" * 2000}


async def test_appending_touches_no_file(tmp_path: Path) -> None:
    """Facts are rendered and written in the writer's thread; here they are only queued."""
    seen: list[str] = []

    class Watched:
        def __str__(self) -> str:
            seen.append(threading.current_thread().name)
            return "watched"

    journal = open_run(tmp_path, RUN).journal
    await journal.append([_fact(value=Watched())])
    await journal.flush()
    assert seen == ["ensemble-ray-record"]
    await journal.close()


async def test_appended_facts_are_written_without_a_flush(tmp_path: Path) -> None:
    """Within the group's time: a process that is killed later has lost nothing."""
    run = open_run(tmp_path, RUN, writer="w")
    await run.journal.append([_fact(text="answer")])
    async with asyncio.timeout(30):
        while len(_lines(run.directory.path / "facts-w.jsonl")) < 2:  # noqa: ASYNC110  a file tells nobody
            await asyncio.sleep(0.01)
    await run.journal.close()


async def test_runs_share_one_thread(tmp_path: Path) -> None:
    """However many there are."""
    journals = [open_run(tmp_path, f"run-{number}").journal for number in range(20)]
    for number, journal in enumerate(journals):
        await journal.append([Fact(run=f"run-{number}", kind="model", name="t#0/0/model", at=1, data={})])
    await asyncio.gather(*(journal.flush() for journal in journals))
    assert sum(thread.name == "ensemble-ray-record" for thread in threading.enumerate()) == 1
    for journal in journals:
        await journal.close()


async def test_many_appends_and_flushes_lose_nothing(tmp_path: Path) -> None:
    """From many tasks at the same time."""
    journal = open_run(tmp_path, RUN).journal

    async def work(task: int) -> None:
        for turn in range(50):
            await journal.append([_fact(f"t{task}#0/{turn}/model")])
            if turn % 10 == task % 10:
                await journal.flush()
                assert journal.recorded(f"t{task}#0/{turn}/model", "model") is not None

    await asyncio.gather(*(work(task) for task in range(20)))
    await journal.close()
    assert len({fact.name for fact in read_facts(RUN, tmp_path)}) == 1000


async def test_facts_are_written_when_the_process_just_ends(tmp_path: Path) -> None:
    """Nobody closed the journal; the interpreter's end writes what is queued."""
    code = (
        "import asyncio, pathlib, sys\n"
        "from ensemble_ray.messages import Fact\n"
        "from ensemble_ray.record.journal_file import open_run\n"
        "async def main():\n"
        "    journal = open_run(pathlib.Path(sys.argv[1]), 'run-1').journal\n"
        "    await journal.append([Fact(run='run-1', kind='model', name='t#0/0/model', at=1, data={'text': 'x'})])\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=HOME_OF_CODE)  # noqa: ASYNC221, S603  our own code
    assert [fact.data for fact in read_facts(RUN, tmp_path)] == [{"text": "x"}]


async def test_writer_name_gets_a_number_when_it_is_taken(tmp_path: Path) -> None:
    """Nobody appends to another's segment: its last line may be half written."""
    journals = [FileJournal(tmp_path / "r", RUN, writer="inline") for _ in range(3)]
    assert [journal.writer for journal in journals] == ["inline", "inline-2", "inline-3"]
    for journal in journals:
        await journal.close()


def test_writer_names_differ() -> None:
    """Two processes, or two openings, never share files."""
    assert len({new_writer_name() for _ in range(100)}) == 100
    assert f"-{os.getpid()}-" in new_writer_name()


# When it cannot be written.


def test_error_says_where_and_what_to_do_when_the_home_cannot_be_made(tmp_path: Path) -> None:
    """Read-only home, a file in the way: one clear error, with its cause."""
    (tmp_path / "home").write_text("a file")
    with pytest.raises(RecordError) as caught:
        open_run(tmp_path / "home", RUN)
    assert "set ENSEMBLE_RAY_HOME to a directory that can be written" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.path == str(tmp_path / "home" / "runs")
    with pytest.raises(RecordError, match="Cannot write the run's record"):
        join_run(tmp_path / "home", RUN)


async def test_writer_is_told_when_the_disk_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By flush, by the next append, by close; and once in the log."""
    run = open_run(tmp_path, RUN, writer="w")
    (run.directory.path / "bodies-w.jsonl").mkdir()  # so that the first long text cannot be kept
    await run.journal.append([_fact(text="x" * 2000)])
    with caplog.at_level(logging.ERROR), pytest.raises(RecordError, match=r"bodies-w\.jsonl: File exists"):
        await run.journal.flush()
    with pytest.raises(RecordError, match="Free space or correct the rights there"):
        await run.journal.append([_fact()])
    with pytest.raises(RecordError):
        await run.journal.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_writer_is_told_when_the_disk_is_full(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk; what was written before stays readable."""
    code = (
        "import asyncio, pathlib, resource, sys\n"
        "from ensemble_ray.errors import RecordError\n"
        "from ensemble_ray.messages import Fact\n"
        "from ensemble_ray.record.journal_file import open_run\n"
        "async def main():\n"
        "    journal = open_run(pathlib.Path(sys.argv[1]), 'run-1', writer='w').journal\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n"
        "    for turn in range(1000):\n"
        "        try:\n"
        "            fact = Fact(run='run-1', kind='model', name=f't#0/{turn}/model', at=turn, data={'text': 'x' * 500})\n"
        "            await journal.append([fact])\n"
        "            await journal.flush()\n"
        "        except RecordError as error:\n"
        "            print(turn, error)\n"
        "            return\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(  # noqa: ASYNC221, S603  our own code
        [sys.executable, "-c", code, str(tmp_path)], check=True, cwd=HOME_OF_CODE, capture_output=True, text=True
    )
    turn, message = done.stdout.split(" ", 1)
    assert message.startswith(f"Cannot write the run's record to {tmp_path}/runs/{RUN}/facts-w.jsonl: ")
    assert len(read_facts(RUN, tmp_path)) == int(turn)


# Owners and guests.


async def test_second_owner_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    """S-SET-39: one id, one run; a guest may write to it."""
    run = open_run(tmp_path, RUN)
    with pytest.raises(RunExistsError, match="Run 'run-1' is running"):
        open_run(tmp_path, RUN)
    guest = join_run(tmp_path, RUN)
    await guest.append([_fact()])
    await guest.close()
    await run.journal.close()
    run.directory.write_state(RunState.COMPLETED)
    again = open_run(tmp_path, RUN)
    await again.journal.close()
    again.directory.release()


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x", "a/b", "a b", ".hidden", "-x", "x" * 129, "a\nb"])
def test_id_is_refused_when_it_cannot_name_a_directory(tmp_path: Path, run_id: str) -> None:
    """S-SET-39: a chosen id never leads out of the home."""
    with pytest.raises(ValidationError, match="cannot name a record"):
        open_run(tmp_path, run_id)
