"""A newer deployment of an endpoint on a cluster: it takes over what the older one had accepted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from ensemble_ray.testing import ModelServer
from tests.processes import free_ports, own_directory
from tests.scenarios.job_head import JobHead, job_head
from tests.serve.endpoint import Endpoint
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_map_reduce, write_team

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
SERVE = str(Path(sys.executable).with_name("serve"))


@pytest.fixture
def models() -> Iterator[ModelServer]:
    """The models' endpoint."""
    with ModelServer(script, api_key=KEY) as server:
        yield server


def deploy(head: JobHead, directory: Path, port: int, teams: Sequence[Path], **limits: int) -> None:
    """Deploy the application anew, as the shipped configuration does; it returns before the new one answers."""
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"] = {"teams": list(map(str, teams)), "limits": limits}
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [SERVE, "deploy", str(file), "--address", head.url]
    done = subprocess.run(  # noqa: S603  a command of ours
        command, env=dict(head.environment), cwd=directory, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr


def served(endpoint: Endpoint) -> list[str]:
    """The names of the teams that are served just now."""
    try:
        status, answer = endpoint.ask("GET", "/ensembles")
    except OSError:
        return []
    return [each["name"] for each in answer["ensembles"]] if status == 200 else []


def test_a_newer_deployment_takes_over_the_runs_of_the_older_one(models: ModelServer) -> None:
    """S-SRV-43: a planned run, a map-reduce and one that waits for its turn; what a team is served for no more is left."""
    (port,) = free_ports(1)
    with own_directory() as directory:
        planned, mapped = write_team(directory, models.base_url), write_map_reduce(directory, models.base_url)
        other = directory / "other.yaml"
        other.write_text(planned.read_text(encoding="utf-8"), encoding="utf-8")
        with job_head(directory, **{KEY_VARIABLE: KEY}) as head:
            endpoint = Endpoint(head.program, port, directory / "records")
            deploy(head, directory, port, [planned, mapped, other], max_running=1)
            head.program.until(lambda: served(endpoint) == ["many", "other", "team"], "the teams")
            models.pause()
            try:
                for run_id, team in (("plan", "team"), ("map", "many"), ("gone", "other"), ("queued", "other")):
                    body = {"ensemble": team, "inputs": {"topic": "x"}, "run_id": run_id}
                    assert endpoint.ask("POST", "/runs", body)[0] == 202
                models.wait_arrived(3, timeout_s=180)
                deploy(head, directory, port, [planned, mapped], max_running=2)
                head.program.until(lambda: served(endpoint) == ["many", "team"], "the newer deployment")
            finally:
                models.resume()
            for run_id in ("plan", "map"):
                events = list(endpoint.follow(run_id))
                assert (events[-1][1], events[-1][2]["exit_reason"]) == ("ensemble_completed", "completed")
                assert endpoint.ask("GET", f"/runs/{run_id}")[1]["result"]["raw"] == "a line"
            left = [endpoint.ask("GET", f"/runs/{run_id}")[1]["status"] for run_id in ("gone", "queued")]
            assert left == ["interrupted", "interrupted"]
            deploy(head, directory, port, [planned, mapped, other], max_running=1)
            head.program.until(lambda: served(endpoint) == ["many", "other", "team"], "the third deployment")
            for run_id in ("gone", "queued"):
                assert list(endpoint.follow(run_id))[-1][2]["exit_reason"] == "completed"
                assert endpoint.ask("GET", f"/runs/{run_id}")[1]["result"]["raw"] == "a line"
            assert len(head.program.members(named="ray::RunDriver")) == 1
