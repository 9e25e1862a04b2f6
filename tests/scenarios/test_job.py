"""A team as a job of a cluster: `ray job submit`, end to end, on a cluster of the test's own."""

from __future__ import annotations

import json
import subprocess

from ensemble_ray import RunState
from ensemble_ray.record.runs import RunDirectory, read_facts
from ensemble_ray.testing import ModelServer
from tests.processes import own_directory
from tests.scenarios.job_head import RAY, job_head
from tests.serve.teams import KEY, KEY_VARIABLE, script, write_map_reduce, write_team


def test_a_team_and_a_map_reduce_run_as_a_job_of_a_cluster() -> None:
    """The job's `python` and package are those of the node, its runs join the cluster, and their records lie there.

    S-MR-161, S-MR-177: the tasks of the second run are made by the job's own process.
    """
    with own_directory() as directory, ModelServer(script, api_key=KEY) as models:
        team, many = write_team(directory, models.base_url), write_map_reduce(directory, models.base_url)
        with job_head(directory, **{KEY_VARIABLE: KEY}) as head:
            cluster = head.program
            entry_point = (
                f"ensemble-ray run {team} --input topic=Ray --run-id job --json --quiet && "
                f"ensemble-ray run {many} --run-id many --quiet"
            )
            submit = [RAY, "job", "submit", f"--address={head.url}", "--", "sh", "-c", entry_point]
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
        assert [RunDirectory(records, name).state() for name in ("job", "many")] == [RunState.COMPLETED] * 2
        answers = [sum(fact.kind == "model" for fact in read_facts(name, records)) for name in ("job", "many")]
        assert (answers, len(models.requests)) == ([2, 6], 8)
        rows = [json.loads(line) for line in (directory / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        assert sorted(row["item"]["topic"] for row in rows) == ["kelp", "salt", "tides"]
