"""Planning of a run: `validate`, `resolve_tasks`, `synthesize_agents` (the only step that calls models) and `plan_run`.

Planning copies only tasks that change.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, TypeVar, cast, overload

import msgspec
from msgspec import Struct
from pydantic import BeforeValidator

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition, HierarchicalConstraints, Levels, ManagerPromptContext
from ensemble_ray.definition.fields import (
    TEAM_MODEL,
    ParallelErrorStrategy,
    Workflow,
    escape_data,
    fill_inputs,
    limit_model,
    resolve_model,
)
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
from ensemble_ray.errors import (
    AgentExecutionError,
    BudgetExhaustedError,
    EnsembleError,
    IllegalStateError,
    PromptTemplateError,
    ValidationError,
)
from ensemble_ray.errors.texts import agent_failure, brief, describe
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE, HierarchyRules, Node, Plan
from ensemble_ray.plan.unit_plans import SYNTHESIZED, NodeMaker, Scope, plan_members, task_keys
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.concurrency import USER_ERRORS, call_user
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.prompts.task import manager_prompts
from ensemble_ray.text.answers import find_json
from ensemble_ray.text.foreign_text import whole_json, whole_text
from ensemble_ray.values.attachments import Attachment, attachments_in
from ensemble_ray.values.delegation import Peer, spoken_role
from ensemble_ray.values.ids import effect_name, instance_of
from ensemble_ray.values.messages import ChatMessage, ChatResponse
from ensemble_ray.values.value import Value

T = TypeVar("T")

_log = bounded_logger(__name__)
_GOAL = "Have the tasks done by the agents of the team, within the rules, and answer with the whole"
_EXPECTED_OUTPUT = "One answer that covers all tasks, made of what the agents of the team gave."
_VARIABLE = re.compile(r"\{\{(?P<escaped>\w+)\}\}|\{(?P<name>\w+)\}")
_SHOWN = 100
_UNSAFE_NAME = re.compile(r"[/\\:?#@%\0]")  # in a part of a path or a URL
_MAY_ATTACH = (Attachment, list, tuple)  # types of inputs


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


def needed_inputs(tasks: Iterable[Task]) -> dict[str, list[str]]:
    """Return the variables of the tasks' texts, each with the tasks that use it."""
    needed: dict[str, list[str]] = {}
    for position, task in enumerate(tasks, start=1):
        for text in (task.description, task.expected_output, *(each.source for each in task.attachments)):
            try:
                resolve_template(text, {})
            except PromptTemplateError as error:
                for name in error.missing_variables:
                    users = needed.setdefault(name, [])
                    label = task.name or f"task {position}"
                    if label not in users:
                        users.append(label)
    return needed


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


class ResolvedTasks(Struct, frozen=True, kw_only=True):
    #: in the order of `all_tasks`; their context contains resolved tasks too
    tasks: tuple[Task, ...]
    keys: tuple[str, ...]
    inputs: Mapping[str, str]
    workflow: Workflow
    models: TeamModels
    #: inputs that are attachments
    attached: Mapping[str, Sequence[Attachment]] = msgspec.field(default_factory=dict[str, Sequence[Attachment]])


class Planned(Struct, frozen=True, kw_only=True):
    """A plan, and its parts that cannot be data."""

    plan: Plan
    #: without context, agent and tools, which are stored in the plan and in `agents`: a chain of nested tasks would grow with
    #: the square of its length
    tasks: Mapping[str, Task]
    agents: Mapping[str, Agent]
    #: agents that may receive delegated work, in the order of the ensemble's agents
    peers: tuple[Peer, ...] = ()
    #: as declared, with their predicates and conditions
    units: Mapping[str, Loop | Phase | Graph] = msgspec.field(default_factory=dict[str, Loop | Phase | Graph])
    #: inputs that are attachments, read
    attached: Mapping[str, Sequence[Attachment]] = msgspec.field(default_factory=dict[str, Sequence[Attachment]])


