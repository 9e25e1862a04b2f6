"""A dynamic run for users: levels, counts and the first failures, as rows of a tree or JSON data. Pure.

The size of the result does not depend on the number of items.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import cast

from ensemble_ray.errors import RecordError
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.facts.effects import ToolIntended, ToolReturned
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import (
    BatchRecorded,
    DirectiveRecorded,
    ExitRecorded,
    FailureRecorded,
    GroupRecorded,
    ItemOutputRecorded,
    ItemsRecorded,
    LossAccepted,
    ModelSwitched,
    OutputRecorded,
    read_trace,
)
from ensemble_ray.record.batches import RecordedBatches
from ensemble_ray.record.head import HEAD_KINDS
from ensemble_ray.record.identity.definition import DIRECT, FINAL, position_of
from ensemble_ray.record.map_reduce_fold import MapReduceResumeReader, RecordedOutcome
from ensemble_ray.record.units import LevelTally, tally_data
from ensemble_ray.record.unknown_outcomes import UNKNOWN_KINDS, UnknownOutcomes
from ensemble_ray.record.view import tree
from ensemble_ray.record.view.tree import TreeRow, row_text
from ensemble_ray.values.metrics import add_tokens
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.value import utc_of

VIEW_KINDS = (
    *HEAD_KINDS,
    *kinds_of(
        ItemsRecorded,
        GroupRecorded,
        ItemOutputRecorded,
        OutputRecorded,
        FailureRecorded,
        ExitRecorded,
        LossAccepted,
        DirectiveRecorded,
        ModelSwitched,
        BatchRecorded,
    ),
    *UNKNOWN_KINDS,
)
_MOST_SHOWN = 20  # Failures that are shown; all of them are in the record.
_TITLE = 100
_REASON = 400


class MapReduceView:
    def __init__(self, run_id: str, *, is_running: bool = False) -> None:
        self._is_running = is_running
        self._unknown = UnknownOutcomes()
        self._run_id = run_id
        self._recovery = MapReduceResumeReader(self._apply_output, keep_inner=self._apply_inner)
        self._levels: dict[int, LevelTally] = {}
        self._failures: dict[str, str] = {}  # the first ones; a view leaves out tasks that succeeded later
        self._batches = RecordedBatches()
        self._last_at = 0.0
        self._lost: list[str] = []

    def apply(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            self._last_at = max(self._last_at, fact.at)
            self._unknown.apply(fact)
            match fact.data:
                case LossAccepted(reason=reason):
                    self._lost.append(reason)
                case BatchRecorded():
                    self._batches.apply(cast("Fact[BatchRecorded]", fact))
                case ToolIntended() | ToolReturned():
                    pass
                case _:
                    self._recovery.apply([fact])
                    if isinstance(fact.data, FailureRecorded) and "/" not in fact.name:
                        self._apply_failure(cast("Fact[FailureRecorded]", fact))

    @property
    def state(self) -> RunState:
        return self._recovery.head.state

    @property
    def levels(self) -> list[LevelTally]:
        levels = dict(self._recovery.groups.counts)
        unknown: Counter[int | None] = Counter()
        for key, count in self._unknown.counts(self._is_over).items():
            unknown[self._level_of(key)] += count
        if self._recovery.items.count:
            levels[0] = self._recovery.items.count
        for level in {*levels, *self._levels}:
            tally = self._tally(level)
            final = self._recovery.groups.final
            named = [FINAL] if final is not None and level == final.level else []
            outcomes = [self._recovery.outcome(key) for key in (*named, *([DIRECT] if level == 0 else ()))]
            tally.done, tally.failed = (
                self._recovery.count(outcome, level) + outcomes.count(outcome)
                for outcome in (RecordedOutcome.COMPLETED, RecordedOutcome.FAILED)
            )
            tally.unknown = unknown[level]
            tally.total = max(levels.get(level, 0), tally.done + tally.failed)
        return [self._levels[level] for level in sorted(self._levels)]

    def rows(self) -> Iterator[TreeRow]:
        levels, head = self.levels, self._recovery.head
        failures = self._standing_failures()
        calls, asked, answered = (
            sum(tally.model_calls for tally in levels),
            sum(tally.input_tokens for tally in levels),
            sum(tally.output_tokens for tally in levels),
        )
        workflow = head.header.workflow or "map-reduce"
        yield TreeRow(
            depth=0,
            kind="run",
            title=f"Run {row_text(self._run_id, _TITLE)}: {row_text(workflow, _TITLE)}, {self.state.value}",
            details=(
                *tree.name_details(head.name),
                tree.format_seconds(timedelta(seconds=max(0.0, self._last_at - head.started_at))),
                tree.format_count(self._recovery.items.count, "item"),
                tree.format_count(calls, "model call"),
                tree.format_tokens(asked, answered),
                *tree.format_reused(
                    sum(tally.reused_calls for tally in levels), add_tokens(tally.reused_tokens for tally in levels)
                ),
            ),
            is_bad=bool(failures) or any(tally.unknown for tally in levels),
        )
        if head.tags:
            yield tree.tags_row(head.tags)
        yield from map(tree.lost_row, self._lost)
        yield from map(tree.level_row, levels)
        yield from map(tree.batch_row, self._batches)
        yield from self._unknown.rows(self._is_over)
        yield from tree.directive_rows(self._recovery.directives)
        for key, text in failures.items():
            yield TreeRow(depth=1, kind="error", title=f"{row_text(key, _TITLE)}: {text}", is_bad=True)
        if (own := self._own_error()) not in {"", *failures.values()}:
            place = self._recovery.head.errors[0].place
            details = (row_text(place, _REASON),) if place else ()
            yield TreeRow(depth=1, kind="error", title=own, details=details, is_bad=True)
        more = self._recovery.count(RecordedOutcome.FAILED) - len(failures)
        if more > 0:
            yield TreeRow(depth=1, kind="error", title=f"and {more:,} more failed", is_bad=True)

    def data(self) -> dict[str, object]:
        head = self._recovery.head
        return {
            "run_id": self._run_id,
            **({"name": head.name} if head.name else {}),
            "workflow": head.header.workflow,
            "state": self.state.value,
            "started_at": utc_of(head.started_at).isoformat(),
            "last_at": utc_of(self._last_at).isoformat(),
            "items": self._recovery.items.count,
            "levels": tally_data(self.levels),
            "failed": self._recovery.count(RecordedOutcome.FAILED),
            "first_failures": self._standing_failures(),
            **({"error": own} if (own := self._own_error()) else {}),
            **({"tags": dict(head.tags)} if head.tags else {}),
            **({"lost": self._lost} if self._lost else {}),
            **({"batches": [each.to_data() for each in self._batches]} if self._batches else {}),
            **tree.directive_data(self._recovery.directives),
            "unknown_outcomes": self._unknown.counts(self._is_over).total(),
            "first_unknown_outcomes": self._unknown.describe(self._is_over),
        }

    def _own_error(self) -> str:
        if (own := self._recovery.head.own_error) is None:
            return ""
        return f"{row_text(own.error_type, _TITLE)}: {row_text(own.message, _REASON)}"

    def _is_over(self, key: str) -> bool:
        return not self._is_running or self._recovery.outcome(key) is not RecordedOutcome.UNKNOWN

    def _standing_failures(self) -> dict[str, str]:
        return {
            key: text for key, text in self._failures.items() if self._recovery.outcome(key) is RecordedOutcome.FAILED
        }

    def _tally(self, level: int) -> LevelTally:
        tally = self._levels.get(level)
        if tally is None:
            final = self._recovery.groups.final
            is_final = final is not None and level == final.level
            node_type = FINAL if is_final else "reduce" if level else "map"
            tally = self._levels[level] = LevelTally(level=level, node_type=node_type)
        return tally

    def _level_of(self, key: str) -> int | None:
        position = position_of(key)
        if position is not None:
            return position[0]
        final = self._recovery.groups.final
        return 0 if key == DIRECT else None if final is None else final.level

    def _apply_output(self, key: str, end: OutputRecorded) -> None:
        level = self._level_of(key)
        if level is None:
            raise RecordError(f"The record is damaged: '{key}' has an output and no group")
        output = typed_output({**end.output_data(), "trace": None, "parsed_output": None})
        tally = self._tally(level)
        if key == DIRECT:
            tally.node_type = DIRECT
        tally.add(output.metrics, output.completed_at - output.duration, output.completed_at)

    def _apply_inner(self, key: str, fact: Fact[OutputRecorded] | Fact[FailureRecorded]) -> None:
        if isinstance(fact.data, OutputRecorded):
            self._apply_output(key, fact.data)
        elif (trace := read_trace(fact)) is not None:  # pyright: ignore[reportArgumentType]  it is not an output
            self._tally(0).add(trace.metrics, trace.started_at, trace.completed_at)

    def _apply_failure(self, fact: Fact[FailureRecorded]) -> None:
        key = fact.name.rpartition("#")[0]
        if key in self._failures or len(self._failures) < _MOST_SHOWN:
            error_type, text = fact.data.error_type, fact.data.message
            self._failures[key] = f"{row_text(error_type, _TITLE)}: {row_text(text, _TITLE)}"
        level, trace = self._level_of(key), read_trace(fact)
        if level is not None and trace is not None:
            self._tally(level).add(trace.metrics, trace.started_at, trace.completed_at)
