"""The levels of a map-reduce: traces and outputs in level order, and totals per level. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from ensemble_ray.values.ids import node_key
from ensemble_ray.values.metrics import TaskMetrics
from ensemble_ray.values.trace import ExecutionTrace, MapReduceLevelSummary, TaskTrace, ToolCallTrace

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunOutcome, TaskFailure
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.task_output import TaskOutput

_T = TypeVar("_T")


def place_trace(trace: TaskTrace, node_type: str | None, level: int | None) -> TaskTrace:
    return trace.model_copy(update={"node_type": node_type, "map_reduce_level": level})


def placed_outcome(plan: Plan, outcome: RunOutcome) -> RunOutcome:
    if not plan.has_levels:
        return outcome
    places = {node.key: (node.node_type, node.level) for node in plan.nodes}

    def output_of(instance: str, output: TaskOutput) -> TaskOutput:
        trace = None if output.trace is None else place_trace(output.trace, *places[node_key(instance)])
        return output.model_copy(update={"trace": trace})

    def failure_of(instance: str, failure: TaskFailure) -> TaskFailure:
        return (
            failure
            if failure.trace is None
            else replace(failure, trace=place_trace(failure.trace, *places[node_key(instance)]))
        )

    return replace(
        outcome,
        completed=[(instance, output_of(instance, output)) for instance, output in outcome.completed],
        failures=[replace(each, failure=failure_of(each.instance, each.failure)) for each in outcome.failures],
        unfinished=[(instance, failure_of(instance, each)) for instance, each in outcome.unfinished],
    )


def in_level_order(plan: Plan, keyed: Sequence[tuple[str, _T]]) -> Sequence[tuple[str, _T]]:
    if not plan.has_levels:
        return keyed
    positions = {node.key: position for position, node in enumerate(plan.nodes)}
    return sorted(keyed, key=lambda entry: positions[node_key(entry[0])])


def level_summaries(traces: Iterable[TaskTrace]) -> tuple[MapReduceLevelSummary, ...]:
    """Return one summary per level (S-MR-93). Traces without a level are ignored."""
    by_level: dict[int, list[TaskTrace]] = {}
    for trace in traces:
        if trace.map_reduce_level is not None:
            by_level.setdefault(trace.map_reduce_level, []).append(trace)
    return tuple(
        MapReduceLevelSummary(
            level=level,
            task_count=len(found),
            duration=max(trace.completed_at for trace in found) - min(trace.started_at for trace in found),
        )
        for level, found in sorted(by_level.items())
    )


# Totals.


@dataclass(slots=True, kw_only=True)
class LevelTally:
    level: int
    node_type: str  # `map`, `reduce`, `final-reduce` or `direct`
    total: int = 0
    done: int = 0
    failed: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    unknown: int = 0
    incomplete: int = 0
    uncounted: int = 0  # tasks whose tokens the provider did not count
    started_at: datetime | None = None
    ended_at: datetime | None = None

    def add(self, metrics: TaskMetrics, started_at: datetime, ended_at: datetime) -> None:
        self.model_calls += metrics.llm_call_count
        self.tool_calls += metrics.tool_call_count
        self.input_tokens += max(metrics.input_tokens, 0)
        self.output_tokens += max(metrics.output_tokens, 0)
        self.incomplete += metrics.incomplete_answers
        self.uncounted += metrics.llm_call_count > 0 and min(metrics.input_tokens, metrics.output_tokens) < 0
        self.started_at = started_at if self.started_at is None else min(started_at, self.started_at)
        self.ended_at = ended_at if self.ended_at is None else max(ended_at, self.ended_at)

    @property
    def duration(self) -> timedelta:
        if self.started_at is None or self.ended_at is None:
            return timedelta()
        return self.ended_at - self.started_at


def level_tallies(trace: ExecutionTrace, failed: Collection[tuple[str, str]]) -> list[LevelTally]:
    """Return the levels of a trace; `failed` are the roles and descriptions of its failed tasks."""
    found: dict[int, LevelTally] = {}
    for task in trace.task_traces:
        level = task.map_reduce_level
        if level is None:
            continue
        tally = found.setdefault(level, LevelTally(level=level, node_type=task.node_type or ""))
        tally.total += 1
        has_failed = (task.agent_role, task.task_description) in failed
        tally.failed += has_failed
        tally.done += not has_failed and "state" not in task.metadata
        tally.unknown += len(unknown_calls(task)) or task.metadata.get("outcome") == "unknown"
        tally.add(task.metrics, task.started_at, task.completed_at)
    return [found[level] for level in sorted(found)]


def unknown_calls(task: TaskTrace) -> list[ToolCallTrace]:
    return [call for model in task.llm_interactions for call in model.tool_calls if call.outcome == "unknown"]


def tally_data(tallies: Iterable[LevelTally]) -> list[dict[str, object]]:
    return [
        {
            "level": tally.level,
            "node_type": tally.node_type,
            "tasks": tally.total,
            "done": tally.done,
            "failed": tally.failed,
            "model_calls": tally.model_calls,
            "tool_calls": tally.tool_calls,
            "unknown_outcomes": tally.unknown,
            **({"incomplete_answers": tally.incomplete} if tally.incomplete else {}),
            "input_tokens": tally.input_tokens,
            "output_tokens": tally.output_tokens,
            "uncounted_tasks": tally.uncounted,
            "duration_s": tally.duration.total_seconds(),
        }
        for tally in tallies
    ]
