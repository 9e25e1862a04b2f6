"""`ensemble-ray plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.inputs import options
from ensemble_ray.cli.view import export
from ensemble_ray.cli.view.terminal import count_noun, own_command, screen_line, show_result, write_note
from ensemble_ray.errors import ValidationError

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.definition.task import Task
    from ensemble_ray.ensemble import Ensemble
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.plan.planner import Planned, ResolvedTasks
    from ensemble_ray.visualization.dag_model import DagModel

_ROLES, _LINE, _TEXT = 200, 120, 72


def plan(
    target: options.Target,
    *,
    inputs: options.Inputs = None,
    inputs_file: options.InputsFile = None,
    workflow: options.Workflow = None,
    llm: options.Llm = None,
    as_json: options.ItAsJson = False,
    svg: export.Svg = None,
    mermaid: export.Mermaid = None,
    dag: export.Dag = None,
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
    pictures = export.Pictures(svg=svg, mermaid=mermaid, dag=dag)
    loaded = load_runnable(target, llm=llm, needs_keys=False)
    if isinstance(loaded, MapDefinition) and not getattr(loaded, "is_planned", False):
        if pictures.is_asked:
            _draw_map_reduce(target, loaded, pictures)
            return
        data = _map_reduce_data(loaded)
        show_result(data, _map_reduce_lines(target, data), as_json=as_json)
        return
    ensemble = planned_form(loaded)
    if workflow is not None:
        ensemble = ensemble.replace(workflow=workflow.value)
    for line in input_warnings(inputs or (), ensemble, values):
        write_note(line)
    if pictures.is_asked:
        _draw_plan(target, ensemble, values, pictures)
        return
    data = _plan_data(ensemble, values)
    show_result(data, _plan_lines(target, data), as_json=as_json)


def _draw_map_reduce(target: str, definition: MapDefinition, pictures: export.Pictures) -> None:
    from ensemble_ray.visualization.declared import map_reduce_flow

    def refuse() -> DagModel:
        raise ValidationError(
            "The tasks of this team are made while it runs, so there is no graph of them as data before. "
            f"Of a run: {own_command()} trace RUN --dag FILE"
        )

    pictures.write(target, lambda: map_reduce_flow(definition), refuse)


def _draw_plan(target: str, ensemble: Ensemble, inputs: Mapping[str, object], pictures: export.Pictures) -> None:
    """A manager's graph includes its tasks."""
    from ensemble_ray.visualization.dag_model import DagExporter, dag_of_plan
    from ensemble_ray.visualization.declared import dag_flow

    resolved, planned, _ = _plan(ensemble, inputs)
    if planned.plan.hierarchy is None:
        graph = dag_of_plan(planned.plan)
    else:
        graph = DagExporter.build(ensemble.with_tasks(resolved.tasks))
    pictures.write(target, lambda: dag_flow(graph), lambda: graph)


def _plan(ensemble: Ensemble, inputs: Mapping[str, object]) -> tuple[ResolvedTasks, Planned, Mapping[str, list[str]]]:
    """Also return the variables without a value, which stay in the texts, with the tasks that use them."""
    from ensemble_ray.plan.planner import needed_inputs, plan_run
    from ensemble_ray.runs.planned import check

    needed = needed_inputs(ensemble.all_tasks)
    missing = {name: users for name, users in needed.items() if name not in {**ensemble.inputs, **inputs}}
    placeholders = {name: f"{{{name}}}" for name in missing}
    resolved = check(ensemble, {**inputs, **placeholders})
    return resolved, plan_run(ensemble, resolved), missing


def _plan_data(ensemble: Ensemble, inputs: Mapping[str, object]) -> dict[str, Any]:
    from ensemble_ray.plan.plan import MANAGER_KEY

    resolved, planned, missing = _plan(ensemble, inputs)
    plan = planned.plan
    manager = _manager_data(ensemble, planned)
    keys = {task.object_id: key for task, key in zip(resolved.tasks, resolved.keys, strict=True)}
    return {
        "workflow": plan.workflow,
        "error_strategy": plan.error_strategy,
        "max_parallel_tasks": plan.max_parallel_tasks,
        "levels": [] if manager else levels_of(plan),
        "units": _units_data(planned),
        "tasks": [_describe_task(task, keys, ensemble, planned) for task in resolved.tasks]
        if manager
        else [_task(node, ensemble) for node in plan.nodes],
        "agents": [_agent(key, planned, ensemble) for key in planned.agents if not (manager and key == MANAGER_KEY)],
        "manager": manager,
        "delegation": _delegation_data(ensemble, planned),
        "inputs": {name: value for name, value in plan.inputs.items() if name not in missing},
        "missing_inputs": missing,
    }


