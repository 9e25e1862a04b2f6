"""The command line as tests call it: in this process, or as a program of its own that is led nowhere else.

In: arguments. Out: exit code, standard output, standard error. Never: a program without a limit of its time.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from ensemble_ray.cli.app import invoke
from ensemble_ray.testing import ModelServer
from tests.processes import own_environment
from tests.template import run_forked

ROOT = Path(__file__).resolve().parents[1]
#: The command line as a program.
COMMAND = (sys.executable, "-m", "ensemble_ray.cli")
#: Generous: Ray starts on two cores while other things run.
PATIENCE_S = 300.0


class Called(NamedTuple):
    """What a command did."""

    code: int
    #: on standard output
    printed: str
    #: on standard error
    said: str


Call = Callable[..., Called]


def calling(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return what calls a command in this process."""

    def call(*arguments: str) -> Called:
        capsys.readouterr()
        code = invoke(arguments)
        return Called(code, *capsys.readouterr())

    return call


def work_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make it the current directory; afterwards forget what was imported from it. Runs are inline."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with _forgetting_modules_of(folder):
        yield folder


@contextlib.contextmanager
def _forgetting_modules_of(folder: Path) -> Generator[None, None, None]:
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def environment_of(place: Path, server: ModelServer | None = None, **more: str) -> dict[str, str]:
    """Return the environment of a program whose files are in that place and whose models at that server; inline."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    url = {} if server is None else {"OPENAI_BASE_URL": server.base_url}
    given = {"PYTHONPATH": path, "OPENAI_API_KEY": "sk-of-a-test", "ENSEMBLE_RAY_RUNTIME": "inline", **url, **more}
    return own_environment(place, **given)


def run_command(
    place: Path,
    environment: Mapping[str, str],
    *arguments: str,
    given: str | None = None,
    timeout_s: float = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in that place, with that on its standard input."""
    return run_forked(
        [*COMMAND, *arguments],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        input=given,
    )


def call_command(
    place: Path, environment: Mapping[str, str], *arguments: str, is_merged: bool = False
) -> subprocess.CompletedProcess[str]:
    """Do in this process what `run_command` has a program do, where neither its start nor its end is what is checked.

    A program costs seconds of processor time before it begins; its environment may not be one that Ray reads when it is imported.
    `is_merged`: what it writes on standard error is among what it writes on standard output.
    """
    out = io.StringIO()
    err = out if is_merged else io.StringIO()
    with pytest.MonkeyPatch.context() as patch, _forgetting_modules_of(place):
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.chdir(place)
        patch.setattr(sys, "path", [str(place), *sys.path])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = invoke(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), "" if is_merged else err.getvalue())
