"""The record of a map-reduce that resumes, as its tasks query it.

On a cluster, a task's end may be recorded before the driver's fact of its item: it waits here for that fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, cast

from ensemble_ray.definition.map_reduce import find_output_type
from ensemble_ray.errors import ValidationError
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import (
    AgentsJoined,
    BatchRecorded,
    FailureRecorded,
    ItemOutputRecorded,
    ItemsRecorded,
    OutputRecorded,
    read_trace,
)
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.batches import RecordedBatches
from ensemble_ray.record.identity.definition import DIRECT, FINAL, map_key, position_of, reduce_key
from ensemble_ray.record.map_reduce_fold import MAP_REDUCE_KINDS, MapReduceResumeReader, RecordedOutcome
from ensemble_ray.record.resume.reading import RecordedFailures, read_pages
from ensemble_ray.record.stores import RunStore
from ensemble_ray.runs.map_reduce.outputs import MapReduceFailure, MapReduceOutputs, node_type
from ensemble_ray.schedule.instructions import ReduceGroup
from ensemble_ray.schedule.stimuli import Evaluated
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.task_output import OutputType, TaskOutput, join_iterations
from ensemble_ray.values.trace import TaskTrace

_log = bounded_logger(__name__)


def recorded_failure(key: str, level: int, fact: Fact[FailureRecorded]) -> MapReduceFailure:
    trace = read_trace(fact)
    return MapReduceFailure(
        key=key,
        level=level,
        at=fact.at if trace is None else trace.completed_at.timestamp(),
        task_description=key if trace is None else trace.task_description,
        agent_role="" if trace is None else trace.agent_role,
        error=error_from(fact.data.error_data),
        attempts=fact.data.attempts,
    )


class MapReduceResumePoint:
    """A map is named by its position in the source; outputs are in the store."""

    def __init__(self, outputs: MapReduceOutputs, output_types: Mapping[str, OutputType] | None = None) -> None:
        """`output_types` are those of the current definition, by full name; other outputs stay JSON data."""
        self._outputs = outputs
        self._output_types = output_types or {}
        self._found: dict[str, OutputType | None] = {}  # by full name
        self._failures: RecordedFailures[tuple[int, int]] = RecordedFailures()
        self._early: dict[str, OutputRecorded | Fact[FailureRecorded]] = {}  # ends of unrecorded items, by key
        self._inner: dict[str, dict[str, OutputRecorded | Fact[FailureRecorded]]] = {}  # by key of an open item
        self._output_facts: dict[str, ItemOutputRecorded] = {}  # outputs of items whose parts are incomplete
        self.batches = RecordedBatches()
        self.facts = MapReduceResumeReader(self._keep, self._keep_failure, self._keep_inner, self._keep_item)

    @classmethod
    async def read(
        cls, store: RunStore, run_id: str, outputs: MapReduceOutputs, output_types: Mapping[str, OutputType]
    ) -> MapReduceResumePoint:
        """Read a record page by page. A RecordError: it is damaged."""
        record = cls(outputs, output_types)
        await read_pages(store, run_id, (*MAP_REDUCE_KINDS, AgentsJoined.KIND, BatchRecorded.KIND), record.apply)
        return record

    def apply(self, facts: Sequence[Fact]) -> None:
        self.facts.apply(facts)
        self.batches.apply_all(facts)
        for fact in facts:
            if isinstance(fact.data, AgentsJoined):
                self._outputs.keep_recorded_agents(fact.data.summaries())
        if any(isinstance(fact.data, ItemsRecorded) for fact in facts):
            early, self._early = self._early, {}
            for key, end in early.items():
                if isinstance(end, OutputRecorded):
                    self._keep(key, end)
                else:
                    self._keep_failure(key, end)
            for key in [*self._output_facts]:
                self._keep_output(key)

    def _keep(self, key: str, end: OutputRecorded) -> None:
        position = self._position_of(key)
        if position is None:
            self._early[key] = end
            return
        type_of_node = node_type(position[0], is_final=key == FINAL, is_direct=key == DIRECT)
        self._outputs.keep(*position, self._output_of(end), type_of_node)

    def _keep_inner(self, key: str, fact: Fact[OutputRecorded] | Fact[FailureRecorded]) -> None:
        end = fact.data
        kept = end if isinstance(end, OutputRecorded) else cast("Fact[FailureRecorded]", fact)
        self._inner.setdefault(key, {})[fact.name] = kept
        self._keep_output(key)

    def _keep_item(self, key: str, end: ItemOutputRecorded) -> None:
        self._output_facts[key] = end
        self._keep_output(key)

    def _keep_output(self, key: str) -> None:
        """Store the output of an item, once all its parts are known."""
        position, end, inner = self._position_of(key), self._output_facts.get(key), self._inner.get(key, {})
        if position is None or end is None or any(name not in inner for name in end.outputs):
            return
        del self._output_facts[key]
        given = [self._output_of(cast("OutputRecorded", inner[name])) for name in end.outputs]
        output = given[0] if len(given) == 1 else join_iterations(given)
        self._outputs.keep(*position, output, node_type(position[0]), executions=self._executions(key))

    def _executions(self, key: str) -> list[TaskTrace]:
        ends = self._inner.pop(key, {}).values()
        traces = [self._output_of(end).trace if isinstance(end, OutputRecorded) else read_trace(end) for end in ends]
        return [trace for trace in traces if trace is not None]

    def _output_of(self, end: OutputRecorded) -> TaskOutput:
        return typed_output(end.output_data(), self._find_type(end.read().output_type))

    def _find_type(self, name: str) -> OutputType | None:
        if name not in self._found:
            self._found[name] = find_output_type(name, self._output_types)
            if name and self._found[name] is None:
                _log.warning(
                    "Recorded outputs of type %s stay JSON data: no factory of the definition refers to that type. "
                    "Use its class in a factory, or a module-level alias of it",
                    name,
                )
        return self._found[name]

    def _keep_failure(self, key: str, fact: Fact[FailureRecorded]) -> None:
        position = self._position_of(key)
        if position is None:
            self._early[key] = fact
            return
        self._failures.put(position, fact)
        type_of_node = node_type(position[0], is_final=key == FINAL, is_direct=key == DIRECT)
        self._outputs.mark_lost(*position, read_trace(fact), type_of_node, executions=self._executions(key))

    def _position_of(self, key: str) -> tuple[int, int] | None:
        """Return the machine's level and number; None if the record lacks them."""
        if key == DIRECT:
            return 0, 0
        if key == FINAL:
            final = self.facts.groups.final
            return None if final is None else (final.level, final.number)
        position = position_of(key)
        if position is None or position[0]:
            return position
        number = self.facts.items.number(position[1])
        return None if number is None else (0, number)

    def _key(self, level: int, number: int) -> str:
        final = self.facts.groups.final
        if final is not None and (final.level, final.number) == (level, number):
            return FINAL
        return reduce_key(level, number) if level else map_key(self.facts.items.index(number))

    @property
    def groups(self) -> Sequence[ReduceGroup]:
        return self.facts.groups

    @property
    def failed(self) -> Iterable[tuple[int, int]]:
        """Tasks that failed at least once; some may have been retried."""
        return self._failures

    def outcome(self, level: int, number: int) -> RecordedOutcome:
        return self.facts.outcome(self._key(level, number))

    def failure(self, level: int, number: int) -> MapReduceFailure | None:
        """Return the failure of a task that is not retried."""
        key = self._key(level, number)
        fact = self._failures.get((level, number)) if self.facts.outcome(key) is RecordedOutcome.FAILED else None
        if fact is None:
            return None
        return recorded_failure(key, level, fact)

    def exit_reason(self, level: int, number: int) -> ExitReason | None:
        return self.facts.exits.get(self._key(level, number))

    def occurrence(self, level: int, number: int) -> int:
        if not level and number >= self.facts.items.count:
            return 0
        return int(self.facts.instance(self._key(level, number)).rpartition("#")[2])

    @property
    def verdicts(self) -> Mapping[str, Sequence[Evaluated]]:
        """Of items that have not ended, by instance."""
        return self.facts.verdicts

    @property
    def knows_all(self) -> bool:
        return self.facts.items.are_all

    def check_items(self, first: int, indices: Sequence[int], digests: Sequence[str]) -> int:
        """Return how many items from `first` are recorded. `ValidationError`: they differ (S-MR-162)."""
        items = self.facts.items
        compared = max(0, min(len(indices), items.count - first))
        for number in range(compared):
            index, digest = indices[number], digests[number]
            recorded = items.digest(index) if items.index(first + number) == index else None
            if recorded is None or (recorded and digest and recorded != digest):
                raise ValidationError(
                    f"items changed: item {index} is not what it was. Resume with the items that the run began with, or "
                    f"begin a new run{self._order_advice()}"
                )
        if items.are_all and first + len(indices) > items.count:
            self._refuse_count("more")
        return compared

    def check_end(self, count: int) -> None:
        """Refuse a source with fewer items than recorded."""
        if count < self.facts.items.count:
            self._refuse_count(str(count))

    def _refuse_count(self, found: str) -> NoReturn:
        raise ValidationError(
            f"items changed: the run recorded {self.facts.items.count} items, the source has {found}. Resume with the items "
            f"that the run began with, or begin a new run{self._order_advice()}"
        )

    def _order_advice(self) -> str:
        if (self.facts.head.header.items or {}).get("kind") != "dataset":
            return ""
        return (
            ". A Ray Dataset keeps the order of its rows only if dataset.context.execution_options.preserve_order "
            "is True, its files are the same, and it is not shuffled"
        )
