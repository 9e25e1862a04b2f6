"""What is to be seen on a cluster of two nodes: programs of their own drive it, since tests elsewhere share a cluster of one."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.testing import ModelServer
from tests.chaos.cluster import cluster_there
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


_COMMANDS = (
    ("doctor", "--cluster", "--json"),
    ("run", "team.yaml", "--runtime", "ray", "--check-nodes"),
    ("run", "lonely_team:team", "--runtime", "ray"),
)


@dataclass(frozen=True)
class Came:
    """What came of the program on the cluster."""

    #: the node of the program, and that of each item
    here: str
    nodes: list[str]
    facts: list[Fact]
    #: exit code, standard output and standard error of each command
    called: list[tuple[int, str, str]]
    #: how often a model was asked by one of them
    requests: int


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> Came:
    """Run the program once for all tests, with modules that no other process has."""
    place = tmp_path_factory.mktemp("two nodes")
    modules, file, records = place / "modules", place / "came.json", place / "records"
    modules.mkdir()
    (modules / "lonely_team.py").write_text(_TEAM, encoding="utf-8")
    (modules / "lonely_tools.py").write_text(
        "from ensemble_ray import tool\n\n@tool\ndef look(text: str) -> str:\n    return text\n", encoding="utf-8"
    )
    (place / "team.yaml").write_text(
        "llm: {model: m, base_url: 'http://127.0.0.1:9/v1'}\n"
        "agents: {a: {role: A, goal: g, tools: ['lonely_tools:look']}}\n"
        "tasks: {t: {description: d, expected_output: e, agent: a}}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "tests.scenarios.spread_run", str(file), json.dumps(_COMMANDS)]
    with cluster_there(has_two_nodes=True) as cluster, ModelServer("answer") as models:
        path = os.pathsep.join(map(str, (ROOT, modules)))
        environment = {**os.environ, **cluster.environment, "PYTHONPATH": path, "ENSEMBLE_RAY_HOME": str(records)}
        environment["MODEL"] = models.base_url
        with program(command, log=place / "log", env=environment, cwd=place) as driver:
            assert driver.process.wait(timeout=_PATIENCE_S) == 0, driver.text
    facts = run_blocking(store_at(StoreAddress(home=str(records))).facts("spread"))
    return Came(facts=facts, requests=len(models.requests), **json.loads(file.read_text(encoding="utf-8")))


def test_replicas_are_on_all_nodes_and_recorded_on_that_of_the_driver(came: Came) -> None:
    """S-MR-141, S-MR-161: as many here as there; what is done elsewhere is in the record beside the rest."""
    counts = Counter(came.nodes)
    assert len(counts) == 2
    assert came.here in counts
    assert min(counts.values()) == COUNT // 2
    assert Counter(fact.kind for fact in came.facts)["output"] == COUNT


def test_each_of_two_nodes_says_what_it_lacks(came: Came) -> None:
    """S-CLU-1, S-CLU-3 to S-CLU-5: a module that only the caller has, and an endpoint that nobody reaches; no model is asked."""
    (code, printed, said), (lacking_code, _, lacking), _ = came.called
    found = json.loads(printed)
    assert (code, found["is_fine"]) == (0, True), said
    assert len({node["node_id"] for node in found["nodes"]}) == 2
    assert lacking_code == 2, lacking
    assert lacking.count("Agent 'A' cannot be loaded: ModuleNotFoundError: No module named 'lonely_tools'") == 2
    assert lacking.count("http://127.0.0.1:9/v1: cannot be reached: ") == 2
    assert "2 of 2 nodes cannot run it" in lacking
    assert "Nothing was asked of any model" in lacking


def test_a_team_is_refused_before_any_call_when_the_cluster_lacks_its_module(came: Came) -> None:
    """S-SET-56: the second agent's tool cannot be loaded; the first agent's call is not paid for. Exit code 2."""
    code, _, said = came.called[2]
    assert code == 2, said
    assert "Agent 'Armed' cannot be loaded on node" in said
    assert "No module named 'lonely_team'" in said
    assert "ray job submit --working-dir ." in said
    assert came.requests == 0
