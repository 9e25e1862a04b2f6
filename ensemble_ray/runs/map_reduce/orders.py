"""Call factories, one at a time (S-MR-143), and create orders from their tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import TypeAlias, cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import Workflow, braced_texts, fill_inputs
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.validation import TeamModels, validate
from ensemble_ray.errors import ValidationError
from ensemble_ray.execute.local_executor import AgentTemplates
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.execute.redaction import clean_agent, clean_planned, clean_task
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import AgentsJoined, GroupRecorded
from ensemble_ray.plan.map_reduce_factories import (
    FactoryFailure,
    ItemLoop,
    Made,
    apply_process_settings,
    counted_tokens,
    estimate_tokens,
    make_direct_in_run,
    make_maps_in_run,
    make_reduce_in_run,
)
from ensemble_ray.plan.plan import LoopUnit, Node
from ensemble_ray.plan.planner import Planned, ResolvedTasks, plan_run, resolve_attachments, synthesize_agents
from ensemble_ray.plan.unit_plans import task_keys
from ensemble_ray.ports import ChatModel, Persistence
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.identity.definition import DIRECT, FINAL, map_key, reduce_key
from ensemble_ray.runs.attachments import store_attachments
from ensemble_ray.runs.coordinator import RunDirectives, RunJournal
from ensemble_ray.runs.map_reduce.items import ItemBuffer
from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs, node_type
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint
from ensemble_ray.runs.outputs import OutputStore
from ensemble_ray.runs.planned_tasks import gather_context, revision_of
from ensemble_ray.schedule.instructions import MapItem, ReduceGroup, Start
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.text.redaction import Redaction
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.ids import RUN, instance_of, key_of, node_key
from ensemble_ray.values.task_output import TaskOutput

_log = bounded_logger(__name__)
_MOST_WARNINGS = 20  # limit for repeated warnings
_MOST_READS = 8  # attachments that are read at the same time


class ReadyTask(Struct, frozen=True, kw_only=True):
    key: str
    task: Task  # pickled: without context, agent and tools
    agent: Agent | None  # None: a handler task
    agent_role: str
    is_streaming: bool


class ReadyLoop(Struct, frozen=True, kw_only=True):
    planned: Planned  # of the loop alone, with pickled tasks
    unit: LoopUnit
    nodes: Mapping[str, Node]
    chosen: str  # body task with the item's output; "": the last shown output


class TaskMaker:
    def __init__(
        self,
        definition: MapDefinition,
        inputs: Mapping[str, str],
        *,
        attached: Mapping[str, Sequence[Attachment]] = MappingProxyType({}),
        recorded: Callable[[str, ChatModel, Callable[[Fact], None]], ChatModel] | None = None,
    ) -> None:
        """`recorded` wraps a synthesizer's model so that it records its calls under an effect name (S-SET-46)."""
        self._definition = definition
        self._rules = rules_for_tasks(definition)  # the rules of all tasks of the run
        self._models = TeamModels(self._rules)
        self._inputs = inputs
        self._attached = attached  # inputs that are attachments
        self._recorded = recorded
        self._facts: list[Fact] = []
        self._warned_of: set[str] = set()

    async def ready(self, tasks: Sequence[Task], keys: Sequence[str], data: Sequence[object]) -> list[ReadyTask]:
        """Return the tasks under these keys; `data` has the item or the answers behind each.

        `ValidationError`: one cannot run; no model was called. `AgentExecutionError`: a synthesizer's model failed.
        """
        filled = tuple(
            # The order has the context outputs.
            self._render(task.rewritten(context=()) if task.context else task, self._texts_of(each))
            for task, each in zip(tasks, data, strict=True)
        )
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

    @property
    def fails_run(self) -> bool:
        """Whether a failed item fails the run."""
        return self._definition.item_policy == "fail"

    def claim_facts(self) -> list[Fact]:
        """Return once the facts of model calls that created agents."""
        claimed, self._facts = self._facts, []
        return claimed

    def _wrap_model(self, name: str, model: ChatModel) -> ChatModel:
        return model if self._recorded is None else self._recorded(name, model, self._facts.append)

    def _texts_of(self, data: object) -> Sequence[str]:
        return braced_texts(data) if self._inputs else ()

    def _render(self, task: Task, data: Sequence[str]) -> Task:
        changes: dict[str, object] = {}
        for name in ("description", "expected_output"):
            text: str = getattr(task, name)
            if (filled := fill_inputs(text, self._inputs, data)) != text:
                changes[name] = filled
        if task.attachments or self._attached:
            added = resolve_attachments(task, self._inputs, self._attached, partial(fill_inputs, data=()))
            if added != task.attachments:
                changes["attachments"] = added
        return task.rewritten(**changes) if changes else task

    def _warn(self, text: str) -> None:
        if text not in self._warned_of and len(self._warned_of) < _MOST_WARNINGS:
            self._warned_of.add(text)
            _log.warning("%s", text)