def resolve_tasks(definition: EnsembleDefinition, inputs: Mapping[str, object] | None = None) -> ResolvedTasks:
    """Fill in variables and infer the workflow (S-ENG-1); `inputs` win over the ensemble's (S-DOM-66)."""
    given = {**definition.inputs, **(inputs or {})}
    merged = {str(name): text_of(value) for name, value in given.items()}
    attached = attached_inputs(given)
    tasks = tuple(definition.all_tasks)
    workflow = infer_workflow(definition)
    if definition.workflow is None:
        _log.info("Workflow inferred: %s", workflow.value)
    return ResolvedTasks(
        tasks=_resolve_all(tasks, merged, definition.levels, attached),
        keys=task_keys(tasks),
        inputs=merged,
        workflow=workflow,
        models=TeamModels(definition),
        attached=attached,
    )


def attached_inputs(inputs: Mapping[str, object]) -> dict[str, Sequence[Attachment]]:
    """Return the inputs that are attachments or lists of them."""
    given = {str(name): attachments_in(value) for name, value in inputs.items() if isinstance(value, _MAY_ATTACH)}
    return {name: found for name, found in given.items() if found}


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
    return Planned(
        plan=plan,
        tasks=tasks,
        agents=maker.agents,
        peers=maker.peers(),
        units=members.definitions,
        attached=resolved.attached,
    )


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
    if isinstance(value, list | tuple) and (attached := attachments_in(value)):
        return ", ".join(map(str, attached))
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


def _resolve_all(
    tasks: tuple[Task, ...],
    inputs: Mapping[str, str],
    levels: Levels | None,
    attached: Mapping[str, Sequence[Attachment]],
) -> tuple[Task, ...]:
    """Fill in texts in list order, then make context refer to the resolved tasks (S-TPL-11)."""
    changes: dict[str, dict[str, object]] = {}
    for task in tasks:
        data = () if levels is None else levels.texts.get(task.object_id, ())  # texts of the items of a map-reduce
        description = resolve_template(escape_data(task.description, data), inputs)
        expected_output = resolve_template(escape_data(task.expected_output, data), inputs)
        if description is not task.description or expected_output is not task.expected_output:
            changes[task.object_id] = {"description": description, "expected_output": expected_output}
        if task.attachments or attached:
            fill = partial(fill_inputs, data=()) if levels is not None else resolve_template
            added = resolve_attachments(task, inputs, attached, fill)
            if added != task.attachments:
                changes.setdefault(task.object_id, {})["attachments"] = added
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


def resolve_attachments(
    task: Task,
    inputs: Mapping[str, str],
    attached: Mapping[str, Sequence[Attachment]],
    fill: Callable[[str, Mapping[str, str]], str],
) -> tuple[Attachment, ...]:
    """Return a task's attachments with their variables filled in, then the inputs that its texts name."""
    declared = [each.with_source(fill(each.source, inputs)) if each.source else each for each in task.attachments]
    named = [
        found["name"]
        for text in (task.description, task.expected_output)
        for found in (_VARIABLE.finditer(text) if attached else ())
    ]
    return tuple(dict.fromkeys([*declared, *(each for name in named for each in attached.get(name, ()))]))


def check_foreign_values(tasks: Iterable[Task], values: Mapping[str, object]) -> None:
    """Refuse values of a client that would choose a directory or a host of the team's attachments (S-ATT-16).

    Raises:
        ValidationError: a value in a path or a URL is not one plain name.
    """
    for task in tasks:
        for each in task.attachments:
            for name in [found["name"] for found in _VARIABLE.finditer(each.source)]:
                text = str(values.get(name) or "")
                is_host = each.is_url and f"{{{name}}}" in each.source.split("/")[2] and bool(text)
                if is_host or _UNSAFE_NAME.search(text) or text.startswith("."):
                    raise ValidationError(
                        f"Input '{name}' is a part of the path or URL of an attachment, so it must be one plain name and no host, got: "
                        f"{text[:80]!r}"
                    )


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


