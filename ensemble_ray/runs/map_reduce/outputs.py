"""Outputs, traces and failures of a map-reduce, in a file (S-MR-132); 40 bytes per task stay in memory."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import cast

import msgspec
from msgspec import Struct

from ensemble_ray.definition.agent import Agent
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.items.line_file import Spool, SpooledSequence
from ensemble_ray.items.pulling import NumberSet
from ensemble_ray.plan.unit_plans import tool_names
from ensemble_ray.schedule.instructions import End
from ensemble_ray.values.ids import key_of
from ensemble_ray.values.metrics import ExecutionMetrics, MetricsSum
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import AgentSummary, MapReduceLevelSummary, TaskTrace

_NONE = -1
_OUTPUT, _TRACE = 1, 2


def node_type(level: int, *, is_final: bool = False, is_direct: bool = False) -> str:
    """Return a task's type in the tree (S-MR-38, S-MR-82)."""
    if is_direct:
        return "direct"
    if is_final:
        return "final-reduce"
    return "reduce" if level else "map"


class _Payload(Struct, frozen=True, kw_only=True):
    """A task's output with its trace, or the trace alone."""

    output: TaskOutput | bytes | None  # bytes: as it arrived from another process, without `unit_type` and `level`
    trace: TaskTrace | None
    unit_type: str
    level: int
    item: object = None


class _Level(Struct):
    slots: array[int] = msgspec.field(default_factory=lambda: array("q"))
    gave: bytearray = msgspec.field(default_factory=bytearray)  # per slot: an output, a trace alone, or neither
    count: int = 0
    started_at: datetime | None = None
    completed_at: datetime | None = None
    inner_numbers: array[int] = msgspec.field(default_factory=lambda: array("q"))  # by trace: number of the task
    inner_slots: array[int] = msgspec.field(default_factory=lambda: array("q"))

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
    def __init__(self, *, keeps_items: bool = False) -> None:
        """Create an empty store; `keeps_items`: whether items are stored beside their outputs, for readers."""
        self._spool = Spool()
        self._levels: list[_Level] = []
        self._keeps_items = keeps_items
        self._metrics = MetricsSum()
        self.tool_calls = 0
        self._agents: array[int] = array("q")  # slots of agents, and hashes of known and of recorded ones
        self._met = NumberSet()
        self._recorded_agents = NumberSet()
        self._held: list[_Payload] = []  # values that cannot be pickled; inline, any object may be an output

    def keep(
        self,
        level: int,
        number: int,
        output: TaskOutput,
        unit_type: str,
        *,
        item: object = None,
        executions: Sequence[TaskTrace] = (),
        packed: bytes | None = None,
    ) -> TaskOutput:
        """Store an output, perhaps `packed` as it arrived; return it annotated. Traces of all executions count."""
        trace = _annotate(output.trace, unit_type, level)
        output = output.model_copy(update={"trace": trace})
        self.tool_calls += sum([each.metrics.tool_call_count for each in executions] or [output.tool_call_count])
        # Only objects of the user may change in this process. Other outputs need not be pickled again.
        is_plain = output.parsed_output is None and output.output_type is None
        stored = packed if packed is not None and is_plain else output
        self._put((level, number), stored, trace, unit_type, item=item, executions=executions)
        return output

    def mark_lost(
        self,
        level: int,
        number: int,
        trace: TaskTrace | None,
        unit_type: str,
        *,
        item: object = None,
        executions: Sequence[TaskTrace] = (),
    ) -> None:
        """Store the trace of a task without an output (S-MR-105)."""
        trace = _annotate(trace, unit_type, level)
        self._put((level, number), None, trace, unit_type, item=item, executions=executions)

    def meet(self, agents: Sequence[Agent]) -> list[AgentSummary]:
        """Add agents; return those that are new here and in the record."""
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
        """Objects of another process are identified by their content."""
        for summary in agents:
            self._recorded_agents.add(_hash_of(summary))
        self._agents.extend(self._spool.put(pickle.dumps(summary, protocol=5)) for summary in agents)

    def _put(
        self,
        position: tuple[int, int],
        output: TaskOutput | bytes | None,
        trace: TaskTrace | None,
        unit_type: str,
        *,
        item: object,
        executions: Sequence[TaskTrace],
    ) -> None:
        level, number = position
        payload = _Payload(
            output=output,
            trace=trace if output is None else None,
            unit_type=unit_type,
            level=level,
            item=item if self._keeps_items else None,
        )
        slot = self._pack_payload(payload)
        while len(self._levels) <= level:
            self._levels.append(_Level())
        here = self._levels[level]
        here.note(number, slot, trace, gave=output is not None)
        for each in executions:
            inner = _annotate(each, unit_type, level)
            payload = _Payload(output=None, trace=inner, unit_type=unit_type, level=level)
            here.inner_numbers.append(number)
            here.inner_slots.append(self._pack_payload(payload))
            here.note_trace(each)
            self._metrics.add(each.with_workers())
        if trace is not None and not executions:
            self._metrics.add(trace.with_workers())

    def _pack_payload(self, payload: _Payload) -> int:
        """Return the slot in the file."""
        try:
            packed = pickle.dumps(payload, protocol=5)
        except Exception:  # noqa: BLE001  pickle raises whatever the object's own methods do
            self._held.append(payload)
            packed = pickle.dumps(len(self._held) - 1)
        return self._spool.put(packed)

    def output(self, level: int, number: int) -> TaskOutput:
        return _output_of(self._payload(level, number))

    def has(self, level: int, number: int) -> bool:
        return level < len(self._levels) and self._levels[level].has(number)

    def get_mapped(self, number: int) -> tuple[object, TaskOutput]:
        """Return the output of an ended map with its item, None if items are not stored."""
        payload = self._payload(0, number)
        return payload.item, _output_of(payload)

    @property
    def last(self) -> tuple[int, int] | None:
        """Level and number of the last output in level order."""
        for level in range(len(self._levels) - 1, -1, -1):
            number = self._levels[level].gave.rfind(_OUTPUT)
            if number >= 0:
                return level, number
        return None

    @property
    def outputs(self) -> Sequence[TaskOutput]:
        """In level order: item order at level 0, creation order above (S-SET-20)."""
        slots = array("q", (slot for level in self._levels for slot in level.gave_slots()))
        return SpooledSequence(self._spool, slots, lambda packed: _output_of(self._open(packed)))

    @property
    def traces(self) -> Sequence[TaskTrace]:
        """In level order, with failed tasks."""
        slots = array("q", (slot for level in self._levels for slot in level.traced_slots()))

        def trace_of(packed: bytes) -> TaskTrace:
            payload = self._open(packed)
            return cast("TaskTrace", payload.trace if payload.output is None else _output_of(payload).trace)

        return SpooledSequence(self._spool, slots, trace_of)

    @property
    def agents(self) -> Sequence[AgentSummary]:
        """Each once, in order of their first task."""
        return SpooledSequence(self._spool, self._agents, pickle.loads, what="agents")  # as in `_open`

    @property
    def levels(self) -> tuple[MapReduceLevelSummary, ...]:
        return tuple(
            MapReduceLevelSummary(
                level=level, task_count=each.count, duration=each.completed_at - each.started_at, workflow="parallel"
            )
            for level, each in enumerate(self._levels)
            if each.started_at is not None and each.completed_at is not None
        )

    @property
    def span(self) -> tuple[datetime, datetime] | None:
        """First start and last end of a task (S-MR-92)."""
        started = [each.started_at for each in self._levels if each.started_at is not None]
        completed = [each.completed_at for each in self._levels if each.completed_at is not None]
        return (min(started), max(completed)) if started else None

    @property
    def metrics(self) -> ExecutionMetrics:
        return self._metrics.total()

    def _payload(self, level: int, number: int) -> _Payload:
        return self._open(self._spool.get(self._levels[level].slots[number]))

    def _open(self, packed: bytes) -> _Payload:
        found: _Payload | int = pickle.loads(packed)  # noqa: S301  our own temporary file, which nobody else can open
        return self._held[found] if isinstance(found, int) else found


