"""Declare: frozen values that say what shall be done. They hold specifications, never clients, locks or handles."""

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition, RunOptions
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.validation import validate
from ensemble_ray.definition.workflow import ParallelErrorStrategy, Workflow

__all__ = ["Agent", "EnsembleDefinition", "ParallelErrorStrategy", "RunOptions", "Task", "Workflow", "validate"]
