"""From a definition and its inputs to a plan. Package: plan. Pure but for log lines.

A run goes: `validate` -> `resolve_tasks` -> `synthesize_agents` (only it calls models) -> `plan_run`. A task whose texts
hold no variables is the same object in every step: planning a thousand tasks copies nothing that did not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.levels import Levels
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.team_model import TeamModels
from ensemble_ray.definition.validation import declared_agents, infer_workflow
from ensemble_ray.definition.workflow import ParallelErrorStrategy, Workflow
from ensemble_ray.plan.dependencies import TaskDependencyGraph
from ensemble_ray.plan.manager import manager_context, manager_of, rules_of, task_of_manager, workers_of
from ensemble_ray.plan.plan import MANAGER_KEY, AgentEntry, Node, Plan
from ensemble_ray.plan.templates import resolve_template
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.prompts.manager import manager_prompts
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.values.delegation import Colleague

__all__ = [
    "DETERMINISTIC",
    "SYNTHESIZED",
    "Planned",
    "ResolvedTasks",
    "needs_synthesis",
    "plan_run",
    "resolve_tasks",
    "task_keys",
    "text_of",
    "tool_names",
]

_log = bounded_logger(__name__)

#: Role that is shown for a handler task (S-ENG-18).
DETERMINISTIC = "(deterministic)"
#: Role that is shown for a task whose agent is not made yet.
SYNTHESIZED = "(synthesized)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTasks:
    """The tasks of one run with their variables filled in."""

    #: in list order; their context holds resolved tasks too
    tasks: tuple[Task, ...]
    #: key of each task, in the same order
    keys: tuple[str, ...]
    #: the ensemble's inputs with the run's above them
    inputs: Mapping[str, str]
    #: chosen, or inferred where none was chosen
    workflow: Workflow
    #: what agents ask that name no model
    models: TeamModels


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what of it cannot be data."""

    plan: Plan
    #: by task key: resolved tasks as they travel, without context, agent, tools and model: those are in the plan and in
    #: `agents`, and a chain of tasks inside each other would grow with the square of its length
    tasks: Mapping[str, Task]
    #: by agent key
    agents: Mapping[str, Agent]
    #: whom work may be handed to, where anybody may do so; in the order of the ensemble's agents
    colleagues: tuple[Colleague, ...] = ()


def resolve_tasks(definition: EnsembleDefinition, inputs: Mapping[str, object] | None = None) -> ResolvedTasks:
    """Fill in the variables of all tasks and find the workflow (S-ENG-1, second and third step).

    Args:
        definition: Validated.
        inputs: Values of this run; they win over the ensemble's own (S-DOM-66).

    Raises:
        PromptTemplateError: a variable has no value; told of the first such text in task order (S-TPL-12).
    """
    merged = {str(name): text_of(value) for name, value in {**definition.inputs, **(inputs or {})}.items()}
    tasks = tuple(definition.tasks)
    workflow = infer_workflow(definition)
    if definition.workflow is None:
        _log.info("Workflow inferred: %s", workflow.value)
    return ResolvedTasks(
        tasks=_resolve_all(tasks, merged),
        keys=task_keys(tasks),
        inputs=merged,
        workflow=workflow,
        models=TeamModels(definition),
    )


