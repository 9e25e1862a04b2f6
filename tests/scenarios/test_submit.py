"""`ensemble-ray submit` and `attach` over a job server: real clusters, with and without a token."""

from __future__ import annotations

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
from tests.processes import free_ports, own_directory, own_environment, program
from tests.scenarios.job_head import job_head
from tests.serve.endpoint import Endpoint
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_team

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]


def _work_in(directory: Path) -> Path:
    work = directory / "work"
    work.mkdir()
    return work


def test_a_submitted_run_is_checked_followed_left_and_attached_to() -> None:
    """S-CLU-10, S-CLU-11, S-CLU-12, S-CLU-13, S-CLU-14, S-CLU-16, S-CLU-18, S-CLU-20, S-CLU-23, on a cluster that demands its token.

    What the cluster has of the team is what was sent along; the key is this environment's.
    """
    is_asked, may_answer = threading.Event(), threading.Event()

    def answer(request: ServedRequest) -> str | Fault:
        is_asked.set()
        may_answer.wait(240)
        return script(request)

    with own_directory() as directory, ModelServer(answer, api_key=KEY) as models:
        team = write_team(_work_in(directory), models.base_url)
        with job_head(directory, PYTHONPATH=str(ROOT)) as head:
            env = {**head.environment, KEY_VARIABLE: KEY}
            begin = ("submit", str(team), "--address", head.url, "--env", KEY_VARIABLE, "--input", "topic=Ray")

            # Without a terminal Ctrl-C leaves the run going.
            log = directory / "left.log"
            with program([*COMMAND, *begin, "--run-id", "left"], log=log, env=env, cwd=directory) as watching:
                watching.until(is_asked.is_set, "the model's first call")
                watching.until(lambda: "started  draft" in watching.text, "what is done there")
                os.kill(watching.process.pid, signal.SIGINT)
                assert watching.process.wait(timeout=60) == 130
                assert "The run continues. Watch it: " in watching.text
                assert watching.text.startswith("Run left, job ensemble-ray-left-")
                assert watching.text.index("1 node can run") < watching.text.index("started  draft")
            attached = [*COMMAND, "attach", "left", "--address", head.url]
            with program(attached, log=log, env=env, cwd=directory) as watching:
                watching.until(lambda: "left: 0 of 2 tasks" in watching.text, "what was done before")
                may_answer.set()
                assert watching.process.wait(timeout=120) == 0, watching.text
                assert "done     2/2  final (Editor)" in watching.text
                assert "\na line\n" in watching.text
            assert RunDirectory(directory / "records", "left").state() is RunState.COMPLETED

            stranger = {name: value for name, value in env.items() if not name.startswith("RAY_AUTH")}
            refused = run_command(directory, stranger, *begin)
            assert refused.returncode == 1
            assert "the cluster demands its token. Set RAY_AUTH_MODE=token" in refused.stderr


def test_a_cluster_without_a_token_takes_runs_and_stops_them() -> None:
    """S-CLU-10, S-CLU-11, S-CLU-15, S-CLU-17: the second Ctrl-C of somebody at a terminal ends the job and its run.

    What is ignored is not sent, and what is not there is named before a model is asked.
    """
    is_asked, is_over = threading.Event(), threading.Event()

    def answer(request: ServedRequest) -> str | Fault:
        is_asked.set()
        is_over.wait(240)
        return script(request)

    with own_directory() as directory, ModelServer(answer, api_key=KEY) as models:
        work = _work_in(directory)
        team = write_team(work, models.base_url)
        with job_head(directory, has_token=False, PYTHONPATH=str(ROOT)) as head:
            env = {**head.environment, KEY_VARIABLE: KEY}
            begin = ["submit", str(team), "--address", head.url, "--env", KEY_VARIABLE, "--input", "topic=Ray"]
            (work / ".gitignore").write_text("team_tools.py\n", encoding="utf-8")
            lacking = run_command(directory, env, *begin)
            assert (lacking.returncode, lacking.stdout) == (2, ""), lacking.stderr
            assert "team_tools" in lacking.stderr
            assert not models.requests
            (work / ".gitignore").unlink()

            words = [*begin, "--run-id", "stopped", "--no-check"]
            command = [sys.executable, "-m", "tests.scenarios.at_terminal", *words]
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


SHOP = """
from contextlib import contextmanager

class Shop:
    def __init__(self, user): self.tea, self.user = 3, user

@contextmanager
def open_shop(run):
    yield Shop(run.user)

def price_of(context):
    return f"{context.deps.tea} for {context.deps.user}"
"""
SELLING = """
deps: shop:open_shop
deps_type: shop:Shop
tasks:
  sell: {description: Sell tea, handler: "shop:price_of"}
"""


def test_deps_of_the_file_are_opened_on_the_cluster_when_its_run_is_submitted_or_served() -> None:
    """S-CTX-62, S-CTX-40, S-CLU-10: the module of the deps is sent along; the endpoint's workers import it, too."""
    with own_directory() as directory:
        work = _work_in(directory)
        (work / "shop.py").write_text(SHOP, encoding="utf-8")
        (work / "selling.yaml").write_text(SELLING, encoding="utf-8")
        with job_head(directory, has_token=False, PYTHONPATH=str(ROOT)) as head:
            words = ("submit", str(work / "selling.yaml"), "--address", head.url, "--user", "ada")
            submitted = run_command(directory, dict(head.environment), *words)
            assert (submitted.returncode, submitted.stdout.strip()) == (0, "3 for ada"), submitted.stderr
        (port,) = free_ports(1)
        command = [*COMMAND, "serve", "selling.yaml", "--port", str(port)]
        with program(command, log=directory / "log", env=own_environment(directory), cwd=work) as running:
            endpoint = Endpoint(running, port, directory / "records")
            running.until(lambda: "Ctrl-C stops" in running.text, "the address")
            status, ended = endpoint.run({"user": "eve"})
            assert (status, ended["result"]["raw"]) == (200, "3 for eve"), running.text
