"""Agents of others in team files."""

from __future__ import annotations

from pathlib import Path

from ensemble_ray.teamfile import load_ensemble
from ensemble_ray.testing import ScriptedModel
from tests.ensemble_ray.teamfile.conftest import Load, Refused

RUNNERS = """
from ensemble_ray import OpenAIChatModel as Imported

class Echo:
    async def run(self, request):
        return request.description

made = Echo()
"""
WRITTEN = """
from ensemble_ray import Agent, Ensemble, Task
from runners import Echo

clerk = Agent(role="Clerk", goal="Help", runner=Echo())
team = Ensemble(tasks=[Task(description="Help", expected_output="Help", agent=clerk)])
"""
TEAM = """
agents:
  clerk:
    role: Clerk
    goal: Help
    runner: {RUNNER}
    runner_effect: none
tasks:
  help: {description: Help, agent: clerk}
"""


def test_runner_of_a_team_file_does_its_tasks(folder: Path, load: Load) -> None:
    """S-INT-58: a class is called, an object is taken; no model is needed."""
    (folder / "runners.py").write_text(RUNNERS, encoding="utf-8")
    for named in ("runners:Echo", "runners:made"):
        team = load(TEAM.replace("{RUNNER}", named))
        assert team.tasks[0].agent is not None
        assert team.tasks[0].agent.runner_effect == "none"
        assert team.run(runtime="inline").raw == "Help"


def test_other_model_leaves_a_runner_alone(folder: Path, load: Load) -> None:
    """S-INT-58: `--llm` is for those who have a model."""
    (folder / "runners.py").write_text(RUNNERS, encoding="utf-8")
    (folder / "written.py").write_text(WRITTEN, encoding="utf-8")
    load(TEAM.replace("{RUNNER}", "runners:Echo"))
    model = ScriptedModel()
    for target in ("team.yaml", "written:team"):
        assert load_ensemble(target, llm=model).run(runtime="inline").raw == "Help"


def test_what_is_no_runner_is_refused_with_its_place(folder: Path, refused: Refused) -> None:
    """S-INT-58, S-INT-50: nothing of it is called; what an installed package brings must say its effect."""
    (folder / "runners.py").write_text(RUNNERS, encoding="utf-8")
    for named, said in (
        ("runners:RUNNERS", "no attribute 'RUNNERS'"),
        ("runners:Imported", "an object with 'run'"),
        ("asyncio:Runner", "an object with 'run'"),
        ("runners:Echo\n    tools: [calculator]", "Agent cannot have both a runner and tools."),
    ):
        lines = refused(TEAM.replace("{RUNNER}", named))
        assert any(said in line for line in lines), lines
