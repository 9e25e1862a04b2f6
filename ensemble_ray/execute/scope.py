"""What every part of one task's work shares: the run's context, the ports, the order, the effects. Package: execute.

Parts note facts and publish events through it; none of them holds the runner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ensemble_ray.events import Event
from ensemble_ray.events.telemetry.active import effect_span
from ensemble_ray.execute.effects import is_doing
from ensemble_ray.execute.slots import Slot
from ensemble_ray.facts.fact import Fact, FactData, find_fact, require_usable
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.limits.endpoints import EndpointService, process_endpoints
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.messages import ChatMessage

if TYPE_CHECKING:
    from ensemble_ray.execute.delegation.peers import Peers
    from ensemble_ray.execute.effects import TaskEffects
    from ensemble_ray.execute.orders import RunContext, TaskOrder
    from ensemble_ray.execute.ports import Callables, RunReflections
    from ensemble_ray.execute.spending import Spending
    from ensemble_ray.execute.tools.unknown_effect import UnknownEffect
    from ensemble_ray.facts.effects import ModelAnswered
    from ensemble_ray.ports import Clock, EventSink, Journal, Reviewer, ToolMetrics
    from ensemble_ray.ports.memory import RunMemory
    from ensemble_ray.ports.services import Services
    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import TaskTrace

__all__ = ["RunnerPorts", "TaskScope"]

D = TypeVar("D", bound=FactData)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerPorts:
    """Everything a runner touches."""

    clock: Clock
    journal: Journal
    events: EventSink
    callables: Callables
    services: Services
    tool_metrics: ToolMetrics
    #: what model calls may spend; None: as much as they like
    spending: Spending | None = None
    #: whether and when endpoints are asked; the process's own unless a test brings another
    endpoints: EndpointService = field(default_factory=process_endpoints)
    #: told (effect, recorded fact, digest of today's request, its messages) where a recorded answer is used (S-DUR-55)
    compare: Callable[[str, Fact[ModelAnswered], str, Sequence[ChatMessage]], None] | None = None
    #: the user's callable that is asked about unknown outcomes in this process; None: its terminal (S-DUR-24)
    ask_unknown: Callable[[UnknownEffect], object] | None = None
    #: asks at review gates, in the process that started the run; None: another one has it, or there is nobody to ask
    reviewer: Reviewer | None = None
    #: the run's memory; None where it has none, or nobody answers for it
    memory: RunMemory | None = None
    #: what is learned of its tasks; None where no task is reflected on, or nobody answers for it
    reflections: RunReflections | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScope:
    """One task at work."""

    context: RunContext
    ports: RunnerPorts
    order: TaskOrder
    effects: TaskEffects
    #: what an earlier process of this task recorded: (name, kind) -> fact
    recorded_facts: Mapping[tuple[str, str], Fact] = field(default_factory=dict[tuple[str, str], Fact])
    #: its place among its agent's tasks
    slot: Slot = field(default_factory=Slot)
    #: who does what it delegates; None where nothing can be
    peers: Peers | None = None

    @property
    def is_manager(self) -> bool:
        """Whether it is the task of a hierarchical run's manager."""
        return self.context.hierarchy is not None and not self.order.depth

    @property
    def delegated(self) -> tuple[tuple[str, TaskOutput], ...]:
        """The outputs of a manager's workers, by role, in the order in which they were done (S-HIER-6)."""
        if not self.is_manager:
            return ()
        given = [each.output for each in self.effects.delegations if each.output is not None]
        return tuple((each.agent_role, each) for each in sorted(given, key=lambda output: output.completed_at))

    @property
    def failed_delegations(self) -> tuple[TaskTrace, ...]:
        """The traces of a manager's workers that failed; their tokens were spent (S-TRC-43)."""
        if not self.is_manager:
            return ()
        attempts = self.effects.delegations
        return tuple(each.trace for each in attempts if each.output is None and each.trace is not None)

    def find_recorded(self, name: str, wanted: type[D]) -> Fact[D] | None:
        """Return the effect recorded under that name, which is not performed again; None when there is none.

        Raises:
            RecordError: something of it is missing.
        """
        # Empty, as a rule: asked at every step, it is looked at before anything is looked up.
        found = find_fact(self.recorded_facts, name, wanted) if self.recorded_facts else None
        return None if found is None else require_usable(found)

    @property
    def loss(self) -> Fact[LossAccepted] | None:
        """What tells that a part of the record is lost in which the task may have called something; None: nothing does."""
        found = find_fact(self.recorded_facts, RUN, LossAccepted)
        return found if found is not None and found.data.has_effect else None

    async def note(
        self, name: str, *data: FactData, until: Persistence = Persistence.QUEUED, at: float | None = None
    ) -> None:
        """Put a fact, or several at once, into the journal; return when that is as safe as the next step needs.

        Args:
            name: Their name.
            data: What happened.
            until: How safe it must be.
            at: When it happened, Unix time, s; None: now.

        Raises:
            StaleEpochError: another process has this task now; nothing more of it must be done here.
            RecordError: the store refused it.
        """
        order = self.order
        self.effects.is_recorded = self.effects.is_recorded or any(map(is_doing, data))
        now = self.ports.clock.now() if at is None else at
        facts = [Fact(run=order.run_id, name=name, at=now, data=each, epoch=order.epoch) for each in data]
        await self.ports.journal.append(facts, epoch=order.epoch, until=until)

    async def note_end(self, *data: FactData) -> None:
        """Put the task's end on record, committed.

        Whoever wants it stopped meanwhile comes too late: the run must say what its record does (S-DUR-138).
        """
        try:
            await self.note(self.order.instance, *data, until=Persistence.COMMITTED)
        except asyncio.CancelledError:  # while it waits for the commit of what a journal has taken before it waits
            await self.ports.journal.flush()

    def effect_span(self, name: str) -> AbstractContextManager[None]:
        """Perform the effect of that name in the block, as its span where the run is traced (S-INT-37)."""
        return effect_span(self.context.tracing, name)

    def emit(self, event_type: type[Event], build: Callable[[], Event]) -> None:
        """Publish an event, building it only if somebody wants its type."""
        if self.ports.events.wants(event_type):
            self.ports.events.emit(build())
