"""Load a team from a target: the path of a YAML file, or `module:attribute`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import Origin
from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble, Startable
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.plan.planner import TaskDependencyGraph
from ensemble_ray.ports import ChatModel
from ensemble_ray.teamfile.document import list_known_names, suggestion
from ensemble_ray.teamfile.references import (
    Provenance,
    definer_of,
    find_attribute,
    is_reference,
    make_importable,
    module_provenance,
)

if TYPE_CHECKING:
    from ensemble_ray.map_reduce import MapEnsemble, MapReduceEnsemble


Runnable: TypeAlias = "Ensemble | MapReduceEnsemble | MapEnsemble"

_PRODUCT = "ensemble_ray"
_YAML = {".yaml", ".yml"}
_LOADER_OVERRIDES = {"directory", "llm", "workflow"}  # others are arguments of the user's factory


def is_team_file(target: str) -> bool:
    """Return whether a target is the path of a YAML file."""
    return Path(target).suffix.lower() in _YAML


def load_ensemble(
    target: str,
    *,
    llm: str | ChatModel | Sequence[ChatModel | str] | None = None,
    needs_keys: bool = True,
    arguments: Mapping[str, str] | None = None,
) -> Ensemble:
    """Load a target like `load_runnable`. A planned map-reduce becomes an ensemble."""
    found = load_runnable(target, llm=llm, needs_keys=needs_keys, arguments=arguments)
    planned = find_planned_form(found)
    if planned is None:
        raise ValidationError(
            f"'{target}' is a {type(found).__name__} whose tasks are made while it runs: it has no plan to fork or to "
            f"serve. `ensemble-ray run {target}` runs it, also as a job of a cluster"
        )
    return planned


def find_planned_form(definition: Runnable) -> Ensemble | None:
    """Return the definition as an ensemble of the same origin; None: its tasks are made during the run."""
    if isinstance(definition, Ensemble):
        return definition
    from ensemble_ray.map_reduce import MapReduceEnsemble

    if isinstance(definition, MapReduceEnsemble) and definition.is_planned:
        return definition.to_ensemble().with_source(definition.source)
    return None


def load_runnable(
    target: str,
    *,
    llm: str | ChatModel | Sequence[ChatModel | str] | None = None,
    needs_keys: bool = True,
    arguments: Mapping[str, str] | None = None,
    text: str | None = None,
) -> Runnable:
    """Load the team of a YAML file, or of `module:attribute`: a team or a callable that makes one.

    `llm` replaces every model. If not `needs_keys`, the team is only inspected. `arguments` are for the callable. `text` replaces the
    content of the file.
    """
    model = None
    if llm is not None:
        from ensemble_ray.llm.fallback import resolve_chain

        model = resolve_chain(llm)
    chosen = {"llm": llm} if isinstance(llm, str) else {}
    if is_team_file(target):
        from ensemble_ray.teamfile.team import load_team_file

        loaded = load_team_file(target, llm=model, needs_keys=needs_keys, text=text)
        return loaded.with_origin(loaded.origin or target, chosen)
    if is_reference(target):
        make_importable(Path.cwd())
        chosen["directory"] = str(Path.cwd())
        return _replace_models(_load_from_module(target, arguments or {}), model).with_origin(target, chosen)
    text = f"'{target}' is neither a YAML file (name.yaml) nor module:attribute"
    module, colon, attribute = target.partition(":")
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").replace("/", ".").strip(".")
        text = f"{text}. Did you mean '{dotted}:{attribute or 'team'}'?"
    elif not colon and Path(target).is_file():
        text = f"{text}. A team file's name ends in .yaml"
    elif Path(f"{target}.yaml").is_file():
        text = f"{text}. Did you mean '{target}.yaml'?"
    raise ValidationError(text)


def load_source(source: Origin, *, needs_keys: bool = True) -> Runnable:
    """Load the team of a record. Refuse a target that no user can have started: a record is data from outside."""
    target, chosen = source.place, source.overrides
    if directory := chosen.get("directory"):
        make_importable(Path(directory))
    arguments = {name: value for name, value in chosen.items() if name not in _LOADER_OVERRIDES}
    if is_reference(target):
        module = target.partition(":")[0]
        found = module_provenance(module)
        if found is Provenance.STANDARD:
            raise ValidationError(f"'{target}' belongs to {found.value}: a record cannot have begun there")
        if arguments and found is Provenance.INSTALLED and module.partition(".")[0] != _PRODUCT:
            raise ValidationError(f"'{target}' is of {found.value}, and takes no arguments from a record")
    loaded = load_runnable(target, llm=chosen.get("llm"), needs_keys=needs_keys, arguments=arguments)
    if (workflow := chosen.get("workflow")) and isinstance(loaded, Ensemble):
        loaded = loaded.replace(workflow=workflow)
    return loaded.with_origin(target, chosen)


def _load_from_module(target: str, arguments: Mapping[str, str]) -> Runnable:
    found = find_attribute(target)
    if not isinstance(found, Startable) and callable(found):
        definer = definer_of(found)
        if not definer or module_provenance(definer) in {Provenance.STANDARD, None}:  # never call library functions
            kind = "class" if isinstance(found, type) else type(found).__name__
            raise ValidationError(
                f"'{target}' is a {kind} of {definer or 'no known module'}, and neither an Ensemble nor a function that "
                f"makes one.{_suggest_team(target)}"
            )
        found = _call(found, target, arguments)
    if isinstance(found, Startable):
        return cast("Runnable", found)
    raise ValidationError(
        f"'{target}' is a {type(found).__name__}, and neither an Ensemble nor a function that makes one."
        f"{_suggest_team(target)}"
    )


def _call(factory: Callable[..., object], target: str, arguments: Mapping[str, str]) -> object:
    try:
        needed = [
            each.name
            for each in inspect.signature(factory).parameters.values()
            if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
            if each.name not in arguments
        ]
    except (TypeError, ValueError):
        needed = []
    if needed:
        raise ValidationError(f"'{target}' needs arguments: [{', '.join(needed)}]. A factory of a team takes none")
    if inspect.iscoroutinefunction(factory):
        raise ValidationError(f"'{target}' is async. A factory of a team is a plain function")
    try:
        return factory(**arguments)
    except ValidationError as error:
        raise ValidationError(f"{target}(): {error}") from error
    except Exception as error:
        raise ValidationError(f"{target}() failed: {type(error).__name__}: {message_of(error)}") from error


def _suggest_team(target: str) -> str:
    module_name, _, attribute = target.partition(":")
    teams = [name for name, value in vars(sys.modules[module_name]).items() if isinstance(value, Startable)]
    return f"{suggestion(attribute, teams)} {list_known_names(teams)}" if teams else ""


def _replace_models(ensemble: Runnable, model: ChatModel | None) -> Runnable:
    """Return the team with this model. Tasks and agents keep their identity."""
    if model is None:
        return ensemble
    if not isinstance(ensemble, Ensemble):
        raise ValidationError(
            f"No other model can be chosen for a {type(ensemble).__name__}, since its factories make the agents: "
            "let them use its llm"
        )
    agents: dict[str, Agent] = {}

    def with_model(agent: Agent) -> Agent:
        return agents.setdefault(agent.object_id, agent if agent.runner is not None else agent.rewritten(llm=model))

    tasks: dict[str, Task] = {}
    for task in TaskDependencyGraph(ensemble.all_tasks).in_dependency_order():
        changes: dict[str, object] = {"context": tuple(tasks.get(each.object_id, each) for each in task.context)}
        if task.agent is not None:
            changes["agent"] = with_model(task.agent)
        if task.llm is not None:
            changes["llm"] = model
        if task.reflection_config is not None and task.reflection_config.model is not None:
            changes["reflection_config"] = task.reflection_config.replace(model=model)
        tasks[task.object_id] = task.rewritten(**changes)
    listed = None if ensemble.agents is None else [with_model(agent) for agent in ensemble.agents]
    if len(tasks) < len({task.object_id for task in ensemble.all_tasks}):
        return ensemble  # a circular dependency, which the run reports
    return ensemble.replace(
        tasks=[tasks[task.object_id] for task in ensemble.tasks],
        loops=[loop.with_tasks_of(tasks) for loop in ensemble.loops],
        phases=[phase.with_tasks_of(tasks) for phase in ensemble.phases],
        graph=None if ensemble.graph is None else ensemble.graph.with_tasks_of(tasks),
        agents=listed,
        llm=model,
        # None stays None: the manager then has the model of the first agent.
        manager_llm=None if ensemble.manager_llm is None else model,
    )
