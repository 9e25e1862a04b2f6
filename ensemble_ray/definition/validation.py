"""Checks of an ensemble: its parts against each other, in the order of S-DOM-61, and the keys of its models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition, check_constraints, check_roles
from ensemble_ray.definition.fields import TEAM_MODEL, Durability, Workflow, limit_model
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop, body_key
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.run_rules import RunRules
from ensemble_ray.definition.task import Task, UnitOutput
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.ports import ChatModel
from ensemble_ray.values.ids import MOST_RESENDS
from ensemble_ray.values.prices import RunPrices

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.llm.limits.limiter import RateLimitedChatModel

# S-DOM-61.5.
_NO_MODEL_ADVICE = (
    "Provide an explicit agent, a task-level llm, an ensemble-level llm, or configure a deterministic handler."
)
_SET_A_MODEL = "Set llm on the task, the ensemble, or provide an explicit agent or handler."


def validate(definition: EnsembleDefinition) -> list[str]:
    """Check an ensemble, and return warnings to log (S-DOM-64). The first check that fails raises."""
    if not definition.tasks and not definition.has_units:
        raise ValidationError("Ensemble must have at least one task")
    _check_units(definition)
    check_rules(definition)
    _check_reuse(definition)
    _check_agents(definition)
    _check_models(definition)
    _check_delegation(definition)
    workflow = infer_workflow(definition)
    if workflow is Workflow.PARALLEL and definition.parallel_error_strategy is None:
        raise ValidationError("Ensemble parallel_error_strategy must not be None for PARALLEL workflow")
    if workflow is Workflow.HIERARCHICAL:
        _check_hierarchical(definition)
    _refuse_cycles(definition.all_tasks, definition.all_loops)
    if workflow is Workflow.SEQUENTIAL:
        _check_order(definition.tasks)
    return _warnings(definition)


def check_rules(definition: RunRules) -> None:
    """Check the rules of an ensemble of any kind."""
    if definition.rate_limit is not None and definition.llm is None:
        raise ValidationError(
            "Ensemble rate_limit is configured but llm is None. "
            "An ensemble-level llm is required when rate_limit is set."
        )
    _check_costs(definition)
    if definition.is_detached and definition.durability is Durability.OFF:
        raise ValidationError(
            "Ensemble review_wait 'detach' needs a record, in which the run waits, and durability is 'off'. "
            "Use durability 'effects' or 'run', or review_wait 'attached'"
        )


def check_hierarchy(definition: EnsembleDefinition, roles: Sequence[str]) -> None:
    """Check a hierarchical ensemble against the roles of all its workers (S-HIER-4, S-HIER-30 to S-HIER-37)."""
    check_roles(roles)
    check_constraints(definition.hierarchical_constraints, roles)


def doubled_names(tasks: Sequence[Task]) -> list[str]:
    """Return a warning for each name of several tasks (S-DOM-71)."""
    counts = Counter(task.name for task in tasks if task.name is not None)
    return [
        f"{count} tasks are named '{name}'; in the plan and the record the others are '{name}~2' and so on"
        for name, count in counts.items()
        if count > 1
    ]


def infer_workflow(definition: EnsembleDefinition) -> Workflow:
    """Return the declared workflow, else parallel if a listed task has another one as context (S-DET-40, S-DET-43, S-LOOP-125)."""
    if definition.workflow is not None:
        return definition.workflow
    listed = {task.object_id for task in definition.tasks}
    is_linked = any(entry.object_id in listed for task in definition.tasks for entry in task.context)
    return Workflow.PARALLEL if is_linked else Workflow.SEQUENTIAL


def declared_agents(definition: EnsembleDefinition) -> tuple[Agent, ...]:
    """Return the declared agents, else the agents of the tasks in first-use order (S-DOM-65)."""
    agents = definition.agents
    named = agents if agents is not None else (task.agent for task in definition.all_tasks if task.agent is not None)
    return tuple(dict.fromkeys(named))


def manager_model(definition: EnsembleDefinition, workers: Sequence[Agent]) -> ChatModel:
    """Return the model of a hierarchical run's manager (S-HIER-2)."""
    model = definition.manager_llm
    if model is None:
        model = next((worker.llm for worker in workers if worker.runner is None), None)
    if model is None and definition.tasks:
        model = definition.tasks[0].llm  # S-DET-20
    if model is None:
        model = definition.llm
    if model is None:
        raise ValidationError(
            "No Manager LLM available for hierarchical workflow. Set manager_llm, an agent's llm, or an ensemble-level llm."
        )
    return model


