"""`ensemble-ray submit` and `attach` over a job server: real clusters, with and without a token."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from ensemble_ray import RunState
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import Fault, ModelServer, ServedRequest
from tests.command_line import COMMAND, run_command
from tests.processes import own_directory, program
from tests.scenarios.job_head import job_head
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_team

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


def _work_in(directory: Path) -> Path:
    work = directory / "work"
    work.mkdir()
    return work


def test_a_submitted_run_is_checked_followed_left_and_attached_to() -> None:
    """S-CLU-10 to S-CLU-16, S-CLU-18, S-CLU-20, S-CLU-23, on a cluster that demands its token.

    What the cluster has of the team is what was sent along; the key is this environment's.
    """
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(request: ServedRequest) -> str | Fault:
        if "Write about patience" in request.text:
            is_asked.set()
            may_answer.wait(240)
        return script(request)

    with own_directory() as directory, ModelServer(answer, api_key=KEY) as models:
        work = _work_in(directory)
        team = write_team(work, models.base_url)
        with job_head(directory, PYTHONPATH=str(ROOT)) as head:
            env = {**head.environment, KEY_VARIABLE: KEY}
            begin = ("submit", str(team), "--address", head.url, "--env", KEY_VARIABLE)

            done = run_command(directory, env, *begin, "--input", "topic=Ray", "--run-id", "job")
            assert (done.returncode, done.stdout) == (0, "a line\n"), done.stderr
            said = done.stderr.splitlines()
            assert said[0].startswith("Run job, job ensemble-ray-job-")
            table, first = (
                next(n for n, line in enumerate(said) if text in line) for text in ("1 node can run", "draft")
            )
            assert table < first
            assert RunDirectory(directory / "records", "job").state() is RunState.COMPLETED

            ended = run_command(directory, env, "attach", "job", "--address", head.url, "--json")
            assert ended.returncode == 0, ended.stderr
            assert json.loads(ended.stdout)["raw"] == "a line"

            failed = run_command(directory, env, *begin, "--input", "topic=failure", "--quiet", "--no-check")
            assert (failed.returncode, failed.stdout) == (1, "")
            assert "too much" in failed.stderr

            # Without a terminal Ctrl-C leaves the run going.
            log = directory / "left.log"
            left = [*COMMAND, *begin, "--input", "topic=patience", "--run-id", "left", "--no-check"]
            with program(left, log=log, env=env, cwd=directory) as watching:
                watching.until(is_asked.is_set, "the model's first call")
                os.kill(watching.process.pid, signal.SIGINT)
                assert watching.process.wait(timeout=60) == 130
                assert "The run goes on. Watch it: " in watching.text
            attached = [*COMMAND, "attach", "left", "--address", head.url]
            with program(attached, log=log, env=env, cwd=directory) as watching:
                watching.until(lambda: "left: 0 of 2 tasks" in watching.text, "what was done before")
                may_answer.set()
                assert watching.process.wait(timeout=120) == 0, watching.text
                assert "done     2/2  final (Editor)" in watching.text
                assert "\na line\n" in watching.text

            # What is ignored is not sent, and what is not there is named before a model is asked.
            (work / ".gitignore").write_text("team_tools.py\n", encoding="utf-8")
            asked = len(models.requests)
            lacking = run_command(directory, env, *begin, "--input", "topic=Ray")
            assert lacking.returncode == 2, lacking.stderr
            assert "team_tools" in lacking.stderr
            assert len(models.requests) == asked

            stranger = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH")}
            refused = run_command(directory, stranger, *begin, "--input", "topic=Ray")
            assert refused.returncode == 1
            assert "the cluster demands its token. Set RAY_AUTH_MODE=token" in refused.stderr


def test_a_cluster_without_a_token_takes_runs_and_stops_them() -> None:
    """S-CLU-10, S-CLU-17: the second Ctrl-C of somebody at a terminal ends the job and its run."""
    is_asked, is_over = threading.Event(), threading.Event()

    def answer(request: ServedRequest) -> str | Fault:
        is_asked.set()
        is_over.wait(240)
        return script(request)

    with own_directory() as directory, ModelServer(answer, api_key=KEY) as models:
        team = write_team(_work_in(directory), models.base_url)
        with job_head(directory, has_token=False, PYTHONPATH=str(ROOT)) as head:
            env = {**head.environment, KEY_VARIABLE: KEY}
            words = ["submit", str(team), "--address", head.url, "--env", KEY_VARIABLE, "--input", "topic=Ray"]
            command = [sys.executable, "-m", "tests.scenarios.at_terminal", *words, "--run-id", "stopped"]
            with program(
                command, log=directory / "told", env={**env, "PYTHONPATH": str(ROOT)}, cwd=directory
            ) as typing:
                typing.until(is_asked.is_set, "the model's first call")
                os.kill(typing.process.pid, signal.SIGUSR1)
                typing.until(lambda: "Leave the run going" in typing.text, "the question")
                os.kill(typing.process.pid, signal.SIGUSR1)
                assert typing.process.wait(timeout=120) == 130, typing.text
            state = RunDirectory(directory / "records", "stopped").state()
            assert state is RunState.CANCELLED, typing.text
        is_over.set()  # the server waits for those that answer
