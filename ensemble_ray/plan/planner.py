"""Planning of a run: `validate`, `resolve_tasks`, `synthesize_agents` (the only step that calls models) and `plan_run`.

Planning copies only tasks that change.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast, overload

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition, HierarchicalConstraints, Levels, ManagerPromptContext
from ensemble_ray.definition.fields import ParallelErrorStrategy, Workflow, escape_data
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.validation import (
    TeamModels,
    check_hierarchy,
    declared_agents,
    infer_workflow,
    manager_model,
)
from ensemble_ray.errors import PromptTemplateError
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE, HierarchyRules, Node, Plan
from ensemble_ray.plan.unit_plans import NodeMaker, Scope, plan_members, task_keys
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.prompts.manager import manager_prompts
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.delegation import Peer

T = TypeVar("T")

_log = bounded_logger(__name__)
_GOAL = "Have the tasks done by the agents of the team, within the rules, and answer with the whole"
_EXPECTED_OUTPUT = "One answer that covers all tasks, made of what the agents of the team gave."
_VARIABLE = re.compile(r"\{\{(?P<escaped>\w+)\}\}|\{(?P<name>\w+)\}")
_SHOWN = 100


@overload
def resolve_template(template: str, inputs: Mapping[str, object] | None) -> str: ...
@overload
def resolve_template(template: None, inputs: Mapping[str, object] | None) -> None: ...
def resolve_template(template: str | None, inputs: Mapping[str, object] | None) -> str | None:
    """Fill in the variables of a template; a value None is "", other values become text with `str`.

    Raises:
        PromptTemplateError: variables have no value; the error lists all of them in the order of their first appearance.
    """
    if template is None or "{" not in template:
        return template
    values = inputs or {}
    missing: dict[str, None] = {}
    count = 0

    def fill(found: re.Match[str]) -> str:
        nonlocal count
        if found["escaped"] is not None:
            return f"{{{found['escaped']}}}"
        name = found["name"]
        if name not in values:
            missing[name] = None
            return ""
        count += 1
        return "" if values[name] is None else str(values[name])

    _log.debug("Resolving a template of %d characters with %d inputs", len(template), len(values))
    resolved = _VARIABLE.sub(fill, template)
    if missing:
        shown = template if len(template) <= _SHOWN else template[:_SHOWN] + "..."
        raise PromptTemplateError(
            f"Missing template variables: [{', '.join(missing)}]. Provide them in ensemble.run(inputs). "
            f"Template: '{shown}'",
            tuple(missing),
            template,
        )
    _log.debug("Resolved a template: %d variables", count)
    return resolved


class TaskDependencyGraph:
    """Tasks and their context tasks, if these are in the same list.

    Args:
        tasks: In any order; a task that appears twice is one node.

    Raises:
        ValueError: `tasks` or one of them is None.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks: dict[str, Task] = {}
        for task in _require(tasks, "tasks"):
            self._tasks.setdefault(_require(task, "task").object_id, task)
        self._dependencies: dict[str, list[str]] = {}
        self._dependents: dict[str, list[str]] = {object_id: [] for object_id in self._tasks}
        for object_id, task in self._tasks.items():
            inside = list(dict.fromkeys(entry.object_id for entry in task.context if entry.object_id in self._tasks))
            self._dependencies[object_id] = inside
            for dependency in inside:
                self._dependents[dependency].append(object_id)

    @property
    def all_tasks(self) -> list[Task]:
        """Every task, in list order."""
        return list(self._tasks.values())

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self._tasks)

    @property
    def roots(self) -> list[Task]:
        """Tasks that wait for none of the others, in list order."""
        return [task for object_id, task in self._tasks.items() if not self._dependencies[object_id]]

    def get_ready_tasks(self, completed: Iterable[Task]) -> list[Task]:
        """Return the open tasks without open dependencies, in list order.

        Raises:
            ValueError: `completed` is None.
        """
        done = {_require(task, "completed task").object_id for task in _require(completed, "completed")}
        return [
            task
            for object_id, task in self._tasks.items()
            if object_id not in done and done.issuperset(self._dependencies[object_id])
        ]

    def get_dependents(self, task: Task) -> list[Task]:
        """Return the tasks with this one as context, in list order; an empty list for a task outside the graph.

        Raises:
            ValueError: `task` is None.
        """
        return [self._tasks[object_id] for object_id in self._dependents.get(_require(task, "task").object_id, ())]

    def is_in_graph(self, task: Task) -> bool:
        """Return whether it is one of the tasks.

        Raises:
            ValueError: `task` is None.
        """
        return _require(task, "task").object_id in self._tasks

    def in_dependency_order(self) -> list[Task]:
        """Return every task after its dependencies, otherwise in list order; tasks in a cycle are omitted."""
        waits = {object_id: len(inside) for object_id, inside in self._dependencies.items()}
        ready = deque(object_id for object_id, count in waits.items() if count == 0)
        ordered: list[Task] = []
        while ready:
            object_id = ready.popleft()
            ordered.append(self._tasks[object_id])
            for dependent in self._dependents[object_id]:
                waits[dependent] -= 1
                if waits[dependent] == 0:
                    ready.append(dependent)
        return ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTasks:
    #: in the order of `all_tasks`; their context contains resolved tasks too
    tasks: tuple[Task, ...]
    keys: tuple[str, ...]
    inputs: Mapping[str, str]
    workflow: Workflow
    models: TeamModels


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and its parts that cannot be data."""

    plan: Plan
    #: without context, agent and tools, which are stored in the plan and in `agents`: a chain of nested tasks would grow with
    #: the square of its length
    tasks: Mapping[str, Task]
    agents: Mapping[str, Agent]
    #: agents that may receive delegated work, in the order of the ensemble's agents
    peers: tuple[Peer, ...] = ()
    #: as declared, with their predicates and conditions
    units: Mapping[str, Loop | Phase | Graph] = field(default_factory=dict[str, Loop | Phase | Graph])


def resolve_tasks(definition: EnsembleDefinition, inputs: Mapping[str, object] | None = None) -> ResolvedTasks:
    """Fill in variables and infer the workflow (S-ENG-1); `inputs` win over the ensemble's (S-DOM-66)."""
    merged = {str(name): text_of(value) for name, value in {**definition.inputs, **(inputs or {})}.items()}
    tasks = tuple(definition.all_tasks)
    workflow = infer_workflow(definition)
    if definition.workflow is None:
        _log.info("Workflow inferred: %s", workflow.value)
    return ResolvedTasks(
        tasks=_resolve_all(tasks, merged, definition.levels),
        keys=task_keys(tasks),
        inputs=merged,
        workflow=workflow,
        models=TeamModels(definition),
    )


