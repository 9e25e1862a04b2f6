"""Schedules of a real endpoint: its run driver is killed around their times, and the command line controls them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from ensemble_ray.testing import ModelServer, ServedRequest
from tests.command_line import COMMAND
from tests.processes import free_ports, own_directory, own_environment, program
from tests.serve.endpoint import Endpoint

TEAM = """
llm: {{model: "openai:any", base_url: "{url}", max_retries: 0}}
tasks:
  read: {{description: "Read {{text}}"}}
schedules:
  often: {{every: 2s, input: text, overlap: queue, missed: all, max_waiting: 1000}}
  yearly: {{cron: 0 3 1 1 *, timezone: Europe/Berlin, inputs: {{text: a year}}}}
  inbox: {{folder: "{folder}", pattern: "*.txt", input: text, attach: true, every: 1s}}
"""


def answer(request: ServedRequest) -> str:
    """What the model answers."""
    return "read" if "Read" in request.text else "what?"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    """A team with schedules, served until it is interrupted."""
    with ModelServer(answer) as models, own_directory() as directory:
        folder = directory / "inbox"
        folder.mkdir()
        file = directory / "letters.yaml"
        file.write_text(TEAM.format(url=models.base_url, folder=folder), encoding="utf-8")
        (port,) = free_ports(1)
        env = own_environment(directory, OPENAI_API_KEY="k")
        command = [*COMMAND, "serve", file.name, "--port", str(port)]
        with program(command, log=directory / "log", env=env, cwd=directory) as running:
            served = Endpoint(running, port, directory / "records")
            running.until(lambda: "Ctrl-C stops" in running.text, "the address")
            yield served
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(timeout=180) == 0, running.text


def history(endpoint: Endpoint, name: str) -> list[dict[str, Any]]:
    """What a schedule has started or skipped, newest first; empty while the run driver restarts."""
    status, found = endpoint.ask("GET", f"/schedules/letters/{name}")
    return found["history"] if status == 200 else []


def runs(endpoint: Endpoint, name: str) -> list[dict[str, Any]]:
    """The runs of a schedule, newest first."""
    status, found = endpoint.ask("GET", f"/runs?limit=200&tag=schedule:{name}")
    assert status == 200
    return list(found["runs"])


def test_no_time_is_lost_or_repeated_when_the_run_driver_is_killed(endpoint: Endpoint) -> None:
    """S-SCH-20, S-SCH-21, S-SCH-23, S-SCH-30: each time from the first to the last one has one run, in order."""
    for kill in range(3):
        count = len(runs(endpoint, "often"))
        endpoint.program.until(lambda count=count: len(runs(endpoint, "often")) > count, f"a run before kill {kill}")
        endpoint.kill("ray::RunDriver")
    count = len(runs(endpoint, "often"))
    endpoint.program.until(lambda: len(runs(endpoint, "often")) > count + 1, "runs after the kills")
    assert endpoint.ask("POST", "/schedules/letters/often/pause")[0] == 200
    found = runs(endpoint, "often")[::-1]
    times = [datetime.strptime(each["run_id"].split("-")[1], "%Y%m%dT%H%M%S%z") for each in found]
    assert times == [times[0] + timedelta(seconds=2 * number) for number in range(len(times))]
    for each in found:
        assert list(endpoint.follow(each["run_id"]))[-1][2]["exit_reason"] == "completed"
    assert len(endpoint.program.members(named="ray::RunDriver")) == 1


def test_times_wait_for_the_end_of_a_drain_when_the_run_driver_is_killed(endpoint: Endpoint) -> None:
    """S-SCH-25, S-VER-6: the next process continues the drain, and then each time has its run."""
    before = {each["run_id"] for each in runs(endpoint, "often")}
    assert endpoint.ask("POST", "/drain", {})[0] == 200
    assert endpoint.ask("POST", "/schedules/letters/often/resume")[0] == 200

    def waiting() -> int:
        status, found = endpoint.ask("GET", "/schedules/letters/often")
        return found["waiting"] if status == 200 else 0

    endpoint.program.until(lambda: waiting() > 0, "a time that waits")
    endpoint.kill("ray::RunDriver")
    endpoint.program.until(lambda: waiting() > 1, "times that wait in the next process")
    status, drain = endpoint.ask("GET", "/drain")
    assert (status, drain["state"]) == (200, "drained")
    assert {each["run_id"] for each in runs(endpoint, "often")} == before
    count = waiting()
    assert endpoint.ask("POST", "/drain/end", {})[0] == 200
    endpoint.program.until(lambda: len(runs(endpoint, "often")) >= len(before) + count, "runs of these times")
    assert endpoint.ask("POST", "/schedules/letters/often/pause")[0] == 200
    found = sorted(each["run_id"].split("-")[1] for each in runs(endpoint, "often") if each["run_id"] not in before)
    times = [datetime.strptime(each, "%Y%m%dT%H%M%S%z") for each in found]
    assert times == [times[0] + timedelta(seconds=2 * number) for number in range(len(times))]


def test_a_file_starts_one_run_when_the_run_driver_is_killed(endpoint: Endpoint) -> None:
    """S-SCH-40, S-SCH-41, S-SCH-43: its content reaches the model."""
    folder = endpoint.records.parent / "inbox"
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"letter {number}", encoding="utf-8")
        endpoint.program.until(lambda number=number: len(runs(endpoint, "inbox")) > number, "a run of the file")
        endpoint.kill("ray::RunDriver")
    (folder / "last.txt").write_text("the last letter", encoding="utf-8")
    endpoint.program.until(lambda: len(runs(endpoint, "inbox")) > 3, "a run of the last file")
    files = [each["file"] for each in history(endpoint, "inbox")]
    assert files == ["last.txt", "2.txt", "1.txt", "0.txt"]
    for each in runs(endpoint, "inbox"):
        assert list(endpoint.follow(each["run_id"]))[-1][2]["exit_reason"] == "completed"


def command(endpoint: Endpoint, *words: str) -> subprocess.CompletedProcess[str]:
    """The end of `ensemble-ray schedules` for this endpoint."""
    line = [*COMMAND, "schedules", *words, "--url", f"http://127.0.0.1:{endpoint.port}"]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603  a command of ours


def test_the_command_line_lists_and_controls_schedules(endpoint: Endpoint) -> None:
    """S-SCH-51."""
    listed = command(endpoint)
    assert listed.returncode == 0, listed.stderr
    header, inbox, often, yearly = listed.stdout.splitlines()
    assert header.split() == ["schedule", "when", "next", "last", "state"]
    assert inbox.split()[0] == "letters/inbox"
    assert "every 2s" in often
    assert "letters/yearly  0 3 1 1 * (Europe/Berlin)" in yearly
    assert "-01-01 02:00:00Z  -" in yearly
    assert yearly.endswith("active")
    assert command(endpoint, "pause", "letters/yearly").stdout.endswith("paused\n")
    begun = command(endpoint, "run", "letters/yearly").stdout.strip()
    assert list(endpoint.follow(begun))[-1][2]["exit_reason"] == "completed"
    shown = command(endpoint, "history", "letters/yearly").stdout.splitlines()
    assert shown[0].split() == ["time", "trigger", "state", "run", "or", "reason"]
    assert shown[1].split()[-3:] == ["manual", "completed", begun]
    assert command(endpoint, "resume", "letters/yearly").stdout.rstrip().endswith("active")
    data = json.loads(command(endpoint, "history", "letters/yearly", "--json").stdout)
    assert [each["run_id"] for each in data["history"]] == [begun]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("pause", "letters/none"), "The team 'letters' has no schedule 'none'. There are: [inbox, often, yearly]"),
        (("pause", "yearly"), "'yearly' must be TEAM/NAME"),
        (("run", "letters/inbox"), "The schedule 'inbox' waits for files"),
    ],
)
def test_the_command_line_says_what_is_wrong(endpoint: Endpoint, words: tuple[str, ...], problem: str) -> None:
    """S-SCH-51: the endpoint's message, and exit code 2."""
    done = command(endpoint, *words)
    assert done.returncode == 2
    assert problem in done.stderr
