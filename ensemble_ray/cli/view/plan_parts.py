"""The parts of `plan`: loops, phases and graphs; delegation; a map-reduce that creates its tasks while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.view.terminal import count_noun, screen_line

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.definition.task import Task
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.plan.planner import Planned

_ROLES, _NAMES, _TEXT = 200, 120, 72
_SIDES = ("map", "reduce", "direct")
_ON_CAP = {"throw": ", fails at the cap", "return_with_flag": ", flagged at the cap", "return_last": ""}


def units_data(planned: Planned) -> list[dict[str, Any]]:
    from ensemble_ray.definition.graph import Graph, GraphEdge  # the help does not need them
    from ensemble_ray.definition.loop import Loop

    found: list[dict[str, Any]] = []
    for unit in planned.plan.units:
        data: dict[str, Any] = asdict(unit)
        declared = planned.units[unit.key]
        if isinstance(declared, Loop):
            data["until"] = None if declared.until is None else _name_of(declared.until)
        if isinstance(declared, Graph):
            for entry, edge in zip(data["edges"], declared.edges, strict=True):
                if isinstance(edge, GraphEdge):
                    entry["condition"] = None if edge.condition is None else _name_of(edge.condition)
        found.append(data)
    return found


def shape_of(data: Mapping[str, Any]) -> str:
    """Return one word for the order of tasks: phases, a graph, or the workflow."""
    kinds = {unit["unit"] for unit in data["units"]}
    return "graph" if "graph" in kinds else "phases" if "phase" in kinds else str(data["workflow"])


def _name_of(predicate: object) -> str:
    from ensemble_ray.definition.loop import Until
    from ensemble_ray.execute.callables import callable_name

    if not isinstance(predicate, Until):
        return callable_name(predicate)
    if predicate.condition is not None:
        return f"parsed output: {callable_name(predicate.condition)}"
    if predicate.kind == "unchanged":
        return "output unchanged"
    return f"text contains '{predicate.text}'"


def unit_lines(
    key: str, units: Mapping[str, Mapping[str, Any]], lines_of_task: Callable[[str], list[str]], width: int
) -> list[str]:
    """Return a unit and its members as text.

    Args:
        key: Key of the unit.
        units: All units, by key.
        lines_of_task: Returns the lines of a task.
        width: Width of the column of keys.
    """
    unit = units[key]
    match unit["unit"]:
        case "loop":
            head, inside = _loop(unit), unit["body"]
        case "phase":
            review = [unit["review"]] if unit["review"] else []
            head, inside = _phase(unit), [*unit["members"], *review]
        case _:
            head, inside = _graph(unit), [state["member"] for state in unit["states"]]
    lines = [f"  {key:<{width}}  {screen_line(head, _NAMES)}"]
    for member in inside:
        is_unit = member in units
        found = unit_lines(member, units, lines_of_task, width) if is_unit else lines_of_task(member)
        lines += [f"  {line}" for line in found]
    if unit["unit"] == "graph":
        lines += [f"    {screen_line(line, _NAMES)}" for line in _edges(unit)]
    return lines


def _loop(unit: Mapping[str, Any]) -> str:
    until = f", until {unit['until']}" if unit["until"] else ""
    tokens = "" if unit["max_tokens"] is None else f", at most {count_noun(unit['max_tokens'], 'token')}"
    waits = f" <- {', '.join(unit['context'])}" if unit["context"] else ""
    cap = f"at most {count_noun(unit['max_iterations'], 'iteration')}"
    return f"{cap}{tokens}{until}{_ON_CAP[unit['on_max_iterations']]}{waits}"


def _phase(unit: Mapping[str, Any]) -> str:
    after = f", after {', '.join(unit['after'])}" if unit["after"] else ""
    retries = "1 retry" if unit["max_retries"] == 1 else f"{unit['max_retries']} retries"
    review = f", reviewed by {unit['review']} (at most {retries})" if unit["review"] else ""
    return f"{unit['workflow']}{after}{review}"


def _graph(unit: Mapping[str, Any]) -> str:
    steps = count_noun(unit["max_steps"], "step")
    return f"begins at {unit['start']}, at most {steps}{_ON_CAP[unit['on_max_steps']]}"


def _edges(unit: Mapping[str, Any]) -> Iterator[str]:
    for edge in unit["edges"]:
        match edge["entry"]:
            case "edge":
                reasons = [each for each in (edge["label"], edge["condition"] and f"if {edge['condition']}") if each]
                why = f" ({', '.join(reasons)})" if reasons else ""
                yield f"{edge['from_state']} -> {_target(edge['to_state'])}{why}"
            case "fork":
                yield f"{edge['from_state']} -> {', '.join(edge['to_states'])} (side by side)"
            case _:
                needed = "all of them" if edge["count"] is None else f"the first {edge['count']}"
                yield f"{', '.join(edge['from_states'])} -> {_target(edge['to_state'])} (after {needed})"


def _target(state: str) -> str:
    return "END" if state == "__END__" else state


# Delegation.


def manager_data(ensemble: Ensemble, planned: Planned) -> dict[str, Any] | None:
    """Return the manager and its rules as JSON data, or None without a manager."""
    from ensemble_ray.plan.plan import MANAGER_KEY  # the help does not need it

    rules = planned.plan.hierarchy
    if rules is None:
        return None
    manager = planned.agents[MANAGER_KEY]
    return {
        "model": repr(manager.llm),
        "max_iterations": manager.max_iterations,
        "prompts": None
        if ensemble.manager_prompt_strategy is None
        else type(ensemble.manager_prompt_strategy).__name__,
        "rules": asdict(rules),
    }


def delegation_data(ensemble: Ensemble, planned: Planned) -> dict[str, Any] | None:
    """Return the rules of all delegations as JSON data, or None without delegations."""
    peers = [entry.role for entry in planned.plan.agents if entry.allow_delegation]
    if planned.plan.hierarchy is None and not peers:
        return None
    limit = ensemble.delegation_timeout
    return {
        "peers": peers,
        "max_depth": ensemble.max_delegation_depth,
        "policies": [getattr(each, "__name__", type(each).__name__) for each in ensemble.delegation_policies],
        "timeout_s": None if limit is None else limit.total_seconds(),
        "retries": ensemble.delegation_retries,
    }


def manager_lines(manager: Mapping[str, Any], delegation: Mapping[str, Any]) -> list[str]:
    prompts = f", prompts by {manager['prompts']}" if manager["prompts"] else ""
    rules = [*_rules(manager["rules"]), *_describe_shared(delegation)]
    width = max(len(name) for name, _ in rules)
    return [
        "\nManager",
        f"  model {manager['model']}, at most {count_noun(manager['max_iterations'], 'tool call')}{prompts}",
        "\nRules",
        *(f"  {name:<{width}}  {text}" for name, text in rules),
    ]


def peer_lines(delegation: Mapping[str, Any]) -> list[str]:
    rules = [("may delegate", _join_roles(delegation["peers"])), ("depth", f"at most {delegation['max_depth']}")]
    rules += list(_describe_shared(delegation))
    width = max(len(name) for name, _ in rules)
    return ["\nDelegation", *(f"  {name:<{width}}  {text}" for name, text in rules)]


def _rules(rules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if rules["allowed_workers"]:
        yield "allowed", _join_roles(rules["allowed_workers"])
    if rules["required_stages"]:
        yield "stages", screen_line(" -> ".join(", ".join(stage) for stage in rules["required_stages"]), _ROLES)
    if rules["required_workers"]:
        ways = {"remind": "the manager is reminded once", "fail": "the manager is not reminded"}
        yield "required", f"{_join_roles(rules['required_workers'])} ({ways[rules['enforce_required']]})"
    if rules["max_calls_per_worker"]:
        caps = rules["max_calls_per_worker"].items()
        yield "calls", screen_line(", ".join(f"{role} at most {cap}" for role, cap in caps), _ROLES)
    if rules["global_max_delegations"]:
        yield "delegations", f"at most {rules['global_max_delegations']}"
    turns = rules["stall_turns"]
    yield "stall", f"ends after {count_noun(turns, 'turn')} without progress" if turns else "never ends the run"


def _describe_shared(delegation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if delegation["policies"]:
        yield "policies", screen_line(", ".join(delegation["policies"]), _NAMES)
    if delegation["timeout_s"] is not None:
        yield "timeout", f"{delegation['timeout_s']:g} s"


def _join_roles(roles: list[str]) -> str:
    return screen_line(", ".join(roles), _ROLES)


# Map-reduce.


def map_reduce_data(definition: MapDefinition) -> dict[str, Any]:
    """Return the definition as JSON data, without reading an item."""
    from ensemble_ray.definition.map_reduce import MapReduceDefinition

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
    from ensemble_ray.definition.validation import TeamModels
    from ensemble_ray.record.identity.definition import identity_of

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
