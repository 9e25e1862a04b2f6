"""OrderMaker: calls factories and makes orders of what they give.

In: works that the machine wants started, with items and outputs. Out: their orders. One call at a time (S-MR-143). A group
is on record before its reduce is made (S-MR-161), and so is what was asked of a model to make an agent (S-SET-46).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ensemble_ray.coordinator.map_reduce.outputs import node_type
from ensemble_ray.coordinator.map_reduce.ready_tasks import inner_key
from ensemble_ray.coordinator.start_orders import gather_context, revision_of
from ensemble_ray.definition.task import Task
from ensemble_ray.execute.local_executor import AgentTemplates
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.facts.items import AgentsJoined, GroupRecorded
from ensemble_ray.plan.map_reduce_factories import FactoryFailure, ItemLoop
from ensemble_ray.ports import Persistence
from ensemble_ray.record.identity.map_reduce import DIRECT, FINAL, map_key, reduce_key
from ensemble_ray.schedule.instructions import MapItem, ReduceGroup
from ensemble_ray.values.ids import RUN, instance_of, key_of, node_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray.coordinator.directives import RunDirectives
    from ensemble_ray.coordinator.map_reduce.item_buffer import ItemBuffer
    from ensemble_ray.coordinator.map_reduce.outputs import MapReduceOutputs
    from ensemble_ray.coordinator.map_reduce.ports import RecordedTasks, TaskFactories
    from ensemble_ray.coordinator.map_reduce.ready_tasks import ReadyLoop, ReadyTask, TaskMaker
    from ensemble_ray.coordinator.outputs import OutputStore
    from ensemble_ray.coordinator.run_journal import RunJournal
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.schedule.instructions import Start
    from ensemble_ray.values.task_output import TaskOutput

#: Characters that a reduce is shown of the description of what it reduces.
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedOrder:
    """A map or reduce with its order."""

    level: int
    number: int
    #: what it is in the tree
    unit_type: str
    order: TaskOrder

    @property
    def instance(self) -> str:
        """Return its instance."""
        return self.order.instance


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMap:
    """A map whose factory raised (S-MR-154)."""

    instance: str
    number: int
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLoop:
    """The loop of an item (S-MR-190)."""

    instance: str
    number: int
    unit_type: str
    ready: ReadyLoop


#: What comes of making a map or a reduce.
PreparedTask: TypeAlias = PreparedOrder | PreparedLoop | FailedMap


def _shorten(output: TaskOutput) -> TaskOutput:
    """Return an output as a reduce is shown it (S-MR-118)."""
    description = output.task_description
    shown = description.partition("\n\n")[0][:_SHOWN]
    return output if shown == description else output.model_copy(update={"task_description": f"{shown.rstrip()} ..."})


class OrderMaker:
    """Makes the orders of one run."""

    def __init__(
        self,
        journal: RunJournal,
        *,
        factories: TaskFactories,
        maker: TaskMaker,
        items: ItemBuffer,
        directives: RunDirectives,
        store: MapReduceOutputs,
        record: RecordedTasks | None,
        item_count: int | None,
        is_direct: bool,
    ) -> None:
        """Make one.

        Args:
            journal: Of the run.
            factories: The user's.
            maker: Makes what they give ready to be done.
            items: Has the items.
            directives: What people told the run.
            store: Has the outputs.
            record: What is recorded of a run that goes on.
            item_count: How many items there are, where that is known.
            is_direct: Whether the only task is that of the short-circuit (S-MR-81).
        """
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
        """Return the key of a task (S-MR-160)."""
        if self._is_direct:
            return DIRECT
        if is_final:
            return FINAL
        return reduce_key(level, number) if level else map_key(self._items.index(number))

    def instance(self, unit: MapItem | ReduceGroup) -> str:
        """Return the instance of a task: its key, and which attempt of the run at it this is."""
        level, is_final = (unit.level, unit.is_final) if isinstance(unit, ReduceGroup) else (0, False)
        key = self.key(level, unit.number, is_final=is_final)
        return instance_of(key, occurrence=0 if self._record is None else self._record.occurrence(level, unit.number))

    def _total(self, unit_type: str) -> int:
        """How many tasks a level has, as far as it is known before its last one: there is one final reduce."""
        return self._item_count if unit_type == "map" else int(unit_type != "reduce")

    async def maps(self, numbers: Mapping[str, int], is_discarded: Callable[[str], bool]) -> list[PreparedTask]:
        """Make the maps of items, by instance, but for those that are discarded when their turn comes.

        Raises:
            Exception: what a factory raised, or what is wrong with what it gave.
        """
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
        orders = [
            self._order(each, instance, (0, number), unit_type)
            for (instance, number), each in zip(tasks, prepared, strict=True)
        ]
        failed = (
            FailedMap(instance=instance, number=number, error=each.error)
            for (instance, number), each in zip(wanted, results, strict=True)
            if isinstance(each, FactoryFailure)
        )
        return [*orders, *loops, *failed]

    async def reduce(
        self, group: ReduceGroup, instance: str, is_discarded: Callable[[str], bool]
    ) -> list[PreparedTask]:
        """Make the reduce of a group, unless it is discarded when its turn comes.

        Raises:
            Exception: as `maps`.
        """
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
        shown = [_shorten(outputs[position]) for position in wanted]
        return [self._order(prepared, instance, (level, number), unit_type, context=shown)]

    async def _ready_loop(self, made: ItemLoop, position: tuple[str, int], item: object) -> PreparedLoop:
        instance, number = position
        try:
            ready = await self._maker.ready_loop(made, key_of(instance), item)
        finally:
            await self._append_asked()
        await self._meet(list(ready.planned.agents.values()))
        return PreparedLoop(instance=instance, number=number, unit_type=node_type(0), ready=ready)

    def inner(self, prepared: PreparedLoop, start: Start, outputs: OutputStore[TaskOutput]) -> TaskOrder:
        """Return the order of a task of an item's loop, which the loop's machine wants started."""
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
        """Make tasks ready; put what was asked of a model for that on record, and who will do them."""
        try:
            prepared = await self._maker.ready(tasks, keys, data)
        finally:
            await self._append_asked()
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
            total_tasks=self._total(unit_type),
            context=tuple(context),
            is_streaming=prepared.is_streaming,
            input_guardrails=len(task.input_guardrails),
            output_guardrails=len(task.output_guardrails),
            directives=self.directives.active(),
            switches=self.directives.switches,
        )
        return PreparedOrder(level=level, number=number, unit_type=unit_type, order=order)
