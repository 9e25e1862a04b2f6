"""A map on a cluster of two nodes: a program of its own drives it, since tests here share a cluster of one."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

from ensemble_ray.process.loop import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from tests.chaos.cluster import cluster_there
from tests.processes import program
from tests.scenarios.spread_run import COUNT

ROOT = Path(__file__).resolve().parents[2]
#: Generous: processes start on both nodes of a machine on which other things run.
_PATIENCE_S = 300.0


def test_replicas_are_on_all_nodes_and_recorded_on_that_of_the_driver(tmp_path: Path) -> None:
    """S-MR-141, S-MR-161: as many here as there; what is done elsewhere is in the record beside the rest."""
    file, records = tmp_path / "came.json", tmp_path / "records"
    with cluster_there(has_two_nodes=True) as cluster:
        environment = {**os.environ, **cluster.environment, "PYTHONPATH": str(ROOT), "ENSEMBLE_RAY_HOME": str(records)}
        command = [sys.executable, "-m", "tests.scenarios.spread_run", str(file)]
        with program(command, log=tmp_path / "log", env=environment, cwd=ROOT) as driver:
            assert driver.process.wait(timeout=_PATIENCE_S) == 0, driver.text
    came = json.loads(file.read_text(encoding="utf-8"))
    counts = Counter(came["nodes"])
    assert len(counts) == 2
    assert came["here"] in counts
    assert min(counts.values()) == COUNT // 2
    facts = run_blocking(store_at(StoreAddress(home=str(records))).facts("spread"))
    assert Counter(fact.kind for fact in facts)["output"] == COUNT