def _hash_of(summary: AgentSummary) -> int:
    return hash(summary) & (1 << 64) - 1


def _output_of(payload: _Payload) -> TaskOutput:
    if not isinstance(payload.output, bytes):
        return cast("TaskOutput", payload.output)
    output: TaskOutput = pickle.loads(payload.output)  # noqa: S301  bytes of our own cluster
    return output.model_copy(update={"trace": _annotate(output.trace, payload.unit_type, payload.level)})


def _annotate(trace: TaskTrace | None, unit_type: str, level: int) -> TaskTrace | None:
    return None if trace is None else trace.model_copy(update={"node_type": unit_type, "map_reduce_level": level})


class MapReduceFailure(Struct, frozen=True, kw_only=True):
    key: str  # of its task; of the item if its map has several tasks; "": the run itself failed
    level: int
    at: float
    task_description: str
    agent_role: str
    error: BaseException
    attempts: int = 0  # for its last model call (S-MR-152)


class MapReduceEnd(Struct, kw_only=True):
    ending: End
    started_at: float
    completed_at: float
    failures: Sequence[MapReduceFailure] = msgspec.field(default_factory=list["MapReduceFailure"])  # the first ones
    failed_maps: int = 0
    cause: BaseException | None = None  # of the source or a factory
    refusal: MapReduceFailure | None = None  # first provider error that affects all calls (S-MR-155)
    warning: str = ""  # to log, such as a spent budget


_MOST_FAILURES = 100  # most failures of maps, and of reduces, in an error; a run may have a hundred thousand


def failure_of(level: int, order: TaskOrder, result: TaskResult, error: BaseException) -> MapReduceFailure:
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
    def __init__(self) -> None:
        self.first: list[MapReduceFailure] = []  # in order of arrival
        self._counts = [0, 0]  # of maps and of reduces

    def add(self, failure: MapReduceFailure) -> None:
        index = min(failure.level, 1)
        self._counts[index] += 1
        if self._counts[index] <= _MOST_FAILURES:
            self.first.append(failure)

    @property
    def failed_maps(self) -> int:
        return self._counts[0]
