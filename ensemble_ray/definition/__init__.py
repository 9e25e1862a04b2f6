"""Definitions: frozen values that a user declares, without clients, locks or handles."""

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import ParallelErrorStrategy, Workflow
from ensemble_ray.definition.run_options import RunOptions
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.validation import validate

__all__ = ["Agent", "EnsembleDefinition", "ParallelErrorStrategy", "RunOptions", "Task", "Workflow", "validate"]