def levels_of(plan: Plan) -> list[list[str]]:
    """Return the tasks and units that can run concurrently, level by level."""
    from ensemble_ray.plan.plan import in_waiting_order

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
    model = _model(task.llm or (ensemble.llm if is_synthesized else None))
    return {
        "key": node.key, "agent": node.agent_key, "role": node.agent_role, "description": node.description,
        "expected_output": node.expected_output, "context": list(node.context), "model": model,
        "tools": _names(task.tools) if is_synthesized else [], "streams": node.is_streaming,
    }  # fmt: skip


def _describe_task(task: Task, keys: Mapping[str, str], ensemble: Ensemble, planned: Planned) -> dict[str, Any]:
    """The manager chooses the worker; the task's agent is a suggestion."""
    is_synthesized = task.agent is None
    found = next((key for key, agent in planned.agents.items() if agent == task.agent), None)
    role = "(synthesized)" if task.agent is None else task.agent.role
    context = [keys[entry.object_id] for entry in task.context if entry.object_id in keys]
    return {
        "key": keys[task.object_id], "agent": found, "role": role, "description": task.description,
        "expected_output": task.expected_output, "context": context,
        "model": _model(task.llm or ensemble.llm) if is_synthesized else None,
        "tools": _names(task.tools) if is_synthesized else [], "streams": False,
    }  # fmt: skip


def _agent(key: str, planned: Planned, ensemble: Ensemble) -> dict[str, Any]:
    agent = planned.agents[key]
    return {
        "key": key, "role": agent.role, "goal": agent.goal, "model": _model(agent.llm) if agent.runner is None else None,
        "runner": None if agent.runner is None else type(agent.runner).__name__, "tools": _names(agent.tools),
        "max_iterations": agent.max_iterations, "allow_delegation": agent.allow_delegation,
        "on_incomplete": agent.on_incomplete or ensemble.on_incomplete,
    }  # fmt: skip


def _model(llm: object) -> str | None:
    return None if llm is None else repr(llm)


def _names(tools: Sequence[object]) -> list[str]:
    from ensemble_ray.tools.registry import resolve_tools
    from ensemble_ray.tools.tool import DynamicToolProvider

    names: list[str] = []
    for entry in tools:
        is_dynamic = isinstance(entry, DynamicToolProvider)
        names += [f"({type(entry).__name__}: known when a task begins)"] if is_dynamic else resolve_tools([entry]).names
    return names


def _plan_lines(target: str, data: Mapping[str, Any]) -> list[str]:
    tasks = {task["key"]: task for task in data["tasks"]}
    cap = data["max_parallel_tasks"]
    rules = f"at most {cap} at a time, {data['error_strategy']}" if cap else data["error_strategy"]
    parallel = f" ({rules})" if data["workflow"] == "parallel" else ""
    units = {unit["key"]: unit for unit in data["units"]}
    kinds = {unit["unit"] for unit in data["units"]}
    shape = "graph" if "graph" in kinds else "phases" if "phase" in kinds else data["workflow"]
    counts = f"{count_noun(len(tasks), 'task')}, {count_noun(len(data['agents']), 'agent')}"
    lines = [f"{target}: {shape}{parallel}, {counts}"]
    if manager := data["manager"]:
        prompts = f", prompts by {manager['prompts']}" if manager["prompts"] else ""
        does = f"  model {manager['model']}, at most {count_noun(manager['max_iterations'], 'tool call')}{prompts}"
        lines += ["\nManager", does, "\nRules", *_rule_lines(_rules(manager["rules"]), data["delegation"])]
    keys = [*tasks, *(agent["key"] for agent in data["agents"]), *units]
    width = min(32, max(map(len, keys), default=0))
    is_leveled = data["workflow"] == "parallel" or "phase" in kinds
    for number, level in enumerate(data["levels"], start=1):
        if is_leveled or number == 1:
            lines.append(f"\nLevel {number}" if is_leveled else "\nIn this order")
        lines += [line for key in level for line in _member_lines(key, units, tasks, width)]
    if manager:
        lines.append("\nTasks of the manager")
        lines += [line for task in data["tasks"] for line in _task_lines(task, width)]
    if data["agents"]:
        lines.append("\nWorkers" if manager else "\nAgents")
    for agent in data["agents"]:
        role, goal = screen_line(agent["role"], _TEXT), screen_line(agent["goal"], _TEXT)
        does = f"model {agent['model']}" if agent["runner"] is None else f"runner {agent['runner']}"
        lines += [f"  {agent['key']:<{width}}  {role}: {goal}", f"  {'':<{width}}  {does}{_tools(agent)}"]
    if data["delegation"] and not manager:
        shared = data["delegation"]
        depth = ("depth", f"at most {shared['max_depth']}")
        lines += ["\nDelegation", *_rule_lines([("may delegate", _join_roles(shared["peers"])), depth], shared)]
    if data["missing_inputs"]:
        lines.append("\nMissing inputs")
    for name, users in data["missing_inputs"].items():
        lines.append(f"  --input {name}=...  (used by {', '.join(users)})")
    return [*lines, "\nNo model was called."]


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


