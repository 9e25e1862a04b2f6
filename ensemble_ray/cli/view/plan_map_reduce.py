"""The part of `plan` about a map-reduce that creates its tasks while it runs: items, texts, groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.view.terminal import screen_line
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.definition.validation import TeamModels
from ensemble_ray.record.identity.definition import identity_of

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task

_SIDES = ("map", "reduce", "direct")
_TEXT = 72


def map_reduce_data(definition: MapDefinition) -> dict[str, Any]:
    """Return the definition as JSON data, without reading an item."""
    reduced = definition if isinstance(definition, MapReduceDefinition) else None
    factories = {side: getattr(definition, f"{side}_task", None) for side in _SIDES}
    return {
        "workflow": definition.shown_workflow,
        "items": {"source": definition.item_source.place, "count": definition.item_source.count},
        "tasks": {side: _side(factory, definition) for side, factory in factories.items() if factory is not None},
        "mode": None if reduced is None else reduced.mode,
        "ordered": None if reduced is None else reduced.ordered,
        "token_budget": None if reduced is None else reduced.budget,
        "chunk_size": None if reduced is None or reduced.is_adaptive else reduced.effective_chunk_size,
        "on_item_error": definition.item_policy,
        "results": None if definition.results is None else str(definition.results),
        "dead_letters": None if definition.dead_letters is None else str(definition.dead_letters),
    }


def _side(factory: object, definition: MapDefinition) -> dict[str, Any]:
    """Return the texts of a factory's task, or the factory's name."""
    task: Task | None = getattr(factory, "task", None)
    if task is None:
        return {"factory": identity_of(factory)["callable"]}
    agent = task.agent
    model = task.llm
    if model is None and agent is not None:
        model = TeamModels(definition).resolve_agent(agent).llm
    return {
        "description": task.description,
        "role": None if agent is None else agent.role,
        "model": None if model is None else repr(model),
    }


def map_reduce_lines(target: str, data: Mapping[str, Any]) -> list[str]:
    count = data["items"]["count"]
    lines = [f"{target}: {data['workflow']}, {'as many items as there are' if count is None else f'{count:,} items'}"]
    lines += ["", "Items", f"  {data['items']['source']}", f"  a failed one: {data['on_item_error']}", "", "Tasks"]
    for side, task in data["tasks"].items():
        if "factory" in task:
            lines.append(f"  {side:<7}  made by {task['factory']}")
            continue
        lines.append(f"  {side:<7}  {task['role'] or '(synthesized)'}: {screen_line(task['description'], _TEXT)}")
        if task["model"]:
            lines.append(f"  {'':<7}  model {task['model']}")
    if data["mode"] is not None:
        size = f"{data['token_budget']:,} tokens" if data["token_budget"] else f"{data['chunk_size']} outputs"
        order = ", in the order of the items" if data["ordered"] else ""
        how = "level by level" if data["mode"] == "levels" else f"as outputs come{order}"
        lines += ["", "Groups", f"  of {size}, {how}"]
    files = {"rows": data["results"], "failed items": data["dead_letters"]}
    if any(files.values()):
        lines += ["", "Files", *(f"  {name}: {path}" for name, path in files.items() if path)]
    return [*lines, "", "No model was called."]