def inner_key(item: str, task: str) -> str:
    """Return the key of a loop's task in the run: `map-3/writer`."""
    return f"{item}/{task}"


def rules_for_tasks(definition: MapDefinition) -> EnsembleDefinition:
    """Return an ensemble without tasks, with the rules of all tasks of the run."""
    shared = {
        name: getattr(definition, name)
        for name in EnsembleDefinition.model_fields
        if name in type(definition).model_fields
    }
    return EnsembleDefinition.model_construct(**shared).with_options(definition.chosen_options)


def clean_ready(redaction: Redaction, ready: ReadyTask) -> ReadyTask:
    """Return the task of an item without values."""
    agent = None if ready.agent is None else clean_agent(redaction, ready.agent)
    return replace(ready, task=clean_task(redaction, ready.task), agent=agent)


_SHOWN = 200  # characters of an input's description for a reduce


class PreparedOrder(Struct, frozen=True, kw_only=True):
    level: int
    number: int
    unit_type: str  # in the tree
    order: TaskOrder

    @property
    def instance(self) -> str:
        return self.order.instance


class FailedMap(Struct, frozen=True, kw_only=True):
    instance: str
    number: int
    error: Exception


class PreparedLoop(Struct, frozen=True, kw_only=True):
    instance: str
    number: int
    unit_type: str
    ready: ReadyLoop


PreparedTask: TypeAlias = PreparedOrder | PreparedLoop | FailedMap