def needs_synthesis(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the tasks for which an agent has to be made: no handler does them and they name none (S-DET-20)."""
    return tuple(task for task in tasks if task.agent is None and task.handler is None)


def plan_run(
    definition: EnsembleDefinition,
    resolved: ResolvedTasks,
    synthesized: Mapping[str, Agent] | None = None,
    prompts: tuple[str, str] | None = None,
) -> Planned:
    """Put tasks and agents in their places.

    Args:
        definition: The ensemble.
        resolved: What `resolve_tasks` gave for this run.
        synthesized: Agents by object id of the task they were made for; a task without its agent is planned as
            `(synthesized)`, which is enough to show a plan (S-SET-46).
        prompts: Background and task of a hierarchical run's manager; None: its strategy is asked here.
    """
    synthesized_agents = synthesized or {}
    if resolved.workflow is Workflow.HIERARCHICAL:
        return _plan_hierarchy(definition, resolved, synthesized_agents, prompts)
    key_of: dict[str, str] = {}
    for task, key in zip(resolved.tasks, resolved.keys, strict=True):
        key_of.setdefault(task.object_id, key)
    maker = _NodeMaker(definition, key_of, resolved.models)
    nodes: list[Node] = []
    for index, (task, key) in enumerate(zip(resolved.tasks, resolved.keys, strict=True), start=1):
        agent = task.agent if task.agent is not None else synthesized_agents.get(task.object_id)
        nodes.append(maker.node(task, key, index=index, agent=agent))
    if any(agent.allow_delegation for agent in maker.agents.values()):
        for agent in declared_agents(definition):
            maker.agent_key(agent)  # it may be asked, though no task is its own
    strategy = definition.parallel_error_strategy or ParallelErrorStrategy.FAIL_FAST
    plan = Plan(
        workflow=resolved.workflow.value,
        nodes=tuple(nodes if definition.levels is None else _in_levels(nodes, definition.levels)),
        agents=tuple(maker.entries),
        error_strategy=strategy.value,
        max_parallel_tasks=definition.max_parallel_tasks,
        inputs=resolved.inputs,
        shown_as=None if definition.levels is None else definition.levels.workflow,
    )
    tasks = {key: _as_it_travels(task) for task, key in zip(resolved.tasks, resolved.keys, strict=True)}
    return Planned(plan=plan, tasks=tasks, agents=maker.agents, colleagues=maker.colleagues())


def _in_levels(nodes: Iterable[Node], levels: Levels) -> Iterator[Node]:
    """Return the nodes of a map-reduce with their positions in its tree; each counted within its level (S-MR-95)."""
    counted: dict[int, int] = {}
    for node in nodes:
        node_type, level = levels.places[node.object_id]
        counted[level] = counted.get(level, 0) + 1
        yield replace(node, index=counted[level], node_type=node_type, level=level)


def _plan_hierarchy(
    definition: EnsembleDefinition,
    resolved: ResolvedTasks,
    synthesized_agents: Mapping[str, Agent],
    prompts: tuple[str, str] | None,
) -> Planned:
    """Plan one task, the manager's; all agents work for it (S-HIER-1)."""
    workers = workers_of(definition, resolved.tasks, synthesized_agents, models=resolved.models)
    agents = [agent for agent, _ in workers]
    if prompts is None:
        prompts = manager_prompts(definition.manager_prompt_strategy, manager_context(agents, resolved.tasks))
    background, description = prompts
    manager, task = manager_of(definition, agents, background), task_of_manager(description)
    maker = _NodeMaker(definition, {}, resolved.models)
    node = maker.node(task, MANAGER_KEY, index=1, agent=manager)
    for agent, is_synthesized in workers:
        maker.agent_key(agent, is_synthesized=is_synthesized)
    plan = Plan(
        workflow=Workflow.HIERARCHICAL.value,
        nodes=(node,),
        agents=tuple(maker.entries),
        inputs=resolved.inputs,
        hierarchy=rules_of(definition),
    )
    return Planned(plan=plan, tasks={MANAGER_KEY: task}, agents=maker.agents, colleagues=maker.colleagues(but=manager))


def task_keys(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Return a key for each task: its name, else its position; the second of a name gets `~2`, and so on.

    `/` and `#` become `_`: they part the steps of an instance's path.
    """
    names = _Names()
    return tuple(
        names.claim(re.sub(r"[/#]", "_", task.name) if task.name else f"task-{index}")
        for index, task in enumerate(tasks, start=1)
    )


@dataclass(slots=True)
class _Names:
    """Gives out names, each once."""

    _used: set[str] = field(default_factory=set[str])
    _next: dict[str, int] = field(default_factory=dict[str, int])

    def claim(self, wanted: str) -> str:
        name = wanted
        while name in self._used:
            # The next number is kept per name, or a thousand researchers would take half a million look-ups.
            number = self._next.get(wanted, 2)
            self._next[wanted] = number + 1
            name = f"{wanted}~{number}"
        self._used.add(name)
        return name


class _NodeMaker:
    """Makes the nodes of tasks, and the entries of agents in the order of their first use (S-DOM-65)."""

    def __init__(self, definition: EnsembleDefinition, key_of: Mapping[str, str], models: TeamModels) -> None:
        self.entries: list[AgentEntry] = []
        self.agents: dict[str, Agent] = {}
        self._definition = definition
        self._models = models
        self._key_of = key_of
        self._agent_keys: dict[str, str] = {}
        self._names = _Names()

    def node(self, task: Task, key: str, *, index: int, agent: Agent | None) -> Node:
        """Return the node of a task; `agent` does it, None for a handler task or before synthesis."""
        role, agent_key = SYNTHESIZED, None
        if task.handler is not None:
            role = DETERMINISTIC
        elif agent is not None:
            role = agent.role
            agent_key = self.agent_key(agent, is_synthesized=task.agent is None and key != MANAGER_KEY)
        inside = self._key_of
        return Node(
            key=key,
            index=index,
            object_id=task.object_id,
            description=task.description,
            expected_output=task.expected_output,
            agent_role=role,
            agent_key=agent_key,
            context=tuple(inside[entry.object_id] for entry in task.context if entry.object_id in inside),
            context_outside=tuple(entry.description for entry in task.context if entry.object_id not in inside),
            is_streaming=task.handler is None and _streams(agent, task, self._definition),
        )

    def colleagues(self, *, but: Agent | None = None) -> tuple[Colleague, ...]:
        """Return the agents that work may be delegated to; none where no agent may delegate."""
        if but is None and not any(agent.allow_delegation for agent in self.agents.values()):
            return ()
        rank = {agent: position for position, agent in enumerate(declared_agents(self._definition))}
        order = sorted(self.agents.items(), key=lambda entry: rank.get(entry[1], len(rank)))
        return tuple(
            Colleague(key=key, role=agent.role, is_streaming=_streams(agent, None, self._definition))
            for key, agent in order
            if agent is not but
        )

    def agent_key(self, agent: Agent, *, is_synthesized: bool = False) -> str:
        """Return the key of an agent, which takes part from now on."""
        key = self._agent_keys.get(agent.object_id)
        if key is not None:
            return key
        key = self._names.claim(re.sub(r"\W+", "-", agent.role.lower()).strip("-") or "agent")
        self._agent_keys[agent.object_id] = key
        self.agents[key] = self._models.resolve_agent(agent)
        self.entries.append(
            AgentEntry(
                key=key,
                role=agent.role,
                goal=agent.goal,
                background=agent.background,
                tool_names=tool_names(agent),
                is_synthesized=is_synthesized,
                allow_delegation=agent.allow_delegation,
            )
        )
        return key


def _streams(agent: Agent | None, task: Task | None, definition: EnsembleDefinition) -> bool:
    """Return the first of agent, task and ensemble that says anything (S-STR-1)."""
    for chosen in (None if agent is None else agent.is_streaming, None if task is None else task.stream):
        if chosen is not None:
            return chosen
    return definition.is_streaming


def tool_names(agent: Agent) -> tuple[str, ...]:
    """Return the names of an agent's tools as declared; what a provider offers is known when a task begins."""
    if not agent.tools:
        return ()
    from ensemble_ray.tools.decorator import marked_functions, tool_mark  # only agents with tools pay
    from ensemble_ray.tools.tool import AgentTool  # same

    names: list[str] = []
    for entry in agent.tools:
        if isinstance(entry, AgentTool):
            names.append(entry.name)
            continue
        methods = marked_functions(type(entry)) if tool_mark(entry) is None else ()
        marks = (tool_mark(getattr(entry, method)) for method in methods) if methods else (tool_mark(entry),)
        names.extend(mark.name for mark in marks if mark is not None)
    return tuple(names)


def _resolve_all(tasks: tuple[Task, ...], inputs: Mapping[str, str]) -> tuple[Task, ...]:
    """Fill in texts in list order, then point context at the resolved tasks, dependencies first (S-TPL-11)."""
    changes: dict[str, dict[str, object]] = {}
    for task in tasks:
        description = resolve_template(task.description, inputs)
        expected_output = resolve_template(task.expected_output, inputs)
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


def _as_it_travels(task: Task) -> Task:
    if not task.context and task.agent is None and task.llm is None and not task.tools:
        return task
    return task.rewritten(context=(), agent=None, llm=None, tools=())


def text_of(value: object) -> str:
    """Return an input as text (S-DOM-70), fit for UTF-8 (S-SEC-56); None is "" (S-TPL-4)."""
    return "" if value is None else whole_text(str(value))
