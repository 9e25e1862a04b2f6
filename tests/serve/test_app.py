"""One team behind a real Serve instance: `serve run` with the shipped configuration, on a cluster of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ensemble_ray.testing import ModelServer
from tests.processes import Program, free_ports, own_directory, own_environment, program
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_team

ROOT = Path(__file__).resolve().parents[2]
#: As the documentation says: the limit of bodies holds in Serve's proxy too.
PROXY = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "ensemble_ray.serve.middleware:for_proxy"}
SERVE = str(Path(sys.executable).with_name("serve"))


@dataclass(frozen=True)
class Endpoint:
    """A served team."""

    program: Program
    port: int
    records: Path

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, object]]:
        """Status and JSON of an answer; Serve itself answers in text before the team is there."""
        connection = self.send(method, path, body)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text.startswith(b"{") else {"text": text.decode()}

    def send(self, method: str, path: str, body: object = None) -> http.client.HTTPConnection:
        """Ask, and leave the answer to the caller."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection

    def peaks(self) -> dict[int, int]:
        """The most memory, in bytes, that each of its processes that run Python ever had."""
        found: dict[int, int] = {}
        for pid in self.program.members():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                if "VmHWM:" in text:
                    found[pid] = int(text.partition("VmHWM:")[2].split()[0]) * 1024
        return found

    def is_up(self) -> bool:
        """Whether the team is served."""
        try:
            return self.ask("GET", "/healthz")[0] == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def models() -> Iterator[ModelServer]:
    """The models' endpoint."""
    with ModelServer(script, api_key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def endpoint(models: ModelServer) -> Iterator[Endpoint]:
    """The shipped configuration on another port, with a team of ours."""
    with own_directory() as directory:
        team = write_team(directory, models.base_url)
        config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
        (port,) = free_ports(1)
        config["http_options"]["port"] = port
        (application,) = config["applications"]
        application["args"]["team"] = str(team)
        (directory / "serve.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        # RAY_ADDRESS=local: it must not join a cluster that happens to run on this machine.
        env = own_environment(directory, RAY_ADDRESS="local", **PROXY, **{KEY_VARIABLE: KEY})
        command = [SERVE, "run", "serve.yaml"]
        with program(command, log=directory / "log", env=env, cwd=directory) as running:
            served = Endpoint(running, port, directory / "records")
            running.until(served.is_up, "the team")
            yield served


def test_a_served_team_runs_on_the_cluster_it_lives_in(endpoint: Endpoint, models: ModelServer) -> None:
    """The answer and the record are there, and no second cluster was started."""
    status, answer = endpoint.ask("POST", "/runs", {"inputs": {"topic": "Ray"}, "run_id": "served"})
    assert (status, answer.get("raw")) == (200, "a line"), endpoint.program.text
    tasks = answer["tasks"]
    assert isinstance(tasks, list)
    assert [(each["role"], each["text"]) for each in tasks] == [("Writer", "a draft"), ("Editor", "a line")]
    assert any("shout" in request.tools for request in models.requests)
    assert (endpoint.records / "runs" / "served" / "meta.json").is_file()
    assert len(endpoint.program.members(named="gcs_server")) == 1


def test_a_served_team_listens_on_loopback_alone(endpoint: Endpoint) -> None:
    """What listens on every interface answers to every address of loopback."""
    assert endpoint.is_up()
    with pytest.raises(OSError, match=r".+"):
        http.client.HTTPConnection("127.0.0.2", endpoint.port, timeout=5).connect()


@pytest.mark.skipif(sys.platform != "linux", reason="the peaks of other processes are read from /proc")
def test_a_long_body_fills_the_memory_of_no_process(endpoint: Endpoint) -> None:
    """S-SEC-80: neither Serve's proxy nor the replica nor the scheduler keeps the 100 MB of a client that goes on sending."""
    assert endpoint.ask("POST", "/runs", {"inputs": {"topic": "Ray"}})[0] == 200
    before = endpoint.peaks()
    part = b"[" * 1_000_000
    for how in ("content-length: 100000000", "transfer-encoding: chunked"):
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=300) as opened:
            head = f"POST /runs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{how}\r\n\r\n"
            opened.sendall(head.encode())
            with contextlib.suppress(OSError):  # it has had enough
                for _ in range(100):
                    opened.sendall(part if "length" in how else b"%x\r\n%s\r\n" % (len(part), part))
    assert endpoint.ask("POST", "/runs", {"inputs": {"topic": "Ray"}})[0] == 200
    grown = {pid: peak - before[pid] for pid, peak in endpoint.peaks().items() if pid in before}
    assert max(grown.values()) < 60_000_000


def test_a_foreign_host_and_a_long_body_are_refused_with_a_failure(endpoint: Endpoint) -> None:
    """S-SEC-80, S-SEC-82: through Serve's proxy too."""
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=300)
    connection.request("GET", "/healthz", headers={"host": "evil.example"})
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]) == (421, "InvalidRequest")
    connection.close()
    status, failure = endpoint.ask("POST", "/runs", {"inputs": {"topic": "x" * 1_100_000}})
    assert (status, failure["error"]) == (413, "InvalidRequest")


def test_a_client_that_goes_away_does_not_end_the_run(endpoint: Endpoint, models: ModelServer) -> None:
    """S-SET-39: the run is finished and recorded; asked again, it is answered without a model call."""
    asked_before = len(models.requests)
    asked = {"inputs": {"topic": "patience"}, "run_id": "left"}
    models.pause()
    try:
        connection = endpoint.send("POST", "/runs", asked)
        models.wait_in_flight(1, timeout_s=120)
        connection.close()
        gone = "Run left: its client has gone; the run goes on"
        endpoint.program.until(lambda: gone in endpoint.program.text, "the client's leave")
        assert endpoint.ask("POST", "/runs", asked)[0] == 409
    finally:
        models.resume()
    models.wait_served(asked_before + 2, timeout_s=120)
    endpoint.program.until(lambda: endpoint.ask("POST", "/runs", asked)[0] != 409, "the end of the run")
    status, answer = endpoint.ask("POST", "/runs", asked)
    assert (status, answer.get("raw")) == (200, "a line")
    assert len(models.requests) == asked_before + 2


def test_a_failure_is_answered_as_json(endpoint: Endpoint) -> None:
    """Missing inputs are the client's, a model's refusal is not."""
    status, answer = endpoint.ask("POST", "/runs", {})
    assert (status, answer["error"], answer["missing"]) == (422, "PromptTemplateError", ["topic"])
    status, answer = endpoint.ask("POST", "/runs", {"inputs": {"topic": "failure"}, "run_id": "failed"})
    assert (status, answer["error"], answer["run_id"]) == (502, "TaskExecutionError", "failed")
    assert "too much" in str(answer["causes"])
    assert KEY not in endpoint.program.text


def test_a_wrong_team_ends_the_deployment_with_its_name(tmp_path: Path) -> None:
    """`serve run serve.app:app` refuses it before it starts or joins a cluster."""
    env = own_environment(tmp_path, ENSEMBLE_RAY_TEAM="taem.yaml")
    write_team(tmp_path, "http://127.0.0.1:9/v1")
    command = [SERVE, "run", "serve.app:app"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180)  # noqa: S603  a command of ours
    assert done.returncode != 0
    assert "There is no file 'taem.yaml'" in done.stderr
    assert not [name for name in os.listdir(tmp_path) if name.startswith("ray")]  # noqa: PTH208  names alone
