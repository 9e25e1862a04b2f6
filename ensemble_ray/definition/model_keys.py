"""Whether the models of a definition have their keys in this process, before any of them is asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.validation import declared_agents, manager_model, uses_team_model
from ensemble_ray.errors import ValidationError, message_of

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.ports import ChatModel


#: How many places of one model's are named.
_MOST_PLACES = 3


def check_model_keys(definition: EnsembleDefinition | MapDefinition) -> None:
    """Check that every model that a run will ask has its key.

    Args:
        definition: What will run. Tasks that are made while it runs are not known yet.

    Raises:
        ValidationError: models have no key; it names all of them.
    """
    check_keys_of(_models_of(definition))


def check_team_keys(teams: Mapping[str, EnsembleDefinition | MapDefinition]) -> None:
    """Check the same of teams that are served, and of their `models`, which a run asks only when it is told to.

    Raises:
        ValidationError: models have no key; it names all of them, with their teams.
    """
    problems: list[str] = []
    for name, team in teams.items():
        try:
            check_keys_of([*_models_of(team), *team.models.items()])
        except ValidationError as error:
            problems += [f"Team '{name}': {line}" for line in message_of(error).splitlines()]
    if problems:
        raise ValidationError("\n".join(problems))


def check_keys_of(models: Iterable[tuple[str, object]]) -> None:
    """Check that models have their keys.

    Args:
        models: Where each is given, and the model; whatever has no method `check_key` needs none.

    Raises:
        ValidationError: some have no key; it names all of them.
    """
    problems: dict[str, dict[str, None]] = {}
    for place, model in models:
        model = getattr(model, "delegate", model)  # noqa: PLW2901  behind its rate limit
        check = getattr(model, "check_key", None)
        try:
            if callable(check):
                check()
        except ValidationError as error:
            problems.setdefault(message_of(error), {})[place] = None
    if problems:
        raise ValidationError("\n".join(f"{_shown([*places])}: {text}" for text, places in problems.items()))


def _models_of(definition: EnsembleDefinition | MapDefinition) -> Iterator[tuple[str, object]]:
    """Yield the models that a run asks, with where they are given."""
    if not isinstance(definition, EnsembleDefinition):
        tasks = _known_tasks(definition)
        yield from _models_of_tasks(tasks, (), definition.llm)
        if definition.reflection_store is not None:
            yield from _models_of_reflection(tasks)
        return
    tasks, agents = definition.all_tasks, declared_agents(definition)
    has_manager = definition.workflow is Workflow.HIERARCHICAL
    yield from _models_of_tasks(tasks, agents, definition.llm, has_manager=has_manager)
    if has_manager:
        yield "manager_llm", manager_model(definition, agents)
    else:
        yield from _models_of_reflection(tasks)
    if definition.memory is not None:
        yield "memory", getattr(definition.memory.long_term, "embedding_model", None)
    yield "memory_store", getattr(definition.memory_store, "embedding_model", None)


def _models_of_tasks(
    tasks: Sequence[Task], agents: Sequence[Agent], shared: ChatModel | None, *, has_manager: bool = False
) -> Iterator[tuple[str, object]]:
    """Yield the model of each task, and those of all agents where work may be delegated to them."""
    if not has_manager:
        named = {task.agent: None for task in tasks if task.agent is not None}
        can_delegate = any(agent.allow_delegation for agent in named)
        agents = (
            [*named, *agents] if can_delegate else [task.agent for task in tasks if task.agent and task.llm is None]
        )
    for agent in dict.fromkeys(agents):
        if uses_team_model(agent):
            yield "llm", shared
        elif agent.runner is None:
            yield f"Agent '{agent.role}'", agent.llm
    for number, task in enumerate(tasks, start=1):
        if task.handler is not None or (task.agent is not None and (has_manager or task.agent.runner is not None)):
            continue
        if task.llm is not None:
            yield f"Task '{task.name or number}'", task.llm
        elif task.agent is None:
            yield "llm", shared


def _models_of_reflection(tasks: Sequence[Task]) -> Iterator[tuple[str, object]]:
    for number, task in enumerate(tasks, start=1):
        config = task.reflection_config
        if config is not None and config.strategy is None:
            model = task.llm if config.model is None else config.model
            yield f"Task '{task.name or number}' reflection_config", model


def _known_tasks(definition: MapDefinition) -> Sequence[Task]:
    """Return the tasks that factories fill in, as those of team files and of the command line do."""
    factories = (getattr(definition, name, None) for name in ("map_task", "reduce_task", "direct_task"))
    return [task for each in factories if isinstance(task := getattr(each, "task", None), Task)]


def _shown(places: list[str]) -> str:
    more = len(places) - _MOST_PLACES
    return ", ".join(places[:_MOST_PLACES]) + (f" and {more} more" if more > 0 else "")