def uses_team_model(agent: Agent) -> bool:
    """Return whether an agent needs a model and declares none."""
    if agent.runner is not None:
        return False
    return agent.llm is TEAM_MODEL or (agent.rate_limit is not None and getattr(agent.llm, "delegate", 0) is TEAM_MODEL)


def with_model(agent: Agent, model: ChatModel) -> Agent:
    """Return the same agent with another model, under the limit of its present model."""
    from ensemble_ray.llm.limits.limiter import RateLimitedChatModel  # needed only if a run changes models

    own = agent.llm
    return agent.rewritten(llm=own.around(model) if isinstance(own, RateLimitedChatModel) else model)


def with_task_model(agent: Agent, model: ChatModel) -> Agent:
    """Return the same agent with a task's model, under the agent's own limit (S-DOM-90)."""
    return with_model(agent, model) if agent.rate_limit is not None else agent.rewritten(llm=model)


class TeamModels:
    """Models of one run for agents that declare none."""

    def __init__(self, definition: RunRules) -> None:
        """Limit the model of the ensemble, with one bucket for the run (S-RATE-33)."""
        self._model = definition.llm
        #: under its limit
        self.shared: ChatModel | None = None if self._model is None else limit_model(self._model, definition.rate_limit)
        #: by bucket: an agent has one model in a run
        self._limited: WeakValueDictionary[str, RateLimitedChatModel] = WeakValueDictionary()

    def resolve_agent(self, agent: Agent, task_model: ChatModel | None = None) -> Agent:
        """Return the same agent with the ensemble's model, else its task's (S-DOM-91)."""
        if not uses_team_model(agent):
            return agent
        if self._model is None and task_model is not None:
            return with_task_model(agent, task_model)
        if self._model is None or self.shared is None:
            raise ValidationError(f"Agent '{agent.role}' has no llm: give it one, or give the ensemble llm=...")
        if agent.llm is TEAM_MODEL:
            return agent.rewritten(llm=self.shared)
        from ensemble_ray.llm.limits.limiter import RateLimitedChatModel  # needed only with limits

        own = agent.llm
        assert isinstance(own, RateLimitedChatModel)  # noqa: S101  `uses_team_model` saw its `delegate`
        # The agent keeps its own bucket across runs (S-RATE-30).
        return agent.rewritten(llm=self._limited.setdefault(own.bucket, own.around(self._model)))


def _check_reuse(definition: EnsembleDefinition) -> None:
    """S-USE-3."""
    if definition.durability is not Durability.OFF:
        return
    for task in definition.all_tasks:
        if task.reuse is not None:
            raise ValidationError(
                f"Task '{task.description}' reuses answers from the records of earlier runs, and durability is 'off'. "
                "Use durability 'effects' or 'run', or leave out reuse"
            )


def _check_agents(definition: EnsembleDefinition) -> None:
    """S-DOM-61.3 and S-DOM-61.4."""
    if definition.agents is None:
        return
    if not definition.agents:
        raise ValidationError("Ensemble must have at least one agent")
    registered = set(definition.agents)
    for task in definition.all_tasks:
        if task.agent is not None and task.agent not in registered:
            raise ValidationError(
                f"Task '{task.description}' references agent '{task.agent.role}' "
                "which is not in the ensemble's agent list"
            )