_ON_CAP = {"throw": ", fails at the cap", "return_with_flag": ", flagged at the cap", "return_last": ""}


def _units_data(planned: Planned) -> list[dict[str, Any]]:
    from ensemble_ray.definition.graph import Graph, GraphEdge
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


def _member_lines(
    key: str, units: Mapping[str, Mapping[str, Any]], tasks: Mapping[str, Mapping[str, Any]], width: int
) -> list[str]:
    if key not in units:
        return _task_lines(tasks[key], width)
    unit = units[key]
    match unit["unit"]:
        case "loop":
            until = f", until {unit['until']}" if unit["until"] else ""
            tokens = "" if unit["max_tokens"] is None else f", at most {count_noun(unit['max_tokens'], 'token')}"
            waits = f" <- {', '.join(unit['context'])}" if unit["context"] else ""
            cap = f"at most {count_noun(unit['max_iterations'], 'iteration')}"
            head, inside = f"{cap}{tokens}{until}{_ON_CAP[unit['on_max_iterations']]}{waits}", unit["body"]
        case "phase":
            after = f", after {', '.join(unit['after'])}" if unit["after"] else ""
            retries = "1 retry" if unit["max_retries"] == 1 else f"{unit['max_retries']} retries"
            review = f", reviewed by {unit['review']} (at most {retries})" if unit["review"] else ""
            head = f"{unit['workflow']}{after}{review}"
            inside = [*unit["members"], *([unit["review"]] if unit["review"] else [])]
        case _:
            steps = count_noun(unit["max_steps"], "step")
            head = f"begins at {unit['start']}, at most {steps}{_ON_CAP[unit['on_max_steps']]}"
            inside = [state["member"] for state in unit["states"]]
    lines = [f"  {key:<{width}}  {screen_line(head, _LINE)}"]
    lines += [f"  {line}" for member in inside for line in _member_lines(member, units, tasks, width)]
    if unit["unit"] == "graph":
        lines += [f"    {screen_line(line, _LINE)}" for line in _edges(unit)]
    return lines


def _edges(unit: Mapping[str, Any]) -> Iterator[str]:
    for edge in unit["edges"]:
        match edge["entry"]:
            case "edge":
                reasons = [each for each in (edge["label"], edge["condition"] and f"if {edge['condition']}") if each]
                why = f" ({', '.join(reasons)})" if reasons else ""
                yield f"{edge['from_state']} -> {edge['to_state'].replace('__END__', 'END')}{why}"
            case "fork":
                yield f"{edge['from_state']} -> {', '.join(edge['to_states'])} (side by side)"
            case _:
                needed = "all of them" if edge["count"] is None else f"the first {edge['count']}"
                yield f"{', '.join(edge['from_states'])} -> {edge['to_state'].replace('__END__', 'END')} (after {needed})"


def _manager_data(ensemble: Ensemble, planned: Planned) -> dict[str, Any] | None:
    from ensemble_ray.plan.plan import MANAGER_KEY

    rules = planned.plan.hierarchy
    if rules is None:
        return None
    manager, prompts = planned.agents[MANAGER_KEY], ensemble.manager_prompt_strategy
    return {
        "model": repr(manager.llm),
        "max_iterations": manager.max_iterations,
        "prompts": None if prompts is None else type(prompts).__name__,
        "rules": asdict(rules),
    }


def _delegation_data(ensemble: Ensemble, planned: Planned) -> dict[str, Any] | None:
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


def _rule_lines(rules: Iterable[tuple[str, str]], delegation: Mapping[str, Any]) -> list[str]:
    rows = list(rules)
    if delegation["policies"]:
        rows.append(("policies", screen_line(", ".join(delegation["policies"]), _LINE)))
    if delegation["timeout_s"] is not None:
        rows.append(("timeout", f"{delegation['timeout_s']:g} s"))
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {text}" for name, text in rows]


def _join_roles(roles: list[str]) -> str:
    return screen_line(", ".join(roles), _ROLES)


def _map_reduce_data(definition: MapDefinition) -> dict[str, Any]:
    from ensemble_ray.definition.map_reduce import MapReduceDefinition

    reduced = definition if isinstance(definition, MapReduceDefinition) else None
    factories = {side: getattr(definition, f"{side}_task", None) for side in ("map", "reduce", "direct")}
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
    agent, model = task.agent, task.llm
    if model is None and agent is not None:
        model = TeamModels(definition).resolve_agent(agent).llm
    return {
        "description": task.description,
        "role": None if agent is None else agent.role,
        "model": None if model is None else repr(model),
    }


def _map_reduce_lines(target: str, data: Mapping[str, Any]) -> list[str]:
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
