"""MapReduceOutputs: what the tasks of a map-reduce gave, kept outside of memory until somebody asks (S-MR-132).

In: outputs and traces of tasks, by level and number, as they come. Out: one output for a reduce that needs it; all of
them, in level order, as sequences that read when asked; sums. Of a task that is done some 40 bytes stay here.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, cast

from ensemble_ray.items.pulling import NumberSet
from ensemble_ray.items.spool import Spool, SpooledSequence
from ensemble_ray.plan.unit_plans import tool_names
from ensemble_ray.values.ids import key_of
from ensemble_ray.values.metrics import MetricsSum
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import AgentSummary, MapReduceLevelSummary, TaskTrace

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.definition.task import Task
    from ensemble_ray.execute.orders import TaskOrder, TaskResult
    from ensemble_ray.plan.map_reduce_factories import FactoryFailure, ItemLoop
    from ensemble_ray.schedule.instructions import End, ReduceGroup
    from ensemble_ray.schedule.stimuli import Evaluated
    from ensemble_ray.values.metrics import ExecutionMetrics
    from ensemble_ray.values.outputs import ExitReason


_NONE = -1
_OUTPUT, _TRACE = 1, 2


def node_type(level: int, *, is_final: bool = False, is_direct: bool = False) -> str:
    """Return what a task is in the tree (S-MR-38, S-MR-82)."""
    if is_direct:
        return "direct"
    if is_final:
        return "final-reduce"
    return "reduce" if level else "map"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Payload:
    """What is kept of one task: its output, which has its trace, or the trace alone where it gave none."""

    output: TaskOutput | None
    trace: TaskTrace | None
    item: object = None


@dataclass(slots=True)
class _Level:
    """The tasks of one level, by number."""

    slots: array[int] = field(default_factory=lambda: array("q"))
    #: what the slot has: an output, a trace alone, or neither
    gave: bytearray = field(default_factory=bytearray)
    count: int = 0
    started_at: datetime | None = None
    completed_at: datetime | None = None
    #: of tasks that were several executions: number and slot of each trace, in the order in which the tasks ended
    inner_numbers: array[int] = field(default_factory=lambda: array("q"))
    inner_slots: array[int] = field(default_factory=lambda: array("q"))

    def has(self, number: int) -> bool:
        return number < len(self.gave) and self.gave[number] == _OUTPUT

    def gave_slots(self) -> Iterator[int]:
        return (slot for slot, what in zip(self.slots, self.gave, strict=True) if what == _OUTPUT)

    def traced_slots(self) -> Iterator[int]:
        inner: dict[int, list[int]] = {}
        for number, slot in zip(self.inner_numbers, self.inner_slots, strict=True):
            inner.setdefault(number, []).append(slot)
        for number, (slot, what) in enumerate(zip(self.slots, self.gave, strict=True)):
            if number in inner:
                yield from inner[number]
            elif what:
                yield slot

    def note_trace(self, trace: TaskTrace) -> None:
        self.started_at = min(self.started_at or trace.started_at, trace.started_at)
        self.completed_at = max(self.completed_at or trace.completed_at, trace.completed_at)

    def note(self, number: int, slot: int, trace: TaskTrace | None, *, gave: bool) -> None:
        missing = number + 1 - len(self.slots)
        if missing > 0:
            self.slots.extend([_NONE] * missing)
            self.gave.extend(bytes(missing))
        self.count += self.slots[number] == _NONE
        self.slots[number] = slot
        self.gave[number] = _OUTPUT if gave else _TRACE if trace is not None else 0
        if trace is not None:
            self.note_trace(trace)


class MapReduceOutputs:
    """Bodies of one run's tasks."""

    def __init__(self, *, keeps_items: bool = False) -> None:
        """Make an empty one; `keeps_items` says whether items are kept beside their outputs, for readers."""
        self._spool = Spool()
        self._levels: list[_Level] = []
        self._keeps_items = keeps_items
        self._metrics = MetricsSum()
        self._tool_calls = 0
        #: slots of agents, short hashes of those that were met, and hashes of what is recorded of those of earlier
        self._agents: array[int] = array("q")
        self._met = NumberSet()
        self._recorded_agents = NumberSet()
        #: what cannot be pickled stays here: inline, anything may be an output
        self._held: list[_Payload] = []

    # What comes in.

    def keep(
        self,
        level: int,
        number: int,
        output: TaskOutput,
        unit_type: str,
        *,
        item: object = None,
        executions: Sequence[TaskTrace] = (),
    ) -> TaskOutput:
        """Keep an output; gives it with its trace annotated. Of several executions the traces of all are counted."""
        trace = self._annotate(output.trace, unit_type, level)
        output = output.model_copy(update={"trace": trace})
        tool_calls = [each.metrics.tool_call_count for each in executions] or [output.tool_call_count]
        self._tool_calls += sum(tool_calls)
        self._put((level, number), output=output, trace=trace, item=item, executions=executions, unit_type=unit_type)
        return output

    def lose(
        self,
        level: int,
        number: int,
        trace: TaskTrace | None,
        unit_type: str,
        *,
        item: object = None,
        executions: Sequence[TaskTrace] = (),
    ) -> None:
        """Keep what a task did that gave no output (S-MR-105)."""
        trace = self._annotate(trace, unit_type, level)
        self._put((level, number), output=None, trace=trace, item=item, executions=executions, unit_type=unit_type)

    def meet(self, agents: Sequence[Agent]) -> list[AgentSummary]:
        """Keep who is about to take part; gives those that nobody met before, and no record tells of."""
        fresh: list[AgentSummary] = []
        for agent in agents:
            if not self._met.add(int(agent.object_id[:16], 16)):
                continue
            summary = AgentSummary(
                role=agent.role,
                goal=agent.goal,
                background=agent.background,
                tool_names=tool_names(agent),
                allow_delegation=agent.allow_delegation,
            )
            if _hash_of(summary) not in self._recorded_agents:
                fresh.append(summary)
        self._agents.extend(self._spool.put(pickle.dumps(summary, protocol=5)) for summary in fresh)
        return fresh

    def keep_recorded_agents(self, agents: Sequence[AgentSummary]) -> None:
        """Keep who took part, as the record has it; objects of another process are known by what they say."""
        for summary in agents:
            self._recorded_agents.add(_hash_of(summary))
        self._agents.extend(self._spool.put(pickle.dumps(summary, protocol=5)) for summary in agents)

    def _put(
        self,
        position: tuple[int, int],
        *,
        output: TaskOutput | None,
        trace: TaskTrace | None,
        item: object,
        executions: Sequence[TaskTrace],
        unit_type: str,
    ) -> None:
        level, number = position
        self._put_payload(position, output=output, trace=trace, item=item)
        for each in executions:
            inner = self._annotate(each, unit_type, level)
            here = self._levels[level]
            here.inner_numbers.append(number)
            here.inner_slots.append(self._pack_payload(_Payload(output=None, trace=inner)))
            here.note_trace(each)
            self._metrics.add(each.with_workers())
        if trace is not None and not executions:
            self._metrics.add(trace.with_workers())

    def _put_payload(
        self, position: tuple[int, int], *, output: TaskOutput | None, trace: TaskTrace | None, item: object
    ) -> None:
        level, number = position
        payload = _Payload(
            output=output,
            trace=trace if output is None else None,
            item=item if self._keeps_items else None,
        )
        slot = self._pack_payload(payload)
        while len(self._levels) <= level:
            self._levels.append(_Level())
        self._levels[level].note(number, slot, trace, gave=output is not None)

    def _pack_payload(self, payload: _Payload) -> int:
        """Put it into the file; gives its slot."""
        try:
            packed = pickle.dumps(payload, protocol=5)
        except Exception:  # noqa: BLE001  pickle raises whatever the object's own methods do
            self._held.append(payload)
            packed = pickle.dumps(len(self._held) - 1)
        return self._spool.put(packed)

    @staticmethod
    def _annotate(trace: TaskTrace | None, unit_type: str, level: int) -> TaskTrace | None:
        return None if trace is None else trace.model_copy(update={"node_type": unit_type, "map_reduce_level": level})

    # What is asked.

    def output(self, level: int, number: int) -> TaskOutput:
        """One output."""
        return _output_of(self._payload(level, number))

    def has(self, level: int, number: int) -> bool:
        """Whether that task gave an output."""
        return level < len(self._levels) and self._levels[level].has(number)

    def get_mapped(self, number: int) -> tuple[object, TaskOutput]:
        """Return the item of a map that is done, None where items are not kept, and its output."""
        payload = self._payload(0, number)
        return payload.item, _output_of(payload)

    @property
    def last(self) -> tuple[int, int] | None:
        """Level and number of the last output in level order; None when there is none."""
        for level in range(len(self._levels) - 1, -1, -1):
            number = self._levels[level].gave.rfind(_OUTPUT)
            if number >= 0:
                return level, number
        return None

    @property
    def outputs(self) -> Sequence[TaskOutput]:
        """All outputs in level order: item order at level 0, order of making above (S-SET-20)."""
        slots = array("q", (slot for level in self._levels for slot in level.gave_slots()))
        return SpooledSequence(self._spool, slots, lambda packed: _output_of(self._open(packed)))

    @property
    def traces(self) -> Sequence[TaskTrace]:
        """All traces in level order, those of failed tasks in their places."""
        slots = array("q", (slot for level in self._levels for slot in level.traced_slots()))
        return SpooledSequence(self._spool, slots, lambda packed: _trace_of(self._open(packed)))

    @property
    def agents(self) -> Sequence[AgentSummary]:
        """Who took part, each once, in the order in which they were met."""
        return SpooledSequence(self._spool, self._agents, pickle.loads, what="agents")  # as in `_open`

    @property
    def levels(self) -> tuple[MapReduceLevelSummary, ...]:
        """What each level did (S-MR-93)."""
        return tuple(
            MapReduceLevelSummary(
                level=level, task_count=each.count, duration=each.completed_at - each.started_at, workflow="parallel"
            )
            for level, each in enumerate(self._levels)
            if each.started_at is not None and each.completed_at is not None
        )

    @property
    def span(self) -> tuple[datetime, datetime] | None:
        """From the first start of a task to the last end (S-MR-92); None when there was none."""
        started = [each.started_at for each in self._levels if each.started_at is not None]
        completed = [each.completed_at for each in self._levels if each.completed_at is not None]
        return (min(started), max(completed)) if started else None

    @property
    def metrics(self) -> ExecutionMetrics:
        """Sums over all tasks (S-MR-91)."""
        return self._metrics.total()

    @property
    def tool_calls(self) -> int:
        """Tool calls of all tasks that gave an output."""
        return self._tool_calls

    def _payload(self, level: int, number: int) -> _Payload:
        return self._open(self._spool.get(self._levels[level].slots[number]))

    def _open(self, packed: bytes) -> _Payload:
        found: _Payload | int = pickle.loads(packed)  # noqa: S301  our own temporary file, which nobody else can open
        return self._held[found] if isinstance(found, int) else found


