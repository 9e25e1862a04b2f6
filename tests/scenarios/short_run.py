"""A program that ends with its only run."""

from __future__ import annotations

from ensemble_ray import Ensemble
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, task


def main() -> None:
    """Run a team, and wait for nothing else."""
    Ensemble(tasks=[task("write", agent(ScriptedModel("text")))]).run(runtime="inline")