def needs_synthesis(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the tasks without a handler and an agent (S-DET-20)."""
    return tuple(task for task in tasks if task.agent is None and task.handler is None)


def plan_run(
    definition: EnsembleDefinition,
    resolved: ResolvedTasks,
    synthesized: Mapping[str, Agent] | None = None,
    prompts: tuple[str, str] | None = None,
) -> Planned:
    """Plan the tasks and agents of a run.

    Args:
        synthesized: Agents by object id of their task. Without its agent a task is planned as `(synthesized)`, which is enough
            to show a plan (S-SET-46).
        prompts: Background and task of a manager; None: the prompt strategy writes them now.
    """
    synthesized_agents = synthesized or {}
    if resolved.workflow is Workflow.HIERARCHICAL:
        return _plan_hierarchy(definition, resolved, synthesized_agents, prompts)
    maker = NodeMaker(definition, resolved.models, synthesized_agents)
    members = plan_members(definition, list(zip(resolved.tasks, resolved.keys, strict=True)), maker)
    nodes = members.nodes
    if any(agent.allow_delegation for agent in maker.agents.values()):
        for agent in declared_agents(definition):
            maker.agent_key(agent)  # work may be delegated to it, even if it has no task
    strategy = definition.parallel_error_strategy or ParallelErrorStrategy.FAIL_FAST
    plan = Plan(
        workflow=resolved.workflow.value,
        nodes=tuple(nodes if definition.levels is None else in_levels(nodes, definition.levels)),
        agents=tuple(maker.entries),
        error_strategy=strategy.value,
        max_parallel_tasks=definition.max_parallel_tasks,
        inputs=resolved.inputs,
        shown_as=None if definition.levels is None else definition.levels.workflow,
        units=tuple(members.units),
    )
    tasks = {
        key: _without_parts(task, synthesized_agents.get(task.object_id))
        for task, key in zip(resolved.tasks, resolved.keys, strict=True)
    }
    return Planned(plan=plan, tasks=tasks, agents=maker.agents, peers=maker.peers(), units=members.definitions)


def in_levels(nodes: Iterable[Node], levels: Levels) -> Iterator[Node]:
    """Number the nodes within each level (S-MR-95)."""
    counted: dict[int, int] = {}
    for node in nodes:
        node_type, level = levels.places[node.object_id]
        counted[level] = counted.get(level, 0) + 1
        yield replace(node, index=counted[level], node_type=node_type, level=level)


def workers_of(
    definition: EnsembleDefinition, tasks: Sequence[Task], synthesized: Mapping[str, Agent], *, models: TeamModels
) -> tuple[tuple[Agent, bool], ...]:
    """Check the roles of a manager's agents; return these, and whether each was synthesized (S-HIER-1, S-DET-26)."""
    workers = dict.fromkeys(declared_agents(definition), False)
    complete = True
    for task in tasks:
        if task.agent is None and task.handler is None:
            complete = complete and task.object_id in synthesized
            if task.object_id in synthesized:
                workers.setdefault(synthesized[task.object_id], True)
    if complete:
        check_hierarchy(definition, [agent.role for agent in workers])
    return tuple((models.resolve_agent(agent), is_synthesized) for agent, is_synthesized in workers.items())


def manager_context(workers: Sequence[Agent], tasks: Sequence[Task]) -> ManagerPromptContext:
    return ManagerPromptContext(agents=tuple(workers), tasks=tuple(tasks))


def text_of(value: object) -> str:
    """Return an input as text (S-DOM-70) that can be encoded as UTF-8 (S-SEC-56); None is "" (S-TPL-4)."""
    return "" if value is None else whole_text(str(value))


def _plan_hierarchy(
    definition: EnsembleDefinition,
    resolved: ResolvedTasks,
    synthesized_agents: Mapping[str, Agent],
    prompts: tuple[str, str] | None,
) -> Planned:
    workers = workers_of(definition, resolved.tasks, synthesized_agents, models=resolved.models)
    agents = [agent for agent, _ in workers]
    if prompts is None:
        prompts = manager_prompts(definition.manager_prompt_strategy, manager_context(agents, resolved.tasks))
    background, description = prompts
    manager = Agent(  # S-HIER-2, S-HIER-3
        role=MANAGER_ROLE,
        goal=_GOAL,
        background=background or None,
        llm=manager_model(definition, agents),
        max_iterations=definition.manager_max_iterations,
        isolation="process",
    )
    task = Task(description=description, expected_output=_EXPECTED_OUTPUT)
    maker = NodeMaker(definition, resolved.models)
    node = maker.node(task.rewritten(agent=manager), MANAGER_KEY, index=1, scope=Scope())
    for agent, is_synthesized in workers:
        maker.agent_key(agent, is_synthesized=is_synthesized)
    limits = definition.hierarchical_constraints or HierarchicalConstraints()
    plan = Plan(
        workflow=Workflow.HIERARCHICAL.value,
        nodes=(node,),
        agents=tuple(maker.entries),
        inputs=resolved.inputs,
        hierarchy=HierarchyRules(
            required_workers=limits.required_workers,
            allowed_workers=limits.allowed_workers,
            max_calls_per_worker=dict(limits.max_calls_per_worker),
            global_max_delegations=limits.global_max_delegations,
            required_stages=limits.required_stages,
            enforce_required=definition.enforce_required,
            stall_turns=definition.manager_stall_turns,
        ),
    )
    return Planned(plan=plan, tasks={MANAGER_KEY: task}, agents=maker.agents, peers=maker.peers(but=manager))


def _resolve_all(tasks: tuple[Task, ...], inputs: Mapping[str, str], levels: Levels | None) -> tuple[Task, ...]:
    """Fill in texts in list order, then make context refer to the resolved tasks (S-TPL-11)."""
    changes: dict[str, dict[str, object]] = {}
    for task in tasks:
        data = () if levels is None else levels.texts.get(task.object_id, ())  # texts of the items of a map-reduce
        description = resolve_template(escape_data(task.description, data), inputs)
        expected_output = resolve_template(escape_data(task.expected_output, data), inputs)
        if description is not task.description or expected_output is not task.expected_output:
            changes[task.object_id] = {"description": description, "expected_output": expected_output}
    if not changes:
        return tasks
    resolved: dict[str, Task] = {}
    for task in TaskDependencyGraph(tasks).in_dependency_order():
        changed = changes.get(task.object_id, {})
        context = tuple(resolved.get(entry.object_id, entry) for entry in task.context)
        if any(new is not old for new, old in zip(context, task.context, strict=True)):
            changed["context"] = context
        resolved[task.object_id] = task.rewritten(**changed) if changed else task
    return tuple(resolved[task.object_id] for task in tasks)


def _without_parts(task: Task, made: Agent | None) -> Task:
    """Return the task without parts that are stored elsewhere. Its model stays, unless its synthesized agent has the model."""
    if not task.context and task.agent is None and task.llm is None and not task.tools:
        return task
    reflection = task.reflection_config
    if made is not None and made.llm is not task.llm and reflection is not None and reflection.model is None:
        reflection = reflection.replace(model=task.llm)  # the synthesizer chose another model for the agent (S-REFL-9)
    model = task.llm if made is None else None
    return task.rewritten(context=(), agent=None, llm=model, tools=(), reflection_config=reflection)


def _require(value: T, name: str) -> T:
    if cast("object", value) is None:
        raise ValueError(f"{name} must not be None")
    return value
