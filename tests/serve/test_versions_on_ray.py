"""Versions and a drain of a real endpoint on Ray, whose driver dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from ensemble_ray.record.runs import RunDirectory, RunState
from ensemble_ray.testing import ModelServer
from tests.command_line import COMMAND, call_command
from tests.processes import free_ports, own_directory, own_environment, program
from tests.serve.endpoint import Endpoint
from tests.serve.teams import KEY, KEY_VARIABLE
from tests.serve.versioned import greet, write


@pytest.fixture
def models() -> Iterator[ModelServer]:
    """The models' endpoint."""
    with ModelServer(greet, api_key=KEY) as server:
        yield server


def test_runs_keep_their_version_and_a_drain_goes_on_when_the_driver_dies(models: ModelServer) -> None:
    """S-VER-2, S-VER-3, S-VER-6, S-VER-7, S-VER-20, S-VER-25, S-VER-28: and it drains before it stops."""
    (port,) = free_ports(1)
    with own_directory() as directory:
        reviewed = write(directory, models.base_url, "Hello", is_reviewed=True)
        env = own_environment(directory, **{KEY_VARIABLE: KEY})
        command = [*COMMAND, "serve", reviewed.name, "--port", str(port), "--drain-s", "120"]
        with program(command, log=directory / "log", env=env, cwd=directory) as running:
            endpoint = Endpoint(running, port, directory / "records")
            running.until(lambda: "Ctrl-C stops" in running.text, "the address")
            _keep_versions(endpoint, models)
            _drain(endpoint, models)
            _stop(endpoint, models)


def _keep_versions(endpoint: Endpoint, models: ModelServer) -> None:
    """A run waits for a review, its team changes twice, and the driver dies before the decision."""
    directory = endpoint.records.parent
    status, waiting = endpoint.run({"inputs": {"who": "Ann"}, "run_id": "first"})
    assert (status, waiting["status"]) == (202, "waiting"), endpoint.program.text
    write(directory, models.base_url, "Servus")
    status, found = endpoint.ask("POST", "/ensembles/greeting/versions", {"share": 1})
    assert (status, [each["share"] for each in found["versions"]]) == (200, [1.0, 0.0]), found
    new, old = [each["version"] for each in found["versions"]]
    status, second = endpoint.run({"inputs": {"who": "Ann"}, "run_id": "second"})
    assert (status, second["version"], second["result"]["raw"]) == (200, new, "Servus")
    write(directory, models.base_url, "Moin")
    endpoint.kill("ray::RunDriver")
    assert endpoint.ask("GET", "/ensembles/greeting/versions")[1] == found
    (gate,) = endpoint.ask("GET", "/runs/first")[1]["reviews"]
    status, _ = endpoint.ask("POST", f"/reviews/first/{gate['gate_id']}", {"decision": "approve"})
    assert status == 200
    assert list(endpoint.follow("first"))[-1][2]["exit_reason"] == "completed"
    ended = endpoint.ask("GET", "/runs/first")[1]
    assert (ended["version"], [each["text"] for each in ended["result"]["tasks"]]) == (old, ["Hello", "Hello"])
    assert endpoint.run({"inputs": {"who": "Ann"}})[1]["version"] == new


def _drain(endpoint: Endpoint, models: ModelServer) -> None:
    """An open run continues, also when the driver dies during the drain."""
    asked_before = len(models.requests)
    models.pause()
    try:
        assert endpoint.ask("POST", "/runs", {"inputs": {"who": "Ann"}, "run_id": "open"})[0] == 202
        models.wait_arrived(asked_before + 1, timeout_s=120)
        status, drain = endpoint.ask("POST", "/drain", {})
        assert (status, drain["state"], drain["open"]["running"]) == (200, "draining", 1)
        endpoint.kill("ray::RunDriver")
        for method, path, body in (("GET", "/readyz", None), ("POST", "/runs", {"inputs": {"who": "Ann"}})):
            status, refused = endpoint.ask(method, path, body)
            assert (status, refused["code"]) == (503, "DRAINING")
    finally:
        models.resume()
    directory = endpoint.records.parent
    url = f"http://127.0.0.1:{endpoint.port}"
    done = call_command(directory, {**os.environ}, "drain", "--url", url, "--json")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (0, "drained"), done.stderr
    assert endpoint.ask("GET", "/runs/open")[1]["result"]["raw"] == "Servus"
    assert endpoint.ask("POST", "/drain/end", {})[1]["state"] == "serving"


def _stop(endpoint: Endpoint, models: ModelServer) -> None:
    """The process that serves lets a run end before it stops."""
    asked_before, running = len(models.requests), endpoint.program
    models.pause()
    try:
        assert endpoint.ask("POST", "/runs", {"inputs": {"who": "Ann"}, "run_id": "last"})[0] == 202
        models.wait_arrived(asked_before + 1, timeout_s=120)
        running.process.send_signal(signal.SIGTERM)
        running.until(lambda: "Draining: 1 open run" in running.text, "the drain")
        assert endpoint.ask("POST", "/runs", {"inputs": {"who": "Ann"}})[1]["code"] == "DRAINING"
    finally:
        models.resume()
    assert running.process.wait(timeout=180) == 0, running.text
    assert RunDirectory(endpoint.records, "last").state() is RunState.COMPLETED