def _check_models(definition: EnsembleDefinition) -> None:
    """S-DOM-61.5, S-DOM-73 and S-DOM-91."""
    if definition.llm is not None:
        return
    for task in definition.tasks:
        if task.handler is None and task.agent is None and task.llm is None:
            raise ValidationError(f"Task '{task.description}' has no LLM available. {_NO_MODEL_ADVICE}")
    tasks = definition.all_tasks
    without = {task.agent for task in tasks if task.llm is None}
    with_model = {task.agent for task in tasks} - without
    for agent in declared_agents(definition):
        if uses_team_model(agent) and agent not in with_model:
            raise ValidationError(f"Agent '{agent.role}' has no llm: give it one, or give the ensemble llm=...")


def _check_delegation(definition: EnsembleDefinition) -> None:
    """S-DOM-61.6."""
    depth, timeout = definition.max_delegation_depth, definition.delegation_timeout
    retries = definition.delegation_retries
    if depth <= 0:
        raise ValidationError(f"Ensemble max_delegation_depth must be > 0, got: {depth}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValidationError(f"Ensemble delegation_timeout must be > 0 when set, got: {timeout}")
    if not 0 <= retries <= MOST_RESENDS:
        raise ValidationError(f"Ensemble delegation_retries must be between 0 and {MOST_RESENDS}, got: {retries}")


def _check_hierarchical(definition: EnsembleDefinition) -> None:
    """S-DOM-61.7 and S-DOM-61.9. Roles of synthesized agents are checked later."""
    if definition.manager_max_iterations < 1:
        raise ValidationError(
            "Ensemble manager_max_iterations must be > 0 for HIERARCHICAL workflow, "
            f"got: {definition.manager_max_iterations}"
        )
    if definition.manager_stall_turns < 0:
        raise ValidationError(
            f"Ensemble manager_stall_turns must be >= 0 for HIERARCHICAL workflow, got: {definition.manager_stall_turns}"
        )
    roles = [agent.role for agent in declared_agents(definition)]
    check_roles(roles)
    is_complete = all(task.agent is not None or task.handler is not None for task in definition.tasks)
    check_constraints(definition.hierarchical_constraints, roles if is_complete else None)
    for task in definition.tasks:
        if task.handler is not None:
            raise ValidationError(
                "Deterministic handler tasks are not supported in HIERARCHICAL workflow. "
                f"Task '{task.description}' has a handler configured. "
                "Give the task to an agent, or use the sequential or parallel workflow."
            )


def _check_order(tasks: Sequence[Task]) -> None:
    """S-DOM-61.11 for all tasks, then S-DOM-61.12."""
    listed = {task.object_id for task in tasks}
    seen: set[str] = set()
    absent: str | None = None
    for task in tasks:
        for entry in task.context:
            if entry.object_id in seen or isinstance(entry, UnitOutput):
                continue
            subject = f"Task '{task.description}' references context task '{entry.description}' which"
            if entry.object_id in listed:
                raise ValidationError(f"{subject} appears later in the task list")
            absent = absent or f"{subject} is not in the ensemble's task list"
        seen.add(task.object_id)
    if absent is not None:
        raise ValidationError(absent)


def _refuse_cycles(tasks: Sequence[Task], loops: Sequence[Loop]) -> None:
    """S-DOM-61.10, S-DOM-62: also of tasks outside the lists."""
    by_id = {loop.object_id: loop for loop in loops}
    finished: set[str] = set()
    roots: tuple[Task | Loop, ...] = (*tasks, *loops)
    for root in roots:
        root_id = root.object_id
        if root_id in finished:
            continue
        # Chains may exceed the recursion limit of Python.
        path = {root_id}
        stack: list[tuple[str, Iterator[Task | UnitOutput]]] = [(root_id, iter(root.context))]
        while stack:
            object_id, rest = stack[-1]
            entry = next(rest, None)
            if entry is None:
                stack.pop()
                path.discard(object_id)
                finished.add(object_id)
            elif (entry_id := entry.object_id) in path:
                raise ValidationError(f"Circular context dependency detected involving task: '{entry.description}'")
            elif entry_id not in finished:
                path.add(entry_id)
                waited = by_id.get(entry_id) if isinstance(entry, UnitOutput) else entry
                stack.append((entry_id, iter(() if waited is None else waited.context)))


def _warnings(definition: EnsembleDefinition) -> list[str]:
    """Unused agents (S-DOM-64), and fields of tasks without effect (S-HIER-88, S-DOM-92).

    If work may be delegated, no agent counts as unused.
    """
    if definition.workflow is Workflow.HIERARCHICAL:
        return [warning for task in definition.tasks if (warning := _without_effect(task)) is not None]
    ignored = [warning for task in definition.all_tasks if (warning := _left_to_agent(task)) is not None]
    used = {task.agent for task in definition.all_tasks}
    if any(agent is not None and agent.allow_delegation for agent in used):
        return ignored
    return ignored + [
        f"Agent '{agent.role}' is registered but not assigned to any task"
        for agent in definition.agents or ()
        if agent not in used
    ]


def _left_to_agent(task: Task) -> str | None:
    if task.agent is None:
        return None
    has_runner = task.agent.runner is not None
    uses_llm = task.llm is not None and (not has_runner or task.reflection_config is not None)
    fields = [
        "tools",
        "max_iterations",
        *([] if uses_llm else ["rate_limit", "llm"]),
        *(["reuse"] if has_runner else []),
    ]
    declared = [field for field in fields if getattr(task, field)]
    if not declared:
        return None
    owner, of_owner = ("runner", "the runner of ") if has_runner else ("agent", "")
    return (
        f"Task '{task.description}' has {' and '.join(declared)} without effect: {of_owner}its agent '{task.agent.role}' "
        f"has its own. Set them on the {owner}"
    )


def _without_effect(task: Task) -> str | None:
    fields = ("output_type", "input_guardrails", "output_guardrails", "reflection_config", "reuse")
    declared = [field for field in fields if getattr(task, field)]
    if task.agent is not None and task.llm is not None:
        declared.append("llm")
    if not declared:
        return None
    return (
        f"Task '{task.description}' has {' and '.join(declared)} without effect in HIERARCHICAL workflow: its manager decides "
        "what becomes of it. Use a delegation policy, or another workflow"
    )


def _check_units(definition: EnsembleDefinition) -> None:
    _check_mixing(definition)
    _check_loops(definition)
    if definition.phases:
        _check_phases(definition)
    if definition.graph is not None:
        _check_graph(definition, definition.graph)
    elif not definition.phases:
        _check_outputs(definition)


def _check_mixing(definition: EnsembleDefinition) -> None:
    """S-PHASE-13, S-LOOP-30, S-GRAPH-30, S-GRAPH-31, S-LOOP-31, S-PHASE-112."""
    if definition.tasks and definition.phases:
        raise ValidationError(
            "Cannot mix tasks and phases on the same Ensemble. Use flat tasks for simple pipelines, or phases for named "
            "workstreams with parallel execution -- but not both on the same ensemble."
        )
    if definition.loops and definition.phases:
        raise ValidationError(
            "Cannot mix loops and phases on the same Ensemble. Use loops within a flat task list, or compose phases instead."
        )
    if definition.graph is not None and (definition.tasks or definition.loops or definition.phases):
        raise ValidationError(
            "Cannot mix a graph with tasks, loops or phases on the same Ensemble. Graph is an exclusive orchestration style; "
            "pick one per ensemble."
        )
    units = (
        (definition.graph, "a Graph", "the default workflow when declaring a graph"),
        (definition.loops, "Loop nodes", "Workflow.SEQUENTIAL or Workflow.PARALLEL when declaring loops"),
        (definition.phases, "phases", "Workflow.SEQUENTIAL or Workflow.PARALLEL when declaring phases"),
    )
    for declared, what, advice in units:
        if declared and definition.workflow is Workflow.HIERARCHICAL:
            raise ValidationError(f"Workflow.HIERARCHICAL does not support {what}. Use {advice}.")


def _check_loops(definition: EnsembleDefinition) -> None:
    """S-LOOP-32, S-LOOP-33, S-LOOP-35; also in phases and graphs."""
    loops = definition.all_loops
    name = _find_duplicate(loop.name for loop in loops)
    if name is not None:
        raise ValidationError(f"Duplicate loop name '{name}' detected. Loop names must be unique within an ensemble.")
    for loop in loops:
        for task in loop.body:
            if not _has_model(task, definition):
                msg = f"Loop '{loop.name}' body task '{body_key(task)}' has no LLM source. {_SET_A_MODEL}"
                raise ValidationError(msg)
    listed = {task.object_id for task in definition.tasks}
    for loop in definition.loops:
        for entry in _outside((each for each in loop.context if isinstance(each, Task)), listed):
            raise ValidationError(
                f"Loop '{loop.name}' declares context on task '{entry.name or entry.description}', "
                "which is not in the ensemble's tasks"
            )


def _check_outputs(definition: EnsembleDefinition) -> None:
    """S-LOOP-167."""
    listed = {loop.object_id for loop in definition.loops}
    waiting: list[tuple[str, Sequence[Task | UnitOutput]]] = [
        *((f"Task '{task.description}'", task.context) for task in definition.tasks),
        *((f"Loop '{loop.name}'", loop.context) for loop in definition.loops),
    ]
    for subject, context in waiting:
        for entry in context:
            if isinstance(entry, UnitOutput) and entry.object_id not in listed:
                raise ValidationError(
                    f"{subject} references the output of {entry.unit} '{entry.name}' which is not in the ensemble's {entry.unit}s"
                )


def _check_phases(definition: EnsembleDefinition) -> None:
    """S-PHASE-15 to S-PHASE-20."""
    phases = definition.phases
    name = _find_duplicate(phase.name for phase in phases)
    if name is not None:
        raise ValidationError(f"Duplicate phase name '{name}' detected. Phase names must be unique within an ensemble.")
    _refuse_phase_cycles(phases)
    for phase in phases:
        for task in phase.all_tasks:
            if not _has_model(task, definition):
                msg = f"Task '{task.description}' in phase '{phase.name}' has no LLM available. {_NO_MODEL_ADVICE}"
                raise ValidationError(msg)
    listed = {phase.object_id: phase for phase in phases}
    for phase in phases:
        _check_phase_context(phase, listed, definition)
    _check_membership(phases, listed)


def _check_membership(phases: Sequence[Phase], listed: Mapping[str, Phase]) -> None:
    """S-PHASE-19, S-PHASE-20."""
    for phase in phases:
        for before in phase.after:
            if before.object_id not in listed:
                msg = f"Phase '{phase.name}' comes after phase '{before.name}', which is not in the ensemble's phases"
                raise ValidationError(msg)
    owner: dict[str, str] = {}
    for phase in phases:
        for task in (*phase.tasks, *(task for loop in phase.loops for task in loop.body)):
            other = owner.setdefault(task.object_id, phase.name)
            if other != phase.name:
                raise ValidationError(
                    f"Task '{task.description}' is in phase '{other}' and in phase '{phase.name}'. A task belongs to one phase."
                )


def _refuse_phase_cycles(phases: Sequence[Phase]) -> None:
    """S-PHASE-16. If a phase exists as two objects, the listed one's predecessors count."""
    listed = {phase.object_id: phase for phase in phases}
    finished: set[str] = set()
    for root in phases:
        path: dict[str, Iterator[Phase]] = {root.object_id: iter(root.after)}
        while path:
            here, rest = next(reversed(path.items()))
            before = next(rest, None)
            if before is None:
                path.pop(here)
                finished.add(here)
            elif before.object_id in path:
                raise ValidationError(
                    f"Circular phase dependency detected involving phase '{before.name}'. Phase dependencies must form a "
                    "directed acyclic graph (DAG)."
                )
            elif before.object_id not in finished:
                path[before.object_id] = iter(listed.get(before.object_id, before).after)


def _check_phase_context(phase: Phase, listed: Mapping[str, Phase], definition: EnsembleDefinition) -> None:
    """S-PHASE-18, S-PHASE-113: context may name tasks of the same phase and of phases before it."""
    known = {entry for before in _before(phase, listed) for entry in (*_ids_of(before), before.object_id)}
    own = set(_ids_of(phase))
    workflow = phase.workflow or definition.workflow or Workflow.SEQUENTIAL
    seen: set[str] = {loop.object_id for loop in phase.loops}
    for task in phase.tasks:
        earlier = own if workflow is Workflow.PARALLEL else seen
        for entry in _outside(task.context, known | earlier):
            where = (
                "comes later in that phase" if entry.object_id in own else "is neither in it nor in a phase before it"
            )
            raise ValidationError(
                f"Task '{task.description}' in phase '{phase.name}' references context task '{entry.description}' which {where}"
            )
        seen.add(task.object_id)
    others = [(f"Loop '{loop.name}'", loop.context) for loop in phase.loops]
    if phase.review is not None:
        others.append((f"Review task '{phase.review.task.description}'", phase.review.task.context))
    for subject, context in others:
        for entry in _outside(context, known | own):
            raise ValidationError(
                f"{subject} in phase '{phase.name}' references context task '{entry.description}' which is neither in it nor "
                "in a phase before it"
            )


def _before(phase: Phase, listed: Mapping[str, Phase]) -> list[Phase]:
    """Return the direct and transitive predecessors."""
    found: dict[str, Phase] = {}
    waiting = list(phase.after)
    while waiting:
        before = waiting.pop()
        if before.object_id not in found:
            before = found[before.object_id] = listed.get(before.object_id, before)
            waiting.extend(before.after)
    return list(found.values())


def _ids_of(phase: Phase) -> Iterator[str]:
    """Yield the ids that the context of a later task may name."""
    for member in (*phase.tasks, *phase.loops):
        yield member.object_id


def _check_graph(definition: EnsembleDefinition, graph: Graph) -> None:
    """S-GRAPH-32, S-GRAPH-55."""
    states = graph.states.items()
    for name, state in states:
        if isinstance(state, Task) and not _has_model(state, definition):
            raise ValidationError(f"Graph '{graph.name}' state '{name}' Task has no LLM source. {_SET_A_MODEL}")
    known = {state.object_id for _, state in states}
    for name, state in states:
        for entry in _outside(state.context, known):
            raise ValidationError(
                f"Graph '{graph.name}' state '{name}' declares context on '{entry.description}', which is no state of the graph"
            )


def _outside(context: Iterable[Task | UnitOutput], known: set[str]) -> Iterator[Task | UnitOutput]:
    return (entry for entry in context if entry.object_id not in known)


def _find_duplicate(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _has_model(task: Task, definition: EnsembleDefinition) -> bool:
    if definition.llm is not None or task.handler is not None:
        return True
    return task.llm is not None or (task.agent is not None and not uses_team_model(task.agent))


def _check_costs(definition: RunRules) -> None:
    """Check names of models in `prices` (S-PRC-13), and that a limit of money has the price of every model (S-BUD-1)."""
    if definition.cost_configuration is not None or (definition.max_cost is None and not definition.prices):
        return
    # Few runs need prices before they start.
    from ensemble_ray.llm.prices import check_given, describe_model, describe_unpriced

    if definition.prices:
        check_given(RunPrices(given=definition.prices), priced_models(definition))
    if definition.max_cost is not None and (unpriced := find_unpriced(definition)) is not None:
        place, model = unpriced
        raise ValidationError(
            f"max_cost needs cost_configuration: a limit of {definition.max_cost:g} needs the price of every model, and that "
            f"of {describe_model(model)} is unknown ({place}). {describe_unpriced(model)}"
        )


def find_unpriced(definition: RunRules) -> tuple[str, object] | None:
    """Return the first model without a price, and where it is declared; None: all models have one."""
    if definition.cost_configuration is not None:
        return None
    from ensemble_ray.llm.prices import embedding_price, price_of  # see above

    prices = RunPrices(given=definition.prices)
    chat = (each for each in priced_models(definition) if price_of(prices, each[1]) is None)
    embeds = (each for each in embedding_models(definition) if embedding_price(prices, each[1]) is None)
    agents = declared_agents(definition) if isinstance(definition, EnsembleDefinition) else ()
    runners = ((f"Agent '{each.role}'", each.runner) for each in agents if each.runner is not None)
    return next(chat, None) or next(embeds, None) or next(runners, None)


def priced_models(definition: RunRules) -> Iterator[tuple[str, object]]:
    """Yield each model that a run asks or can be switched to, and where it is declared."""
    from ensemble_ray.llm.fallback import members_of  # few runs need prices

    named = [*_models_of(cast("EnsembleDefinition | MapDefinition", definition))]
    if not isinstance(definition, EnsembleDefinition) and definition.llm is not None:
        named.append(("llm", definition.llm))
    named += [(f"models '{name}'", model) for name, model in definition.models.items()]
    yield from ((place, each) for place, model in named for each in members_of(model))


def embedding_models(definition: RunRules) -> Iterator[tuple[str, object]]:
    """Yield the embedding models of a run's memory that are asked at an endpoint, and where they are declared."""
    if isinstance(definition, EnsembleDefinition):
        long_term = None if definition.memory is None else definition.memory.long_term
        for place, store in (("memory", long_term), ("memory_store", definition.memory_store)):
            model = getattr(store, "embedding_model", None)
            if hasattr(type(model), "base_url"):
                yield place, model


_MOST_PLACES = 3


def check_model_keys(definition: EnsembleDefinition | MapDefinition) -> None:
    """Check the keys of all models that a run will use."""
    check_keys_of([*_models_of(definition), *embedding_models(definition)])


def check_team_keys(teams: Mapping[str, EnsembleDefinition | MapDefinition]) -> None:
    """Check the keys of served teams, also of their `models`."""
    problems: list[str] = []
    for name, team in teams.items():
        try:
            check_keys_of([*_models_of(team), *embedding_models(team), *team.models.items()])
        except ValidationError as error:
            problems += [f"Team '{name}': {line}" for line in message_of(error).splitlines()]
    if problems:
        raise ValidationError("\n".join(problems))


def check_keys_of(models: Iterable[tuple[str, object]]) -> None:
    """Check the keys of models, each with its place. The error names all models without a key."""
    problems: dict[str, dict[str, None]] = {}
    for place, model in models:
        check = getattr(getattr(model, "delegate", model), "check_key", None)  # `delegate`: behind its rate limit
        try:
            if callable(check):
                check()
        except ValidationError as error:
            problems.setdefault(message_of(error), {})[place] = None
    lines: list[str] = []
    for text, places in problems.items():
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        lines.append(f"{', '.join([*places][:_MOST_PLACES])}{more}: {text}")
    if lines:
        raise ValidationError("\n".join(lines))


def _models_of(definition: EnsembleDefinition | MapDefinition) -> Iterator[tuple[str, object]]:
    """Yield each model that a run asks, and where it is declared."""
    if not isinstance(definition, EnsembleDefinition):
        # Factories of team files contain a task that they fill in.
        factories = (getattr(definition, name, None) for name in ("map_task", "reduce_task", "direct_task"))
        tasks: Sequence[Task] = [task for each in factories if isinstance(task := getattr(each, "task", None), Task)]
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


def _models_of_tasks(
    tasks: Sequence[Task], agents: Sequence[Agent], shared: ChatModel | None, *, has_manager: bool = False
) -> Iterator[tuple[str, object]]:
    """Yield the model of each task, and of all agents if work may be delegated to them."""
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