def _hash_of(summary: AgentSummary) -> int:
    return hash(summary) & (1 << 64) - 1


def _output_of(payload: _Payload) -> TaskOutput:
    return cast("TaskOutput", payload.output)


def _trace_of(payload: _Payload) -> TaskTrace:
    return cast("TaskTrace", payload.trace if payload.output is None else payload.output.trace)


class TaskFactories(Protocol):
    """The user's factories; each call is made in a thread, one at a time (S-MR-143)."""

    async def maps(self, items: Sequence[object]) -> Sequence[Task | ItemLoop | FactoryFailure]:
        """Make a task for each item, or tell why its factory could not."""
        ...

    async def reduce(self, outputs: Sequence[TaskOutput]) -> tuple[Task, Sequence[int]]:
        """Return a task that reduces these outputs, and the positions of those that it wants as context, in its order.

        Raises:
            ValidationError: its context lacks one (S-MR-24).
        """
        ...


class ItemResults(Protocol):
    """Hears what comes of items."""

    async def free_slots(self, in_flight: Callable[[], int]) -> int:
        """Return how many more items may be pulled, when some may: a reader or a file may be slow (S-MR-131).

        Args:
            in_flight: Tells how many items were pulled whose results have not come.
        """
        ...

    def write_output(self, number: int, index: int, item: object, output: TaskOutput) -> None:
        """Note that the item of that place, and of that index in its source, has its output."""
        ...

    def write_failure(self, index: int, item: object, error: BaseException, attempts: int) -> None:
        """Note that an item has none."""
        ...


