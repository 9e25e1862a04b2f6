"""Runs on clusters of several nodes: a program has each cluster, since tests here share one of a single node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import environment_in
from tests.processes import own_directory, program

ROOT = Path(__file__).resolve().parents[2]
#: Generous: nodes start one after the other on a machine on which other things run.
_PATIENCE_S = 400.0


def came_of(log: Path, *steps: str) -> dict[str, Any]:
    """What came of these steps, in this order, on a cluster of their own."""
    with own_directory() as directory:
        environment = environment_in(directory, RAY_AUTH_MODE="token")
        # A node that is gone is noticed after seconds instead of a minute; one that is there may be slow to answer.
        for name, value in (("initial_delay", 0), ("period", 500), ("timeout", 10_000)):
            environment[f"RAY_health_check_{name}_ms"] = str(value)
        environment["RAY_health_check_failure_threshold"] = "3"
        file = directory / "came.json"
        command = [sys.executable, "-m", "tests.scenarios.nodes_run", str(file), *steps]
        with program(command, log=log, env=environment, cwd=ROOT) as driver:
            assert driver.process.wait(timeout=_PATIENCE_S) == 0, driver.text
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _check_placed(placed: dict[str, Any]) -> None:
    asking, away, *plain = placed["answers"]
    assert (asking, away) == (placed["desk"], placed["head"])
    assert set(plain) == {placed["desk"], placed["head"]}
    assert placed["schedulers"] == ["ensemble_ray"]  # the driver is in a namespace of its own


def _check_refused(refused: dict[str, Any]) -> None:
    lacking, greedy, mapped = refused["texts"]
    assert "Agent 'Lacking' asks for num_gpus=1, which no node has. The cluster has" in lacking
    assert "desk 1; zone=a" in lacking
    assert "Agent 'Greedy 0', Agent 'Greedy 1': the processes ask for 2 desk together, and the nodes have 1" in greedy
    assert "Agent 'Lacking' asks for num_gpus=1, which no node has" in mapped


@pytest.mark.extended
def test_agents_live_where_they_ask_to_and_their_run_goes_on_elsewhere_when_a_node_is_lost(tmp_path: Path) -> None:
    """S-CLU-42, S-CLU-43, S-CLU-50, S-CLU-53, S-CLU-60: labels and resources name nodes, others are spread.

    S-CLU-44, S-CLU-51, S-CLU-52: what waits for a node says so and starts on a new one; a group that grows uses a node that came
    meanwhile.
    """
    came = came_of(tmp_path / "log", "placed", "refused", "lost", "added")
    _check_placed(came["placed"])
    _check_refused(came["refused"])
    lost, added = came["lost"], came["added"]
    assert lost["after"] == lost["new"] != lost["before"]
    assert "Agent 'Clerk': its process waits for a node that has resources={desk: 1} free" in lost["warning"]
    assert added["new"] in added["nodes"]
