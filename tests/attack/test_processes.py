"""Programs of the process tool: what they are told of their owner's secrets, and that they end with their owner."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import ProcessAgentTool
from ensemble_ray.teamfile import load_ensemble
from tests.processes import own_environment
from tests.template import ForkedProgram

_KEYS = ("OPENAI_API_KEY", "TAVILY_API_KEY", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "ENSEMBLE_RAY_STORE")
_PRINT_NAMES = [sys.executable, "-I", "-S", "-c", "import os; print('\\n'.join(sorted(os.environ)))"]

#: Says who it is and waits for ever, and so does its child, which ignores what can be ignored. The child has none of the
#: streams, or is what the call waits for, since the program leaves it behind with them.
_PROGRAM = """
import os, signal, sys, time
child = os.fork()
if not child:
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[2] == "stay":
        os.closerange(0, 3)
with open(f"{sys.argv[1]}.{'program' if child else 'child'}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.removesuffix(".new"))
if child and sys.argv[2] == "leave":
    os._exit(0)
while True:
    time.sleep(3600)
"""
_DRIVER = """
import sys
from ensemble_ray import ProcessAgentTool
ProcessAgentTool("p", "d", [sys.executable, "-I", "-S", "-c", *sys.argv[1:]], timeout=3600).execute("x")
"""


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in this process's environment."""
    for name in _KEYS:
        monkeypatch.setenv(name, "s3cr3t")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("CITY", "Brest")


@pytest.mark.usefixtures("secrets")
def test_program_gets_no_keys_when_nothing_is_said() -> None:
    """S-BIT-67: a short list of names, and nothing else of this process's environment."""
    names = set(ProcessAgentTool("env", "d", _PRINT_NAMES).execute("x").output.split())
    assert {"PATH", "LC_ALL"} <= names
    assert not names & {*_KEYS, "CITY", "PYTHONPATH"}


@pytest.mark.usefixtures("secrets")
def test_program_gets_what_it_is_given() -> None:
    """S-BIT-67: names, all, and variables of its own, which win."""
    by_name = ProcessAgentTool("env", "d", _PRINT_NAMES, inherit=["CITY", "NOT_THERE"]).execute("x").output.split()
    assert "CITY" in by_name
    assert not {*_KEYS, "NOT_THERE"} & set(by_name)
    everything = ProcessAgentTool("env", "d", _PRINT_NAMES, inherit=True).execute("x").output.split()
    assert {*_KEYS, "CITY"} <= set(everything)
    command = [sys.executable, "-I", "-S", "-c", "import os; print(os.environ['CITY'], os.environ['HOME'])"]
    own = ProcessAgentTool("env", "d", command, inherit=["CITY"], environment={"CITY": "Cork", "HOME": "/its/own"})
    assert own.execute("x").output == "Cork /its/own"


@pytest.mark.usefixtures("secrets")
def test_team_file_says_what_a_program_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-BIT-67: a value that must not stand in the file is named by its variable."""
    monkeypatch.chdir(tmp_path)
    tool = "{process: {name: env, description: d, command: [env], inherit: [CITY], environment: {K: {env: OPENAI_API_KEY}}}}"
    Path("team.yaml").write_text(f"llm: local\ntasks: {{t: {{description: d, tools: [{tool}]}}}}\n", encoding="utf-8")
    (made,) = load_ensemble("team.yaml").tasks[0].tools
    assert isinstance(made, ProcessAgentTool)
    said = made.execute("x").output.split("\n")
    assert {"CITY=Brest", "K=s3cr3t"} <= set(said)
    assert not [line for line in said if line.startswith(_KEYS)]


@pytest.mark.parametrize("program", ["stay", "leave"])
@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
def test_program_and_its_children_end_when_their_owner_is_killed(tmp_path: Path, program: str) -> None:
    """S-BIT-68: SIGKILL leaves the owner no time to say anything; also where only a child of the program is left."""
    marks = [tmp_path / "mark.program", tmp_path / "mark.child"]
    command = [sys.executable, "-c", _DRIVER, _PROGRAM, str(tmp_path / "mark"), program]
    with ForkedProgram[bytes](command, env=own_environment(tmp_path), start_new_session=True) as driver:
        try:
            _wait(lambda: all(mark.exists() for mark in marks), "the program and its child")
            pids = [int(mark.read_text()) for mark in marks]
            if program == "stay":
                assert all(_is_alive(pid) for pid in pids)
            assert _is_alive(pids[1])
            driver.send_signal(signal.SIGKILL)
            driver.wait(timeout=120)
            _wait(lambda: not any(_is_alive(pid) for pid in pids), f"the end of {pids}")
        finally:
            driver.kill()
            for mark in marks:
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(mark.read_text()), signal.SIGKILL)


def test_exit_is_told_as_ever_when_a_signal_ends_the_program() -> None:
    """S-BIT-63: what supervises the program passes on how it ended."""
    command = [sys.executable, "-I", "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    assert ProcessAgentTool("p", "d", command).execute("x").error_message == "Process exited with code -9"


def _is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody has collected yet does not."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607  ours
    return listed.stdout.strip()[:1] not in {"", "Z"}


def _wait(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, f"waited two minutes for {what}"
        time.sleep(0.05)
