"""Forked programs behave as started ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.template import ForkedProgram, forking, run_forked

_TELL = """
import json, os, sys
parent, session = os.getppid(), os.getsid(0) == os.getpid()
path = [each for each in sys.path if "more" in each]
found = [sys.argv, os.getcwd(), os.environ.get("ONE"), "HOME" in os.environ, path, __name__, sys.stdin.read(), session]
print(json.dumps([*found, parent, len(os.listdir("/proc/self/task"))]))
print("an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["text", "module", "file"])
def test_program_has_what_it_was_given(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "telling.py"
    file.write_text(_TELL, encoding="utf-8")
    words = {"text": ["-c", _TELL], "module": ["-m", "telling"], "file": [str(file)]}[kind]
    first = {"text": "-c", "module": str(file), "file": str(file)}[kind]
    environment = {"ONE": "1", "PYTHONPATH": "/more"}
    command = [sys.executable, *words, "a", "ä"]
    begun = ForkedProgram[str](
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    out, err = begun.communicate("typed", timeout=60)
    assert (begun.is_forked, begun.returncode, err) == (True, 7, "an error\n")
    given = [[first, "a", "ä"], str(tmp_path), "1", False, ["/more"], "__main__", "typed", True]
    assert json.loads(out) == [*given, os.getpid(), 1]


def test_code_is_read_again_when_it_was_changed(tmp_path: Path) -> None:
    for text in ("first", "second, which is longer"):
        (tmp_path / "changing.py").write_text(f"TEXT = {text!r}", encoding="utf-8")
        command = [sys.executable, "-c", "import changing; print(changing.TEXT)"]
        assert run_forked(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == f"{text}\n"


def test_libraries_are_there_and_no_cluster_is() -> None:
    code = "import sys; print('openai' in sys.modules, 'ray' in sys.modules); import ray; print(ray.is_initialized())"
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = run_forked([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True True\nFalse\n"


def test_programs_of_subprocess_are_forked_in_a_block_with_more_modules() -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.getppid(), 'this' in sys.modules)"]
    plain = subprocess.Popen
    with forking("this"):
        assert subprocess.Popen is ForkedProgram
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  our own program
    assert subprocess.Popen is plain
    assert done.stdout == f"{os.getpid()} True\n"


def test_two_programs_draw_different_numbers() -> None:
    command = [sys.executable, "-c", "import os, random, uuid; print(random.random(), uuid.uuid4(), os.urandom(4))"]
    assert len({run_forked(command, capture_output=True, check=True).stdout for _ in range(2)}) == 2


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("pass", 0, ""),
        ("import os; os._exit(3)", 3, ""),
        ("raise SystemExit('no way')", 1, "no way\n"),
        ("raise SystemExit(-1)", 255, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'at the end', file=sys.stderr)", 0, "at the end\n"),
        ("import threading; threading.Timer(0.05, lambda: print(1 / 0)).start()", 0, "ZeroDivisionError: division by zero\n"),
    ],
)  # fmt: skip
def test_end_is_that_of_an_interpreter(code: str, expected: int, said: str) -> None:
    command = [sys.executable, "-c", code]
    for run in (run_forked, subprocess.run):
        ended = run(command, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (ended.returncode, ended.stderr[-len(said) :] if said else ended.stderr) == (expected, said)


def test_program_is_killed_when_its_time_is_over(tmp_path: Path) -> None:
    code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(3600)"
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked([sys.executable, "-c", code], cwd=tmp_path, timeout=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        ([sys.executable, "-c", "print(1)"], {"PYTHONHASHSEED": "1"}),
        ([sys.executable, "-c", "print(1)"], {"RAY_a_setting_of_its_own": "1"}),
        ([sys.executable, "-W", "error", "-c", "print(1)"], {}),
        (["/bin/sh", "-c", "echo 1"], {}),
        ([sys.executable, "-c", "print(1)", "x" * 100_000, "y" * 100_000], {}),
    ],
)
def test_program_starts_plainly_when_the_template_cannot_be_it(command: list[str], environment: dict[str, str]) -> None:
    with ForkedProgram[str](command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True) as begun:
        assert (begun.communicate(timeout=60)[0], begun.is_forked) == ("1\n", False)


def test_program_starts_plainly_where_there_is_no_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with ForkedProgram[str]([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE, text=True) as begun:
        assert (begun.communicate(timeout=60)[0], begun.is_forked) == ("1\n", False)