class OrderMaker:
    """Creates the orders of one run."""

    def __init__(
        self,
        journal: RunJournal,
        *,
        factories: DefinitionFactories,
        maker: TaskMaker,
        items: ItemBuffer,
        directives: RunDirectives,
        store: MapReduceOutputs,
        record: MapReduceResumePoint | None,
        item_count: int | None,
        is_direct: bool,
    ) -> None:
        """`is_direct`: whether the short-circuit's task is the only one (S-MR-81)."""
        self._journal = journal
        self._factories = factories
        self._maker = maker
        self._templates = AgentTemplates()
        self._items = items
        self.directives = directives
        self._store = store
        self._record = record
        self._item_count = item_count or 0
        self._is_direct = is_direct
        self._turn = asyncio.Lock()

    def key(self, level: int, number: int, *, is_final: bool = False) -> str:
        if self._is_direct:
            return DIRECT
        if is_final:
            return FINAL
        return reduce_key(level, number) if level else map_key(self._items.index(number))

    def instance(self, unit: MapItem | ReduceGroup) -> str:
        """Return a task's key with the number of its attempt."""
        level, is_final = (unit.level, unit.is_final) if isinstance(unit, ReduceGroup) else (0, False)
        key = self.key(level, unit.number, is_final=is_final)
        return instance_of(key, occurrence=0 if self._record is None else self._record.occurrence(level, unit.number))

    async def maps(self, numbers: Mapping[str, int], is_discarded: Callable[[str], bool]) -> list[PreparedTask]:
        """Create the maps of items, by instance, except discarded ones."""
        async with self._turn:
            wanted = [(each, number) for each, number in numbers.items() if not is_discarded(each)]
            if not wanted:
                return []
            items = {each: self._items.item(number) for each, number in wanted}
            results = await self._factories.maps(list(items.values()))
            tasks = {position: each for position, each in zip(wanted, results, strict=True) if isinstance(each, Task)}
            keys = [key_of(instance) for instance, _ in tasks]
            data = [items[instance] for instance, _ in tasks]
            prepared = await self._ready(list(tasks.values()), keys, data) if tasks else []
            loops = [
                await self._ready_loop(each, position, items[position[0]])
                for position, each in zip(wanted, results, strict=True)
                if isinstance(each, ItemLoop)
            ]
        unit_type = node_type(0, is_direct=self._is_direct)
        attached = await self._attach(prepared)
        orders = [
            self._order(each, instance, (0, number), unit_type)
            for (instance, number), each in zip(tasks, attached, strict=True)
            if isinstance(each, ReadyTask)
        ]
        failures = [*zip(wanted, results, strict=True), *zip(tasks, attached, strict=True)]
        failed = (
            FailedMap(instance=instance, number=number, error=each.error)
            for (instance, number), each in failures
            if isinstance(each, FactoryFailure)
        )
        return [*orders, *loops, *failed]

    async def _attach(self, prepared: Sequence[ReadyTask]) -> Sequence[ReadyTask | FactoryFailure]:
        """Read and record the attachments of tasks of items. One that cannot be read fails its item (S-ATT-26)."""
        if not any(each.task.attachments for each in prepared):
            return prepared
        slots = asyncio.Semaphore(_MOST_READS)

        async def attach(ready: ReadyTask) -> ReadyTask | FactoryFailure:
            try:
                async with slots:
                    return replace(ready, task=await store_attachments(ready.task, self._journal.journal))
            except ValidationError as error:
                if self._maker.fails_run:
                    raise
                return FactoryFailure(error)

        return await asyncio.gather(*map(attach, prepared))

    async def reduce(
        self, group: ReduceGroup, instance: str, is_discarded: Callable[[str], bool]
    ) -> list[PreparedTask]:
        """Create the reduce of a group, unless it is discarded."""
        level, number = group.level, group.number
        key = self.key(level, number, is_final=group.is_final)
        inputs = [self.key(*each) for each in group.inputs]
        data = GroupRecorded(level=level, number=number, inputs=inputs, is_final=group.is_final)
        await self._journal.append(self._journal.fact(instance_of(key), data), until=Persistence.COMMITTED)
        async with self._turn:
            if is_discarded(instance):
                return []
            outputs = [self._store.output(*each) for each in group.inputs]
            task, wanted = await self._factories.reduce(outputs)
            (prepared,) = await self._ready([task], [key], [[output.raw for output in outputs]])
        unit_type = node_type(level, is_final=group.is_final)
        prepared = replace(prepared, task=await store_attachments(prepared.task, self._journal.journal))
        agent = prepared.agent
        # A prompt has the texts of outputs alone; other readers also receive their traces, ten times as much.
        is_prompt = agent is not None and agent.runner is None and not prepared.task.input_guardrails
        shown: list[TaskOutput] = []
        for output in [outputs[position] for position in wanted]:
            description = output.task_description
            head = description.partition("\n\n")[0][:_SHOWN]
            changes: dict[str, object] = {"trace": None} if is_prompt else {}
            if head != description:
                changes["task_description"] = f"{head.rstrip()} ..."
            shown.append(output.model_copy(update=changes) if changes else output)
        return [self._order(prepared, instance, (level, number), unit_type, context=shown)]

    async def _ready_loop(self, made: ItemLoop, position: tuple[str, int], item: object) -> PreparedLoop:
        instance, number = position
        try:
            ready = await self._maker.ready_loop(made, key_of(instance), item)
        finally:
            await self._append_asked()
        planned = ready.planned
        if (redaction := self._journal.redaction) is not None:
            planned = clean_planned(redaction, planned)
            nodes = {node.key: node for node in planned.plan.nodes}
            ready = replace(ready, planned=planned, nodes=nodes)
        if any(task.attachments for task in planned.tasks.values()):
            journal = self._journal.journal
            tasks = {key: await store_attachments(task, journal) for key, task in planned.tasks.items()}
            ready = replace(ready, planned=replace(planned, tasks=tasks))
        await self._meet(list(ready.planned.agents.values()))
        return PreparedLoop(instance=instance, number=number, unit_type=node_type(0), ready=ready)

    def inner(self, prepared: PreparedLoop, start: Start, outputs: OutputStore) -> TaskOrder:
        ready = prepared.ready
        node = ready.nodes[node_key(start.instance)]
        task = ready.planned.tasks[node.key]
        agent = None if node.agent_key is None else ready.planned.agents[node.agent_key]
        context, joined = gather_context(start.context or (), outputs)
        return TaskOrder(
            run_id=self._journal.run_id,
            key=inner_key(key_of(prepared.instance), node.key),
            instance=f"{prepared.instance}/{start.instance}",
            epoch=self._journal.epoch,
            index=node.index,
            task=task,
            agent_key=None if agent is None else self._templates.name_of(agent),
            agent_role=node.agent_role,
            agent=agent,
            total_tasks=node.total,
            context=context,
            joined=joined,
            revision=revision_of(start.changes, outputs),
            is_streaming=node.is_streaming,
            input_guardrails=len(task.input_guardrails),
            output_guardrails=len(task.output_guardrails),
            directives=self.directives.active(),
            switches=self.directives.switches,
        )

    async def _ready(self, tasks: Sequence[Task], keys: Sequence[str], data: Sequence[object]) -> list[ReadyTask]:
        """Prepare tasks; record their agents and the model calls that created them."""
        try:
            prepared = await self._maker.ready(tasks, keys, data)
        finally:
            await self._append_asked()
        if (redaction := self._journal.redaction) is not None:
            prepared = [clean_ready(redaction, each) for each in prepared]
        await self._meet([each.agent for each in prepared if each.agent is not None])
        return prepared

    async def _append_asked(self) -> None:
        if asked := self._maker.claim_facts():
            await self._journal.append(*asked, until=Persistence.COMMITTED)

    async def _meet(self, agents: Sequence[Agent]) -> None:
        if fresh := self._store.meet(agents):
            await self._journal.append(self._journal.fact(RUN, AgentsJoined.of(fresh)))

    def _order(
        self,
        prepared: ReadyTask,
        instance: str,
        position: tuple[int, int],
        unit_type: str,
        *,
        context: Sequence[TaskOutput] = (),
    ) -> PreparedOrder:
        (level, number), task = position, prepared.task
        order = TaskOrder(
            run_id=self._journal.run_id,
            key=prepared.key,
            instance=instance,
            epoch=self._journal.epoch,
            index=number + 1,
            task=task,
            agent_key=None if prepared.agent is None else self._templates.name_of(prepared.agent),
            agent_role=prepared.agent_role,
            agent=prepared.agent,
            # The number of tasks of its level is known except in the last: there is one final reduce.
            total_tasks=self._item_count if unit_type == "map" else int(unit_type != "reduce"),
            context=tuple(context),
            is_streaming=prepared.is_streaming,
            input_guardrails=len(task.input_guardrails),
            output_guardrails=len(task.output_guardrails),
            directives=self.directives.active(),
            switches=self.directives.switches,
        )
        return PreparedOrder(level=level, number=number, unit_type=unit_type, order=order)