class RecordedTasks(Protocol):
    """What the record knows of a run that goes on; what its tasks gave is in the store already.

    Tasks are named as the machine names them: a map by its place in the source.
    """

    @property
    def groups(self) -> Sequence[ReduceGroup]:
        """Recorded groups, in their order."""
        ...

    def failure(self, level: int, number: int) -> MapReduceFailure | None:
        """Return how a task failed that is not tried again; None for one that did not fail."""
        ...

    def exit_reason(self, level: int, number: int) -> ExitReason | None:
        """Return why a task ended the run early; None for one that did not."""
        ...

    def occurrence(self, level: int, number: int) -> int:
        """Return which attempt of the run at that task is the current one."""
        ...

    @property
    def verdicts(self) -> Mapping[str, Sequence[Evaluated]]:
        """Recorded answers of the predicates of items that have not ended, by the instance of the item."""
        ...

    @property
    def knows_all(self) -> bool:
        """Whether it says how many items there are."""
        ...

    def check_items(self, first: int, indices: Sequence[int], digests: Sequence[str]) -> int:
        """Compare items, the first of which has that place, with the recorded ones; how many of them are recorded.

        Raises:
            ValidationError: one differs, or there are more than there were (S-MR-162).
        """
        ...

    def check_end(self, count: int) -> None:
        """Compare how many items there are.

        Raises:
            ValidationError: the record has more (S-MR-162).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReduceFailure:
    """A map or reduce that failed."""

    #: of its task; of an item whose map is more than one task, the item's; empty: the run itself failed
    key: str
    level: int
    at: float
    task_description: str
    agent_role: str
    error: BaseException
    #: requests to the provider for its last model call (S-MR-152)
    attempts: int = 0


@dataclass(slots=True, kw_only=True)
class MapReduceEnd:
    """How a map-reduce ended."""

    ending: End
    started_at: float
    completed_at: float
    #: the first of them, on all levels
    failures: Sequence[MapReduceFailure] = field(default_factory=list["MapReduceFailure"])
    #: how many maps failed
    failed_maps: int = 0
    #: what the source or a factory raised
    cause: BaseException | None = None
    #: the first call that a provider refused as it would refuse all others (S-MR-155)
    refusal: MapReduceFailure | None = None
    #: what to warn of, such as a budget that is spent; "": nothing
    warning: str = ""


#: Failures of maps, and of reduces, that an error of the whole run shows, of the hundred thousand there may be.
_MOST_FAILURES = 100


def failure_of(level: int, order: TaskOrder, result: TaskResult, error: BaseException) -> MapReduceFailure:
    """Return how a task of that level failed."""
    return MapReduceFailure(
        key=key_of(order.instance),
        level=level,
        at=result.at,
        task_description=order.task.description,
        agent_role=order.agent_role,
        error=error,
        attempts=result.attempts,
    )


class FailureLog:
    """Keeps the first failures of a run and counts them all."""

    def __init__(self) -> None:
        self._first: list[MapReduceFailure] = []
        #: how many there were, of maps and of reduces
        self._counts = [0, 0]

    def add(self, failure: MapReduceFailure) -> None:
        """Count a failure, and keep it if it is among the first of its kind."""
        index = min(failure.level, 1)
        self._counts[index] += 1
        if self._counts[index] <= _MOST_FAILURES:
            self._first.append(failure)

    @property
    def first(self) -> Sequence[MapReduceFailure]:
        """The first failures, in the order in which they came."""
        return self._first

    @property
    def failed_maps(self) -> int:
        """How many maps failed."""
        return self._counts[0]
