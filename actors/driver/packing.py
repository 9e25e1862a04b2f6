"""Orders of a fed run as bytes, in the driver's process. What many orders share is pickled once and sent under a name.

In: orders with agents and callables as objects. Out: packed orders, and what each needs. Must never happen: a name that
comes to stand for another object, or shared objects that pile up with the orders that were done.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actors.driver.preflight import dump
from actors.link.fed_wire import FedKind, FedOrder, TaskCallables
from actors.link.wire import WireOrder, pack_output
from ensemble_ray.epochs import REDISPATCH_STEP
from ensemble_ray.execute.kinds import Shelf, overlay_of

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.definition.task import Task
    from ensemble_ray.execute.orders import TaskOrder

__all__ = ["Packed", "Packer"]


@dataclass(frozen=True, slots=True)
class _Template:
    agent: Agent
    #: under which it travels
    name: str
    kind: FedKind


@dataclass(frozen=True, slots=True)
class _Callable:
    #: keeps the object alive whose id it is found by
    thing: object
    name: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Packed:
    """An order as bytes, and what it needs."""

    fed: FedOrder
    #: key of its agent's kind; None: it has no agent
    kind: str | None
    #: keys of its callables
    callables: tuple[str, ...]

    @property
    def instance(self) -> str:
        """Its instance."""
        return self.fed.order.instance

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        order = self.fed.order
        return 500 + len(order.task) + len(order.overlay or b"") + sum(map(len, order.context))

    def again(self, steps: int) -> Packed:
        """The same under a higher epoch."""
        order = self.fed.order
        raised = replace(order, epoch=order.epoch + steps * REDISPATCH_STEP)
        return replace(self, fed=replace(self.fed, order=raised))


class Packer:
    """Packs the orders of one run."""

    def __init__(self) -> None:
        self._kinds: Shelf[_Template] = Shelf()
        self._callables: Shelf[_Callable] = Shelf()
        self._numbers = itertools.count(1)

    def pack(self, order: TaskOrder) -> Packed:
        """The order as bytes; what it needs is kept until `done`.

        Raises:
            ValidationError: something of it cannot travel; the path to the culprit is named (S-CONV-34).
        """
        task = order.task
        where = f"Task '{order.key}'"
        body = _task_body(task, where)
        context = tuple(pack_output(output) for output in order.context)
        template, overlay = None, None
        if order.agent is not None:
            template = self._template(order.agent_key or "", order.agent)
            overlay = pickle.dumps(overlay_of(order.agent, template.agent), protocol=5)
        callables, keys = self._called(task, where)
        wire = WireOrder(
            order.key,
            order.instance,
            order.epoch,
            order.index,
            body,
            None if template is None else template.name,
            order.agent_role,
            context,
            order.missing_context,
            order.is_streaming,
            order.input_guardrails,
            order.output_guardrails,
            overlay=overlay,
            total_tasks=order.total_tasks,
        )
        # Nothing fails from here on, so that all that is used is done some time.
        if template is not None:
            self._kinds.use(order.agent_key or "")
        for key in keys:
            self._callables.use(key)
        self._kinds.trim()
        self._callables.trim()
        kind = None if template is None else order.agent_key or ""
        return Packed(FedOrder(wire, task.description, callables), kind, keys)

    def done(self, packed: Packed) -> None:
        """Its result has come."""
        if packed.kind is not None:
            self._kinds.done(packed.kind)
        for key in packed.callables:
            self._callables.done(key)

    def kind_of(self, packed: Packed) -> tuple[str, FedKind] | None:
        """Name and template of its agent's kind; None where it has no agent."""
        template = None if packed.kind is None else self._kinds.get(packed.kind)
        return None if template is None else (template.name, template.kind)

    def bodies_of(self, packed: Packed) -> dict[str, bytes]:
        """Names and bytes of its callables."""
        found = (self._callables.get(key) for key in packed.callables)
        return {held.name: held.body for held in found if held is not None}

    def _template(self, kind: str, agent: Agent) -> _Template:
        """The template of a kind: the first agent of it since it was last forgotten, under a name of its own each time."""
        template = self._kinds.get(kind)
        if template is None:
            body = dump(agent, f"Agent '{agent.role}'")
            replicas = agent.replicas if "replicas" in agent.model_fields_set else None
            name = f"{kind}.{next(self._numbers)}"
            template = _Template(agent, name, FedKind(body, agent.isolation, replicas))
            self._kinds.put(kind, template)
        return template

    def _called(self, task: Task, where: str) -> tuple[TaskCallables | None, tuple[str, ...]]:
        """Names of a task's callables, and the keys that they are kept under."""
        if task.handler is None and not task.input_guardrails and not task.output_guardrails:
            return None, ()
        handler = [] if task.handler is None else [self._callable(task.handler, f"{where} -> handler")]
        inputs = [
            self._callable(each, f"{where} -> input_guardrails -> [{number}]")
            for number, each in enumerate(task.input_guardrails)
        ]
        outputs = [
            self._callable(each, f"{where} -> output_guardrails -> [{number}]")
            for number, each in enumerate(task.output_guardrails)
        ]
        names = TaskCallables(
            handler=handler[0].name if handler else "",
            input_guardrails=tuple(each.name for each in inputs),
            output_guardrails=tuple(each.name for each in outputs),
        )
        return names, tuple(_key(each.thing) for each in (*handler, *inputs, *outputs))

    def _callable(self, thing: object, where: str) -> _Callable:
        """One copy per object, however many tasks have it (S-SET-31)."""
        held = self._callables.get(_key(thing))
        if held is None:
            held = _Callable(thing, f"callable-{next(self._numbers)}", dump(thing, where))
            self._callables.put(_key(thing), held)
        return held


def _key(thing: object) -> str:
    return f"{id(thing):x}"


def _task_body(task: Task, where: str) -> bytes:
    """The task as bytes without what travels otherwise, or was needed only to make its agent."""
    effect = task.effect if task.handler is None else task.handler_effect
    bare = task.rewritten(
        agent=None,
        context=(),
        llm=None,
        tools=(),
        rate_limit=None,
        handler=None,
        effect=effect,
        input_guardrails=(),
        output_guardrails=(),
    )
    # Without a type it is texts and numbers, which need no search for what could not travel.
    is_plain = type(task).__module__.startswith("ensemble_ray.") and task.output_type is None
    return pickle.dumps(bare, protocol=5) if is_plain else dump(bare, where)
