"""Checks of loops, phases and a graph within their ensemble, in the order of the specification. Package: definition.

In: an ensemble, as it was declared. Called by `validation` at the start of every run; nothing is resolved or called here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import body_key
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.team_model import uses_team_model
from ensemble_ray.definition.unit_output import UnitOutput
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError

__all__ = ["NO_MODEL_ADVICE", "check_units"]

#: What to do about a task that no model can be found for (S-DOM-61.5).
NO_MODEL_ADVICE = (
    "Provide an explicit agent, a task-level llm, an ensemble-level llm, or configure a deterministic handler."
)
_GIVE_ONE = "Set llm on the task, the ensemble, or provide an explicit agent or handler."


def check_units(definition: EnsembleDefinition) -> None:
    """Check what loops, phases and graph have to do with each other and with the tasks.

    Raises:
        ValidationError: the first check that fails.
    """
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
    is_hierarchical = definition.workflow is Workflow.HIERARCHICAL
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
    if definition.graph is not None and is_hierarchical:
        raise ValidationError(
            "Workflow.HIERARCHICAL does not support a Graph. Use the default workflow when declaring a graph."
        )
    if definition.loops and is_hierarchical:
        raise ValidationError(
            "Workflow.HIERARCHICAL does not support Loop nodes. Use Workflow.SEQUENTIAL or Workflow.PARALLEL when declaring "
            "loops."
        )
    if definition.phases and is_hierarchical:
        raise ValidationError(
            "Workflow.HIERARCHICAL does not support phases. Use Workflow.SEQUENTIAL or Workflow.PARALLEL when declaring "
            "phases."
        )


# Loops.


def _check_loops(definition: EnsembleDefinition) -> None:
    """S-LOOP-32, S-LOOP-33, S-LOOP-35; also of loops in phases and of states that are loops."""
    loops = definition.all_loops
    name = _find_duplicate(loop.name for loop in loops)
    if name is not None:
        raise ValidationError(f"Duplicate loop name '{name}' detected. Loop names must be unique within an ensemble.")
    for loop in loops:
        for task in loop.body:
            if not _has_model(task, definition):
                raise ValidationError(f"Loop '{loop.name}' body task '{body_key(task)}' has no LLM source. {_GIVE_ONE}")
    listed = {task.object_id for task in definition.tasks}
    for loop in definition.loops:
        for entry in _outside((each for each in loop.context if isinstance(each, Task)), listed):
            raise ValidationError(
                f"Loop '{loop.name}' declares context on task '{entry.name or entry.description}', "
                "which is not in the ensemble's tasks"
            )


def _check_outputs(definition: EnsembleDefinition) -> None:
    """S-LOOP-167: what waits for the output of a loop waits for one of the ensemble's own."""
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


# Phases.


def _check_phases(definition: EnsembleDefinition) -> None:
    """S-PHASE-15 to S-PHASE-20, in this order."""
    phases = definition.phases
    name = _find_duplicate(phase.name for phase in phases)
    if name is not None:
        raise ValidationError(f"Duplicate phase name '{name}' detected. Phase names must be unique within an ensemble.")
    _refuse_phase_cycles(phases)
    for phase in phases:
        for task in phase.all_tasks:
            if not _has_model(task, definition):
                raise ValidationError(
                    f"Task '{task.description}' in phase '{phase.name}' has no LLM available. {NO_MODEL_ADVICE}"
                )
    listed = {phase.object_id: phase for phase in phases}
    for phase in phases:
        _check_phase_context(phase, listed, definition)
    _check_membership(phases, listed)


def _check_membership(phases: Sequence[Phase], listed: Mapping[str, Phase]) -> None:
    """S-PHASE-19, S-PHASE-20."""
    for phase in phases:
        for before in phase.after:
            if before.object_id not in listed:
                raise ValidationError(
                    f"Phase '{phase.name}' comes after phase '{before.name}', which is not in the ensemble's phases"
                )
    owner: dict[str, str] = {}
    for phase in phases:
        for task in (*phase.tasks, *(task for loop in phase.loops for task in loop.body)):
            other = owner.setdefault(task.object_id, phase.name)
            if other != phase.name:
                raise ValidationError(
                    f"Task '{task.description}' is in phase '{other}' and in phase '{phase.name}'. A task belongs to one phase."
                )


def _refuse_phase_cycles(phases: Sequence[Phase]) -> None:
    """S-PHASE-16. Followed by id: of two objects of one phase, the listed one says what comes before it."""
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
    """S-PHASE-18, S-PHASE-113: a task may wait for its own phase and for those before it."""
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
    """Return the direct and transitive predecessors of a phase."""
    found: dict[str, Phase] = {}
    waiting = list(phase.after)
    while waiting:
        before = waiting.pop()
        if before.object_id not in found:
            before = found[before.object_id] = listed.get(before.object_id, before)
            waiting.extend(before.after)
    return list(found.values())


def _ids_of(phase: Phase) -> Iterator[str]:
    """Give the ids of what a later task may name of a phase: its tasks, and its loops by their outputs."""
    for member in (*phase.tasks, *phase.loops):
        yield member.object_id


# Graphs.


def _check_graph(definition: EnsembleDefinition, graph: Graph) -> None:
    """S-GRAPH-32, S-GRAPH-55."""
    states = graph.states.items()
    for name, state in states:
        if isinstance(state, Task) and not _has_model(state, definition):
            raise ValidationError(f"Graph '{graph.name}' state '{name}' Task has no LLM source. {_GIVE_ONE}")
    known = {state.object_id for _, state in states}
    for name, state in states:
        for entry in _outside(state.context, known):
            raise ValidationError(
                f"Graph '{graph.name}' state '{name}' declares context on '{entry.description}', which is no state of the graph"
            )


# All.


def _outside(context: Iterable[Task | UnitOutput], known: set[str]) -> Iterator[Task | UnitOutput]:
    return (entry for entry in context if entry.object_id not in known)


def _find_duplicate(names: Iterable[str]) -> str | None:
    """Return the first name that is there for the second time."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _has_model(task: Task, definition: EnsembleDefinition) -> bool:
    """Whether a task can be done: by a handler, or by an agent for which there is a model."""
    if definition.llm is not None or task.handler is not None:
        return True
    return task.llm is not None or (task.agent is not None and not uses_team_model(task.agent))
