"""An endpoint whose records are in PostgreSQL outlives its machine: here, everything of it but the database is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from ensemble_ray.access.key_store import open_keys
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.serve.driving.ledger import open_ledger
from ensemble_ray.testing import ModelServer
from tests.postgres_server import PostgresServer
from tests.processes import Program, free_ports, own_directory, own_environment, program
from tests.serve.endpoint import Endpoint
from tests.serve.keys import make_key
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_team

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0


@contextlib.contextmanager
def _machine(models: ModelServer, url: str) -> Generator[Endpoint]:
    """An endpoint in a directory that nobody else has, with a Ray of its own; its teams and the database are all it is given."""
    with own_directory() as directory:
        team = write_team(directory, models.base_url)
        (port,) = free_ports(1)
        environment = own_environment(
            directory, PYTHONPATH=str(ROOT), ENSEMBLE_RAY_STORE=url, RAY_ADDRESS="local", **{KEY_VARIABLE: KEY}
        )
        command = [
            sys.executable,
            "-m",
            "ensemble_ray.cli",
            "serve",
            str(team),
            "--port",
            str(port),
            "--keys",
            "required",
        ]
        with program(command, log=directory / "log", env=environment, cwd=directory) as running:
            endpoint = Endpoint(running, port, directory / "records")
            running.until(endpoint.is_up, "the endpoint", timeout_s=PATIENCE_S)
            yield endpoint


def _destroy(running: Program) -> None:
    """Kill all of it at once, so that nothing of it can say that it ends."""
    members = [*psutil.Process(running.process.pid).children(recursive=True), psutil.Process(running.process.pid)]
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for each in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, sign)
    running.process.wait(PATIENCE_S)


def _take_over(postgres: PostgresServer, url: str, endpoint: Endpoint, key: dict[str, str]) -> None:
    """Have the ledger of a running endpoint, as another process would; let it go, and see the endpoint go on (S-SRV-47)."""

    def asked(path: str) -> tuple[int, bytes]:
        connection = endpoint.send("GET", path, **key)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found

    postgres.end_backends(url)
    other = open_ledger(StoreAddress(home="", url=url), "endpoint")
    (before,) = endpoint.program.members(named="ray::RunDriver")
    status, body = asked("/runs")
    assert (status, b"NOT_READY" in body) == (503, True), endpoint.program.text
    endpoint.program.until(
        lambda: endpoint.program.members(named="ray::RunDriver") not in ([], [before]),
        "another driver",
        timeout_s=PATIENCE_S,
    )
    other.close()
    endpoint.program.until(lambda: asked("/runs/begun")[0] == 200, "the endpoint again", timeout_s=PATIENCE_S)
    assert b'"ended"' in asked("/runs")[1]


@pytest.mark.usefixtures("home")
def test_the_next_head_has_what_the_lost_one_accepted(postgres: PostgresServer) -> None:
    """S-SRV-45, S-SRV-163, S-SRV-41: a run in the middle, one that ended, and the key; nothing recorded is asked again.

    S-SRV-47: another process that takes the ledger over is left alone with it, and what drove the runs waits for it.
    """
    url = postgres.new_database()
    key = make_key(open_keys(StoreAddress(home="", url=url)), teams=["team"])
    with ModelServer(script, api_key=KEY) as models:
        with _machine(models, url) as first:
            connection = first.send("POST", "/runs?wait=300", {"inputs": {"topic": "x"}, "run_id": "ended"}, **key)
            assert connection.getresponse().status == 200
            connection.close()
            asked_before = len(models.requests)
            models.pause()
            connection = first.send("POST", "/runs", {"inputs": {"topic": "y"}, "run_id": "begun"}, **key)
            assert connection.getresponse().status == 202
            connection.close()
            models.wait_arrived(asked_before + 1, timeout_s=120)
            assert not (first.records / "endpoint").exists()
            _destroy(first.program)
        models.resume()
        with _machine(models, url) as second:
            connection = second.send("POST", "/runs?wait=300", {"inputs": {"topic": "y"}, "run_id": "begun"}, **key)
            answer = connection.getresponse()
            assert (answer.status, b'"a line"' in answer.read()) == (200, True), second.program.text
            connection.close()
            connection = second.send("GET", "/runs", **key)
            listed = connection.getresponse().read().decode()
            connection.close()
            assert listed.index('"begun"') < listed.index('"ended"')
            assert second.ask("GET", "/runs")[0] == 401
            _take_over(postgres, url, second, key)
        # The call that was on its way when the machine was lost is made again, and no other one.
        assert len(models.requests) == asked_before + 3