_SEARCHED_WORDS = 8
_OBJECT_START = re.compile(r"\{")
_ROLES: Mapping[str, str] = {
    verb: role
    for role, verbs in {
        "Researcher": "research investigate find discover search",
        "Writer": "write draft compose document",
        "Analyst": "analyze analyse evaluate assess compare",
        "Developer": "build implement develop code program",
        "Tester": "test verify",
        "Summarizer": "summarize summarise",
        "Classifier": "classify categorize",
        "Calculator": "calculate compute",
        "Creator": "create",
        "Generator": "generate",
        "Reviewer": "review",
        "Auditor": "audit",
        "Designer": "design",
        "Planner": "plan",
        "Validator": "validate",
        "Translator": "translate",
        "Extractor": "extract",
        "Monitor": "monitor",
        "Tracker": "track",
        "Collector": "scrape",
        "Parser": "parse",
        "Converter": "convert",
        "Formatter": "format",
        "Cleaner": "clean",
        "Processor": "process",
    }.items()
    for verb in verbs.split()
}
_LONGEST_VERB = max(map(len, _ROLES))
_ASK_FOR_AGENT = """\
Describe the person best suited to do the task below. Answer with ONLY one JSON object with these string fields:
"role" (a short job title), "goal" (what that person works towards), "backstory" (experience and manner, one or two \
sentences). Write the values in the language with the code "{locale}".

## Task
{description}

## Expected Output
{expected_output}"""


class SynthesisContext(Value):
    """Input of a synthesizer.

    Attributes:
        model: The model of the agent, unless the synthesizer sets another.
        locale: Language of generated texts, such as `"en"`.
    """

    model: Annotated[ChatModel, BeforeValidator(resolve_model)]
    locale: str = "en"


class AgentSynthesizer(ABC):
    """Makes an agent for a task that names none. Any object with this method, or a function of this form, is accepted too."""

    @abstractmethod
    def synthesize(self, task: Task, context: SynthesisContext, /) -> Agent | Awaitable[Agent]:
        """Return the agent for a task; may be `async`."""

    @staticmethod
    def template() -> AgentSynthesizer:
        """Derive the role from the first verb of the description, without a model call. The default."""
        return _TemplateSynthesizer()

    @staticmethod
    def llm_based() -> AgentSynthesizer:
        """Ask the model for role, goal and background: one call per task."""
        return _LlmSynthesizer()


class _TemplateSynthesizer(AgentSynthesizer):
    def synthesize(self, task: Task, context: SynthesisContext, /) -> Agent:
        return _from_template(task, context.model)


class _LlmSynthesizer(AgentSynthesizer):
    async def synthesize(self, task: Task, context: SynthesisContext, /) -> Agent:
        prompt = _ASK_FOR_AGENT.format(
            locale=context.locale, description=task.description, expected_output=task.expected_output
        )
        try:
            response = await call_user(context.model.chat, [ChatMessage("user", prompt)])
        except BudgetExhaustedError:
            raise
        except USER_ERRORS as error:
            raise AgentExecutionError(agent_failure(SYNTHESIZED, error), SYNTHESIZED, task.description) from error
        text = (response.text or "") if isinstance(response, ChatResponse) else ""
        found = find_json(whole_json(text), _OBJECT_START)
        answer = {} if found is None else cast("Mapping[str, object]", found.value)
        values = (answer.get(name) for name in ("role", "goal", "backstory"))
        role, goal, background = (value.strip() if isinstance(value, str) else "" for value in values)
        if not role or not goal:
            _log.warning(
                "Agent synthesis for task '%s' returned no usable JSON; using the template", task.description[:80]
            )
            return _from_template(task, context.model)
        return Agent(role=role, goal=goal, background=background or None, llm=context.model)


async def synthesize_agents(
    resolved: ResolvedTasks,
    definition: EnsembleDefinition,
    *,
    locale: str = "en",
    recorded: Callable[[str, ChatModel], ChatModel] | None = None,
) -> Mapping[str, Agent]:
    """Make an agent for each task without agent and handler (S-DET-20), all at the same time; return them by the task's id.

    `recorded` wraps a model so that its calls are recorded under an effect name (S-SET-46). The agents keep the model without
    the wrapper.
    """
    shared = resolved.models.shared
    waiting: dict[str, tuple[Task, str]] = {}
    for task, key in zip(resolved.tasks, resolved.keys, strict=True):
        if task.agent is None and task.handler is None:
            waiting.setdefault(task.object_id, (task, key))
    agents: dict[str, Agent] = {}
    calls: dict[str, Awaitable[Agent]] = {}
    synthesizer = definition.agent_synthesizer or AgentSynthesizer.template()
    for object_id, (task, key) in waiting.items():
        if task.llm is not None:
            model = task.llm
        elif definition.llm is None or shared is None:
            raise ValidationError(f"Task '{task.description}' has no LLM available.")
        else:
            model = shared if task.rate_limit is None else limit_model(definition.llm, task.rate_limit)
        if isinstance(synthesizer, _TemplateSynthesizer):
            agents[object_id] = _fit(_from_template(task, model), task)
            continue
        wrapped = model if recorded is None else recorded(effect_name(instance_of(key), 0, "synthesis"), model)
        context = SynthesisContext(model=wrapped, locale=locale)
        calls[object_id] = _call_synthesizer(synthesizer, task, context, model)
    if calls:
        agents.update(zip(calls, await _all(calls.values(), cap=definition.max_parallel_tasks), strict=True))
    return _number_roles(agents, definition) if resolved.workflow is Workflow.HIERARCHICAL else agents


