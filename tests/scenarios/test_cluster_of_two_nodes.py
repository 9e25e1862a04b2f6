"""What is to be seen on a cluster of two nodes: programs of their own drive it, since tests elsewhere share a cluster of one."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray.process.loop import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import ModelServer
from tests.chaos.cluster import Cluster, cluster_there
from tests.command_line import run_command
from tests.processes import program
from tests.scenarios.spread_run import COUNT

ROOT = Path(__file__).resolve().parents[2]
#: Generous: processes start on both nodes of a machine on which other things run.
_PATIENCE_S = 300.0
_TEAM = '''
import os
from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task, tool

@tool
def look(text: str) -> str:
    """Look it up."""
    return text

model = OpenAIChatModel("m", base_url=os.environ["MODEL"], api_key="k")
plain = Agent(role="Plain", goal="g", llm=model)
armed = Agent(role="Armed", goal="g", llm=model, tools=[look])
team = Ensemble(
    tasks=[Task(description="one", expected_output="e", agent=plain), Task(description="two", expected_output="e", agent=armed)],
)
'''


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The cluster; what a test leaves there, such as its scheduler, the others may find."""
    with cluster_there(has_two_nodes=True) as cluster:
        yield cluster


def environment_of(cluster: Cluster, home: Path, *modules: Path, **more: str) -> dict[str, str]:
    """Return the environment of a driver whose modules nobody else has."""
    path = os.pathsep.join(map(str, (ROOT, *modules)))
    return {**os.environ, **cluster.environment, "PYTHONPATH": path, "ENSEMBLE_RAY_HOME": str(home), **more}


def test_replicas_are_on_all_nodes_and_recorded_on_that_of_the_driver(cluster: Cluster, tmp_path: Path) -> None:
    """S-MR-141, S-MR-161: as many here as there; what is done elsewhere is in the record beside the rest."""
    file, records = tmp_path / "came.json", tmp_path / "records"
    command = [sys.executable, "-m", "tests.scenarios.spread_run", str(file)]
    with program(command, log=tmp_path / "log", env=environment_of(cluster, records), cwd=ROOT) as driver:
        assert driver.process.wait(timeout=_PATIENCE_S) == 0, driver.text
    came = json.loads(file.read_text(encoding="utf-8"))
    counts = Counter(came["nodes"])
    assert len(counts) == 2
    assert came["here"] in counts
    assert min(counts.values()) == COUNT // 2
    facts = run_blocking(store_at(StoreAddress(home=str(records))).facts("spread"))
    assert Counter(fact.kind for fact in facts)["output"] == COUNT


def test_each_of_two_nodes_says_what_it_lacks(cluster: Cluster, tmp_path: Path) -> None:
    """S-CLU-1, S-CLU-3 to S-CLU-5: a module that only the caller has, and an endpoint that nobody reaches; no model is asked."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "lonely_tools.py").write_text(
        "from ensemble_ray import tool\n\n@tool\ndef look(text: str) -> str:\n    return text\n", encoding="utf-8"
    )
    (tmp_path / "team.yaml").write_text(
        "llm: {model: m, base_url: 'http://127.0.0.1:9/v1'}\n"
        "agents: {a: {role: A, goal: g, tools: ['lonely_tools:look']}}\n"
        "tasks: {t: {description: d, expected_output: e, agent: a}}\n",
        encoding="utf-8",
    )
    env = environment_of(cluster, tmp_path, modules)
    fine = run_command(tmp_path, env, "doctor", "--cluster", "--json")
    found = json.loads(fine.stdout)
    assert (fine.returncode, found["is_fine"]) == (0, True), fine.stderr
    assert len({node["node_id"] for node in found["nodes"]}) == 2
    lacking = run_command(tmp_path, env, "run", "team.yaml", "--runtime", "ray", "--check-nodes")
    assert lacking.returncode == 2, lacking.stderr
    assert lacking.stderr.count("Agent 'A' cannot be loaded: ModuleNotFoundError: No module named 'lonely_tools'") == 2
    assert lacking.stderr.count("http://127.0.0.1:9/v1: cannot be reached: ") == 2
    assert "2 of 2 nodes cannot run it" in lacking.stderr
    assert "Nothing was asked of any model" in lacking.stderr


def test_a_team_is_refused_before_any_call_when_the_cluster_lacks_its_module(cluster: Cluster, tmp_path: Path) -> None:
    """S-SET-56: the second agent's tool cannot be loaded; the first agent's call is not paid for. Exit code 2."""
    modules, elsewhere = tmp_path / "modules", tmp_path / "elsewhere"
    modules.mkdir()
    elsewhere.mkdir()
    (modules / "lonely_team.py").write_text(_TEAM, encoding="utf-8")
    with ModelServer("answer") as models:
        environment = environment_of(cluster, tmp_path / "records", modules, MODEL=models.base_url)
        command = [sys.executable, "-m", "ensemble_ray", "run", "lonely_team:team", "--runtime", "ray"]
        with program(command, log=tmp_path / "log", env=environment, cwd=elsewhere) as driver:
            assert driver.process.wait(timeout=_PATIENCE_S) == 2, driver.text
            told = driver.text
        assert "Agent 'Armed' cannot be loaded on node" in told
        assert "No module named 'lonely_team'" in told
        assert "ray job submit --working-dir ." in told
        assert models.requests == []
