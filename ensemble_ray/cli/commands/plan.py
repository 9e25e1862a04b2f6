"""`ensemble-ray plan`: show the tasks of a team, their order, agents and models, without a model call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ensemble_ray.cli.commands.run import Inputs, InputsFile, Llm, Target, Workflow
from ensemble_ray.cli.view.pictures import Dag, Mermaid, Pictures, Svg
from ensemble_ray.cli.view.plan_parts import (
    delegation_data,
    manager_data,
    manager_lines,
    map_reduce_data,
    map_reduce_lines,
    peer_lines,
    shape_of,
    unit_lines,
    units_data,
)
from ensemble_ray.cli.view.terminal import count_noun, say, screen_line, show, show_json

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.definition.task import Task
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.plan.planner import Planned, ResolvedTasks
    from ensemble_ray.visualization.dag_model import DagModel

_TEXT = 72


def plan(
    target: Target,
    *,
    inputs: Inputs = None,
    inputs_file: InputsFile = None,
    workflow: Workflow = None,
    llm: Llm = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    svg: Svg = None,
    mermaid: Mermaid = None,
    dag: Dag = None,
) -> None:
    """Show what would run, without a model call.

    Tasks by level, with loops, phases and a graph, or a manager with its rules; agents with tools and models; missing
    inputs. Needs no key. --svg, --mermaid and --dag write the plan as a graph instead.
    """
    from ensemble_ray.cli.inputs.arguments import input_warnings, read_inputs
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.recovery.resuming import planned_form
    from ensemble_ray.teamfile import load_runnable

    values = read_inputs(inputs or (), inputs_file)
    pictures = Pictures(svg=svg, mermaid=mermaid, dag=dag)
    loaded = load_runnable(target, llm=llm, needs_keys=False)
    if isinstance(loaded, MapDefinition) and not getattr(loaded, "is_planned", False):
        if pictures.is_asked:
            _draw_map_reduce(target, loaded, pictures)
            return
        data = map_reduce_data(loaded)
        if as_json:
            show_json(data)
        else:
            show("\n".join(map_reduce_lines(target, data)))
        return
    ensemble = planned_form(loaded)
    if workflow is not None:
        ensemble = ensemble.replace(workflow=workflow.value)
    for line in input_warnings(inputs or (), ensemble, values):
        say(line)
    if pictures.is_asked:
        _draw_plan(target, _plan(ensemble, values), pictures)
        return
    data = plan_data(ensemble, values)
    if as_json:
        show_json(data)
    else:
        show("\n".join(plan_lines(target, data)))


def _draw_map_reduce(target: str, definition: MapDefinition, pictures: Pictures) -> None:
    from ensemble_ray.cli.view.terminal import own_command
    from ensemble_ray.errors import ValidationError
    from ensemble_ray.visualization.declared import map_reduce_flow

    def refuse() -> DagModel:
        raise ValidationError(
            "The tasks of this team are made while it runs, so there is no graph of them as data before. "
            f"Of a run: {own_command()} trace RUN --dag FILE"
        )

    pictures.write(target, lambda: map_reduce_flow(definition), refuse)


def _draw_plan(target: str, found: _Found, pictures: Pictures) -> None:
    """Write the graph of a plan; a manager's graph includes its tasks."""
    from ensemble_ray.visualization.dag_model import DagExporter, dag_of_plan
    from ensemble_ray.visualization.declared import dag_flow

    plan = found.planned.plan
    if plan.hierarchy is None:
        graph = dag_of_plan(plan)
    else:
        graph = DagExporter.build(found.ensemble.with_tasks(found.resolved.tasks))
    pictures.write(target, lambda: dag_flow(graph), lambda: graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    ensemble: Ensemble
    resolved: ResolvedTasks
    planned: Planned
    #: variables without a value, each with the tasks that use it
    missing: Mapping[str, Sequence[str]]


def _plan(ensemble: Ensemble, inputs: Mapping[str, object]) -> _Found:
    """Plan a run. Variables without a value stay in the texts.

    Raises:
        ValidationError: The team cannot run.
    """
    from ensemble_ray.cli.inputs.arguments import needed_inputs  # the help does not need them
    from ensemble_ray.plan.planner import plan_run
    from ensemble_ray.runs.planned import check

    needed = needed_inputs(ensemble.all_tasks)
    missing = {name: users for name, users in needed.items() if name not in {**ensemble.inputs, **inputs}}
    placeholders = {name: f"{{{name}}}" for name in missing}
    resolved = check(ensemble, {**inputs, **placeholders})
    return _Found(ensemble=ensemble, resolved=resolved, planned=plan_run(ensemble, resolved), missing=missing)


def plan_data(ensemble: Ensemble, inputs: Mapping[str, object]) -> dict[str, Any]:
    """Return the plan as JSON data. Variables without a value stay in the texts.

    Raises:
        ValidationError: The team cannot run.
    """
    from ensemble_ray.plan.plan import MANAGER_KEY  # the help does not need it

    found = _plan(ensemble, inputs)
    resolved, planned, missing = found.resolved, found.planned, found.missing
    plan = planned.plan
    manager = manager_data(ensemble, planned)
    keys = {task.object_id: key for task, key in zip(resolved.tasks, resolved.keys, strict=True)}
    return {
        "workflow": plan.workflow,
        "error_strategy": plan.error_strategy,
        "max_parallel_tasks": plan.max_parallel_tasks,
        "levels": [] if manager else levels_of(plan),
        "units": units_data(planned),
        "tasks": [_describe_task(task, keys, ensemble, planned) for task in resolved.tasks]
        if manager
        else [_task(node, ensemble) for node in plan.nodes],
        "agents": [_agent(key, planned, ensemble) for key in planned.agents if not (manager and key == MANAGER_KEY)],
        "manager": manager,
        "delegation": delegation_data(ensemble, planned),
        "inputs": {name: value for name, value in plan.inputs.items() if name not in missing},
        "missing_inputs": missing,
    }


def levels_of(plan: Plan) -> list[list[str]]:
    """Return the tasks and units that can run concurrently, level by level; one per level in a sequential workflow."""
    from ensemble_ray.plan.plan import in_waiting_order  # the help does not need it

    waits_for: dict[str, Sequence[str]] = {node.key: node.context for node in plan.nodes}
    for unit in plan.units:
        waits_for[unit.key] = getattr(unit, "context", ()) or getattr(unit, "after", ())
    order = plan.top_level
    if plan.workflow == "sequential" and not any(unit.unit == "phase" for unit in plan.units):
        return [[key] for key in order]
    level: dict[str, int] = {}
    for key in in_waiting_order(order, waits_for):
        level[key] = 1 + max((level[each] for each in waits_for[key] if each in level), default=-1)
    return [[key for key in order if level[key] == depth] for depth in range(max(level.values(), default=-1) + 1)]


def _task(node: Node, ensemble: Ensemble) -> dict[str, Any]:
    task = next(each for each in ensemble.all_tasks if each.object_id == node.object_id)
    is_synthesized = node.agent_key is None and task.handler is None
    return {
        "key": node.key,
        "agent": node.agent_key,
        "role": node.agent_role,
        "description": node.description,
        "expected_output": node.expected_output,
        "context": list(node.context),
        "model": _model(task.llm or (ensemble.llm if is_synthesized else None)),
        "tools": _names(task.tools) if is_synthesized else [],
        "streams": node.is_streaming,
    }


def _describe_task(task: Task, keys: Mapping[str, str], ensemble: Ensemble, planned: Planned) -> dict[str, Any]:
    """Return a manager's task as data. The manager chooses the worker; the task's agent is a suggestion."""
    is_synthesized = task.agent is None
    found = next((key for key, agent in planned.agents.items() if agent == task.agent), None)
    return {
        "key": keys[task.object_id],
        "agent": found,
        "role": "(synthesized)" if task.agent is None else task.agent.role,
        "description": task.description,
        "expected_output": task.expected_output,
        "context": [keys[entry.object_id] for entry in task.context if entry.object_id in keys],
        "model": _model(task.llm or ensemble.llm) if is_synthesized else None,
        "tools": _names(task.tools) if is_synthesized else [],
        "streams": False,
    }


def _agent(key: str, planned: Planned, ensemble: Ensemble) -> dict[str, Any]:
    agent = planned.agents[key]
    return {
        "key": key,
        "role": agent.role,
        "goal": agent.goal,
        "model": _model(agent.llm) if agent.runner is None else None,
        "runner": None if agent.runner is None else type(agent.runner).__name__,
        "tools": _names(agent.tools),
        "max_iterations": agent.max_iterations,
        "allow_delegation": agent.allow_delegation,
        "on_incomplete": agent.on_incomplete or ensemble.on_incomplete,
    }


def _model(llm: object) -> str | None:
    return None if llm is None else repr(llm)


def _names(tools: Sequence[object]) -> list[str]:
    from ensemble_ray.tools.registry import resolve_tools  # only teams with tools need it
    from ensemble_ray.tools.tool import DynamicToolProvider

    names: list[str] = []
    for entry in tools:
        if isinstance(entry, DynamicToolProvider):
            names.append(f"({type(entry).__name__}: known when a task begins)")
        else:
            names.extend(resolve_tools([entry]).names)
    return names


def plan_lines(target: str, data: Mapping[str, Any]) -> list[str]:
    tasks = {task["key"]: task for task in data["tasks"]}
    cap = data["max_parallel_tasks"]
    rules = f"at most {cap} at a time, {data['error_strategy']}" if cap else data["error_strategy"]
    parallel = f" ({rules})" if data["workflow"] == "parallel" else ""
    lines = [
        f"{target}: {shape_of(data)}{parallel}, {count_noun(len(tasks), 'task')}, {count_noun(len(data['agents']), 'agent')}"
    ]
    if data["manager"]:
        lines += manager_lines(data["manager"], data["delegation"])
    keys = [*tasks, *(agent["key"] for agent in data["agents"])]
    units = {unit["key"]: unit for unit in data["units"]}
    width = min(32, max((len(key) for key in (*keys, *units)), default=0))
    is_leveled = data["workflow"] == "parallel" or any(unit["unit"] == "phase" for unit in data["units"])

    def lines_of_task(key: str) -> list[str]:
        return _task_lines(tasks[key], width)

    for number, level in enumerate(data["levels"], start=1):
        lines.append(f"\nLevel {number}" if is_leveled else ("\nIn this order" if number == 1 else ""))
        for key in level:
            lines += unit_lines(key, units, lines_of_task, width) if key in units else lines_of_task(key)
    lines = [line for line in lines if line]
    if data["manager"]:
        lines.append("\nTasks of the manager")
        lines += [line for task in data["tasks"] for line in _task_lines(task, width)]
    if data["agents"]:
        lines.append("\nWorkers" if data["manager"] else "\nAgents")
    for agent in data["agents"]:
        lines.append(
            f"  {agent['key']:<{width}}  {screen_line(agent['role'], _TEXT)}: {screen_line(agent['goal'], _TEXT)}"
        )
        does = f"model {agent['model']}" if agent["runner"] is None else f"runner {agent['runner']}"
        lines.append(f"  {'':<{width}}  {does}{_tools(agent)}")
    if data["delegation"] and not data["manager"]:
        lines += peer_lines(data["delegation"])
    if data["missing_inputs"]:
        lines.append("\nMissing inputs")
        lines += [
            f"  --input {name}=...  (used by {', '.join(users)})" for name, users in data["missing_inputs"].items()
        ]
    lines.append("\nNo model was called.")
    return lines


def _task_lines(task: Mapping[str, Any], width: int) -> list[str]:
    who = screen_line(task["role"], _TEXT)
    context = f" <- {', '.join(task['context'])}" if task["context"] else ""
    lines = [f"  {task['key']:<{width}}  {who}{context}: {screen_line(task['description'], _TEXT)}"]
    if task["model"]:
        lines.append(f"  {'':<{width}}  model {task['model']}{_tools(task)}")
    return lines


def _tools(owner: Mapping[str, Any]) -> str:
    tools = f", tools [{', '.join(owner['tools'])}]" if owner["tools"] else ""
    if owner.get("allow_delegation"):
        tools += ", may delegate"
    policy = owner.get("on_incomplete", "warn")
    return tools if policy == "warn" else f"{tools}, on_incomplete {policy}"
