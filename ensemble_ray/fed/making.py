"""OrderMaker: calls factories and makes orders of what they give. Room: fed.

In: works that the machine wants started, with items and outputs. Out: their orders. One call at a time (S-MR-143). A group
is on record before its reduce is made (S-MR-161), and so is what was asked of a model to make an agent (S-SET-46).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.definition.task import Task
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.items import AgentsJoined, GroupRecorded
from ensemble_ray.fed.bodies import node_type
from ensemble_ray.ids import RUN, instance_of
from ensemble_ray.plan.map_reduce_factories import FactoryFailure
from ensemble_ray.ports import Until
from ensemble_ray.record.identity.map_reduce import DIRECT, FINAL, map_key, reduce_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray.execute.kinds import Kinds
    from ensemble_ray.fed.bodies import FedBodies
    from ensemble_ray.fed.intake import Intake
    from ensemble_ray.fed.ports import FedFactories, FedRecord
    from ensemble_ray.fed.tasks import MadeTask, TaskMaker
    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.ports import Clock, Journal
    from ensemble_ray.schedule.map_reduce_words import StartReduce

__all__ = ["Envelope", "NotMade", "OrderMaker", "Work"]

#: Characters that a reduce is shown of the description of what it reduces.
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all orders of a run say, and what its facts are written under."""

    run_id: str
    epoch: int
    journal: Journal
    clock: Clock

    async def append(self, *facts: Fact, until: Until = Until.TAKEN) -> None:
        """Put facts on record.

        Raises:
            RecordError, StaleEpochError: it cannot be, or is not ours any more.
        """
        await self.journal.append(facts, epoch=self.epoch, until=until)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A map or reduce with its order."""

    level: int
    number: int
    #: what it is in the tree
    kind: str
    order: TaskOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMade:
    """A map whose factory raised (S-MR-154)."""

    number: int
    error: Exception
    level: int = 0


def _told(output: TaskOutput) -> TaskOutput:
    """An output as a reduce is told of it (S-MR-118)."""
    description = output.task_description
    shown = description.partition("\n\n")[0][:_SHOWN]
    return output if shown == description else output.model_copy(update={"task_description": f"{shown.rstrip()} ..."})


class OrderMaker:
    """Makes the orders of one run."""

    def __init__(
        self,
        envelope: Envelope,
        *,
        factories: FedFactories,
        maker: TaskMaker,
        kinds: Kinds,
        intake: Intake,
        bodies: FedBodies,
        record: FedRecord | None,
        item_count: int | None,
        is_direct: bool,
    ) -> None:
        """Make one.

        Args:
            envelope: Of the run.
            factories: The user's.
            maker: Makes what they give ready to be done.
            kinds: Names what agents have in common.
            intake: Has the items.
            bodies: Has the outputs.
            record: What is recorded of a run that goes on.
            item_count: How many items there are, where that is known.
            is_direct: Whether the only task is that of the short-circuit (S-MR-81).
        """
        self._envelope = envelope
        self._factories = factories
        self._maker = maker
        self._kinds = kinds
        self._intake = intake
        self._bodies = bodies
        self._record = record
        self._item_count = item_count or 0
        self._is_direct = is_direct
        self._turn = asyncio.Lock()

    def key(self, level: int, number: int, *, is_final: bool = False) -> str:
        """The key of a work (S-MR-160)."""
        if self._is_direct:
            return DIRECT
        if is_final:
            return FINAL
        return reduce_key(level, number) if level else map_key(self._intake.index(number))

    def _total(self, kind: str) -> int:
        """How many tasks a level has, as far as it is known before its last one: there is one final reduce."""
        return self._item_count if kind == "map" else int(kind != "reduce")

    async def maps(self, numbers: Sequence[int], is_unwanted: Callable[[int, int], bool]) -> list[Work | NotMade]:
        """Maps of these items, but for those that are unwanted when their turn comes.

        Raises:
            Exception: what a factory raised, or what is wrong with what it gave.
        """
        async with self._turn:
            wanted = [number for number in numbers if not is_unwanted(0, number)]
            if not wanted:
                return []
            given = await self._factories.maps([self._intake.item(number) for number in wanted])
            tasks = {number: each for number, each in zip(wanted, given, strict=True) if isinstance(each, Task)}
            keys = [self.key(0, number) for number in tasks]
            made = await self._ready(list(tasks.values()), keys) if tasks else []
        kind = node_type(0, is_direct=self._is_direct)
        works = [self._work(each, 0, number, kind) for number, each in zip(tasks, made, strict=True)]
        failed = ((n, each) for n, each in zip(wanted, given, strict=True) if isinstance(each, FactoryFailure))
        return [*works, *(NotMade(number=number, error=each.error) for number, each in failed)]

    async def reduce(self, group: StartReduce, is_unwanted: Callable[[int, int], bool]) -> list[Work | NotMade]:
        """The reduce of a group, unless it is unwanted when its turn comes.

        Raises:
            Exception: as `maps`.
        """
        level, number = group.level, group.number
        key = self.key(level, number, is_final=group.is_final)
        inputs = [self.key(*each) for each in group.inputs]
        data = GroupRecorded(level=level, number=number, inputs=inputs, is_final=group.is_final)
        await self._envelope.append(self._fact(instance_of(key), data), until=Until.WRITTEN)
        async with self._turn:
            if is_unwanted(level, number):
                return []
            outputs = [self._bodies.output(*each) for each in group.inputs]
            task, wanted = await self._factories.reduce(outputs)
            (made,) = await self._ready([task], [key])
        kind = node_type(level, is_final=group.is_final)
        return [self._work(made, level, number, kind, [_told(outputs[position]) for position in wanted])]

    async def _ready(self, tasks: Sequence[Task], keys: Sequence[str]) -> list[MadeTask]:
        """Make tasks ready; put what was asked of a model for that on record, and who will do them."""
        try:
            made = await self._maker.ready(tasks, keys)
        finally:
            if asked := self._maker.taken_facts():
                await self._envelope.append(*asked, until=Until.WRITTEN)
        if fresh := self._bodies.meet([each.agent for each in made if each.agent is not None]):
            await self._envelope.append(self._fact(RUN, AgentsJoined.of(fresh)))
        return made

    def _fact(self, name: str, data: FactData) -> Fact:
        return Fact(run=self._envelope.run_id, name=name, at=self._envelope.clock.now(), data=data)

    def _work(self, made: MadeTask, level: int, number: int, kind: str, context: Sequence[TaskOutput] = ()) -> Work:
        occurrence = 0 if self._record is None else self._record.occurrence(level, number)
        task = made.task
        order = TaskOrder(
            run_id=self._envelope.run_id,
            key=made.key,
            instance=instance_of(made.key, occurrence=occurrence),
            epoch=self._envelope.epoch,
            index=number + 1,
            task=task,
            agent_key=None if made.agent is None else self._kinds.kind_of(made.agent),
            agent_role=made.agent_role,
            agent=made.agent,
            total_tasks=self._total(kind),
            context=tuple(context),
            is_streaming=made.is_streaming,
            input_guardrails=len(task.input_guardrails),
            output_guardrails=len(task.output_guardrails),
        )
        return Work(level=level, number=number, kind=kind, order=order)
