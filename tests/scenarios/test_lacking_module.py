"""A team whose module the cluster lacks: a program of its own drives it, with a path that nobody else has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ensemble_ray.testing import ModelServer
from tests.chaos.cluster import cluster_there
from tests.processes import program

ROOT = Path(__file__).resolve().parents[2]
#: Generous: processes start on a machine on which other things run.
_PATIENCE_S = 240.0
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


def test_a_team_is_refused_before_any_call_when_the_cluster_lacks_its_module(tmp_path: Path) -> None:
    """S-SET-56: the second agent's tool cannot be loaded; the first agent's call is not paid for. Exit code 2."""
    modules, elsewhere = tmp_path / "modules", tmp_path / "elsewhere"
    modules.mkdir()
    elsewhere.mkdir()
    (modules / "lonely_team.py").write_text(_TEAM, encoding="utf-8")
    with cluster_there() as cluster, ModelServer("answer") as models:
        environment = {
            **os.environ,
            **cluster.environment,
            "PYTHONPATH": f"{ROOT}:{modules}",
            "ENSEMBLE_RAY_HOME": str(tmp_path / "records"),
            "MODEL": models.base_url,
        }
        command = [sys.executable, "-m", "ensemble_ray", "run", "lonely_team:team", "--runtime", "ray"]
        with program(command, log=tmp_path / "log", env=environment, cwd=elsewhere) as driver:
            assert driver.process.wait(timeout=_PATIENCE_S) == 2, driver.text
            told = driver.text
        assert "Agent 'Armed' cannot be loaded on node" in told
        assert "No module named 'lonely_team'" in told
        assert "ray job submit --working-dir ." in told
        assert models.requests == []
