"""TaskMaker: turns what factories make into tasks that can be done.

In: tasks from the user's factories, some at a time. Out: each with its texts filled in, its agent found or made, and
checked like the tasks of any parallel run. Never: the text of an item or of an answer taken for a template (S-MR-117).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import Workflow, braced_texts, fill_inputs
from ensemble_ray.definition.validation import TeamModels, validate
from ensemble_ray.plan.map_reduce_factories import apply_process_settings
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.plan.planner import Planned, ResolvedTasks, plan_run
from ensemble_ray.plan.synthesis import synthesize_agents
from ensemble_ray.plan.unit_plans import task_keys
from ensemble_ray.process.context import bounded_logger

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.definition.task import Task
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.map_reduce_factories import ItemLoop
    from ensemble_ray.plan.plan import Node
    from ensemble_ray.ports import ChatModel

_log = bounded_logger(__name__)
#: The same advice about a hundred thousand tasks helps nobody.
_MOST_WARNINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyTask:
    """A task that can be done."""

    key: str
    #: as it travels: without context, agent and tools
    task: Task
    #: None for a handler task
    agent: Agent | None
    #: as shown
    agent_role: str
    is_streaming: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyLoop:
    """A loop that can be run for an item."""

    #: a plan of the loop alone, and its tasks as they travel
    planned: Planned
    unit: LoopUnit
    nodes: Mapping[str, Node]
    #: key of the body task whose output is that of the item; "": the last one that the loop shows
    chosen: str


class TaskMaker:
    """Makes tasks of one map-reduce ready."""

    def __init__(
        self,
        definition: MapDefinition,
        inputs: Mapping[str, str],
        *,
        recorded: Callable[[str, ChatModel, Callable[[Fact], None]], ChatModel] | None = None,
    ) -> None:
        """Make one.

        Args:
            definition: The run's.
            inputs: Values of the variables in their texts.
            recorded: Dresses a synthesizer's model such that its calls are recorded under that effect name, by way of
                that function (S-SET-46); None: they are not.
        """
        self._definition = definition
        #: an ensemble without tasks: what all tasks of the run are held to
        self._rules = rules_for_tasks(definition)
        self._models = TeamModels(self._rules)
        self._inputs = inputs
        self._recorded = recorded
        self._facts: list[Fact] = []
        self._warned_of: set[str] = set()

    async def ready(self, tasks: Sequence[Task], keys: Sequence[str], data: Sequence[object]) -> list[ReadyTask]:
        """Return the tasks under these keys, in order.

        Args:
            tasks: Made by factories.
            keys: One for each.
            data: What each was made of: its item, or the answers of its group.

        Raises:
            ValidationError: one of them cannot run; nothing was asked of any model.
            AgentExecutionError: a synthesizer's model failed.
        """
        filled = tuple(self._fill(task, self._texts_of(each)) for task, each in zip(tasks, data, strict=True))
        ensemble = self._rules.model_copy(update={"tasks": filled})
        for warning in validate(ensemble):
            self._warn(warning)
        resolved = ResolvedTasks(
            tasks=filled, keys=tuple(keys), inputs=self._inputs, workflow=Workflow.PARALLEL, models=self._models
        )
        synthesized = await synthesize_agents(
            resolved, ensemble, recorded=None if self._recorded is None else self._wrap_model
        )
        planned = plan_run(
            ensemble,
            resolved,
            {task: apply_process_settings(self._definition, agent) for task, agent in synthesized.items()},
        )
        return [
            ReadyTask(
                key=node.key,
                task=planned.tasks[node.key],
                agent=None if node.agent_key is None else planned.agents[node.agent_key],
                agent_role=node.agent_role,
                is_streaming=node.is_streaming,
            )
            for node in planned.plan.nodes
        ]

    async def ready_loop(self, made: ItemLoop, key: str, item: object) -> ReadyLoop:
        """Return the loop of the item under this key.

        Raises:
            ValidationError, AgentExecutionError: as `ready`.
        """
        ensemble = self._rules.model_copy(update={"loops": (made.loop,)})
        for warning in validate(ensemble):
            self._warn(warning)
        texts = self._texts_of(item)
        body = tuple(self._render(task, texts) for task in made.loop.body)
        keys = task_keys(body)
        resolved = ResolvedTasks(
            tasks=body, keys=keys, inputs=self._inputs, workflow=Workflow.SEQUENTIAL, models=self._models
        )
        synthesized = await synthesize_agents(
            replace(resolved, keys=tuple(inner_key(key, each) for each in keys)),
            ensemble,
            recorded=None if self._recorded is None else self._wrap_model,
        )
        agents = {task: apply_process_settings(self._definition, agent) for task, agent in synthesized.items()}
        planned = plan_run(ensemble, resolved, agents)
        (unit,) = (each for each in planned.plan.units if isinstance(each, LoopUnit))
        places = {task.object_id: each for task, each in zip(body, keys, strict=True)}
        nodes = {node.key: node for node in planned.plan.nodes}
        return ReadyLoop(planned=planned, unit=unit, nodes=nodes, chosen=places[made.chosen] if made.chosen else "")

    def claim_facts(self) -> list[Fact]:
        """Return what is to be put on record of the model calls that made agents, once."""
        claimed, self._facts = self._facts, []
        return claimed

    def _wrap_model(self, name: str, model: ChatModel) -> ChatModel:
        return model if self._recorded is None else self._recorded(name, model, self._facts.append)

    def _texts_of(self, data: object) -> Sequence[str]:
        return braced_texts(data) if self._inputs else ()

    def _fill(self, task: Task, data: Sequence[str]) -> Task:
        """Return the task with its inputs filled in, and without its context, whose outputs travel with the order."""
        return self._render(task.rewritten(context=()) if task.context else task, data)

    def _render(self, task: Task, data: Sequence[str]) -> Task:
        changes: dict[str, object] = {}
        for name in ("description", "expected_output"):
            text: str = getattr(task, name)
            if (filled := fill_inputs(text, self._inputs, data)) != text:
                changes[name] = filled
        return task.rewritten(**changes) if changes else task

    def _warn(self, text: str) -> None:
        if text not in self._warned_of and len(self._warned_of) < _MOST_WARNINGS:
            self._warned_of.add(text)
            _log.warning("%s", text)


def inner_key(item: str, task: str) -> str:
    """Return the key of a task of an item's loop among all tasks of the run: `map-3/writer`."""
    return f"{item}/{task}"


def rules_for_tasks(definition: MapDefinition) -> EnsembleDefinition:
    """Return the ensemble, without tasks, whose rules every task of the run is held to."""
    shared = {
        name: getattr(definition, name)
        for name in EnsembleDefinition.model_fields
        if name in type(definition).model_fields
    }
    return EnsembleDefinition.model_construct(**shared)