def _number_roles(agents: Mapping[str, Agent], definition: EnsembleDefinition) -> Mapping[str, Agent]:
    """Return the same agents with unique roles: ` 2`, ` 3` and so on is added to a role in use (S-DET-26)."""
    declared = declared_agents(definition)
    used = {spoken_role(MANAGER_ROLE), *(spoken_role(agent.role) for agent in declared)}
    # A synthesizer may return one agent for several tasks, or an agent of the ensemble: these are one worker.
    workers = {agent.object_id: agent for agent in declared}
    numbers: dict[str, int] = {}
    for agent in agents.values():
        if agent.object_id in workers:
            continue
        role, number = agent.role, numbers.get(agent.role, 1)
        while spoken_role(role) in used:
            number += 1
            role = f"{agent.role} {number}"
        numbers[agent.role] = number
        used.add(spoken_role(role))
        workers[agent.object_id] = agent if role == agent.role else agent.rewritten(role=role)
    return {object_id: workers[agent.object_id] for object_id, agent in agents.items()}


async def _call_synthesizer(synthesizer: object, task: Task, context: SynthesisContext, model: ChatModel) -> Agent:
    function = cast("Callable[[Task, SynthesisContext], object]", getattr(synthesizer, "synthesize", synthesizer))
    try:
        agent = await call_user(cast("Callable[..., Any]", function), task, context)
    except (EnsembleError, IllegalStateError, BudgetExhaustedError):
        raise
    except USER_ERRORS as error:  # S-ERR-37: a run raises no foreign class
        text = f"The agent synthesizer failed for task '{brief(task.description)}': {describe(error)}"
        raise AgentExecutionError(text, SYNTHESIZED, task.description) from error
    if not isinstance(agent, Agent):
        raise ValidationError(
            f"The agent synthesizer must return an Agent for task '{brief(task.description)}', "
            f"got: {type(agent).__name__}"
        )
    if agent.llm is TEAM_MODEL or (agent.llm is context.model and model is not context.model):
        agent = agent.rewritten(llm=model)
    return _fit(agent, task)


def _fit(agent: Agent, task: Task) -> Agent:
    """Give the agent the task's tools and limit (S-DET-21)."""
    changes: dict[str, object] = {}
    if task.tools:
        changes["tools"] = task.tools
    if task.max_iterations is not None:
        changes["max_iterations"] = task.max_iterations
    # `replace` makes another agent: a synthesizer may return one agent for several tasks.
    return agent.replace(**changes) if changes else agent


async def _all(calls: Iterable[Awaitable[Agent]], *, cap: int | None) -> list[Agent]:
    """The first failure cancels the others."""
    slots = nullcontext() if cap is None else asyncio.Semaphore(cap)

    async def in_slot(call: Awaitable[Agent]) -> Agent:
        async with slots:
            return await call

    futures = [asyncio.ensure_future(in_slot(call)) for call in calls]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _from_template(task: Task, model: ChatModel) -> Agent:
    role = "Agent"
    # A word may be megabytes long, so only its first characters are read.
    for word in task.description.split(maxsplit=_SEARCHED_WORDS)[:_SEARCHED_WORDS]:
        characters = filter(str.isalpha, word.lower())
        if (found := _ROLES.get("".join(islice(characters, _LONGEST_VERB + 1)))) is not None:
            role = found
            break
    background = f"You have worked as an expert {role} for many years."
    return Agent(role=role, goal=task.description, background=background, llm=model)
