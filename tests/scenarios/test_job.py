"""A team as a job of a cluster: `ray job submit`, end to end, on a cluster of the test's own."""

from __future__ import annotations

import json
import subprocess

from ensemble_ray import RunState
from ensemble_ray.record.runs import RunDirectory, read_facts
from ensemble_ray.testing import ModelServer
from tests.processes import own_directory
from tests.scenarios.job_head import RAY, job_head
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_team


def test_a_team_runs_as_a_job_of_a_cluster() -> None:
    """The job's `python` and package are those of the node, its run joins the cluster, and its record lies there."""
    with own_directory() as directory, ModelServer(script, api_key=KEY) as models:
        team = write_team(directory, models.base_url)
        with job_head(directory, **{KEY_VARIABLE: KEY}) as head:
            cluster = head.program
            run = ["ensemble-ray", "run", str(team), "--input", "topic=Ray", "--run-id", "job", "--json", "--quiet"]
            submit = [RAY, "job", "submit", f"--address={head.url}", "--", *run]
            job = subprocess.run(  # noqa: S603  a command of ours
                submit, env=dict(head.environment), capture_output=True, text=True, check=False, timeout=300
            )
            assert job.returncode == 0, f"{job.stdout}\n{job.stderr}\n{cluster.text}"
            assert "succeeded" in job.stdout
            output = json.loads(job.stdout[job.stdout.index("\n{") : job.stdout.rindex("\n}") + 2])
            assert output["raw"] == "a line"
            assert output["run_id"] == "job"
            assert len(cluster.members(named="gcs_server")) == 1
        records = directory / "records"
        assert RunDirectory(records, "job").state() is RunState.COMPLETED
        answers = sum(fact.kind == "model" for fact in read_facts("job", records))
        assert (answers, len(models.requests)) == (2, 2)
