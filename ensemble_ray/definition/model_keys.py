"""Whether the models of a definition have their keys in this process, before any of them is asked. Package: definition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.team_model import uses_team_model
from ensemble_ray.definition.validation import declared_agents
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError, message_of

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.definition.run_rules import RunRules

__all__ = ["check_keys_of", "check_model_keys"]

#: How many places of one model's are named.
_MOST_PLACES = 3


def check_model_keys(definition: EnsembleDefinition | MapDefinition, *, with_named: bool = False) -> None:
    """Check that every model that a run will ask has its key.

    Args:
        definition: What will run. Tasks that are made while it runs are not known yet.
        with_named: Whether `models` are checked too, which a run asks only when it is told to.

    Raises:
        ValidationError: models have no key; it names all of them.
    """
    check_keys_of([*_models_of(definition), *(definition.models.items() if with_named else ())])


def check_keys_of(models: Iterable[tuple[str, object]]) -> None:
    """Check that models have their keys.

    Args:
        models: Where each is given, and the model; whatever has no method `check_key` needs none.

    Raises:
        ValidationError: some have no key; it names all of them.
    """
    problems: dict[str, list[str]] = {}
    for place, model in models:
        model = getattr(model, "delegate", model)  # noqa: PLW2901  behind its rate limit
        check = getattr(model, "check_key", None)
        try:
            if callable(check):
                check()
        except ValidationError as error:
            problems.setdefault(message_of(error), []).append(place)
    if problems:
        raise ValidationError("\n".join(f"{_shown(places)}: {text}" for text, places in problems.items()))


def _models_of(definition: RunRules) -> Iterator[tuple[str, object]]:
    """Yield the models that a run asks, with where they are given."""
    if not isinstance(definition, EnsembleDefinition):
        yield "llm", definition.llm
        return
    agents = declared_agents(definition)
    tasks = [task for task in definition.all_tasks if task.handler is None]
    if any(map(uses_team_model, agents)) or any(task.agent is None and task.llm is None for task in tasks):
        yield "llm", definition.llm
    for agent in agents:
        if agent.runner is None:
            yield f"Agent '{agent.role}'", agent.llm
    for number, task in enumerate(definition.all_tasks, start=1):
        name = f"Task '{task.name or number}'"
        if task.handler is None:
            yield name, task.llm
        if task.reflection_config is not None and task.reflection_config.strategy is None:
            yield f"{name} reflection_config", task.reflection_config.model
    if definition.workflow is Workflow.HIERARCHICAL:
        yield "manager_llm", definition.manager_llm
    if definition.memory is not None:
        yield "memory", getattr(definition.memory.long_term, "embedding_model", None)
    yield "memory_store", getattr(definition.memory_store, "embedding_model", None)


def _shown(places: list[str]) -> str:
    more = len(places) - _MOST_PLACES
    return ", ".join(places[:_MOST_PLACES]) + (f" and {more} more" if more > 0 else "")