_EMPTY = "(empty)"  # a task needs a description, and an output's text may be empty


class DefinitionFactories:
    """Factories of a map or map-reduce; called in a thread, one at a time (S-MR-143)."""

    def __init__(self, definition: MapDefinition) -> None:
        self._definition = definition

    async def maps(self, items: Sequence[object]) -> Sequence[Task | ItemLoop | FactoryFailure]:
        """Return a task per item, or the failure of its factory (S-MR-154)."""
        results = await make_maps_in_run(self._definition, items)
        return [_check(each) for each in results]

    async def reduce(self, outputs: Sequence[TaskOutput]) -> tuple[Task, Sequence[int]]:
        """Return a task that reduces these outputs, and the positions of its context outputs in its order (S-MR-24)."""
        # Stand-ins have the outputs' texts as descriptions.
        texts = (output.raw if output.raw.strip() else _EMPTY for output in outputs)
        stand_ins = [_empty_task().duplicated(description=whole_text(text)) for text in texts]
        places = {stand_in.object_id: index for index, stand_in in enumerate(stand_ins)}
        task, _ = await make_reduce_in_run(cast("MapReduceDefinition", self._definition), stand_ins)
        for entry in task.context:
            if entry.object_id not in places:
                raise ValidationError(
                    f"Reduce task '{task.description}' has the context task '{entry.description}', which is none of its "
                    "group. Use context=chunk_tasks"
                )
        return task, [places[entry.object_id] for entry in task.context]


