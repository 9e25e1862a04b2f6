"""`ensemble-ray studio` as a program."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ensemble_ray.cli.app import invoke
from tests.command_line import COMMAND, environment_of

PATIENCE_S = 120


@pytest.mark.program
def test_it_says_where_it_is_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    """S-STU-70: the address on standard output when it answers; Ctrl-C ends it with success."""
    environment = environment_of(tmp_path)
    program = subprocess.Popen(  # noqa: S603  our own
        [*COMMAND, "studio", "--port", "0"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line.startswith("Studio: http://127.0.0.1:"), line
        with httpx.Client(base_url=line.split()[1], trust_env=False) as client:
            assert client.get("api/studio/runs").json()["total_known"] == 0
            assert client.get("").status_code == 200
        program.send_signal(signal.SIGINT)
        assert program.wait(PATIENCE_S) == 0
    finally:
        if program.poll() is None:
            program.kill()
        program.communicate()


def test_wrong_options_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """S-STU-71, S-STU-72: two places, a port that is none, no key beyond loopback."""
    for arguments, text in (
        (("--home", ".", "--records", "postgresql://x/y"), "choose one"),
        (("--port", "70000"), "0-65535"),
        (("--host", "0.0.0.0"), "keys add"),  # noqa: S104  that is what is asked about
        (("--records", "mysql://x"), "postgresql://"),
    ):
        assert invoke(["studio", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """S-STU-71: with the line that installs them."""
    monkeypatch.setitem(sys.modules, "sse_starlette", None)
    assert invoke(["studio"]) == 2
    text = "Studio needs packages that are not installed (sse_starlette): pip install 'ensemble-ray[studio]'"
    assert text in capsys.readouterr().err
