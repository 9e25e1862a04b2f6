"""A team as a job of a cluster: `ray job submit`, end to end, on a cluster of the test's own."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from ensemble_ray import RunState
from ensemble_ray.record.runs import RunDirectory, read_facts
from ensemble_ray.testing import ModelServer
from tests.processes import free_ports, own_directory, own_environment, program
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_map_reduce, write_team

RAY = str(Path(sys.executable).with_name("ray"))


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_a_team_and_a_map_reduce_run_as_a_job_of_a_cluster() -> None:
    """The job's `python` and package are those of the node, its runs join the cluster, and their records lie there.

    S-MR-161, S-MR-177: the tasks of the second run are made by the job's own process.
    """
    with own_directory() as directory, ModelServer(script, api_key=KEY) as models:
        team, many = write_team(directory, models.base_url), write_map_reduce(directory, models.base_url)
        token = directory / "token"
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        token.chmod(0o600)
        # Clients of a cluster that wants a token must be told so; they do not find out.
        auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        env = own_environment(directory, **auth, **{KEY_VARIABLE: KEY})
        port, dashboard, agent, client = free_ports(4)
        head = [
            *(RAY, "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"),
            *(f"--port={port}", f"--temp-dir={directory / 'ray'}", f"--ray-client-server-port={client}"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        ]
        with program(head, log=directory / "log", env=env, cwd=directory) as cluster:
            cluster.until(lambda: "Ray runtime started" in cluster.text, "the head")
            # It says so before this one stands, and a job that is submitted waits ten seconds for it.
            cluster.until(lambda: _listens(agent), "the agent that starts jobs")
            entry_point = (
                f"ensemble-ray run {team} --input topic=Ray --run-id job --json --quiet && "
                f"ensemble-ray run {many} --run-id many --quiet"
            )
            submit = [RAY, "job", "submit", f"--address=http://127.0.0.1:{dashboard}", "--", "sh", "-c", entry_point]
            job = subprocess.run(submit, env=env, capture_output=True, text=True, check=False, timeout=300)  # noqa: S603  a command of ours
            assert job.returncode == 0, f"{job.stdout}\n{job.stderr}\n{cluster.text}"
            assert "succeeded" in job.stdout
            output = json.loads(job.stdout[job.stdout.index("\n{") : job.stdout.rindex("\n}") + 2])
            assert output["raw"] == "a line"
            assert output["run_id"] == "job"
            assert len(cluster.members(named="gcs_server")) == 1
        records = directory / "records"
        assert [RunDirectory(records, name).state() for name in ("job", "many")] == [RunState.COMPLETED] * 2
        answers = [sum(fact.kind == "model" for fact in read_facts(name, records)) for name in ("job", "many")]
        assert (answers, len(models.requests)) == ([2, 6], 8)
        rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        assert sorted(row["item"]["topic"] for row in rows) == ["kelp", "salt", "tides"]