class DirectFactory(DefinitionFactories):
    """The short-circuit: its one item is all items (S-MR-81), without a reduce."""

    async def maps(self, items: Sequence[object]) -> Sequence[Task | ItemLoop | FactoryFailure]:
        (all_items,) = items
        definition = cast("MapReduceDefinition", self._definition)
        task, _ = await make_direct_in_run(definition, cast("Sequence[object]", all_items))
        return (_alone(task),)


def _check(made: Made) -> Task | ItemLoop | FactoryFailure:
    if isinstance(made, FactoryFailure):
        return made
    if isinstance(made, ItemLoop):
        if made.loop.context:
            raise ValidationError(
                f"Loop '{made.loop.name}' has the context '{made.loop.context[0].description}': the loop of an item has no "
                "context. Put what it needs into the item"
            )
        return made
    return _alone(made[0])


def _alone(task: Task) -> Task:
    """Check that an item's task has no context (S-MR-30)."""
    if task.context:
        raise ValidationError(
            f"Task '{task.description}' has the context task '{task.context[0].description}': the task of an item has no "
            "context. Put what it needs into the item"
        )
    return task


@cache  # copying a stand-in is many times faster than validating one
def _empty_task() -> Task:
    return Task(description=_EMPTY, expected_output=_EMPTY)


class TokenCounts:
    def __init__(self, definition: MapDefinition) -> None:
        """Count as the definition requires; outputs of fixed-size groups and of maps alone have weight 0."""
        reduced = definition if isinstance(definition, MapReduceDefinition) else None
        self._definition = reduced if reduced is not None and reduced.is_adaptive else None
        self._turn = asyncio.Lock()
        self._has_warned = False

    def count(self, output: TaskOutput) -> int | None:
        """Return the tokens of an output; None if the user's estimator must count."""
        definition = self._definition
        if definition is None:
            return 0
        if definition.token_estimator is not None and counted_tokens(output) < 0:
            return None
        return self._warn_once(*estimate_tokens(output, definition))

    async def ask(self, output: TaskOutput) -> int:
        """Return tokens from the provider, else from the estimator."""
        if self._definition is None:
            return 0
        async with self._turn:
            return self._warn_once(*await threads.run(estimate_tokens, output, self._definition))

    def _warn_once(self, tokens: int, warning: str | None) -> int:
        if warning is not None and not self._has_warned:
            self._has_warned = True
            _log.warning("%s. This warning appears once per run", warning)
        return tokens
